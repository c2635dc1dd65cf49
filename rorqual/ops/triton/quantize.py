"""Quantising activations in one launch: values and scales, in any layout of the scales.

A program takes a tile of rows and whole groups of columns, each thread neighbouring values of 16 bytes or more, so that
x is read once. Sizes that change from step to step are plain arguments: two tiles are compiled per format, layout and
dtype, one for few rows and one for many.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.quantize import quantize
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import (
    e2m1_code,
    e4m3_byte,
    e4m3_value,
    largest_magnitude,
    ue8m0_byte,
    ue8m0_inverse,
    ue8m0_value,
)
from rorqual.ops.triton.launch import refuses
from rorqual.quantization import QTensor, QuantFormat, ScaleLayout, allocate_scales

_GROUPS = (16, 32, 64, 128)
_WIDTH = 512
"""Columns of a tile: four of the largest groups, since four scales are packed into a word."""
_FEW_ROWS = 128
"""Below this many, a tile is one row of one warp, so that there are enough programs for all multiprocessors."""
_TILE_ROWS = 16
"""Rows of a tile otherwise: 8,192 values, 64 per thread, so that addresses and scales are a small part of the work; a
column of float32 scales fills two sectors of 32 bytes."""
_SCALE_DTYPES = {"float32": torch.float32, "ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


@triton.jit(do_not_specialize=["rows", "groups", "scale_row", "scale_entry"])
def _quantize_kernel(
    x,
    values,
    scales,
    rows,
    columns,
    groups,
    x_row,
    scale_row,
    scale_entry,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    PAIRS: tl.constexpr,  # e2m1: two values per byte
    SCALE: tl.constexpr,
    PACKED: tl.constexpr,
    AS_FLOAT: tl.constexpr,  # UE8M0 as float32 powers of two
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    chunks = tl.cdiv(groups, GROUPS)
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks) * ROWS + tl.arange(0, ROWS)
    group = chunk * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    here = row < rows
    far = row.to(tl.int64)  # the tensor may have more than 2^31 values

    wait_for_earlier_kernels()
    inside = here[:, None, None] & (column < columns)[None, :, :]
    data = tl.load(x + far[:, None, None] * x_row + column[None, :, :], mask=inside, other=0.0).to(tl.float32)
    amax = tl.maximum(largest_magnitude(data, 2), FLOOR)
    if SCALE == "ue8m0":
        byte = ue8m0_byte(tl.div_rn(amax, LARGEST))
        factor = ue8m0_inverse(byte)
        scale = ue8m0_value(byte) if AS_FLOAT else byte.to(tl.uint8)
    elif SCALE == "e4m3":
        scale = e4m3_byte(amax * (1 / LARGEST))
        factor = tl.div_rn(1.0, e4m3_value(scale))
    else:
        scale = tl.div_rn(amax, LARGEST)
        factor = tl.div_rn(LARGEST, amax)

    scaled = data * factor[:, :, None]
    if PAIRS:
        low, high = tl.split(tl.reshape(e2m1_code(scaled), (ROWS, GROUPS, GROUP // 2, 2)))
        pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
        target = values + far[:, None, None] * (columns // 2) + pair[None, :, :]
        inside = here[:, None, None] & (pair < columns // 2)[None, :, :]
        tl.store(target, (low | (high << 4)).to(tl.uint8), mask=inside)
    else:
        tl.store(values + far[:, None, None] * columns + column[None, :, :], e4m3_byte(scaled), mask=inside)

    if PACKED:
        fours = tl.reshape(tl.where(group[None, :] < groups, byte, 0), (ROWS, GROUPS // 4, 4))
        entry = chunk * (GROUPS // 4) + tl.arange(0, GROUPS // 4)
        stored = tl.sum(fours << (8 * tl.arange(0, 4))[None, None, :], axis=2)
        entries = tl.cdiv(groups, 4)
    else:
        entry, stored, entries = group, scale, groups
    target = scales + far[:, None] * scale_row + entry.to(tl.int64)[None, :] * scale_entry
    tl.store(target, stored, mask=here[:, None] & (entry < entries)[None, :])


def _refuse(x: torch.Tensor, *, format: QuantFormat, layout: ScaleLayout = ScaleLayout.ROW) -> str | None:
    if reason := refuses(x):
        return reason
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"needs bfloat16, float16 or float32 [rows, columns], got {x.dtype} of shape {tuple(x.shape)}"
    if x.stride(1) != 1:
        return f"needs values of a row next to each other, got a stride of {x.stride(1)}"
    if format.block[0] != 1 or format.block[1] not in _GROUPS:
        return f"needs blocks of one row and {_GROUPS} columns, got {format.block}"
    if format.element == "e2m1" and x.shape[1] % 2:
        return f"needs an even number of columns for {format.name}, got {x.shape[1]}"
    if (layout.packed and format.scale != "ue8m0") or (layout.by_column and format.scale == "e4m3"):
        return f"there is no layout {layout.name} for {format.scale} scales"
    if layout is ScaleLayout.ROW_PACKED and -(-x.shape[1] // format.block[1]) % 4:
        return f"layout ROW_PACKED needs a multiple of four groups, got {x.shape[1]} columns"
    return None


@quantize.impl("triton", refuse=_refuse)
def quantize_triton(x: torch.Tensor, *, format: QuantFormat, layout: ScaleLayout = ScaleLayout.ROW) -> QTensor:
    """One launch; equal to the reference to the bit."""
    rows, columns = x.shape
    group = format.block[1]
    groups = -(-columns // group)
    pairs = format.element == "e2m1"
    values = torch.empty((rows, columns // 2 if pairs else columns), dtype=torch.uint8, device=x.device)
    scales = allocate_scales(rows, groups, layout, device=x.device, dtype=_SCALE_DTYPES[format.scale])
    if rows and columns:
        few = rows < _FEW_ROWS
        tile_rows, tile_groups = 1 if few else _TILE_ROWS, _WIDTH // group
        grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(groups, tile_groups),)
        _quantize_kernel[grid](
            x,
            values,
            scales.view(torch.uint8) if format.scale == "e4m3" else scales,
            rows,
            columns,
            groups,
            x.stride(0),
            scales.stride(0),
            scales.stride(1),
            GROUP=group,
            LARGEST=format.largest,
            FLOOR=format.amax_floor,
            PAIRS=pairs,
            SCALE=format.scale,
            PACKED=layout.packed,
            AS_FLOAT=layout is ScaleLayout.COLUMN,
            ROWS=tile_rows,
            GROUPS=tile_groups,
            num_warps=1 if few else 4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return QTensor(values.view(torch.int8 if pairs else torch.float8_e4m3fn), scales, format, layout)
