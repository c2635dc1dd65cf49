"""Mixture of experts: routing, the experts' feed-forward, and both behind a norm as one op."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from rorqual.ops.decoder_blocks import Norm, Product, add_norm
from rorqual.ops.linear import Weight, linear, prepare_weight
from rorqual.ops.registry import op
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.quantization import QTensor, QuantFormat


class Routing(NamedTuple):
    """Which experts each token uses and how much."""

    expert_ids: torch.Tensor
    """[num_tokens, top_k] int64, best first."""
    weights: torch.Tensor
    """[num_tokens, top_k], in the activation dtype or float32."""


@op
def route_softmax(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> Routing:
    """Softmax over all experts in float32, then the top k, renormalised to sum to 1 if asked.

    Among equal logits the expert with the lowest number comes first. router_logits [num_tokens, num_experts], top_k at
    most num_experts; weights are rounded to its dtype. Source: Qwen3-MoE.
    """
    expert_ids = _best(router_logits, top_k)
    weights = router_logits.softmax(-1, dtype=torch.float32).gather(-1, expert_ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(expert_ids, weights.to(router_logits.dtype))


Scoring = Literal["sigmoid", "sqrtsoftplus"]
"""How a router's logits become scores: 1 / (1 + exp(-x)), or sqrt(log(1 + exp(x)))."""

_SMALLEST_SUM = 1e-20
"""Added to the sum that weights are divided by."""


class TokenTable(NamedTuple):
    """Experts that follow from the token itself."""

    expert_ids: torch.Tensor
    """[vocab_size, top_k] int32 or int64."""
    token_ids: torch.Tensor
    """[num_tokens] int32 or int64."""


@op
def route_scores(
    router_logits: torch.Tensor,
    *,
    scoring: Scoring,
    top_k: int,
    renormalize: bool,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    table: TokenTable | None = None,
) -> Routing:
    """Each expert's own score says how much of it; which experts, the scores plus a bias, or a table.

    Args:
        router_logits: [num_tokens, num_experts] float32.
        scoring: what makes scores of them.
        top_k: experts of a token; those of the largest scores + bias, best first.
        renormalize: divide the chosen scores by their sum.
        scale: the weights are multiplied by it.
        bias: [num_experts] float32; it decides which experts, and has no part in the weights.
        num_groups: equal runs of experts; if there are several, each of two experts or more, only those of the
            `top_groups` best groups can be chosen. A group is as good as its two best scores + bias together.
        table: gives the experts, in its order, in place of all that.

    Returns: float32 weights. Among equal scores, and equal groups, the lowest number comes first. Sources: DeepSeek-V3
    (arXiv:2412.19437), DeepSeek-V4.
    """
    scores = router_logits.sigmoid() if scoring == "sigmoid" else F.softplus(router_logits).sqrt()
    if table is not None:
        expert_ids = table.expert_ids[table.token_ids].long()
    else:
        choice = scores if bias is None else scores + bias
        if top_groups < num_groups:
            grouped = choice.view(*choice.shape[:-1], num_groups, choice.shape[-1] // num_groups)
            best_groups = _best(grouped.topk(2, -1).values.sum(-1), top_groups)
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best_groups, True)
            choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        expert_ids = _best(choice, top_k)
    weights = scores.gather(-1, expert_ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _SMALLEST_SUM)
    return Routing(expert_ids, weights * scale)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Numbers of the `count` largest of each row, best first and of equal ones the lowest number."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The gated feed-forward weights of every expert, or of those that are here."""

    gate_up: tuple[Weight, ...]
    """[2 * intermediate_size, hidden_size] each: plain, quantised, or as `prepare_weight` made them."""
    down: tuple[Weight, ...]
    """[hidden_size, intermediate_size] each."""
    activation: QuantFormat | None = None
    """What the input of each product is quantised to beside quantised weights, as in `linear`."""
    swiglu_limit: float | None = None
    """The limit of `silu_and_mul`."""
    num_everywhere: int | None = None
    """How many experts there are where these are some of them: choices that are no numbers of these are another's, and
    add nothing here. None: these are all."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """What kernels made of the above, by backend."""


@op
def allocate_experts(
    num_experts: int,
    out_features: int,
    in_features: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    format: QuantFormat | None = None,
) -> tuple[Weight, ...]:
    """Uninitialised weights [out_features, in_features], one per expert, for `ExpertWeights`: of dtype, or QTensors of
    a format.

    Kernels may want them in one piece of memory, so that they are never there twice.
    """
    shape = (out_features, in_features)
    if format is not None:
        return tuple(QTensor.empty(shape, format, device) for _ in range(num_experts))
    return tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(num_experts))


@op
def prepare_experts(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Lay out the weights that experts have for one product, as `prepare_weight` does; once, at load time.

    Weights from `allocate_experts` may be laid out where they are: what was given is not to be used afterwards.
    """
    return tuple(prepare_weight(weight) for weight in weights)


@op
def fused_experts(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
    """sum over a token's experts e of weight_e * down_e(silu_and_mul(gate_up_e(x))).

    x [num_tokens, hidden_size] -> the same shape. The sum is float32, in the order of the token's expert_ids, and
    rounded once, so that it does not depend on other tokens. Only experts that some token chose are computed. Where
    other experts are elsewhere (`num_everywhere`), the sum is that of the choices that are here, without one it is 0.
    """
    num_tokens, top_k = routing.expert_ids.shape
    chosen, answers = routing.expert_ids.flatten(), x.new_empty(num_tokens * top_k, x.shape[1])
    if experts.num_everywhere is not None:
        here = (chosen >= 0) & (chosen < len(experts.gate_up))
        chosen, answers = torch.where(here, chosen, len(experts.gate_up)), torch.zeros_like(answers)
    order = chosen.argsort(stable=True)
    tokens = order // top_k
    counts = chosen.bincount(minlength=len(experts.gate_up)).tolist()[: len(experts.gate_up)]
    start = 0
    for gate_up, down, count in zip(experts.gate_up, experts.down, counts, strict=True):
        if count:
            rows = slice(start, start + count)
            both = linear(x.index_select(0, tokens[rows]), gate_up, activation=experts.activation)
            hidden = silu_and_mul(both, limit=experts.swiglu_limit)
            answers[order[rows]] = linear(hidden, down, activation=experts.activation)
            start += count
    dtype = torch.promote_types(x.dtype, torch.float32)
    total = torch.zeros_like(x, dtype=dtype)
    by_choice = answers.view(num_tokens, top_k, x.shape[1])
    for choice in range(top_k):
        total += by_choice[:, choice].to(dtype) * routing.weights[:, choice, None].to(dtype)
    return total.to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class SparseMoEBlock:
    """A layer's second norm, the router behind it, and the experts."""

    norm: Norm
    router: Product
    top_k: int
    renormalize: bool
    experts: ExpertWeights
    prepared: dict[str, Any] = field(default_factory=dict)
    """What kernels made of the above, by backend."""


@op
def sparse_moe_block(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: SparseMoEBlock
) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts(n), s) of n = norm(s) and s = hidden + residual, rounded; the router of n says which experts, and how
    much of each. All [num_tokens, hidden_size].
    """
    normed, total = add_norm(hidden, residual, block.norm)
    routing = route_softmax(block.router(normed), top_k=block.top_k, renormalize=block.renormalize)
    return fused_experts(normed, block.experts, routing), total
