"""Reading cache records back into rows, in one launch: a program reads a few slots of one segment."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.load_kv import allocate_loaded, check_load, load_kv
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import e2m1_value, e4m3_value, round_to, ue8m0_value
from rorqual.ops.triton.kv_transform import kind_of, steps_of
from rorqual.ops.triton.launch import refuses
from rorqual.quantization import QTensor
from rorqual.quantization.kv_record import KVRecord

_LARGEST_RECORD = 1024
_TILE = 4096
"""Values of one program."""


@triton.jit(do_not_specialize=["num_blocks", "total"])
def _load_kernel(
    cache,
    segments,
    out,
    num_blocks,
    total,
    block_step,
    value_step,
    scale_step,
    scale_start,
    out_step,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Part of one segment: values times scales, rounded to out's dtype."""
    block, source, row, there = _segment_rows(segments, num_blocks, total, BLOCK_SIZE, ROWS)
    d = tl.arange(0, BLOCK_D)
    found = there & (block >= 0)
    records = cache + block * block_step + source * value_step
    if ELEMENT == "none":
        records = records.to(tl.pointer_type(tl.bfloat16))
        value = tl.load(records[:, None] + d[None, :], mask=found[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    else:
        if ELEMENT == "e4m3":
            code = tl.load(records[:, None] + d[None, :], mask=found[:, None] & (d < D)[None, :], other=0)
            value = e4m3_value(code)
        else:
            half = tl.arange(0, BLOCK_D // 2)
            both = tl.load(records[:, None] + half[None, :], mask=found[:, None] & (half < D // 2)[None, :], other=0)
            value = tl.reshape(tl.join(e2m1_value(both & 15), e2m1_value(both >> 4)), [ROWS, BLOCK_D])
        group = tl.arange(0, BLOCK_D // GROUP)
        scales = cache + block * block_step + scale_start + source * scale_step
        if SCALE == "float32":
            scales = scales.to(tl.pointer_type(tl.float32))
        scale = tl.load(scales[:, None] + group[None, :], mask=found[:, None] & (group < D // GROUP)[None, :], other=0)
        if SCALE == "ue8m0":
            scale = ue8m0_value(scale)
        elif SCALE == "e4m3":
            scale = e4m3_value(scale)
        value = tl.reshape(value, [ROWS, BLOCK_D // GROUP, GROUP]) * scale[:, :, None]
        value = tl.reshape(value, [ROWS, BLOCK_D])
    to = out + row * out_step
    stored = round_to(value, out.dtype.element_ty)
    tl.store(to[:, None] + d[None, :], stored, mask=there[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_blocks", "total"])
def _copy_kernel(
    cache,
    segments,
    values,
    scales,
    num_blocks,
    total,
    block_step,
    scale_start,
    BLOCK_SIZE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Part of one segment of records laid out over the block: bytes as they are."""
    block, source, row, there = _segment_rows(segments, num_blocks, total, BLOCK_SIZE, ROWS)
    found = (there & (block >= 0))[:, None]
    base = cache + block * block_step
    v = tl.arange(0, BLOCK_V)[None, :]
    code = tl.load(base + source[:, None] * VALUE_BYTES + v, mask=found & (v < VALUE_BYTES), other=0)
    tl.store(values + row[:, None] * VALUE_BYTES + v, code, mask=there[:, None] & (v < VALUE_BYTES))
    s = tl.arange(0, BLOCK_S)[None, :]
    scale = tl.load(base + scale_start + source[:, None] * SCALE_BYTES + s, mask=found & (s < SCALE_BYTES), other=0)
    tl.store(scales + row[:, None] * SCALE_BYTES + s, scale, mask=there[:, None] & (s < SCALE_BYTES))


@triton.jit
def _segment_rows(segments, num_blocks, total, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr):
    """(block, slots in it [ROWS], rows of the result [ROWS], which of them there are); none of a segment that reaches
    beyond the cache, its block or the result."""
    wait_for_earlier_kernels()
    segment = segments + tl.program_id(0) * 4
    block = tl.load(segment).to(tl.int64)
    begin = tl.load(segment + 1)
    end = tl.load(segment + 2)
    first_row = tl.load(segment + 3)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid = (block >= -1) & (block < num_blocks) & (begin >= 0) & (end <= BLOCK_SIZE)
    valid = valid & (first_row >= 0) & (first_row + end - begin <= total)
    return block, (begin + i).to(tl.int64), (first_row + i).to(tl.int64), valid & (begin + i < end)


def _refuse_load(
    cache: torch.Tensor, segments: torch.Tensor, total: int, *, record: KVRecord, out: torch.Tensor | None = None
) -> str | None:
    if record.dims > _LARGEST_RECORD:
        return f"needs records of up to {_LARGEST_RECORD} values, got {record.dims}"
    if not segments.is_contiguous():
        return "needs segments without gaps"
    return refuses(cache, segments, out)


@load_kv.impl("triton", refuse=_refuse_load)
def load_kv_triton(
    cache: torch.Tensor, segments: torch.Tensor, total: int, *, record: KVRecord, out: torch.Tensor | None = None
) -> torch.Tensor | QTensor:
    """See the reference."""
    check_load(cache, segments, total, record, out)
    result = allocate_loaded(record, total, cache.device) if out is None else out
    if len(segments) == 0:
        return result
    block_size = cache.shape[1]
    value_step, scale_step, scale_start = steps_of(cache, record)
    block_d = 1 << (record.dims - 1).bit_length()
    rows = min(1 << (block_size - 1).bit_length(), max(1, _TILE // block_d))
    grid = (len(segments), -(-block_size // rows))
    if isinstance(result, QTensor):
        _copy_kernel[grid](
            cache,
            segments,
            result.values.view(torch.uint8),
            result.scales.view(torch.uint8),
            len(cache),
            total,
            cache.stride(0),
            scale_start,
            BLOCK_SIZE=block_size,
            VALUE_BYTES=record.value_bytes,
            SCALE_BYTES=record.scale_bytes,
            BLOCK_V=1 << (record.value_bytes - 1).bit_length(),
            BLOCK_S=1 << (record.scale_bytes - 1).bit_length(),
            ROWS=rows,
            launch_pdl=DEPENDENT_LAUNCH,
        )
        return result
    element, scale, group = kind_of(record.format)
    _load_kernel[grid](
        cache,
        segments,
        result,
        len(cache),
        total,
        cache.stride(0),
        value_step,
        scale_step,
        scale_start,
        result.stride(0),
        BLOCK_SIZE=block_size,
        D=record.dims,
        BLOCK_D=max(block_d, group),
        ROWS=rows,
        ELEMENT=element,
        SCALE=scale,
        GROUP=group,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    return result
