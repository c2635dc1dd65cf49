"""Mixture of experts: routing and the experts' feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

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

    router_logits [num_tokens, num_experts]; weights are rounded to its dtype. Source: Qwen3-MoE.
    """
    weights, expert_ids = router_logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(expert_ids, weights.to(router_logits.dtype))


@op
def fused_experts(
    x: torch.Tensor,
    gate_up_weights: Sequence[Weight],
    down_weights: Sequence[Weight],
    routing: Routing,
    *,
    activation: QuantFormat | None = None,
) -> torch.Tensor:
    """sum over a token's experts e of weight_e * down_e(silu_and_mul(gate_up_e(x))).

    x [num_tokens, hidden]; gate_up_weights: per expert [2 * inter, hidden]; down_weights: per expert [hidden, inter];
    either may be quantised or prepared weights. activation: what the input of each product is quantised to beside
    quantised weights, as in `linear`. Only experts that some token hit are computed. Returns [num_tokens, hidden].
    """
    out = torch.zeros_like(x)
    order = routing.expert_ids.flatten().argsort(stable=True)
    tokens = order // routing.expert_ids.shape[1]
    weights = routing.weights.flatten()[order]
    counts = routing.expert_ids.flatten().bincount(minlength=len(gate_up_weights)).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        rows = tokens[start : start + count]
        hidden = silu_and_mul(linear(x.index_select(0, rows), gate_up_weights[expert], activation=activation))
        result = linear(hidden, down_weights[expert], activation=activation) * weights[start : start + count, None]
        out.index_add_(0, rows, result)
        start += count
    return out
