"""The halves of a decoder layer on CPU: one call, and one parallel region, for each; and all layers in one call."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any, NamedTuple

import torch

from rorqual.batch import Batch, once
from rorqual.ops.decoder_blocks import (
    AttentionBlock,
    DecoderLayers,
    GatedMLPBlock,
    Norm,
    Product,
    attention_block,
    decoder_layers,
    gated_mlp_block,
)
from rorqual.ops.native.library import Operand, kernels, missing, threads_for
from rorqual.ops.native.linear import laid_out
from rorqual.ops.native.rope import INTERLEAVED
from rorqual.ops.native.store_kvcache import refuse_layout
from rorqual.ops.store_kvcache import LayerKV

_BF16 = torch.bfloat16


class _Attention(ctypes.Structure):
    """`attention_block_t` of kernels/decoder_blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("norm", "qkv", "out", "query_norm", "key_norm", "cos_sin")),
        *((name, c_void_p) for name in ("key_cache", "value_cache")),
        *((name, c_int64) for name in ("hidden_size", "heads", "kv_heads", "head_dim", "block_size", "window")),
        *((name, c_int64) for name in ("rotary_width", "rotary_offset", "rotary_flags")),
        *((name, c_float) for name in ("eps", "query_eps", "key_eps", "scale")),
    )


class _GatedMLP(ctypes.Structure):
    """`gated_mlp_block_t` of kernels/decoder_blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("norm", "gate_up", "down")),
        ("hidden_size", c_int64),
        ("eps", c_float),
    )


class _Step(ctypes.Structure):
    """`step_t` of kernels/decoder_blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("positions", "slots", "cu_seqlens", "context_lens", "block_tables")),
        *((name, c_int64) for name in ("tokens", "num_seqs", "max_blocks", "threads")),
    )


class _Layer(ctypes.Structure):
    """`decoder_layer_t` of kernels/decoder_blocks.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention", "feed_forward")),
        *((name, c_int64) for name in ("group", "rotary_rows")),
    )


class _Plan(NamedTuple):
    """What a block's kernel is given each time, or why it is not called."""

    made_of: tuple[object, ...]
    """What it depends on that may change."""
    refusal: str | None
    address: int = 0
    kept: tuple[object, ...] = ()
    """Alive as long as the addresses in the structure are used."""
    groups: tuple[int, ...] = ()
    """Of the caches of all layers, each once."""


def refuse_norm(norm: Norm, size: int) -> str | None:
    """Why a block's kernel does not take a norm, or None."""
    if norm.weight.dtype != _BF16 or norm.weight.numel() != size or not norm.weight.is_contiguous():
        got = f"{norm.weight.dtype} {list(norm.weight.shape)} of strides {list(norm.weight.stride())}"
        return f"needs bfloat16 norms of {size} values in a row, got {got}"
    return None


def _operands(products: tuple[Product, ...]) -> tuple[Operand, ...] | str:
    """The products' weights as the kernels take them, or why they do not."""
    found = []
    for weight, bias, options in products:
        if options:
            return f"its products take no options, got {', '.join(options)}"
        if bias is not None and (bias.dtype != _BF16 or not bias.is_contiguous()):
            return f"needs bfloat16 biases, got {bias.dtype}"
        operand = laid_out(weight, bias)
        if operand is None:
            return "its weights are not laid out for it"
        found.append(operand)
    return tuple(found)


