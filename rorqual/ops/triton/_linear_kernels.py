"""Matrix products of quantised weights: the kernels behind ops/triton/linear.py.

All of them accumulate in float32 and apply scales per block. A program computes one tile of the output, or with
SPLIT > 1 one share of its columns of K. Which columns a share has, and in which order they and the shares are added,
does not depend on the number of rows.

With WEIGHT_FIRST a tile is [BLOCK_N, BLOCK_M], the transposed output: the weight then is the tensor cores' first
operand, which has 16 rows at least, while a decoding batch may have fewer. That operand may also come from registers,
where a packed weight is decoded.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._decode_kernels import (
    GROUP,
    TILE_ROWS,
    WIDTH,
    bfloat16_of_e4m3,
    planes_of_e2m1,
    power_of_two,
    scaled,
)
from rorqual.ops.triton._interpreter import bound, dot
from rorqual.ops.triton._number_formats import round_to

_TILES_TOGETHER = tl.constexpr(8)
"""Tiles of rows that are computed next to each other, so that what they read is still in the L2 cache."""


@triton.jit
def _tile_of(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tile of rows, tile of features) of this program."""
    tile = tl.program_id(0)
    across, down = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
    together = _TILES_TOGETHER * across
    first = tile // together * _TILES_TOGETHER
    height = tl.minimum(down - first, _TILES_TOGETHER)
    return first + tile % together % height, tile % together // height


