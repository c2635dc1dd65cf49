"""Mixture of experts: routing, the experts' feed-forward, and both behind a norm as one op."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rorqual.ops.decoder_blocks import Norm, Product, add_norm
from rorqual.ops.linear import Weight, linear
from rorqual.ops.registry import op
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.quantization import QuantFormat


class Routing(NamedTuple):
    """Which experts each token uses and how much."""

    expert_ids: torch.Tensor
    """[num_tokens, top_k] int64, best first."""
    weights: torch.Tensor
    """[num_tokens, top_k], in the activation dtype."""


@op
def route_softmax(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> Routing:
    """Softmax over all experts in float32, then the top k, renormalised to sum to 1 if asked.

    Among equal logits the expert with the lowest number comes first. router_logits [num_tokens, num_experts], top_k at
    most num_experts; weights are rounded to its dtype. Source: Qwen3-MoE.
    """
    expert_ids = router_logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = router_logits.softmax(-1, dtype=torch.float32).gather(-1, expert_ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(expert_ids, weights.to(router_logits.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The gated feed-forward weights of every expert."""

    gate_up: tuple[Weight, ...]
    """[2 * intermediate_size, hidden_size] each: plain, quantised, or as `prepare_weight` made them."""
    down: tuple[Weight, ...]
    """[hidden_size, intermediate_size] each."""
    activation: QuantFormat | None = None
    """What the input of each product is quantised to beside quantised weights, as in `linear`."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """What kernels made of the above, by backend."""


@op
def allocate_experts(
    num_experts: int, out_features: int, in_features: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Uninitialised plain weights [out_features, in_features], one per expert, for `ExpertWeights`.

    Kernels may want them in one piece of memory, so that they are never there twice.
    """
    return tuple(torch.empty((out_features, in_features), dtype=dtype, device=device) for _ in range(num_experts))


@op
def fused_experts(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
    """sum over a token's experts e of weight_e * down_e(silu_and_mul(gate_up_e(x))).

    x [num_tokens, hidden_size] -> the same shape. The sum is float32, in the order of the token's expert_ids, and
    rounded once, so that it does not depend on other tokens. Only experts that some token chose are computed.
    """
    num_tokens, top_k = routing.expert_ids.shape
    order = routing.expert_ids.flatten().argsort(stable=True)
    tokens = order // top_k
    counts = routing.expert_ids.flatten().bincount(minlength=len(experts.gate_up)).tolist()
    answers = x.new_empty(num_tokens * top_k, x.shape[1])
    start = 0
    for gate_up, down, count in zip(experts.gate_up, experts.down, counts, strict=True):
        if count:
            rows = slice(start, start + count)
            hidden = silu_and_mul(linear(x.index_select(0, tokens[rows]), gate_up, activation=experts.activation))
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
