"""Mixtures of experts on CPU: a layer's second half, or its experts alone, in one call and one parallel region."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch

from rorqual.ops.linear import Weight
from rorqual.ops.moe import ExpertWeights, Routing, SparseMoEBlock, fused_experts, route_softmax, sparse_moe_block
from rorqual.ops.native._integer_linear import PackedIntegers
from rorqual.ops.native.decoder_blocks import refuse_norm, refuse_rows, stream
from rorqual.ops.native.library import Operand, kernels, missing, threads_for
from rorqual.ops.native.linear import laid_out
from rorqual.ops.native.silu_and_mul import limit_in_bfloat16

_BF16 = torch.bfloat16
_INPUT_PLAIN, _INPUT_INTEGERS = 1, 2


class _Experts(ctypes.Structure):
    """`experts_t` of kernels/moe.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate_up", "down")),
        *((name, c_int64) for name in ("num_experts", "hidden_size", "inner_size", "gate_up_inputs", "down_inputs")),
        ("limit", c_float),
        ("some", c_int),
    )


class _SparseMoE(ctypes.Structure):
    """`sparse_moe_block_t` of kernels/moe.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("norm", "router", "experts")),
        *((name, c_int64) for name in ("top_k", "renormalize")),
        ("eps", c_float),
    )


class _Plan(NamedTuple):
    """What a kernel is given each time, or why it is not called."""

    refusal: str | None
    hidden_size: int = 0
    address: int = 0
    kept: tuple[object, ...] = ()
    """Alive as long as the addresses in the structure are used."""


def _inputs(weights: Iterable[Weight]) -> int:
    """What the weights' inputs are wanted as."""
    wanted = 0
    for weight in weights:
        for dynamic in [part.dynamic for part in weight] if isinstance(weight, PackedIntegers) else [False]:
            wanted |= _INPUT_INTEGERS if dynamic else _INPUT_PLAIN
    return wanted


def _shape(weight: Weight) -> tuple[int, int]:
    """(out_features, in_features) of a weight that is laid out."""
    if isinstance(weight, PackedIntegers):
        return weight.out_features, weight.in_features
    return 16 * weight.shape[0], 2 * weight.shape[1]


def _plan_experts(experts: ExpertWeights) -> _Plan:
    if experts.activation is not None:
        return _Plan(f"does not quantise its inputs to {experts.activation.name}")
    operands: list[Operand] = []
    for weight in (*experts.gate_up, *experts.down):
        operand = laid_out(weight)
        if operand is None:
            return _Plan("its weights are not laid out for it")
        operands.append(operand)
    for weights in (experts.gate_up, experts.down):
        if len(shapes := {_shape(weight) for weight in weights}) > 1:
            return _Plan(f"needs experts of one shape, got {sorted(shapes)}")
    num_experts = len(experts.gate_up)
    table = (c_void_p * len(operands))(*(operand.address for operand in operands))
    structure = _Experts(
        gate_up=ctypes.addressof(table),
        down=ctypes.addressof(table) + num_experts * ctypes.sizeof(c_void_p),
        num_experts=num_experts,
        hidden_size=operands[0].in_features,
        inner_size=operands[-1].in_features,
        gate_up_inputs=_inputs(experts.gate_up),
        down_inputs=_inputs(experts.down),
        limit=limit_in_bfloat16(experts.swiglu_limit),
        some=experts.num_everywhere is not None,
    )
    return _Plan(None, operands[0].in_features, ctypes.addressof(structure), (structure, table))


def _plan_block(block: SparseMoEBlock) -> _Plan:
    experts, num_experts = _plan_of(block.experts), len(block.experts.gate_up)
    if experts.refusal:
        return experts
    weight, bias, options = block.router
    router = laid_out(weight, bias)
    if router is None or bias is not None or options:
        return _Plan("its router is not laid out for it, or has a bias or options")
    if (shape := _shape(weight)) != (num_experts, experts.hidden_size) or not 0 < block.top_k <= num_experts:
        return _Plan(f"needs a router to {num_experts} experts that chooses some of them, got {shape}, {block.top_k}")
    if reason := refuse_norm(block.norm, experts.hidden_size):
        return _Plan(reason)
    structure = _SparseMoE(
        norm=block.norm.weight.data_ptr(),
        router=router.address,
        experts=experts.address,
        top_k=block.top_k,
        renormalize=block.renormalize,
        eps=block.norm.eps,
    )
    return _Plan(None, experts.hidden_size, ctypes.addressof(structure), (structure, experts))


