"""Cutting, joining and loading QTensors: nothing is rounded a second time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.quantization import (
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_ROW,
    MXFP4,
    MXFP8_TILE,
    QTensor,
    QuantFormat,
    ScaleLayout,
    decode_e2m1,
    decode_ue8m0,
    unpack_e2m1,
)
from tests.quantization.small import SMALL, assert_same, tensors

ROW, ROW_PACKED, COLUMN, COLUMN_PACKED = ScaleLayout


@settings(max_examples=150, deadline=None)
@given(data=st.data(), x=tensors(), format=st.sampled_from(SMALL))
def test_slices_are_the_same_values(data, x, format):
    q = QTensor.quantize(x, format)
    if format.scale == "ue8m0" and data.draw(st.booleans()):
        q = q.to_layout(COLUMN_PACKED)
    whole = q.dequantize()
    rows = slice(*sorted(data.draw(st.lists(st.integers(0, x.shape[0]), min_size=2, max_size=2))))
    columns = slice(*sorted(2 * data.draw(st.integers(0, x.shape[1] // 2)) for _ in range(2)))
    assert_same(q.slice_rows(rows), whole[rows])
    assert_same(q.slice_columns(columns), whole[:, columns])
    both = q.slice_columns(columns).slice_rows(rows)
    assert_same(both, whole[rows, columns])
    assert both.layout is q.layout
    assert both.scales.shape[-2] == both.format.scale_shape(both.shape)[-2]


def test_slices_at_odd_columns_of_e4m3_are_the_same_values():
    q = QTensor.quantize(torch.randn(3, 40, 7, generator=torch.Generator().manual_seed(4)), FP8_BLOCK)
    assert_same(q.slice_columns(slice(3, 6)), q.dequantize()[..., 3:6])
    assert_same(q.slice_rows(slice(-9, None)), q.dequantize()[:, -9:])
    assert_same(q.slice_rows(slice(30, 20)), q.dequantize()[:, 30:20])


def test_slices_at_block_edges_keep_the_format_and_copy_nothing():
    q = QTensor.quantize(torch.ones(512, 384), FP8_BLOCK)
    part = q.slice_rows(slice(128, 300)).slice_columns(slice(256, 384))
    assert part.format is FP8_BLOCK
    assert part.values.untyped_storage().data_ptr() == q.values.untyped_storage().data_ptr()
    assert part.scales.untyped_storage().data_ptr() == q.scales.untyped_storage().data_ptr()
    assert q.slice_rows(slice(96, 200)).format.block == (32, 128)
    assert q.slice_columns(slice(100, 200)).format.block == (128, 4)


def test_slices_that_are_no_ranges_are_refused():
    q = QTensor.quantize(torch.ones(8, 64), MXFP4)
    with pytest.raises(ValueError, match="steps of 1, got 2"):
        q.slice_rows(slice(0, 8, 2))
    with pytest.raises(ValueError, match="two columns per byte, cannot cut at 3 and 64"):
        q.slice_columns(slice(3, 64))
    with pytest.raises(ValueError, match="no rows to slice"):
        QTensor.quantize(torch.ones(8), MXFP4).slice_rows(slice(0, 1))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), format=st.sampled_from(SMALL))
def test_joined_rows_are_the_same_values(data, format):
    columns = 2 * data.draw(st.integers(1, 10))
    seeds = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    parts, wanted = [], []
    for rows in data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)):
        block = data.draw(st.sampled_from([format.block, (format.block[0] * 2, format.block[1] * 3)]))
        x = torch.randn(rows, columns, generator=seeds) * 100
        part = QTensor.quantize(x, format.with_block(*block))
        if format.scale == "ue8m0":
            part = part.to_layout(data.draw(st.sampled_from([ROW, COLUMN, COLUMN_PACKED])))
        parts.append(part)
        wanted.append(part.dequantize())
    joined = QTensor.cat_rows(parts)
    assert_same(joined, torch.cat(wanted))
    assert joined.layout is ROW
    assert joined.scales.shape == joined.format.scale_shape(joined.shape)


def test_joining_whole_blocks_keeps_the_format():
    parts = [QTensor.quantize(torch.ones(rows, 256), FP8_BLOCK) for rows in (256, 128, 100)]
    assert QTensor.cat_rows(parts).format is FP8_BLOCK
    assert QTensor.cat_rows([*parts, parts[0]]).format.block == (4, 128)
    stacked = [QTensor.quantize(torch.ones(3, rows, 256), FP8_BLOCK) for rows in (128, 5)]
    assert_same(QTensor.cat_rows(stacked), torch.ones(3, 133, 256))


def test_joining_what_does_not_fit_is_refused():
    q = QTensor.quantize(torch.ones(128, 256), FP8_BLOCK)
    others = [
        QTensor.quantize(torch.ones(128, 128), FP8_BLOCK),
        QTensor.quantize(torch.ones(128, 256), FP8_BLOCK_UE8M0),
        QTensor.quantize(torch.ones(2, 128, 256), FP8_BLOCK),
        QTensor.quantize(torch.ones(256), FP8_ROW),
    ]
    for other in others:
        with pytest.raises(ValueError, match="do not go into one tensor"):
            QTensor.cat_rows([q, other])
    with pytest.raises(ValueError, match="list of parts is empty"):
        QTensor.cat_rows([])


@pytest.mark.parametrize("layout", [ROW, COLUMN, COLUMN_PACKED])
def test_smaller_blocks_hold_the_same_values(layout):
    x = torch.randn(2, 300, 190, generator=torch.Generator().manual_seed(5))
    q = QTensor.quantize(x, FP8_BLOCK_UE8M0, layout)
    for rows, columns in ((1, 32), (128, 32), (64, 128), (128, 128), (1, 1)):
        part = q.reblock(rows, columns)
        assert part.format.block == (rows, columns)
        assert part.row_scales().shape == part.format.scale_shape(x.shape)
        assert part.layout is layout
        assert_same(part, q.dequantize())
    for rows, columns in ((3, 128), (256, 128), (128, 0), (128, -1)):
        with pytest.raises(ValueError, match=f"divide them, got {rows} x {columns}"):
            q.reblock(rows, columns)


def test_sizes_count_packed_bytes():
    assert QTensor.quantize(torch.ones(256, 256), FP8_BLOCK).nbytes == 256 * 256 + 4 * 4
    assert QTensor.quantize(torch.ones(256, 256), MXFP4).nbytes == 256 * 128 + 256 * 8


E8M0 = torch.float8_e8m0fnu


@pytest.mark.parametrize(
    ("format", "stored"),
    [
        (FP8_BLOCK, torch.float32),
        (FP8_BLOCK, torch.bfloat16),
        (FP8_BLOCK, E8M0),
        (FP8_BLOCK, torch.uint8),
        (FP8_BLOCK_UE8M0, E8M0),
        (FP8_BLOCK_UE8M0, torch.uint8),
        (FP8_BLOCK_UE8M0, torch.float32),
        (MXFP8_TILE, torch.bfloat16),
        (MXFP4, E8M0),
    ],
)
def test_checkpoints_keep_scales_in_many_dtypes(format, stored):
    generator = torch.Generator().manual_seed(6)
    shape = (300, 160)
    exponents = torch.randint(100, 140, format.scale_shape(shape), generator=generator, dtype=torch.uint8)
    numbers_of = decode_ue8m0(exponents)
    scales = exponents.view(stored) if stored.itemsize == 1 else numbers_of.to(stored)
    data = torch.randint(0, 0x7F, (300, 160), generator=generator, dtype=torch.uint8)
    if format.element == "e4m3":
        values, elements = data.view(torch.float8_e4m3fn), data.view(torch.float8_e4m3fn).float()
    else:
        values = data[:, :80]
        elements = decode_e2m1(unpack_e2m1(values))
    q = QTensor.from_checkpoint(values, scales, format)
    rows, columns = format.block
    wanted = elements * numbers_of.repeat_interleave(rows, 0)[:300].repeat_interleave(columns, 1)[:, :160]
    assert_same(q, wanted)
    assert q.scales.dtype == (torch.float32 if format.scale == "float32" else torch.uint8)
    assert q.values.data_ptr() == values.data_ptr()


def test_packed_values_come_in_three_dtypes():
    data = torch.arange(16, dtype=torch.uint8).reshape(1, 16)
    scales = torch.tensor([[127]], dtype=torch.uint8)
    made = [
        QTensor.from_checkpoint(data.view(d), scales, MXFP4) for d in (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
    ]
    for q in made:
        assert q.values.dtype == torch.int8
        assert q.shape == (1, 32)
        assert q.dequantize()[0, :8].tolist() == [0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.5, 0.0]


@pytest.mark.parametrize(
    ("values", "scales", "format", "error", "message"),
    [
        ((300, 160), torch.ones(3, 1), FP8_BLOCK, ValueError, r"\(300, 160\) .*have shape \(3, 2\), got \(3, 1\)"),
        ((300, 160), torch.ones(2, 3), FP8_BLOCK, ValueError, r"have shape \(3, 2\), got \(2, 3\)"),
        ((2, 128, 128), torch.ones(1, 1), FP8_BLOCK, ValueError, r"have shape \(2, 1, 1\), got \(1, 1\)"),
        ((128, 128), torch.ones(1, 1) * 3, FP8_BLOCK_UE8M0, ValueError, r"powers of two, got 3.0"),
        ((128, 128), torch.zeros(1, 1), FP8_BLOCK_UE8M0, ValueError, r"powers of two, got 0.0"),
        ((128, 128), -torch.ones(1, 1), FP8_BLOCK_UE8M0, ValueError, r"powers of two, got -1.0"),
        ((128, 128), torch.ones(1, 1).long(), FP8_BLOCK, TypeError, r"has float32 scales, got torch.int64"),
        ((128, 128), torch.ones(1, 1), QuantFormat("f", "e4m3", (128, 128), "e4m3"), TypeError, r"has e4m3 scales"),
        (
            (128, 128),
            torch.ones(128, 8),
            MXFP4,
            TypeError,
            r"int8 or uint8 or float4_e2m1fn_x2, got torch.float8_e4m3fn",
        ),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(values, scales, format, error, message):
    with pytest.raises(error, match=message):
        QTensor.from_checkpoint(torch.ones(values).to(torch.float8_e4m3fn), scales, format)


def test_values_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match=r"has values of float8_e4m3fn, got torch\.bfloat16"):
        QTensor.from_checkpoint(torch.ones(128, 128).bfloat16(), torch.ones(1, 1), FP8_BLOCK)
