"""The kernel of the fused write: norm, rotary embedding, Hadamard, cast and store of whole heads.

A program holds its heads in registers: x is read once, every stage works on it there, and only the record's bytes and a
stage that is kept are written. What the rotation pairs up lies in one thread (interleaved) or is read twice (NeoX).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._dependent_launch import wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import (
    e2m1_code,
    e2m1_value,
    e4m3_byte,
    e4m3_value,
    largest_magnitude,
    round_to,
    rounded,
    ue8m0_byte,
    ue8m0_inverse,
    ue8m0_value,
)


@triton.jit
def _store_head(to, tile, rows, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [ROWS, BLOCK_D] to contiguous rows."""
    d = tl.arange(0, BLOCK_D)
    tl.store(to + rows.to(tl.int64)[:, None] * D + d[None, :], tile, mask=there[:, None] & (d < D)[None, :])


@triton.jit
def _rotate_neighbours(v, cos, sin, PART: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pairs (2i, 2i + 1) of part PART of float32 [ROWS, BLOCK_D], seen in parts of R channels. cos, sin [ROWS, R / 2].

    Both of a pair lie in one thread. The other parts meet the angles in registers, where they change nothing.
    """
    turns = (tl.arange(0, BLOCK_D // R) == PART)[None, :, None]
    first, second = tl.split(tl.reshape(v, [ROWS, BLOCK_D // R, R // 2, 2]))
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned_first = tl.where(turns, tl.fma(first, cos, -(second * sin)), first)
    turned_second = tl.where(turns, tl.fma(second, cos, first * sin), second)
    return tl.reshape(tl.join(turned_first, turned_second), [ROWS, BLOCK_D])


@triton.jit
def _rotate_halves(
    v, partner, cos, sin, PART: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Pairs (i, i + R / 2) of part PART; partner [ROWS, R] holds the other one of each pair; cos, sin [ROWS, R]."""
    turns = (tl.arange(0, BLOCK_D // R) == PART)[None, :, None]
    product = partner * sin
    product = tl.where((tl.arange(0, R) < R // 2)[None, :], -product, product)
    parts = tl.reshape(v, [ROWS, BLOCK_D // R, R])
    parts = tl.where(turns, tl.fma(parts, cos[:, None, :], product[:, None, :]), parts)
    return tl.reshape(parts, [ROWS, BLOCK_D])


@triton.jit
def _hadamard(v, LOG_D: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Butterflies at distances 1, 2, 4, ...: each stage takes neighbours apart and makes their bit of the index the
    highest, so that after LOG_D stages every bit is back in its place."""
    for _ in tl.static_range(LOG_D):
        first, second = tl.split(tl.reshape(v, [ROWS, D // 2, 2]))
        both = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        v = tl.reshape(both, [ROWS, D])
    return v


@triton.jit
def _scales_of(groups, ELEMENT: tl.constexpr, SCALE: tl.constexpr):
    """(scales as stored, their float32 values, what the group's values are multiplied by), each [ROWS, groups]."""
    LARGEST: tl.constexpr = 448.0 if ELEMENT == "e4m3" else 6.0
    FLOOR: tl.constexpr = 6.0 * 2.0**-9 if SCALE == "e4m3" else (1e-4 if ELEMENT == "e4m3" else 6.0 * 2.0**-126)
    amax = tl.maximum(largest_magnitude(groups, 2), FLOOR)
    if SCALE == "ue8m0":
        # The quotient's exponent rounded up, which the product with the rounded inverse never misses.
        exponent = ue8m0_byte(amax * (1.0 / LARGEST))
        return exponent.to(tl.uint8), ue8m0_value(exponent), ue8m0_inverse(exponent)
    elif SCALE == "e4m3":  # noqa: RET505 - Triton compiles one branch
        code = e4m3_byte(amax * (1.0 / LARGEST))
        value = e4m3_value(code)
        return code, value, tl.div_rn(1.0, value)
    else:
        value = tl.div_rn(amax, LARGEST)
        return value, value, tl.div_rn(LARGEST, amax)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def transform_kernel(
    x,
    weight,
    positions,
    cos_sin,
    slots,
    values,
    scales,
    kept,
    num_rows,
    num_slots,
    x_token,
    x_head,
    table_step,
    block_step,
    scale_start,
    eps,
    hadamard_scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOG_D: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_STEP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    SHIFT: tl.constexpr,
    SKIP: tl.constexpr,
    R: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    HADAMARD: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STORE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """values: the cache's bytes or numbers where BLOCK_SIZE is not 0, else rows of bytes or of x's dtype. Steps of
    values and scales are in bytes, or for numbers in elements.

    NORM: how many of the D channels are normalised, from the first on. VALUES: how many are quantised; the others are
    stored behind them in bfloat16. SHIFT is taken from each position. SKIP: programs without a slot end at once.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = rows < num_rows
    tokens = rows // HEADS
    d = tl.arange(0, BLOCK_D)
    x_rows = x + tokens.to(tl.int64) * x_token + (rows % HEADS) * x_head

    wait_for_earlier_kernels()
    if SKIP:  # noqa: SIM102 - `and` would load in any case
        if tl.max(tl.load(slots + tokens, mask=there, other=-1), axis=0) < 0:
            return
    # All loads come first: one that waits for another's arithmetic costs its whole latency again.
    if R > 0:
        position = tl.load(positions + tokens, mask=there, other=0)
        if SHIFT > 0:  # tokens without a slot may be nearer to the beginning
            position = tl.maximum(position - SHIFT, 0)
    if BLOCK_SIZE > 0:
        slot = tl.load(slots + tokens, mask=there, other=-1).to(tl.int64)
    if D == BLOCK_D:
        v = tl.load(x_rows[:, None] + d[None, :], mask=there[:, None], other=0.0).to(tl.float32)
    else:
        v = tl.load(x_rows[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    if NORM > 0:
        w = tl.load(weight + d, mask=d < NORM, other=0.0).to(tl.float32)
    if R > 0:
        HALF: tl.constexpr = R // 2
        if INTERLEAVED:
            angle = tl.arange(0, HALF)
        else:
            angle = tl.arange(0, R) % HALF
            other = OFFSET + (tl.arange(0, R) + HALF) % R
            partner = tl.load(x_rows[:, None] + other[None, :], mask=there[:, None], other=0.0).to(tl.float32)
            if NORM > 0:
                partner_weight = tl.load(weight + other, mask=other < NORM, other=0.0).to(tl.float32)
        table = cos_sin + position.to(tl.int64) * table_step
        cos = tl.load(table[:, None] + angle[None, :], mask=there[:, None], other=1.0)
        sin = tl.load(table[:, None] + HALF + angle[None, :], mask=there[:, None], other=0.0)
        if CONJUGATE:
            sin = -sin

    if NORM > 0:
        if NORM == D:
            rstd = tl.rsqrt(tl.sum(v * v, axis=1) * (1.0 / D) + eps)
            v = rounded(v * rstd[:, None] * w[None, :], DTYPE)
        else:
            normed = (d < NORM)[None, :]
            rstd = tl.rsqrt(tl.sum(tl.where(normed, v * v, 0.0), axis=1) * (1.0 / NORM) + eps)
            v = tl.where(normed, rounded(v * rstd[:, None] * w[None, :], DTYPE), v)
        if KEEP == "norm":
            _store_head(kept, v.to(DTYPE), rows, there, D, BLOCK_D)
    if R > 0:
        PART: tl.constexpr = OFFSET // R
        if INTERLEAVED:
            v = _rotate_neighbours(v, cos, sin, PART, R, ROWS, BLOCK_D)
        else:
            if NORM > 0:
                turned = rounded(partner * rstd[:, None] * partner_weight[None, :], DTYPE)
                partner = turned if NORM == D else tl.where((other < NORM)[None, :], turned, partner)
            v = _rotate_halves(v, partner, cos, sin, PART, R, ROWS, BLOCK_D)
        v = rounded(v, DTYPE)
    if HADAMARD:
        v = rounded(_hadamard(v, LOG_D, ROWS, D) * hadamard_scale, DTYPE)
    if KEEP == "transform":
        _store_head(kept, round_to(v, DTYPE), rows, there, D, BLOCK_D)

    if BLOCK_SIZE > 0:
        written = there & (slot >= 0) & (slot < num_slots)
        block = slot // BLOCK_SIZE
        inner = slot - block * BLOCK_SIZE
        to_values = values + block * block_step + inner * VALUE_STEP
        to_scales = values + block * block_step + scale_start + inner * SCALE_STEP
    else:
        written = there
        to_values = values + rows.to(tl.int64) * VALUE_STEP
        to_scales = scales + rows.to(tl.int64) * SCALE_STEP

    if ELEMENT == "none":
        if BLOCK_SIZE > 0 and values.dtype.element_ty != tl.uint8:
            stored = round_to(v, values.dtype.element_ty)
        elif BLOCK_SIZE > 0:
            stored = round_to(v, tl.bfloat16)
            to_values = to_values.to(tl.pointer_type(tl.bfloat16))
            if KEEP == "cast_back":
                _store_head(kept, round_to(stored.to(tl.float32), DTYPE), rows, there, D, BLOCK_D)
        else:
            stored = round_to(v, DTYPE)
        if STORE:
            tl.store(to_values[:, None] + d[None, :], stored, mask=written[:, None] & (d < D)[None, :])
    else:
        groups = tl.reshape(v, [ROWS, BLOCK_D // GROUP, GROUP])
        scale, scale_value, factor = _scales_of(groups, ELEMENT, SCALE)
        scaled = tl.reshape(groups * factor[:, :, None], [ROWS, BLOCK_D])
        if ELEMENT == "e4m3":
            code = e4m3_byte(scaled)
            if STORE:
                tl.store(to_values[:, None] + d[None, :], code, mask=written[:, None] & (d < VALUES)[None, :])
        else:
            code = e2m1_code(scaled)
            if STORE:
                low, high = tl.split(tl.reshape(code, [ROWS, BLOCK_D // 2, 2]))
                half = tl.arange(0, BLOCK_D // 2)
                both = (low | (high << 4)).to(tl.uint8)
                tl.store(
                    to_values[:, None] + half[None, :], both, mask=written[:, None] & (half < VALUES // 2)[None, :]
                )
        if VALUES < D:
            BYTES: tl.constexpr = VALUES if ELEMENT == "e4m3" else VALUES // 2
            plain = (to_values + BYTES).to(tl.pointer_type(tl.bfloat16))
            mask = written[:, None] & ((d >= VALUES) & (d < D))[None, :]
            tl.store(plain[:, None] + d[None, :] - VALUES, round_to(v, tl.bfloat16), mask=mask)
        if STORE:
            group = tl.arange(0, BLOCK_D // GROUP)
            if SCALE == "float32":
                to_scales = to_scales.to(tl.pointer_type(tl.float32))
            mask = written[:, None] & (group < VALUES // GROUP)[None, :]
            tl.store(to_scales[:, None] + group[None, :], scale, mask=mask)
        if KEEP == "cast_back":
            value = e4m3_value(code) if ELEMENT == "e4m3" else e2m1_value(code)
            back = tl.reshape(value, [ROWS, BLOCK_D // GROUP, GROUP]) * scale_value[:, :, None]
            back = round_to(tl.reshape(back, [ROWS, BLOCK_D]), DTYPE)
            _store_head(kept, back, rows, there, D, BLOCK_D)
