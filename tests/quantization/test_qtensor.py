"""QTensor against the number formats' definitions in NumPy, and cutting and joining against dequantised tensors."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.quantization import (
    FORMATS,
    FP4_E4M3,
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_ROW,
    MXFP4,
    MXFP8,
    MXFP8_TILE,
    QTensor,
    QuantFormat,
    ScaleLayout,
    unpack_e2m1,
)
from tests.quantization import numbers
from tests.quantization.small import SMALL, assert_same, tensors

ROW, ROW_PACKED, COLUMN, COLUMN_PACKED = ScaleLayout
NAN, INF = float("nan"), float("inf")


def codes(q: QTensor) -> np.ndarray:
    """One code per value."""
    if q.format.element == "e4m3":
        return q.values.view(torch.uint8).numpy()
    return unpack_e2m1(q.values).numpy()


def assert_as_defined(q: QTensor, x: torch.Tensor) -> None:
    """q is what x [rows, n] becomes."""
    wanted = numbers.quantised(x.float().numpy(), q.format)
    np.testing.assert_array_equal(codes(q), wanted.codes)
    stored = q.scales.view(torch.uint8) if q.format.scale == "e4m3" else q.scales
    np.testing.assert_array_equal(stored.numpy().astype(np.float32), wanted.stored)
    np.testing.assert_array_equal(q.float_scales().numpy(), wanted.scales)


@pytest.mark.parametrize("format", [*SMALL, *FORMATS.values()], ids=lambda format: format.name)
def test_blocks_and_edges_are_quantised_as_defined(format):
    generator = torch.Generator().manual_seed(1)
    for rows, n, dtype in ((1, 2, torch.float32), (5, 14, torch.bfloat16), (130, 300, torch.float16)):
        x = (torch.randn(rows, n, generator=generator) * torch.logspace(-3, 2, rows)[:, None]).to(dtype)
        q = QTensor.quantize(x, format)
        assert q.shape == x.shape
        assert_as_defined(q, x)


@settings(max_examples=150, deadline=None)
@given(x=tensors(), format=st.sampled_from(SMALL))
def test_any_values_are_quantised_as_defined(x, format):
    assert_as_defined(QTensor.quantize(x, format), x)


@settings(max_examples=60, deadline=None)
@given(x=tensors(dims=4), format=st.sampled_from(SMALL))
def test_leading_dimensions_are_apart(x, format):
    q = QTensor.quantize(x, format)
    assert q.shape == x.shape
    whole = q.dequantize()
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            assert_same(QTensor.quantize(x[i, j], format), whole[i, j])


def test_one_dimension_is_one_row():
    x = torch.linspace(-3, 3, 44)
    q = QTensor.quantize(x, MXFP4)
    assert q.scales.shape == (2,)
    assert_same(q, QTensor.quantize(x[None], MXFP4).dequantize()[0])
    with pytest.raises(ValueError, match=r"blocks of 128 x 128 and needs at least 2 dimensions, got shape \(44,\)"):
        QTensor.quantize(x, FP8_BLOCK)


@settings(max_examples=150, deadline=None)
@given(x=tensors(), format=st.sampled_from([f for f in SMALL if f.scale != "e4m3"]))
def test_rounding_is_off_by_half_a_step_at_most(x, format):
    """Half a step is 1/16 of an e4m3 (1/4 of an e2m1), or half of the smallest one where values are small."""
    q = QTensor.quantize(x, format)
    scales = q.float_scales().double()
    scales = scales.repeat_interleave(format.block[0], 0).repeat_interleave(format.block[1], 1)
    scales = scales[: x.shape[0], : x.shape[1]]
    relative, absolute = (2**-4, 2**-10) if format.element == "e4m3" else (2**-2, 2**-2)
    error = (q.dequantize().double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * relative, scales * absolute) * (1 + 1e-5)).all()


@settings(max_examples=150, deadline=None)
@given(x=tensors(), format=st.sampled_from([f for f in SMALL if f.scale != "e4m3"]))
def test_quantising_twice_changes_nothing(x, format):
    """To the bit with powers of two; with float32 scales the codes, and the scales to one rounding."""
    once = QTensor.quantize(x, format)
    again = QTensor.quantize(once.dequantize(), format)
    if format.scale == "ue8m0":
        assert_same(again, once.dequantize())
    else:
        full = (once.float_scales() > format.amax_floor / format.largest).all()
        if full:
            np.testing.assert_array_equal(codes(again), codes(once))
        torch.testing.assert_close(again.dequantize(), once.dequantize(), rtol=2**-22, atol=0)


def test_bfloat16_holds_a_round_trip_through_powers_of_two():
    """What the KV cache's two ways rely on: quantised, kept as bfloat16, quantised again."""
    x = torch.randn(40, 512, generator=torch.Generator().manual_seed(2)).bfloat16()
    for format in (MXFP8, MXFP4):
        round_trip = QTensor.quantize(x, format).dequantize(torch.bfloat16)
        assert torch.equal(QTensor.quantize(round_trip, format).dequantize(torch.bfloat16), round_trip)


@pytest.mark.parametrize("format", SMALL, ids=lambda format: format.name)
def test_zeros(format):
    x = torch.tensor([[0.0, -0.0] * 4] * 4)
    q = QTensor.quantize(x, format)
    assert q.dequantize().signbit().tolist() == x.signbit().tolist()
    assert (q.dequantize() == 0).all()
    assert_as_defined(q, x)


