"""Between projection and attention in one launch: norms and rotation of the heads, and the write into the cache."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.batch import Batch
from rorqual.ops.decoder_blocks import Norm, Rotation, rotate_and_store
from rorqual.ops.store_kvcache import CACHE_DTYPES, LayerKV
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import e4m3_byte, round_to, rounded
from rorqual.ops.triton.launch import refuses

_TILE = 2048
"""Values of a token that one program takes."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _head_weights(query_weight, key_weight, of_query, channel, mask):
    query = tl.load(query_weight + channel, mask=mask, other=0.0).to(tl.float32)
    key = tl.load(key_weight + channel, mask=mask, other=0.0).to(tl.float32)
    return tl.where(of_query, query[None, :], key[None, :])


@triton.jit
def _store_cached(to, value, mask, E4M3: tl.constexpr):
    if E4M3:
        tl.store(to, e4m3_byte(value), mask=mask)
    else:
        tl.store(to, round_to(value, to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_position"])
def _rotate_and_store_kernel(
    qkv,
    query_weight,
    key_weight,
    positions,
    cos_sin,
    slots,
    key_cache,
    value_cache,
    max_position,
    query_eps,
    key_eps,
    token_stride,
    head_stride,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    E4M3: tl.constexpr,
):
    """A token's heads from ROWS * program_id(1) on; query heads are written in place."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, HALF_BLOCK)
    if INTERLEAVED:
        channel, other = 2 * pair, 2 * pair + 1
    else:
        channel, other = pair, pair + HALF
    whole = pair < HALF
    mask = (head < HEADS + 2 * KV_HEADS)[:, None] & whole[None, :]
    of_query, of_value = (head < HEADS)[:, None], (head >= HEADS + KV_HEADS)[:, None]
    row = qkv + token * token_stride + head[:, None] * head_stride

    wait_for_earlier_kernels()
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    first_read = tl.load(row + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    second_read = tl.load(row + other[None, :], mask=mask, other=0.0).to(tl.float32)
    in_table = whole & (position >= 0) & (position < max_position)
    cos = tl.load(cos_sin + position * (2 * HALF) + pair, mask=in_table, other=float("nan"))[None, :]
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + pair, mask=in_table, other=float("nan"))[None, :]
    first, second = first_read, second_read
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        eps = tl.where(head < HEADS, query_eps, key_eps)
        rstd = tl.rsqrt(square / (2 * HALF) + eps)[:, None]
        first = rounded(first * rstd * _head_weights(query_weight, key_weight, of_query, channel, whole), dtype)
        second = rounded(second * rstd * _head_weights(query_weight, key_weight, of_query, other, whole), dtype)
    # The reference's order: one product is rounded, the other goes into the fused multiply-add.
    new_first = rounded(tl.fma(first, cos, -(second * sin)), dtype)
    new_second = rounded(tl.fma(second, cos, first * sin), dtype)
    tl.store(row + channel[None, :], round_to(new_first, dtype), mask=mask & of_query)
    tl.store(row + other[None, :], round_to(new_second, dtype), mask=mask & of_query)

    if slot >= 0:
        block = slot // BLOCK_SIZE
        inner = slot - block * BLOCK_SIZE
        of_key = mask & (head >= HEADS)[:, None] & (head < HEADS + KV_HEADS)[:, None]
        to = key_cache + block * key_block + inner * key_token + (head - HEADS)[:, None] * key_head
        _store_cached(to + channel[None, :], new_first, of_key, E4M3)
        _store_cached(to + other[None, :], new_second, of_key, E4M3)
        to = value_cache + block * value_block + inner * value_token
        to += (head - HEADS - KV_HEADS)[:, None] * value_head
        _store_cached(to + channel[None, :], first_read, mask & of_value, E4M3)
        _store_cached(to + other[None, :], second_read, mask & of_value, E4M3)


def _refuse(
    qkv: torch.Tensor,
    batch: Batch,
    cache: LayerKV,
    *,
    num_heads: int,
    rotation: Rotation,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> str | None:
    slots = batch.caches[cache.group].slot_mapping
    norms = [norm.weight for norm in (query_norm, key_norm) if norm is not None]
    if reason := refuses(qkv, cache.key, cache.value, rotation.cos_sin, batch.positions, slots, *norms):
        return reason
    if qkv.dtype not in _DTYPES or cache.key.dtype not in CACHE_DTYPES:
        return f"does not know heads of {qkv.dtype} beside a cache of {cache.key.dtype}"
    if len(norms) == 1:
        return "needs norms of both query and key, or none"
    if rotation.offset != 0 or rotation.cos_sin.shape[1] != qkv.shape[2] or rotation.cos_sin.dtype != torch.float32:
        return f"rotates whole heads of {qkv.shape[2]}, got an offset of {rotation.offset} and {rotation.cos_sin.shape}"
    if any(t.stride(-1) != 1 for t in (qkv, cache.key, cache.value, rotation.cos_sin, *norms, batch.positions, slots)):
        return "needs channels, positions and slots without gaps"
    return None if rotation.cos_sin.is_contiguous() else "needs a table without gaps"


@rotate_and_store.impl("triton", refuse=_refuse)
def rotate_and_store_triton(
    qkv: torch.Tensor,
    batch: Batch,
    cache: LayerKV,
    *,
    num_heads: int,
    rotation: Rotation,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> torch.Tensor:
    """See the reference; sums of squares are taken in another order."""
    tokens, rows, head_dim = qkv.shape
    key_cache, value_cache = cache.key, cache.value
    e4m3 = key_cache.dtype == torch.float8_e4m3fn
    if e4m3:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    half_block = triton.next_power_of_2(head_dim // 2)
    rows_each = min(triton.next_power_of_2(rows), max(1, _TILE // (2 * half_block)))
    if tokens:
        _rotate_and_store_kernel[(tokens, triton.cdiv(rows, rows_each))](
            qkv,
            qkv if query_norm is None else query_norm.weight,
            qkv if key_norm is None else key_norm.weight,
            batch.positions,
            rotation.cos_sin,
            batch.caches[cache.group].slot_mapping,
            key_cache,
            value_cache,
            rotation.cos_sin.shape[0],
            0.0 if query_norm is None else query_norm.eps,
            0.0 if key_norm is None else key_norm.eps,
            *qkv.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            HEADS=num_heads,
            KV_HEADS=key_cache.shape[2],
            HALF=head_dim // 2,
            HALF_BLOCK=half_block,
            ROWS=rows_each,
            INTERLEAVED=rotation.interleaved,
            NORM=query_norm is not None,
            BLOCK_SIZE=key_cache.shape[1],
            E4M3=e4m3,
            num_warps=4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return qkv[:, :num_heads]
