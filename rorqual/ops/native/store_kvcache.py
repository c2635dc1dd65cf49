"""The paged cache on CPU in the memory order that the compiled attention wants, and the write of new tokens into it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.store_kvcache import KVCache, allocate_kvcache, store_kvcache

_LARGEST_HEAD = 256


def refuse_shape(block_size: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the compiled attention cannot read such a cache, or None."""
    if dtype != torch.bfloat16:
        return f"needs a bfloat16 cache, got {dtype}"
    if block_size % 16:
        return f"needs blocks of a multiple of 16 tokens, got {block_size}"
    if head_dim % 32 or head_dim > _LARGEST_HEAD:
        return f"needs a head_dim that is a multiple of 32 up to {_LARGEST_HEAD}, got {head_dim}"
    return missing()


def refuse_layout(key_cache: torch.Tensor, value_cache: torch.Tensor) -> str | None:
    """Why the kernels in use cannot read these tensors, or None."""
    if refusal := refuse_shape(key_cache.shape[1], key_cache.shape[3], key_cache.dtype):
        return refusal
    found = kernels()
    size, heads, dim = key_cache.shape[1:]
    by_offset = (heads * size * dim, dim, size * dim, 1)
    # AMX multiplies values from the left, channel by channel.
    of_values = (heads * size * dim, 1, size * dim, size) if found and found.isa == "amx" else by_offset
    if key_cache.stride() != by_offset or value_cache.stride() != of_values:
        return "the cache is in another memory order"
    return None


def _refuse_allocate(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> str | None:
    if device.type != "cpu":
        return f"is for the CPU, got {device.type}"
    return refuse_shape(block_size, head_dim, dtype)


@allocate_kvcache.impl("native", refuse=_refuse_allocate)
def allocate_kvcache_native(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Keys [block, head, offset, dim] in memory; values the same, or [block, head, dim, offset] for AMX."""
    found = kernels()
    assert found is not None
    key = torch.empty(num_blocks, num_kv_heads, block_size, head_dim, dtype=dtype).transpose(1, 2)
    if found.isa != "amx":
        return KVCache(key, torch.empty_like(key))
    return KVCache(key, torch.empty(num_blocks, num_kv_heads, head_dim, block_size, dtype=dtype).permute(0, 3, 1, 2))


def _refuse_store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *_args: object,
    **_kwargs: object,
) -> str | None:
    if key.device.type != "cpu":
        return f"needs CPU tensors, got {key.device.type}"
    if key.dtype != torch.bfloat16:
        return f"needs bfloat16, got {key.dtype}"
    return refuse_layout(key_cache, value_cache)


@store_kvcache.impl("native", refuse=_refuse_store)
def store_kvcache_native(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> None:
    """See the reference."""
    found = kernels()
    assert found is not None
    key, value = (t if t.stride(2) == 1 else t.contiguous() for t in (key, value))
    slots = slot_mapping.contiguous()
    found.store_kvcache(
        key.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.data_ptr(),
        value.stride(0),
        value.stride(1),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slots.data_ptr(),
        *key.shape,
        key_cache.shape[1],
        threads_for(key.numel()),
    )