def _attention_structure(block: AttentionBlock, cache: LayerKV) -> _Attention | str:
    if reason := missing() or refuse_layout(cache.key, cache.value):
        return reason
    operands = _operands((block.qkv, block.out))
    if isinstance(operands, str):
        return operands
    qkv, out = operands
    dim, table = block.head_dim, block.rotation.cos_sin
    if table.dtype != torch.float32 or not table.is_contiguous() or block.rotation.offset + table.shape[1] > dim:
        return f"needs a float32 table for at most {dim} channels, got {table.dtype} {list(table.shape)}"
    norms = [(block.norm, qkv.in_features)]
    norms += [(norm, dim) for norm in (block.query_norm, block.key_norm) if norm is not None]
    for norm, size in norms:
        if reason := refuse_norm(norm, size):
            return reason

    def address(norm: Norm | None) -> int | None:
        return None if norm is None else norm.weight.data_ptr()

    return _Attention(
        norm=address(block.norm),
        qkv=qkv.address,
        out=out.address,
        query_norm=address(block.query_norm),
        key_norm=address(block.key_norm),
        cos_sin=table.data_ptr(),
        key_cache=cache.key.data_ptr(),
        value_cache=cache.value.data_ptr(),
        hidden_size=qkv.in_features,
        heads=block.num_heads,
        kv_heads=block.num_kv_heads,
        head_dim=dim,
        block_size=cache.key.shape[1],
        window=block.sliding_window or 0,
        rotary_width=table.shape[1],
        rotary_offset=block.rotation.offset,
        rotary_flags=INTERLEAVED * block.rotation.interleaved,
        eps=block.norm.eps,
        query_eps=block.query_norm.eps if block.query_norm else 0.0,
        key_eps=block.key_norm.eps if block.key_norm else 0.0,
        scale=block.scale,
    )


def _gated_mlp_structure(block: GatedMLPBlock) -> _GatedMLP | str:
    if reason := missing():
        return reason
    operands = _operands((block.gate_up, block.down))
    if isinstance(operands, str):
        return operands
    gate_up, down = operands
    if reason := refuse_norm(block.norm, gate_up.in_features):
        return reason
    return _GatedMLP(
        norm=block.norm.weight.data_ptr(),
        gate_up=gate_up.address,
        down=down.address,
        hidden_size=gate_up.in_features,
        eps=block.norm.eps,
    )


def _plan_of(block: AttentionBlock | GatedMLPBlock, cache: LayerKV | None) -> _Plan:
    """The block's plan, made anew if the cache or the kernels are others."""
    found = kernels()
    made_of = (found and found.isa, cache and cache.key.data_ptr(), cache and cache.value.data_ptr())
    plan: _Plan | None = block.prepared.get("native")
    if plan is None or plan.made_of != made_of:
        if isinstance(block, GatedMLPBlock):
            made: ctypes.Structure | str = _gated_mlp_structure(block)
        else:
            assert cache is not None
            made = _attention_structure(block, cache)
        plan = _Plan(made_of, made) if isinstance(made, str) else _Plan(made_of, None, ctypes.addressof(made), (made,))
        block.prepared["native"] = plan
    return plan


def _plan_of_layers(layers: DecoderLayers, caches: tuple[LayerKV, ...]) -> _Plan:
    """The plan of all layers, made anew if their caches or the kernels are others."""
    found = kernels()
    isa = found and found.isa
    plan: _Plan | None = layers.prepared.get("native")
    if plan is None or plan.made_of[0] is not caches or plan.made_of[1] != isa:
        plan = layers.prepared["native"] = _make_plan_of_layers((caches, isa), layers, caches)
    return plan


def _make_plan_of_layers(made_of: tuple[object, ...], layers: DecoderLayers, caches: tuple[LayerKV, ...]) -> _Plan:
    if not layers.halves:
        return _Plan(made_of, "there are no layers")
    if reason := refuse_norm(layers.norm, layers.halves[0][0].norm.weight.numel()):
        return _Plan(made_of, reason)
    plans: list[_Plan] = []
    made = (_Layer * len(caches))()
    for structure, (attention, feed_forward), cache in zip(made, layers.halves, caches, strict=True):
        of_layer = _plan_of(attention, cache), _plan_of(feed_forward, None)
        for plan in of_layer:
            if plan.refusal is not None:
                return _Plan(made_of, f"a layer is not for it: {plan.refusal}")
        plans += of_layer
        structure.attention, structure.feed_forward = (plan.address for plan in of_layer)
        structure.group, structure.rotary_rows = cache.group, attention.rotation.cos_sin.shape[0]
    groups = tuple({cache.group for cache in caches})
    return _Plan(made_of, None, ctypes.addressof(made), (made, plans), groups)


def refuse_rows(hidden: torch.Tensor, residual: torch.Tensor | None) -> str | None:
    """Why a block's kernel does not take a stream, or None."""
    if hidden.dtype is not _BF16 or not hidden.is_cpu:
        return f"needs bfloat16 on the CPU, got {hidden.dtype} on {hidden.device.type}"
    if not hidden.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        return "needs rows without gaps"
    return None