def _plan_of(block: ExpertWeights | SparseMoEBlock) -> _Plan:
    plan: _Plan | None = block.prepared.get("native")
    if plan is None:
        plan = _plan_block(block) if isinstance(block, SparseMoEBlock) else _plan_experts(block)
        block.prepared["native"] = plan
    return plan


def _refuse_routing(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> str | None:
    if router_logits.dtype is not _BF16 or not router_logits.is_cpu:
        return f"needs bfloat16 on the CPU, got {router_logits.dtype} on {router_logits.device.type}"
    if not 0 < top_k <= router_logits.shape[1]:
        return f"chooses 1 to {router_logits.shape[1]} experts, got {top_k}"
    return missing()


@route_softmax.impl("native", refuse=_refuse_routing)
def route_softmax_native(router_logits: torch.Tensor, *, top_k: int, renormalize: bool) -> Routing:
    """See the reference."""
    found = kernels()
    assert found is not None
    if router_logits.stride(1) != 1:
        router_logits = router_logits.contiguous()
    num_tokens, num_experts = router_logits.shape
    made = Routing(
        torch.empty(num_tokens, top_k, dtype=torch.int64), torch.empty(num_tokens, top_k, dtype=torch.bfloat16)
    )
    found.route_softmax(
        router_logits.data_ptr(),
        router_logits.stride(0),
        num_tokens,
        num_experts,
        top_k,
        renormalize,
        made.expert_ids.data_ptr(),
        made.weights.data_ptr(),
        threads_for(router_logits.numel()),
    )
    return made


def _refuse(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> str | None:
    plan = _plan_of(experts)
    if reason := plan.refusal or missing():
        return reason
    if x.shape != (routing.expert_ids.shape[0], plan.hidden_size):
        return f"needs rows of {plan.hidden_size} values, one for each token that is routed, got {list(x.shape)}"
    if x.dtype is not _BF16 or not x.is_cpu:
        return f"needs bfloat16 on the CPU, got {x.dtype} on {x.device.type}"
    if routing.expert_ids.dtype is not torch.int64 or routing.weights.dtype not in (_BF16, torch.float32):
        got = f"{routing.expert_ids.dtype} and {routing.weights.dtype}"
        return f"needs int64 ids and bfloat16 or float32 weights, got {got}"
    return None


@fused_experts.impl("native", refuse=_refuse)
def fused_experts_native(x: torch.Tensor, experts: ExpertWeights, routing: Routing) -> torch.Tensor:
    """See the reference; equal to the single kernels to the bit, but for products with float32 weights, whose sums are
    fused with them."""
    found = kernels()
    assert found is not None
    if x.stride(1) != 1:
        x = x.contiguous()
    expert_ids, weights = (tensor.contiguous() for tensor in routing)
    out = torch.empty(x.shape, dtype=_BF16)
    failed = found.fused_experts(
        _plan_of(experts).address,
        x.data_ptr(),
        x.stride(0),
        expert_ids.data_ptr(),
        weights.data_ptr(),
        weights.dtype is torch.float32,
        *expert_ids.shape,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed == 1:
        raise MemoryError(f"no memory for the experts of {x.shape[0]} tokens")
    if failed:
        last = len(experts.gate_up) - 1
        raise IndexError(f"experts are numbered from 0 to {last}, got {expert_ids.min()} to {expert_ids.max()}")
    return out


def _refuse_block(hidden: torch.Tensor, residual: torch.Tensor | None, block: SparseMoEBlock) -> str | None:
    return _plan_of(block).refusal or missing() or refuse_rows(hidden, residual)


@sparse_moe_block.impl("native", refuse=_refuse_block)
def sparse_moe_block_native(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: SparseMoEBlock
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; equal to the single kernels to the bit."""
    found = kernels()
    assert found is not None
    out, total, addresses = stream(hidden, residual)
    if found.sparse_moe_block(_plan_of(block).address, *addresses, hidden.shape[0], torch.get_num_threads()):
        raise MemoryError(f"no memory for a mixture of experts of {hidden.shape[0]} tokens")
    return out, total
