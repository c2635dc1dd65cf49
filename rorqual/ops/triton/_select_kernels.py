"""The lightning indexer: the kernels behind ops/triton/select_rows.py.

Scores are products of a tile of keys, the tensor cores' first operand, with the heads of one token at a time: the sum
over heads then lies within a few threads, and a row's score is the same bits whatever else a program computes.

The best top_k of a row of scores are found chunk by chunk: what a chunk keeps is all that it may contribute to the
whole, so that the same kernel chooses among what the chunks kept, until one chunk is left. A chunk's scores stay in
registers while the lowest that is kept is found by halving; counts are integers, so the choice is exact.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.triton._decode_kernels import bfloat16_of_e4m3
from rorqual.ops.triton._dependent_launch import wait_for_earlier_kernels
from rorqual.ops.triton._interpreter import bound, dot
from rorqual.ops.triton._number_formats import e2m1_value, e4m3_value, ue8m0_value
from rorqual.ops.triton.launch import INTERPRETING

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""Plain numbers that kernels read."""

_INTERPRETING = tl.constexpr(INTERPRETING)
_GROUP_BYTES = tl.constexpr(16)
"""Bytes of e2m1 codes that share a scale."""
_NOTHING = tl.constexpr(-(1 << 31))
"""Below every order of a score."""
_NAN = tl.constexpr(0x7F800001)
"""The order of every NaN: above infinity."""

# Four bytes to a register, two codes each. Moved to bits 8-6 of a bfloat16, below its sign in bit 15, a magnitude is
# the code's value times 2^-126, the subnormal 0.5 included; then come 2^126 and the scale, which together may not fit.
_DECODE_E2M1 = tl.constexpr("""{
.reg .b32 t, u, a, b, c;
mov.b32 c, 0x7E807E80;
prmt.b32 t, $4, 0, 0x1404;
prmt.b32 u, $4, 0, 0x3424;
shl.b32 a, t, 4;
and.b32 a, a, 0x80008000;
shr.u32 b, t, 2;
lop3.b32 $0, b, 0x01C001C0, a, 0xEA;
shl.b32 a, u, 4;
and.b32 a, a, 0x80008000;
shr.u32 b, u, 2;
lop3.b32 $1, b, 0x01C001C0, a, 0xEA;
and.b32 a, t, 0x80008000;
shr.u32 b, t, 6;
lop3.b32 $2, b, 0x01C001C0, a, 0xEA;
and.b32 a, u, 0x80008000;
shr.u32 b, u, 6;
lop3.b32 $3, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $0, $0, c;
mul.rn.bf16x2 $1, $1, c;
mul.rn.bf16x2 $2, $2, c;
mul.rn.bf16x2 $3, $3, c;
mul.rn.bf16x2 $0, $0, $5;
mul.rn.bf16x2 $1, $1, $6;
mul.rn.bf16x2 $2, $2, $5;
mul.rn.bf16x2 $3, $3, $6;
}""")


