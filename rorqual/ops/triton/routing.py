"""Routing on NVIDIA GPUs: which experts a token uses and how much, in one launch."""

from __future__ import annotations

import torch

from rorqual.ops.moe import Routing, Scoring, TokenTable, route_scores, route_softmax
from rorqual.ops.triton import _routing_kernels
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton.launch import refuses

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 1024


def power_of_two(number: int) -> int:
    """The lowest that is not less."""
    return 1 << (number - 1).bit_length()


def _refuse_routing(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> str | None:
    if reason := refuses(router_logits):
        return reason
    num_experts = router_logits.shape[1]
    if router_logits.dtype not in _DTYPES or num_experts > MOST_EXPERTS:
        wanted = f"bfloat16, float16 or float32 for up to {MOST_EXPERTS} experts"
        return f"needs {wanted}, got {router_logits.dtype} for {num_experts}"
    return None if 0 < top_k <= num_experts else f"chooses 1 to {num_experts} experts, got {top_k}"


@route_softmax.impl("triton", refuse=_refuse_routing)
def route_softmax_triton(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> Routing:
    """One launch."""
    num_tokens, num_experts = router_logits.shape
    made = Routing(
        torch.empty((num_tokens, top_k), dtype=torch.int64, device=router_logits.device),
        torch.empty((num_tokens, top_k), dtype=router_logits.dtype, device=router_logits.device),
    )
    if num_tokens:
        _routing_kernels.route_softmax_kernel[(num_tokens,)](
            router_logits,
            *made,
            num_experts,
            *router_logits.stride(),
            TOP_K=top_k,
            PADDED_K=power_of_two(top_k),
            PADDED_EXPERTS=power_of_two(num_experts),
            RENORMALIZE=renormalize,
            num_warps=1 if num_experts <= 256 else 4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return made


def _refuse_scores(
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
) -> str | None:
    if reason := refuses(router_logits, bias, *(table or ())):
        return reason
    if router_logits.dim() != 2 or router_logits.dtype is not torch.float32:
        return f"needs float32 [num_tokens, num_experts], got {router_logits.dtype} {list(router_logits.shape)}"
    num_experts = router_logits.shape[1]
    if num_experts > MOST_EXPERTS or num_experts % num_groups:
        return f"takes up to {MOST_EXPERTS} experts in equal groups, got {num_experts} in {num_groups}"
    if table is not None:
        fits = table.expert_ids.shape[1] == top_k and table.expert_ids.stride(1) == 1 and table.token_ids.dim() == 1
        return None if fits else f"needs a table of rows of {top_k} experts, got {list(table.expert_ids.shape)}"
    if bias is not None and (bias.dtype is not torch.float32 or not bias.is_contiguous()):
        return f"needs a float32 bias without gaps, got {bias.dtype}"
    if top_groups < num_groups and num_experts < 2 * num_groups:
        return "needs groups of two experts or more"
    return None if 0 < top_k <= num_experts else f"chooses 1 to {num_experts} experts, got {top_k}"


@route_scores.impl("triton", refuse=_refuse_scores)
def route_scores_triton(
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
    """One launch."""
    num_tokens, num_experts = router_logits.shape
    made = Routing(
        torch.empty((num_tokens, top_k), dtype=torch.int64, device=router_logits.device),
        torch.empty((num_tokens, top_k), dtype=torch.float32, device=router_logits.device),
    )
    groups = num_groups if top_groups < num_groups else 1
    if num_tokens:
        _routing_kernels.route_scores_kernel[(num_tokens,)](
            router_logits,
            bias,
            None if table is None else table.expert_ids,
            None if table is None else table.token_ids.contiguous(),
            *made,
            num_experts,
            num_experts // groups,
            groups,
            *router_logits.stride(),
            0 if table is None else table.expert_ids.stride(0),
            scale,
            SIGMOID=scoring == "sigmoid",
            BIASED=bias is not None,
            TABLE=table is not None,
            RENORMALIZE=renormalize,
            TOP_K=top_k,
            PADDED_K=power_of_two(top_k),
            TOP_GROUPS=top_groups if groups > 1 else 0,
            PADDED_GROUPS=power_of_two(groups),
            PADDED_SIZE=power_of_two(num_experts // groups),
            num_warps=1 if num_experts <= 256 else 4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return made
