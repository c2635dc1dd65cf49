"""RMSNorm in one launch: residual before it, quantisation after it.

A program holds whole rows in registers, so that x is read once and everything is written once. Each thread moves 16
bytes at a time. Sizes that change from step to step are plain arguments: a kernel is compiled once per model and use,
not once per number of tokens.
"""

# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from rorqual.ops.rms_norm import DTYPES, FORMATS, NormOutput, UtccpTarget, check_arguments, rms_norm
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import (
    e4m3_byte,
    largest_magnitude,
    round_to,
    rounded,
    ue8m0_byte,
    ue8m0_inverse,
    ue8m0_value,
)
from rorqual.ops.triton.launch import refuses
from rorqual.quantization import QTensor, QuantFormat, ScaleLayout, allocate_scales

_LARGEST_SIZE = 16384
_TILE = 1024
"""Values that a program holds at least, in several rows where one is shorter."""
_PER_WARP = 1024
"""Values per warp of a long row, 32 per thread: four loads under way, and registers for eight programs of 4,096."""


@triton.jit
def _pack4(bytes, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """int32 [ROWS, COUNT] of 0..255 -> int32 [ROWS, COUNT / 4], the first byte lowest."""
    place = tl.arange(0, 4)[None, None, :] * 8
    return tl.sum(tl.reshape(bytes, (ROWS, COUNT // 4, 4)) << place, axis=2)


@triton.jit(do_not_specialize=["rows", "inner", "scale_batch", "scale_row", "scale_group", "utccp_rows", "utccp_block"])
def _rms_norm_kernel(
    x,
    weight,
    residual,
    out,
    total,
    scales,
    copied,
    utccp,
    rows,
    inner,
    size,
    x_outer,
    x_inner,
    residual_outer,
    residual_inner,
    out_outer,
    out_inner,
    scale_batch,
    scale_row,
    scale_group,
    utccp_rows,
    utccp_block,
    eps,
    out_scale,
    NESTED: tl.constexpr,
    UNROUNDED: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    FLOOR: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], (ROWS, BLOCK))
    here = row < rows
    mask = column < size
    if ROWS > 1:
        mask = mask & here[:, None]
    outer, at = tl.zeros_like(row), row
    if NESTED:
        outer, at = row // inner, row % inner
    far, outer, at = row.to(tl.int64), outer.to(tl.int64), at.to(tl.int64)  # there may be more than 2^31 values
    dense = (far * size)[:, None] + column

    wait_for_earlier_kernels()
    w = tl.load(weight + column, mask=column < size, other=0.0, eviction_policy="evict_last").to(tl.float32)
    x_at = (outer * x_outer + at * x_inner)[:, None] + column
    v = tl.load(x + x_at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if residual is not None:
        residual_at = (outer * residual_outer + at * residual_inner)[:, None] + column
        r = tl.load(residual + residual_at, mask=mask, other=0.0, eviction_policy="evict_first")
        v += r.to(tl.float32)
        s = round_to(v, x.dtype.element_ty)
        tl.store(total + dense, s, mask=mask)
        if not UNROUNDED:
            v = s.to(tl.float32)
    if SCALED:
        w = w * out_scale
    rstd = tl.rsqrt(tl.sum(v * v, axis=1) / size + eps)
    y = v * rstd[:, None] * w

    if GROUP == 0:
        out_at = (outer * out_outer + at * out_inner)[:, None] + column
        tl.store(out + out_at, round_to(y, x.dtype.element_ty), mask=mask)
    else:
        t = rounded(y, x.dtype.element_ty)
        if copied is not None:
            tl.store(copied + dense, round_to(t, tl.bfloat16), mask=mask)
        GROUPS: tl.constexpr = BLOCK // GROUP
        t = tl.reshape(t, (ROWS, GROUPS, GROUP))
        largest = tl.maximum(largest_magnitude(t, 2), FLOOR)
        scale = tl.div_rn(largest, LARGEST)
        if POWER_OF_TWO:
            byte = ue8m0_byte(scale)
            inverse = ue8m0_inverse(byte)
        else:
            inverse = tl.div_rn(LARGEST, largest)
        codes = e4m3_byte(t * inverse[:, :, None])
        tl.store(out + tl.max_contiguous(dense, (1, 8)), tl.reshape(codes, (ROWS, BLOCK)), mask=mask)

        group = tl.arange(0, GROUPS)[None, :]
        num_groups = tl.cdiv(size, GROUP)
        scale_base = (outer * scale_batch + at * scale_row)[:, None]
        if not PACKED:
            there = here[:, None] & (group < num_groups)
            stored = scale
            if POWER_OF_TWO:
                stored = ue8m0_value(byte) if scales.dtype.element_ty == tl.float32 else byte.to(tl.uint8)
            tl.store(scales + scale_base + group * scale_group, stored, mask=there)
        if PACKED or utccp is not None:
            word = _pack4(tl.where(group < num_groups, byte, 0), ROWS, GROUPS)
            pack = tl.arange(0, GROUPS // 4)[None, :]
            there = here[:, None] & (pack < tl.cdiv(num_groups, 4))
            if PACKED:
                tl.store(scales + scale_base + pack * scale_group, word, mask=there)
            if utccp is not None:
                inside = row % utccp_block
                place = row // utccp_block * (tl.cdiv(utccp_block, 128) * 128)
                place += inside // 128 * 128 + inside % 32 * 4 + inside % 128 // 32
                tl.store(utccp + place.to(tl.int64)[:, None] + pack * utccp_rows, word, mask=there)


class _Tile(NamedTuple):
    """How rows are cut among programs and threads. By their size alone: a row's sum must not depend on the batch."""

    rows: int
    block: int
    num_warps: int


@functools.cache
def _tile(size: int, group: int) -> _Tile:
    # Of a quantised row at least four groups, which fill one packed scale.
    block = max(triton.next_power_of_2(size), 4 * group, 16)
    rows = max(1, _TILE // block)
    return _Tile(rows, block, max(4, rows * block // _PER_WARP))


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """(outer, inner) in values: of one dimension there is one row, of two the outer one is not used."""
    strides = x.stride()
    return (strides[0], strides[1]) if len(strides) == 3 else (0, strides[0])


def _refuse(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    format: QuantFormat | None = None,
    layout: ScaleLayout = ScaleLayout.ROW,
    out: torch.Tensor | None = None,
    **_: Any,
) -> str | None:
    if (device := refuses(x, weight, residual, out)) is not None:
        return device
    shape = x.shape
    if not 1 <= len(shape) <= 3 or not 0 < shape[-1] <= _LARGEST_SIZE:
        return f"needs 1 to 3 dimensions, the last of 1 to {_LARGEST_SIZE} values, got {tuple(shape)}"
    if x.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"needs bfloat16, float16 or float32, got {x.dtype} and a weight of {weight.dtype}"
    if weight.shape != shape[-1:] or weight.stride(0) != 1:
        return f"needs a dense weight of {shape[-1]} values, got {tuple(weight.shape)} with strides {weight.stride()}"
    for other in (x, residual, out):
        if other is None:
            continue
        if other.stride(-1) != 1 and shape[-1] > 1:
            return f"needs a last stride of 1, got strides {other.stride()}"
        if other.shape != shape or other.dtype != x.dtype:
            return f"needs tensors like x, {tuple(shape)} of {x.dtype}, got {tuple(other.shape)} of {other.dtype}"
    if format is not None:
        if format not in FORMATS or len(shape) < 2:
            return f"quantises 2 or 3 dimensions to one of its formats, got {format.name} and {tuple(shape)}"
        if layout.packed and format.scale != "ue8m0":
            return f"packs UE8M0 scales only, got {format.name}"
        if layout is ScaleLayout.ROW_PACKED and -(-shape[-1] // format.block[1]) % 4:
            return f"packs a multiple of four scales per row, got {tuple(shape)} in {format.name}"
    return None


@rms_norm.impl("triton", refuse=_refuse)
def rms_norm_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    format: QuantFormat | None = None,
    layout: ScaleLayout = ScaleLayout.ROW,
    copy: bool = False,
    unrounded_sum: bool = False,
    utccp: UtccpTarget | None = None,
    out: torch.Tensor | None = None,
) -> NormOutput:
    """See the reference; sums of squares are taken in another order."""
    shape, dims = x.shape, x.dim()
    size = shape[-1]
    total = copied = scales = None
    scale_strides: tuple[int, ...] = (0, 0, 0)
    group = 0
    if residual is not None:
        total = torch.empty(shape, dtype=x.dtype, device=x.device)
    if format is None:
        if copy or utccp is not None:
            check_arguments(x, weight, copy=copy, utccp=utccp)
        values = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    else:
        check_arguments(x, weight, residual=residual, format=format, copy=copy, utccp=utccp, out=out)
        group = format.block[1]
        values = torch.empty(shape, dtype=torch.uint8, device=x.device)
        scales = allocate_scales(
            shape[-2],
            -(-size // group),
            layout,
            batch=shape[0] if dims == 3 else None,
            device=x.device,
            dtype=torch.uint8 if format.scale == "ue8m0" else torch.float32,
        )
        scale_strides = scales.stride() if dims == 3 else (0, *scales.stride())
        if copy:
            copied = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
    rows = x.numel() // size
    if rows:
        tile = _tile(size, group)
        _rms_norm_kernel[(-(-rows // tile.rows),)](
            x,
            weight,
            residual,
            values,
            total,
            scales,
            copied,
            None if utccp is None else utccp.out,
            rows,
            shape[1] if dims == 3 else rows,
            size,
            *_strides(x),
            *((0, 0) if residual is None else _strides(residual)),
            *_strides(values),
            *scale_strides,
            0 if utccp is None else utccp.out.stride(1),
            1 if utccp is None else utccp.block_m,
            eps,
            out_scale,
            NESTED=dims == 3,
            UNROUNDED=unrounded_sum,
            SCALED=out_scale != 1.0,
            GROUP=group,
            LARGEST=0.0 if format is None else format.largest,
            FLOOR=0.0 if format is None else format.amax_floor,
            POWER_OF_TWO=format is not None and format.scale == "ue8m0",
            PACKED=layout.packed,
            ROWS=tile.rows,
            BLOCK=tile.block,
            num_warps=tile.num_warps,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    if format is None:
        return NormOutput(values, total)
    assert scales is not None
    return NormOutput(QTensor(values.view(torch.float8_e4m3fn), scales, format, layout), total, copied)