@pytest.mark.parametrize("format", [*SMALL, *FORMATS.values()], ids=lambda format: format.name)
def test_not_a_number_leaves_its_neighbours_alone(format):
    x = torch.linspace(-7, 9, 8 * 24).reshape(8, 24)
    spoiled = x.clone()
    spoiled[0, 0] = spoiled[1, 5] = spoiled[7, 23] = NAN
    spoiled[5, 12] = -NAN
    nan = spoiled.isnan()
    absent = torch.where(nan, 0.0, x)
    q, wanted = QTensor.quantize(spoiled, format), QTensor.quantize(absent, format)
    assert torch.equal(q.float_scales(), wanted.float_scales())
    assert (codes(q)[~nan] == codes(wanted)[~nan]).all()
    assert (codes(q)[nan] == numbers.NOT_A_NUMBER[format.element]).all()
    assert q.dequantize()[nan].isnan().all() == (format.element == "e4m3")
    alone = QTensor.quantize(torch.full((3, 8), NAN), format)
    assert_as_defined(alone, torch.full((3, 8), NAN))


@pytest.mark.parametrize("format", [*SMALL, *FORMATS.values()], ids=lambda format: format.name)
def test_infinity_saturates(format):
    x = torch.linspace(-7, 9, 8 * 24).reshape(8, 24)
    x[0, 0], x[3, 7], x[6, 16] = INF, -INF, NAN
    q = QTensor.quantize(x, format)
    largest = torch.finfo(torch.float32).max
    assert torch.equal(q.float_scales(), QTensor.quantize(x.clamp(-largest, largest), format).float_scales())
    elements = q.elements()
    assert elements[0, 0] == format.largest
    assert elements[3, 7] == -format.largest
    assert_as_defined(q, x)


def test_a_block_of_the_largest_numbers():
    x = torch.tensor([[torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 1e38, 0.0]])
    for format in (FP8_ROW, MXFP8, MXFP4):
        q = QTensor.quantize(x, format)
        assert_as_defined(q, x)
        assert q.elements().isfinite().all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(2, 4, dtype=torch.int32), TypeError, "can quantise bfloat16, float16 and float32, got torch.int32"),
        (torch.ones(2, 4).to(torch.float8_e4m3fn), TypeError, "got torch.float8_e4m3fn"),
        (torch.ones(2, 3), ValueError, "two values per byte and needs an even size, got 3"),
        (torch.tensor(1.0), ValueError, r"at least 1 dimensions, got shape \(\)"),
    ],
)
def test_what_cannot_be_quantised_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        QTensor.quantize(given, MXFP4)


def test_formats_describe_themselves():
    assert FP8_BLOCK.scale_shape((3, 300, 257)) == (3, 3, 3)
    assert MXFP4.scale_shape((5, 34)) == (5, 2)
    assert FP8_BLOCK.with_block(1, 128) is FP8_ROW
    assert MXFP8_TILE.with_block(1, 32) is MXFP8
    assert FP8_BLOCK.with_block(4, 128).name == "e4m3_4x128_float32"
    assert FP8_BLOCK.with_block(4, 128) == FP8_BLOCK.with_block(4, 128)
    assert (FP8_BLOCK.largest, MXFP4.largest) == (448.0, 6.0)
    assert FP4_E4M3.amax_floor == 6 * 2**-9
    for wrong in (("e5m2", (1, 32), "ue8m0"), ("e4m3", (1, 32), "int8"), ("e4m3", (0, 32), "ue8m0")):
        with pytest.raises(ValueError, match=r"unknown|at least one"):
            QuantFormat("wrong", *wrong)


@pytest.mark.parametrize("format", [FP8_ROW, FP8_BLOCK_UE8M0, MXFP8, MXFP8_TILE, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(5, 1024), (3, 7, 512), (130, 34), (1, 32), (0, 512)])
def test_layouts_keep_every_scale(format, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    q = QTensor.quantize(x, format)
    for layout in ScaleLayout:
        fits = layout is not ROW_PACKED or q.scales.shape[-1] % 4 == 0
        if (layout.packed and format.scale != "ue8m0") or not fits:
            with pytest.raises(ValueError, match=r"UE8M0|multiple of 4"):
                q.to_layout(layout)
            continue
        there = q.to_layout(layout)
        assert there.layout is layout
        assert there.scales.dtype == (
            torch.int32 if layout.packed else q.scales.dtype if layout is ROW else torch.float32
        )
        assert torch.equal(there.row_scales(), q.scales)
        assert torch.equal(there.float_scales(), q.float_scales())
        assert_same(there, q.dequantize())
        assert_same(there.to_layout(COLUMN).to_layout(ROW), q.dequantize())
        again = QTensor.quantize(x, format, layout)
        assert torch.equal(again.scales, there.scales)
        assert again.scales.stride() == there.scales.stride()
        moved = there.to("cpu")
        assert (moved.layout, moved.scales.stride()) == (layout, there.scales.stride())
        assert torch.equal(copy.deepcopy(there).scales, there.scales)


def test_e4m3_scales_lie_in_rows_only():
    q = QTensor.quantize(torch.ones(4, 64), FP4_E4M3)
    for layout in (ROW_PACKED, COLUMN, COLUMN_PACKED):
        with pytest.raises(ValueError, match=r"has e4m3"):
            q.to_layout(layout)