@triton.jit
def _share(K, SPLIT: tl.constexpr):
    """The first and last + 1 step of the loop over K."""
    steps = tl.cdiv(K, WIDTH)
    part = tl.program_id(1)
    return bound(part * steps // SPLIT), bound((part + 1) * steps // SPLIT)


@triton.jit
def _write(acc, m, n, M, N, bias, out, out_row, ACCUMULATE: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """Add bias and accumulator, round once, store."""
    if bias is not None:
        added = tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        acc += added[:, None] if WEIGHT_FIRST else added[None, :]
    if WEIGHT_FIRST:
        at = m.to(tl.int64)[None, :] * out_row + n[:, None]
        here = (m < M)[None, :] & (n < N)[:, None]
    else:
        at = m.to(tl.int64)[:, None] * out_row + n[None, :]
        here = (m < M)[:, None] & (n < N)[None, :]
    if ACCUMULATE:
        acc += tl.load(out + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, round_to(acc, out.dtype.element_ty), mask=here)


@triton.jit
def _finish(
    acc,
    m,
    n,
    M,
    N,
    bias,
    out,
    out_row,
    partial,
    arrivals,
    ACCUMULATE: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Write a tile; of a tile in several shares, the program that comes last adds them up, always in the same order.

    partial float32 [SPLIT, M, N]. arrivals int32, one per tile, zero before and after the launch.
    """
    if SPLIT == 1:
        _write(acc, m, n, M, N, bias, out, out_row, ACCUMULATE, WEIGHT_FIRST)
    else:
        if WEIGHT_FIRST:
            at = m.to(tl.int64)[None, :] * N + n[:, None]
            here = (m < M)[None, :] & (n < N)[:, None]
        else:
            at = m.to(tl.int64)[:, None] * N + n[None, :]
            here = (m < M)[:, None] & (n < N)[None, :]
        size = M.to(tl.int64) * N
        tl.store(partial + tl.program_id(1) * size + at, acc, mask=here)
        tl.debug_barrier()  # every thread's share is written before one of them says so
        arrived = tl.atomic_add(arrivals + tl.program_id(0), 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            total = tl.load(partial + at, mask=here, other=0.0, cache_modifier=".cg")
            for part in range(1, SPLIT):
                total += tl.load(partial + part * size + at, mask=here, other=0.0, cache_modifier=".cg")
            tl.store(arrivals + tl.program_id(0), 0)
            _write(total, m, n, M, N, bias, out, out_row, ACCUMULATE, WEIGHT_FIRST)


@triton.jit(do_not_specialize=["M", "x_scale_row", "x_scale_group"])
def block_scaled_kernel(
    x,
    x_scales,
    w,
    w_scales,
    bias,
    out,
    partial,
    arrivals,
    M,
    N,
    K,
    x_row,
    x_scale_row,
    x_scale_group,
    w_row,
    w_scale_row,
    w_scale_group,
    out_row,
    w_block_rows,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    STEP: tl.constexpr,
    WORDS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """e4m3 x [M, K] times e4m3 w [N, K], multiplied as FP8 and scaled block by block.

    Scales are float32, one per X_GROUP columns of x and per w_block_rows x W_GROUP of w; or with WORDS UE8M0, one per
    32 columns and four to a word. STEP columns have one scale on either side. ONE_BLOCK: so have a tile's features.
    """
    row_tile, feature_tile = _tile_of(M, N, BLOCK_M, BLOCK_N)
    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = feature_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, STEP)
    here = (m < M)[:, None]
    x_at = x + m.to(tl.int64)[:, None] * x_row + column[None, :]
    # Beyond the last feature the last is read again, and not stored.
    w_at = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_row + column[None, :]
    x_scale_at = x_scales + m.to(tl.int64) * x_scale_row
    if ONE_BLOCK:
        w_scale_at = w_scales + (feature_tile * BLOCK_N // w_block_rows).to(tl.int64) * w_scale_row
    else:
        w_scale_at = w_scales + (tl.minimum(n, N - 1) // w_block_rows).to(tl.int64) * w_scale_row
    acc = tl.zeros((BLOCK_N, BLOCK_M) if WEIGHT_FIRST else (BLOCK_M, BLOCK_N), tl.float32)

    first, last = _share(K, SPLIT)
    for step in tl.range(first, last, num_stages=STAGES):
        if WORDS:
            x_word = tl.load(x_scale_at + step * x_scale_group, mask=m < M, other=0)
            w_word = tl.load(w_scale_at + step * w_scale_group)
        for part in tl.static_range(WIDTH // STEP):
            k = step * WIDTH + part * STEP
            if EVEN:
                x_tile = tl.load(x_at + k, mask=here, other=0.0)
                w_tile = tl.load(w_at + k)
            else:
                x_tile = tl.load(x_at + k, mask=here & (column < K - k)[None, :], other=0.0)
                w_tile = tl.load(w_at + k, mask=(column < K - k)[None, :], other=0.0)
            if WORDS:
                x_scale = power_of_two(x_word, part, tl.float32)
                w_scale = power_of_two(w_word, part, tl.float32)
            elif EVEN:
                x_scale = tl.load(x_scale_at + k // X_GROUP * x_scale_group, mask=m < M, other=0.0)
                w_scale = tl.load(w_scale_at + k // W_GROUP * w_scale_group)
            else:
                within = (m < M) & (k < K)
                x_scale = tl.load(x_scale_at + k // X_GROUP * x_scale_group, mask=within, other=0.0)
                w_scale = tl.load(w_scale_at + k // W_GROUP * w_scale_group, mask=k < K, other=0.0)
            if WEIGHT_FIRST:
                product = dot(w_tile, tl.trans(x_tile), tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
                if ONE_BLOCK:
                    acc += product * (x_scale * w_scale)[None, :]
                else:
                    acc += product * (x_scale[None, :] * w_scale[:, None])
            else:
                product = dot(x_tile, tl.trans(w_tile), tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
                if ONE_BLOCK:
                    acc += product * (x_scale * w_scale)[:, None]
                else:
                    acc += product * (x_scale[:, None] * w_scale[None, :])
    _finish(acc, m, n, M, N, bias, out, out_row, partial, arrivals, ACCUMULATE, WEIGHT_FIRST, SPLIT)


@triton.jit(do_not_specialize=["M"])
def weight_only_kernel(
    x,
    w,
    w_scales,
    bias,
    out,
    partial,
    arrivals,
    M,
    N,
    K,
    x_row,
    w_row,
    w_scale_row,
    w_scale_group,
    out_row,
    w_block_rows,
    ELEMENT: tl.constexpr,
    WORDS: tl.constexpr,
    W_GROUP: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """bfloat16 x [M, K] times a weight that is decoded to bfloat16 in registers, which is exact.

    w: e4m3 codes [N, K] (uint8) with scales as in `block_scaled_kernel`; or e2m1, words in tiles of 64 rows
    [N / 64, K / 128, 64, 32] with scales as in `planes_of_e2m1`, zero beyond K, and w_row the step between tiles.
    Powers of two are part of what is decoded; float32 scales are applied to each block's product.
    """
    row_tile, feature_tile = _tile_of(M, N, BLOCK_M, BLOCK_N)
    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = feature_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_at = tl.minimum(n, N - 1)
    column = tl.arange(0, STEP)
    here = (m < M)[:, None]
    x_at = x + m.to(tl.int64)[:, None] * x_row + column[None, :]
    if ELEMENT == "e2m1":
        tile = (n_at // TILE_ROWS).to(tl.int64) * w_row + (n_at % TILE_ROWS) * GROUP
        w_at = w + tile[:, None] + column[None, :]
    else:
        w_at = w + n_at.to(tl.int64)[:, None] * w_row + column[None, :]
    w_scale_at = w_scales + (n_at // w_block_rows).to(tl.int64) * w_scale_row
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)

    first, last = _share(K, SPLIT)
    for step in tl.range(first, last, num_stages=STAGES):
        if WORDS:
            w_word = tl.load(w_scale_at + step * w_scale_group)
        if ELEMENT == "e2m1":
            k = step * WIDTH
            planes = planes_of_e2m1(tl.load(w_at + step * (TILE_ROWS * GROUP)), w_word, BLOCK_N)
            for part in tl.static_range(4):
                if EVEN:
                    x_tile = tl.load(x_at + k + part * GROUP, mask=here, other=0.0)
                else:
                    inside = here & (column < K - k - part * GROUP)[None, :]
                    x_tile = tl.load(x_at + k + part * GROUP, mask=inside, other=0.0)
                acc = dot(planes[part], tl.trans(x_tile), acc)
        else:
            for part in tl.static_range(WIDTH // STEP):
                k = step * WIDTH + part * STEP
                if EVEN:
                    x_tile = tl.load(x_at + k, mask=here, other=0.0)
                    w_tile = bfloat16_of_e4m3(tl.load(w_at + k))
                else:
                    inside = (column < K - k)[None, :]
                    x_tile = tl.load(x_at + k, mask=here & inside, other=0.0)
                    w_tile = bfloat16_of_e4m3(tl.load(w_at + k, mask=inside, other=0))
                if WORDS:
                    acc = dot(scaled(w_tile, power_of_two(w_word, part, tl.bfloat16)), tl.trans(x_tile), acc)
                else:
                    if EVEN:
                        w_scale = tl.load(w_scale_at + k // W_GROUP * w_scale_group)
                    else:
                        w_scale = tl.load(w_scale_at + k // W_GROUP * w_scale_group, mask=(n >= 0) & (k < K), other=0.0)
                    acc += dot(w_tile, tl.trans(x_tile), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)) * w_scale[:, None]
    _finish(acc, m, n, M, N, bias, out, out_row, partial, arrivals, ACCUMULATE, True, SPLIT)
