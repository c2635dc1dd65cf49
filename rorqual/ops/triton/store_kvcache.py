"""The write of new keys and values into their slots: both in one launch, whatever their strides and dtypes."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from rorqual.ops.store_kvcache import CACHE_DTYPES, store_kvcache
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import e4m3_byte, round_to
from rorqual.ops.triton.launch import refuses

_LARGEST_TILE = 2048
"""Values of a token's key that one program moves; more heads take more programs."""
_LARGEST_HEAD = 2048


@triton.jit
def _copy(rows, cache, block, inner, cache_block, cache_token, cache_head, cache_dim, row_head, row_dim, heads, dims,
          mask, E4M3: tl.constexpr):  # fmt: skip
    """A tile [heads, dims] of one token, converted to the cache's dtype."""
    value = tl.load(rows + heads * row_head + dims * row_dim, mask=mask)
    to = cache + block * cache_block + inner * cache_token + heads * cache_head + dims * cache_dim
    if E4M3:
        tl.store(to, e4m3_byte(value.to(tl.float32)), mask=mask)
    elif cache.dtype.element_ty == rows.dtype.element_ty:
        tl.store(to, value, mask=mask)
    else:
        tl.store(to, round_to(value.to(tl.float32), cache.dtype.element_ty), mask=mask)


@triton.jit
def _store_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_token,
    key_head,
    key_dim,
    value_token,
    value_head,
    value_dim,
    key_cache_block,
    key_cache_token,
    key_cache_head,
    key_cache_dim,
    value_cache_block,
    value_cache_token,
    value_cache_head,
    value_cache_dim,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    E4M3: tl.constexpr,
):
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        inner = slot - block * BLOCK_SIZE
        heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        dims = tl.arange(0, BLOCK_D)[None, :]
        mask = (heads < HEADS) & (dims < DIMS)
        _copy(key + token * key_token, key_cache, block, inner, key_cache_block, key_cache_token, key_cache_head,
              key_cache_dim, key_head, key_dim, heads, dims, mask, E4M3)  # fmt: skip
        _copy(value + token * value_token, value_cache, block, inner, value_cache_block, value_cache_token,
              value_cache_head, value_cache_dim, value_head, value_dim, heads, dims, mask, E4M3)  # fmt: skip


def _refuse(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> str | None:
    if refusal := refuses(key, value, key_cache, value_cache, slot_mapping):
        return refusal
    if key_cache.dtype not in CACHE_DTYPES:
        return (
            f"needs a cache of {', '.join(str(d).removeprefix('torch.') for d in CACHE_DTYPES)}, got {key_cache.dtype}"
        )
    if key.shape[-1] > _LARGEST_HEAD:
        return f"needs a head_dim of up to {_LARGEST_HEAD}, got {key.shape[-1]}"
    if slot_mapping.stride(0) != 1:
        return "needs slots without gaps"
    return None


@store_kvcache.impl("triton", refuse=_refuse)
def store_kvcache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> None:
    """See the reference."""
    num_tokens, heads, dims = key.shape
    if num_tokens == 0:
        return
    e4m3 = key_cache.dtype == torch.float8_e4m3fn
    if e4m3:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    block_d = 1 << (dims - 1).bit_length()
    block_h = min(1 << (heads - 1).bit_length(), max(1, _LARGEST_TILE // block_d))
    _store_kernel[(num_tokens, -(-heads // block_h))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        *key.stride(),
        *value.stride(),
        *key_cache.stride(),
        *value_cache.stride(),
        HEADS=heads,
        DIMS=dims,
        BLOCK_H=block_h,
        BLOCK_D=block_d,
        BLOCK_SIZE=key_cache.shape[1],
        E4M3=e4m3,
        num_warps=max(1, min(4, block_h * block_d // 256)),
        launch_pdl=DEPENDENT_LAUNCH,
    )
