"""Products of quantised experts, and the rounding of what they multiply: kernels behind ops/triton/_moe_quantized.py.

Order and tiles are those of `_moe_kernels`. K is added up from first to last, as there: in one float32 accumulator
where the scales are in the numbers, and elsewhere block by block, each one's sum times its scales.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._decode_kernels import GROUP, TILE_ROWS, WIDTH, bfloat16_of_e4m3, planes_of_e2m1
from rorqual.ops.triton._dependent_launch import let_next_kernel_start, wait_for_earlier_kernels, wait_only
from rorqual.ops.triton._interpreter import bound, dot
from rorqual.ops.triton._moe_kernels import lines_of, tile_of, write_answers
from rorqual.ops.triton._number_formats import (
    e4m3_byte,
    e4m3_value,
    largest_magnitude,
    round_to,
    ue8m0_byte,
    ue8m0_inverse,
    ue8m0_value,
)


@triton.jit
def round_rows_kernel(
    x,
    values,
    scales,
    columns,
    groups,
    x_row,
    GROUP_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    UE8M0: tl.constexpr,
    KIND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """x [rows, columns] rounded to e4m3 with a scale per GROUP_SIZE columns, as `QTensor.quantize` defines it.

    KIND "codes": values are the e4m3 codes (uint8), "elements": their numbers in bfloat16; scales float32 [rows,
    groups]. "products": values are the numbers times their scales, powers of two, in bfloat16, which is exact.
    """
    chunks = tl.cdiv(groups, GROUPS)
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks).to(tl.int64)
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP_SIZE + tl.arange(0, GROUP_SIZE)[None, :]
    inside = column < columns
    wait_for_earlier_kernels()
    data = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    amax = tl.maximum(largest_magnitude(data, 1), FLOOR)
    if UE8M0:
        byte = ue8m0_byte(tl.div_rn(amax, LARGEST))
        factor, scale = ue8m0_inverse(byte), ue8m0_value(byte)
    else:
        scale = tl.div_rn(amax, LARGEST)
        factor = tl.div_rn(LARGEST, amax)
    code = e4m3_byte(data * factor[:, None])
    at = values + row * columns + column
    if KIND == "codes":
        tl.store(at, code, mask=inside)
    elif KIND == "elements":
        tl.store(at, round_to(e4m3_value(code), tl.bfloat16), mask=inside)
    else:
        tl.store(at, round_to(e4m3_value(code) * scale[:, None], tl.bfloat16), mask=inside)
    if KIND != "products":
        tl.store(scales + row * groups + group, scale, mask=group < groups)


@triton.jit
def _multiply_quantized_rows(
    x,
    x_scales,
    w,
    w_scales,
    out,
    order,
    expert,
    first,
    last,
    part,
    features,
    K,
    x_row,
    x_groups,
    w_expert,
    w_row,
    w_scale_expert,
    w_scale_row,
    w_scale_group,
    w_block_rows,
    top_k,
    ELEMENT: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    STEP: tl.constexpr,
    FP8: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEATURES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows first .. last - 1 of the order, BLOCK_M at most, times one part of an expert's features."""
    row = first + tl.arange(0, BLOCK_M)
    here = row < last
    pair = row if ONE_TOKEN else tl.load(order + row, mask=here, other=0)
    line, live = lines_of(part, features, GATED, BLOCK_N, FEATURES)
    if GATED:
        source, target = pair // top_k, row
    else:
        source, target = row, pair
    source = source.to(tl.int64)
    column = tl.arange(0, STEP)
    x_at = x + source[:, None] * x_row + column[None, :]
    x_scale_at = x_scales + source * x_groups
    w += expert.to(tl.int64) * w_expert
    w_scales += expert.to(tl.int64) * w_scale_expert
    w_scale_at = w_scales + (line // w_block_rows) * w_scale_row
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if ELEMENT == "e2m1":
        w_at = w + (line // TILE_ROWS * w_row + line % TILE_ROWS * GROUP)[:, None] + column[None, :]
        for step in tl.range(0, bound(tl.cdiv(K, WIDTH)), num_stages=STAGES):
            word = tl.load(w_scale_at + step * w_scale_group, mask=live, other=0)
            codes = tl.load(w_at + step * (TILE_ROWS * GROUP), mask=live[:, None], other=0)
            planes = planes_of_e2m1(codes, word, BLOCK_N)
            if X_GROUP:
                x_scale = tl.load(x_scale_at + step, mask=here, other=0.0)
                product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            else:
                product = acc
            for quarter in tl.static_range(4):
                k = step * WIDTH + quarter * GROUP
                if EVEN_K:
                    x_tile = tl.load(x_at + k, mask=here[:, None], other=0.0)
                else:
                    x_tile = tl.load(x_at + k, mask=here[:, None] & (column < K - k)[None, :], other=0.0)
                product = dot(planes[quarter], tl.trans(x_tile), product)
            if X_GROUP:
                acc += product * x_scale[None, :]
            else:
                acc = product
    else:
        w_at = w + (line.to(tl.int64) * w_row)[:, None] + column[None, :]
        for k in tl.range(0, bound(K), STEP, num_stages=STAGES):
            if EVEN_K:
                x_tile = tl.load(x_at + k, mask=here[:, None], other=0.0)
                w_tile = tl.load(w_at + k, mask=live[:, None], other=0.0 if FP8 else 0)
            else:
                inside = (column < K - k)[None, :]
                x_tile = tl.load(x_at + k, mask=here[:, None] & inside, other=0.0)
                w_tile = tl.load(w_at + k, mask=live[:, None] & inside, other=0.0 if FP8 else 0)
            scale = tl.load(w_scale_at + k // W_GROUP * w_scale_group, mask=live, other=0.0)[:, None]
            if X_GROUP:
                scale = scale * tl.load(x_scale_at + k // X_GROUP, mask=here, other=0.0)[None, :]
            if not FP8:
                w_tile = bfloat16_of_e4m3(w_tile)
            acc += dot(w_tile, tl.trans(x_tile), tl.zeros((BLOCK_N, BLOCK_M), tl.float32)) * scale
    let_next_kernel_start()
    write_answers(acc, out, target, here, part, features, LIMIT, GATED, True, BLOCK_M, BLOCK_N, FEATURES)


@triton.jit(do_not_specialize=["max_tiles"])
def quantized_experts_kernel(
    x,
    x_scales,
    w,
    w_scales,
    out,
    order,
    tiles,
    num_experts,
    features,
    K,
    x_row,
    x_groups,
    w_expert,
    w_row,
    w_scale_expert,
    w_scale_row,
    w_scale_group,
    w_block_rows,
    top_k,
    max_tiles,
    ELEMENT: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    STEP: tl.constexpr,
    FP8: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEATURES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What `experts_kernel` does, of experts that are quantised; the weight is the tensor cores' first operand.

    ELEMENT "e4m3": w [num_experts, lines, K], multiplied as FP8 if FP8 (x then is e4m3 as well), else decoded to
    bfloat16 from uint8; w_scales float32, one per w_block_rows x W_GROUP. "e2m1": words in tiles of 64 lines
    [num_experts, lines / 64, K / 128, 64, 32] and words of scales, both as `planes_of_e2m1` takes them; w_row is the
    step from tile to tile. x_scales float32 [rows, x_groups], one per X_GROUP columns of x; none if X_GROUP is 0. STEP
    columns of K have one scale on either side.
    """
    wait_only()
    part, expert, first, last = tile_of(tiles, num_experts, features, max_tiles, ONE_TOKEN, FEATURES)
    if expert < 0:
        return
    if BLOCK_M > 64 and last - first <= BLOCK_M // 2:
        _multiply_quantized_rows(
            x,
            x_scales,
            w,
            w_scales,
            out,
            order,
            expert,
            first,
            last,
            part,
            features,
            K,
            x_row,
            x_groups,
            w_expert,
            w_row,
            w_scale_expert,
            w_scale_row,
            w_scale_group,
            w_block_rows,
            top_k,
            ELEMENT,
            X_GROUP,
            W_GROUP,
            STEP,
            FP8,
            LIMIT,
            GATED,
            ONE_TOKEN,
            EVEN_K,
            BLOCK_M // 2,
            BLOCK_N,
            FEATURES,
            STAGES,
        )
    else:
        _multiply_quantized_rows(
            x,
            x_scales,
            w,
            w_scales,
            out,
            order,
            expert,
            first,
            last,
            part,
            features,
            K,
            x_row,
            x_groups,
            w_expert,
            w_row,
            w_scale_expert,
            w_scale_row,
            w_scale_group,
            w_block_rows,
            top_k,
            ELEMENT,
            X_GROUP,
            W_GROUP,
            STEP,
            FP8,
            LIMIT,
            GATED,
            ONE_TOKEN,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            FEATURES,
            STAGES,
        )