@triton.jit
def _planes_of_e2m1(codes, words, COMPUTE: tl.constexpr):
    """uint8 codes [TILE, dims / 2], int32 words of four UE8M0 scales [TILE, words]: the even and the odd channels."""
    byte = tl.arange(0, codes.shape[1])
    scale = (words >> (byte // _GROUP_BYTES % 4 * 8)[None, :]) & 0xFF
    if _INTERPRETING or tl.float32 == COMPUTE:
        power = ue8m0_value(scale)
        even, odd = (e2m1_value(codes & 15) * power).to(COMPUTE), (e2m1_value(codes >> 4) * power).to(COMPUTE)
    else:
        power = tl.maximum(scale << 7, 1 << 6).to(tl.int16).to(tl.bfloat16, bitcast=True)  # 2^-127 is a subnormal
        even, odd = tl.inline_asm_elementwise(
            _DECODE_E2M1,
            "=r,=r,=r,=r,r,r,r",
            [codes, power],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return even, odd


@triton.jit
def _load_keys(values, scales, at, scale_at, ELEMENT: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr,
               COMPUTE: tl.constexpr):  # fmt: skip
    """Keys [TILE, ...] of the tensor cores' dtype, in one tile of all channels or in two of half of them."""
    d = tl.arange(0, PADDED_D)
    if ELEMENT == "e2m1":
        half = tl.arange(0, PADDED_D // 2)
        codes = tl.load(values + at[:, None] + half[None, :], mask=(half < D // 2)[None, :], other=0)
        if D <= 4 * 2 * _GROUP_BYTES:
            words = tl.load(scales + scale_at)[:, None]
        else:
            # A word for every four groups.
            word = half // (4 * _GROUP_BYTES)
            words = tl.load(scales + scale_at[:, None] + word[None, :], mask=(half < D // 2)[None, :], other=0)
        first, second = _planes_of_e2m1(codes, words, COMPUTE)
    else:
        if D == PADDED_D:
            first = tl.load(values + at[:, None] + d[None, :])
        else:
            first = tl.load(values + at[:, None] + d[None, :], mask=(d < D)[None, :], other=0)
        if ELEMENT == "e4m3":
            first = bfloat16_of_e4m3(first) if tl.bfloat16 == COMPUTE else e4m3_value(first)
        first = first.to(COMPUTE)
        second = first
    return first, second


@triton.jit
def _load_query(query, weights, query_head, ELEMENT: tl.constexpr, HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr,
                D: tl.constexpr, PADDED_D: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """One token's heads as keys' channels lie, [PADDED_HEADS, ...] twice, and their weights."""
    head, d = tl.arange(0, PADDED_HEADS), tl.arange(0, PADDED_D)
    at = query + head[:, None] * query_head + d[None, :]
    if HEADS == PADDED_HEADS and D == PADDED_D:
        first = tl.load(at).to(COMPUTE)
    else:
        first = tl.load(at, mask=(head < HEADS)[:, None] & (d < D)[None, :], other=0.0).to(COMPUTE)
    second = first
    if ELEMENT == "e2m1":
        first, second = tl.split(tl.reshape(first, (PADDED_HEADS, PADDED_D // 2, 2)))
    weight = tl.load(weights + head, mask=head < HEADS, other=0.0)
    return first, second, weight


@triton.jit
def _scores(first, second, query_first, query_second, weight, ELEMENT: tl.constexpr):
    """[TILE] float32."""
    acc = dot(first, tl.trans(query_first), tl.zeros((first.shape[0], query_first.shape[0]), tl.float32), "ieee")
    if ELEMENT == "e2m1":
        acc = dot(second, tl.trans(query_second), acc, "ieee")
    return tl.sum(tl.maximum(acc, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :], 1)


@triton.jit(do_not_specialize=["first_seq", "first_token", "end_token", "top_k"])
def scores_kernel(
    query,
    weights,
    values,
    scales,
    block_tables,
    stops,
    cu_seqlens,
    scores,
    first_seq,
    first_token,
    end_token,
    top_k,
    width,
    query_token,
    query_head,
    weights_token,
    value_block,
    value_row,
    scale_block,
    scale_row,
    table_row,
    ELEMENT: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED_D: tl.constexpr,
    ROWS_PER_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """scores float32 [end_token - first_token, width]: of the rows up to a token's stop, where that is above top_k.

    A program takes every so many tiles of one sequence's rows, and TOKENS neighbours of its tokens. If that is one,
    sequence i is token i. Steps are in elements; those of e2m1's scales in words of four.
    """
    wait_for_earlier_kernels()
    seq = first_seq + tl.program_id(2)
    if TOKENS == 1:
        begin, end = seq, seq + 1
    else:
        begin = tl.maximum(tl.load(cu_seqlens + seq), first_token) + tl.program_id(1) * TOKENS
        end = tl.minimum(tl.minimum(tl.load(cu_seqlens + seq + 1), end_token), begin + TOKENS)
    token = begin + tl.arange(0, TOKENS)
    stop = tl.load(stops + token, mask=token < end, other=0)
    last = tl.minimum(tl.max(tl.where(stop > top_k, stop, 0), 0), width)
    table = block_tables + seq.to(tl.int64) * table_row
    query += begin.to(tl.int64) * query_token
    weights += begin.to(tl.int64) * weights_token
    scores += (begin - first_token).to(tl.int64) * width
    if TOKENS == 1:
        query_first, query_second, weight = _load_query(query, weights, query_head, ELEMENT, HEADS, PADDED_HEADS, D,
                                                        PADDED_D, COMPUTE)  # fmt: skip
    for tile in tl.range(
        bound(tl.program_id(0)), bound(tl.cdiv(last, TILE)), bound(tl.num_programs(0)),
        num_stages=STAGES if TOKENS == 1 else 1,
    ):  # fmt: skip
        row = tile * TILE + tl.arange(0, TILE)
        # Rows beyond the last read some row of a block that is there.
        block = tl.load(table + row // ROWS_PER_BLOCK, mask=row < last, other=0).to(tl.int64)
        within = row % ROWS_PER_BLOCK
        scale_at = block * scale_block + within * scale_row
        first, second = _load_keys(values, scales, block * value_block + within * value_row, scale_at, ELEMENT, D,
                                   PADDED_D, COMPUTE)  # fmt: skip
        if ELEMENT == "e4m3":
            scale = tl.load(scales + scale_at)
        if TOKENS == 1:
            score = _scores(first, second, query_first, query_second, weight, ELEMENT)
            if ELEMENT == "e4m3":
                score *= scale
            tl.store(scores + row, score, mask=row < last)
        else:
            for one in tl.range(0, bound(end - begin), num_stages=STAGES):
                query_first, query_second, weight = _load_query(
                    query + one * query_token, weights + one * weights_token, query_head, ELEMENT, HEADS, PADDED_HEADS,
                    D, PADDED_D, COMPUTE,
                )  # fmt: skip
                score = _scores(first, second, query_first, query_second, weight, ELEMENT)
                if ELEMENT == "e4m3":
                    score *= scale
                seen = tl.minimum(tl.load(stops + begin + one), width)
                tl.store(scores + one * width + row, score, mask=row < seen)


@triton.jit
def _order(score):
    """int32 that ascends with float32 scores; 0.0 and -0.0 are equal, NaN is above all, and nothing is _NOTHING."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score != score, _NAN, order)


@triton.jit
def _select(
    scores,
    rows,
    next_scores,
    next_rows,
    out,
    table,
    start,
    count,
    top_k,
    final,
    ROWS_PER_BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best top_k of `count` scores: to out as slots if that is final, else to the next level."""
    i = tl.arange(0, TILE)
    there = i < count
    order = tl.where(there, _order(tl.load(scores + i, mask=there, other=0.0)), _NOTHING)
    kept = tl.minimum(count, top_k)
    # At least `kept` are as high as lo, fewer as high as hi.
    lo, hi = tl.min(tl.where(there, order, 0x7FFFFFFF), 0), tl.max(order, 0) + 1
    as_high_as_lo, as_high_as_hi = count, count * 0
    while (as_high_as_lo != kept) & (lo + 1 < hi):
        middle = (lo >> 1) + (hi >> 1) + (lo & hi & 1)  # their difference may not fit
        found = tl.sum((order >= middle).to(tl.int32), 0)
        enough = found >= kept
        lo, as_high_as_lo = tl.where(enough, middle, lo), tl.where(enough, found, as_high_as_lo)
        hi, as_high_as_hi = tl.where(enough, hi, middle), tl.where(enough, as_high_as_hi, found)
    # From lo on up to hi they are either all wanted or all equal: the first ones complete the number.
    above = there & (order >= hi)
    level = there & (order >= lo) & (order < hi)
    up_to = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)
    wanted = kept - as_high_as_hi
    chosen = above | (level & ((up_to >> 16) <= wanted))
    place = (up_to & 0xFFFF) + tl.minimum(up_to >> 16, wanted) - 1
    row = start + i if LEVEL == 0 else tl.load(rows + i, mask=chosen, other=0)
    if final:
        block = tl.load(table + row // ROWS_PER_BLOCK, mask=chosen, other=0)
        tl.store(out + place, block * ROWS_PER_BLOCK + row % ROWS_PER_BLOCK, mask=chosen)
        for first in range(0, bound(top_k), TILE):
            behind = first + i
            tl.store(out + behind, tl.full((TILE,), -1, tl.int32), mask=(behind >= kept) & (behind < top_k))
    else:
        # Read again: registers are few.
        tl.store(next_scores + place, tl.load(scores + i, mask=chosen, other=0.0), mask=chosen)
        tl.store(next_rows + place, row, mask=chosen)


@triton.jit(do_not_specialize=["first_token", "top_k", "most", "width", "next_width"])
def select_kernel(
    scores,
    rows,
    next_scores,
    next_rows,
    out,
    block_tables,
    owners,
    stops,
    first_token,
    top_k,
    most,
    width,
    next_width,
    table_row,
    ROWS_PER_BLOCK: tl.constexpr,
    LEVEL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk of one token's candidates: scores float32 and rows int32 [num_tokens, width], in the order of the rows.

    At level 0 candidates are all rows, up to `most`; behind it what the chunks of the level before kept, one after the
    other. Where one chunk is all, out int32 [num_tokens, top_k] gets the slots, and further levels have nothing to do.
    """
    wait_for_earlier_kernels()
    chunk, number = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = first_token + number
    left = tl.minimum(tl.load(stops + token), most)
    waits = left >= 0
    for _ in tl.static_range(LEVEL):
        waits = waits & (left > CHUNK)
        left = left // CHUNK * top_k + tl.minimum(left % CHUNK, top_k)
    final = left <= CHUNK
    count = tl.minimum(left - chunk * CHUNK, CHUNK)
    if waits & ((count > 0) | (chunk == 0)):
        if owners is None:
            table = block_tables + token * table_row
        else:
            table = block_tables + tl.load(owners + token).to(tl.int64) * table_row
        start = chunk * CHUNK
        scores += number * width + start
        out += token * top_k
        if LEVEL > 0:
            rows += number * width + start
        next_scores += number * next_width + chunk * top_k
        next_rows += number * next_width + chunk * top_k
        if count <= CHUNK // 8:
            _select(scores, rows, next_scores, next_rows, out, table, start, count, top_k, final, ROWS_PER_BLOCK, LEVEL,
                    CHUNK // 8)  # fmt: skip
        elif count <= CHUNK // 2:
            _select(scores, rows, next_scores, next_rows, out, table, start, count, top_k, final, ROWS_PER_BLOCK, LEVEL,
                    CHUNK // 2)  # fmt: skip
        else:
            _select(scores, rows, next_scores, next_rows, out, table, start, count, top_k, final, ROWS_PER_BLOCK, LEVEL,
                    CHUNK)  # fmt: skip
