# mypy: ignore-errors
"""Rotary position embedding in Triton: query and key in one launch, each value read and written once.

A program takes some rows, a row being one head of one token, of the query or of the key. The angles come from the table
itself: the rows of a program are mostly heads of the same token, so that all but the first find them in the nearest
cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
import triton.language as tl

from rorqual.ops.rope import RotaryOutput, check, rotary_embedding
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton.launch import refuses

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_PAIRS = 1024
"""Pairs of channels that a program rotates at most: 8 for each thread, 16 bytes of bfloat16 in one load."""
_ROWS = 64
"""Rows that a program takes at most."""
_WARPS = 4


@triton.jit
def _copy(source, target, channel_stride, real, START: tl.constexpr, STOP: tl.constexpr):
    """Channels [START, STOP) of the rows that are real, as they are."""
    for start in tl.range(START, STOP, 128):
        channel = start + tl.arange(0, 128)[None, :]
        mask = real & (channel < STOP)
        tl.store(target + channel, tl.load(source + channel * channel_stride, mask=mask), mask=mask)


@triton.jit
def _rotate(
    x_ptr,
    out_ptr,
    block,
    num_tokens,
    heads,
    token_stride,
    head_stride,
    channel_stride,
    positions_ptr,
    cos_sin_ptr,
    max_position,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    INPLACE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Rows [block * ROWS, (block + 1) * ROWS) of one tensor."""
    row = block * ROWS + tl.arange(0, ROWS)
    token, head = row // heads, row % heads
    real = (token < num_tokens)[:, None]
    source = x_ptr + (token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride)[:, None]
    if INPLACE:
        target = out_ptr + (token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride)[:, None]
        target_stride = channel_stride
    else:
        target = out_ptr + (row.to(tl.int64) * HEAD_DIM)[:, None]
        target_stride = 1

    position = tl.load(positions_ptr + token, mask=token < num_tokens, other=0).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    mask = real & (pair < HALF)
    in_table = ((position >= 0) & (position < max_position))[:, None] & (pair < HALF)
    angles = cos_sin_ptr + position[:, None] * (2 * HALF) + pair
    cos = tl.load(angles, mask=in_table, other=float("nan"))
    sin = tl.load(angles + HALF, mask=in_table, other=float("nan"))
    if CONJUGATE:
        sin = -sin

    if INTERLEAVED:
        both = OFFSET + tl.arange(0, 2 * HALF_BLOCK)[None, :]
        both_mask = real & (both < OFFSET + 2 * HALF)
        x = tl.load(source + both * channel_stride, mask=both_mask).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (ROWS, HALF_BLOCK, 2)))
    else:
        first = tl.load(source + (OFFSET + pair) * channel_stride, mask=mask).to(tl.float32)
        second = tl.load(source + (OFFSET + HALF + pair) * channel_stride, mask=mask).to(tl.float32)

    # The reference's order: one product is rounded, the other goes into the fused multiply-add.
    new_first = tl.fma(first, cos, -(second * sin)).to(out_ptr.dtype.element_ty)
    new_second = tl.fma(second, cos, first * sin).to(out_ptr.dtype.element_ty)

    if INTERLEAVED:
        tl.store(target + both * target_stride, tl.interleave(new_first, new_second), mask=both_mask)
    else:
        tl.store(target + (OFFSET + pair) * target_stride, new_first, mask=mask)
        tl.store(target + (OFFSET + HALF + pair) * target_stride, new_second, mask=mask)

    if not INPLACE:
        _copy(source, target, channel_stride, real, 0, OFFSET)
        _copy(source, target, channel_stride, real, OFFSET + 2 * HALF, HEAD_DIM)


@triton.jit(do_not_specialize=["num_tokens", "query_blocks", "max_position"])
def _rotary_embedding_kernel(
    query_ptr,
    query_out_ptr,
    key_ptr,
    key_out_ptr,
    positions_ptr,
    cos_sin_ptr,
    num_tokens,
    query_blocks,
    max_position,
    query_heads,
    query_token_stride,
    query_head_stride,
    query_channel_stride,
    key_heads,
    key_token_stride,
    key_head_stride,
    key_channel_stride,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    INPLACE: tl.constexpr,
    ROWS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    wait_for_earlier_kernels()
    block = tl.program_id(0)
    if block < query_blocks:
        _rotate(
            query_ptr,
            query_out_ptr,
            block,
            num_tokens,
            query_heads,
            query_token_stride,
            query_head_stride,
            query_channel_stride,
            positions_ptr,
            cos_sin_ptr,
            max_position,
            HEAD_DIM,
            HALF,
            OFFSET,
            INTERLEAVED,
            CONJUGATE,
            INPLACE,
            ROWS,
            HALF_BLOCK,
        )
    else:
        _rotate(
            key_ptr,
            key_out_ptr,
            block - query_blocks,
            num_tokens,
            key_heads,
            key_token_stride,
            key_head_stride,
            key_channel_stride,
            positions_ptr,
            cos_sin_ptr,
            max_position,
            HEAD_DIM,
            HALF,
            OFFSET,
            INTERLEAVED,
            CONJUGATE,
            INPLACE,
            ROWS,
            HALF_BLOCK,
        )


def _refuse(
    query: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, key: torch.Tensor | None = None, **_: object
) -> str | None:
    if query.dtype not in _DTYPES:
        return f"needs bfloat16, float16 or float32, got {query.dtype}"
    return refuses(query, positions, cos_sin, key)


@rotary_embedding.impl("triton", refuse=_refuse)
def rotary_embedding_triton(
    query: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    key: torch.Tensor | None = None,
    interleaved: bool = False,
    offset: int = 0,
    conjugate: bool = False,
    inplace: bool = False,
    scratch: dict[Hashable, Any] | None = None,
) -> RotaryOutput:
    """See the reference. Equal to it but for the last bit; a position outside the table gives NaN."""
    check(query, positions, cos_sin, key, offset)
    tokens, heads, head_dim = query.shape
    half = cos_sin.shape[1] // 2
    half_block = triton.next_power_of_2(half)
    rows = max(min(_PAIRS // half_block, _ROWS), 1)
    query_out = query if inplace else torch.empty_like(query, memory_format=torch.contiguous_format)
    query_blocks = triton.cdiv(tokens * heads, rows)
    if key is None:
        key_out, kv_heads, key_strides, key_blocks = None, heads, query.stride(), 0
    else:
        key_out = key if inplace else torch.empty_like(key, memory_format=torch.contiguous_format)
        kv_heads, key_strides = key.shape[1], key.stride()
        key_blocks = triton.cdiv(tokens * kv_heads, rows)
    if query_blocks + key_blocks:
        _rotary_embedding_kernel[(query_blocks + key_blocks,)](
            query,
            query_out,
            query if key is None else key,
            query_out if key is None else key_out,
            positions.contiguous(),
            cos_sin.contiguous(),
            tokens,
            query_blocks,
            cos_sin.shape[0],
            heads,
            *query.stride(),
            kv_heads,
            *key_strides,
            HEAD_DIM=head_dim,
            HALF=half,
            OFFSET=offset,
            INTERLEAVED=interleaved,
            CONJUGATE=conjugate,
            INPLACE=inplace,
            ROWS=rows,
            HALF_BLOCK=half_block,
            num_warps=_WARPS,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return RotaryOutput(query_out, key_out)