def _refuse_attention(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: AttentionBlock, batch: Batch, cache: LayerKV
) -> str | None:
    return _plan_of(block, cache).refusal or refuse_rows(hidden, residual)


def _refuse_gated_mlp(hidden: torch.Tensor, residual: torch.Tensor | None, block: GatedMLPBlock) -> str | None:
    return _plan_of(block, None).refusal or refuse_rows(hidden, residual)


def _refuse_layers(
    hidden: torch.Tensor, layers: DecoderLayers, batch: Batch, caches: tuple[LayerKV, ...]
) -> str | None:
    return refuse_rows(hidden, None) or _plan_of_layers(layers, caches).refusal


def _step_of(batch: Batch, group: int) -> tuple[int, Any]:
    """(address, what lives as long) of the step in one cache group."""

    def make() -> tuple[int, Any]:
        view = batch.caches[group]
        tensors = [
            tensor.contiguous()
            for tensor in (
                batch.positions.long(),
                view.slot_mapping,
                batch.cu_seqlens_q,
                batch.context_lens,
                view.block_tables,
            )
        ]
        structure = _Step(
            *(tensor.data_ptr() for tensor in tensors),
            batch.num_tokens,
            tensors[-1].shape[0],
            tensors[-1].shape[1],
            torch.get_num_threads(),
        )
        return ctypes.addressof(structure), (structure, tensors)

    return once(batch.scratch, ("native step", group), make)


def stream(
    hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int | None, int, int]]:
    """(where a block's output goes, where the sum goes, the addresses of hidden, residual and these two)."""
    out = torch.empty_like(hidden)
    total = hidden if residual is None else torch.empty_like(hidden)
    given = None if residual is None else residual.data_ptr()
    return out, total, (hidden.data_ptr(), given, out.data_ptr(), total.data_ptr())


@attention_block.impl("native", refuse=_refuse_attention)
def attention_block_native(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: AttentionBlock, batch: Batch, cache: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; equal to the single kernels to the bit."""
    found, plan = kernels(), block.prepared["native"]
    assert found is not None
    out, total, addresses = stream(hidden, residual)
    failed = found.attention_block(
        plan.address,
        _step_of(batch, cache.group)[0],
        block.rotation.cos_sin.shape[0],
        *addresses,
    )
    _check(failed, hidden, block, batch)
    return out, total


def _check(failed: int, hidden: torch.Tensor, block: AttentionBlock, batch: Batch) -> None:
    if failed == 1:
        raise MemoryError(f"no memory for a decoder layer with {hidden.shape[0]} tokens")
    if failed:
        rows, at = block.rotation.cos_sin.shape[0], batch.positions
        raise IndexError(f"positions must lie in [0, {rows}), the table's rows, got {at.min()} to {at.max()}")


@gated_mlp_block.impl("native", refuse=_refuse_gated_mlp)
def gated_mlp_block_native(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: GatedMLPBlock
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference; equal to the single kernels to the bit."""
    found, plan = kernels(), block.prepared["native"]
    assert found is not None
    out, total, addresses = stream(hidden, residual)
    failed = found.gated_mlp_block(
        plan.address,
        *addresses,
        hidden.shape[0],
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for a feed-forward block of {hidden.shape[0]} tokens")
    return out, total


@decoder_layers.impl("native", refuse=_refuse_layers)
def decoder_layers_native(
    hidden: torch.Tensor, layers: DecoderLayers, batch: Batch, caches: tuple[LayerKV, ...]
) -> torch.Tensor:
    """See the reference; equal to the single kernels to the bit."""
    found, plan, norm = kernels(), layers.prepared["native"], layers.norm
    assert found is not None
    out, total = torch.empty_like(hidden), torch.empty_like(hidden)
    steps = (c_void_p * len(batch.caches))()
    for group in plan.groups:
        steps[group] = _step_of(batch, group)[0]
    failed = found.decoder_layers(
        plan.address,
        len(caches),
        norm.weight.data_ptr(),
        norm.eps,
        threads_for(hidden.numel()),
        ctypes.addressof(steps),
        hidden.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
    )
    _check(failed, hidden, layers.halves[0][0], batch)
    return out
