"""`linear`: the reference against float64, the contract of its outputs and accumulators, and who may meet whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.ops._decodable import refuse_decoding
from rorqual.ops.cpu._quantized_panels import PanelWeight, panel_linear
from rorqual.ops.linear import (
    ALIGNMENT,
    aligned_copy,
    allocate_output,
    check_out_acc,
    flatten_output,
    flatten_rows,
    linear,
    prepare_weight,
    unpack_weight,
)
from rorqual.ops.registry import load_backends
from rorqual.quantization import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, MXFP8_TILE, QTensor, ScaleLayout
from tests.ops.linear_cases import FORMATS, LINEAR_CASES, WEIGHT_CASES, accumulator
from tests.ops.number_values import numbers
from tests.ops.values import every_other, normal, rows_apart

load_backends("native", "cpu")

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
ONE_ROUNDING = {FP32: 2e-6, BF16: 2**-8}
"""Relative error of a value that was rounded once, with room for a float32 sum."""


def array(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def operand(x: torch.Tensor | QTensor) -> np.ndarray:
    """float64 [rows, columns] of a tensor of either kind."""
    if isinstance(x, torch.Tensor):
        return array(x).reshape(-1, x.shape[-1])
    x = x.to_layout(ScaleLayout.ROW)
    flat = QTensor(x.values.reshape(-1, x.values.shape[-1]), x.scales.reshape(-1, x.scales.shape[-1]), x.format)
    return numbers(flat)


def expected(x, weight, bias=None, *, activation=None, out_dtype=None, out_acc=None) -> np.ndarray:
    """The product in float64, and the magnitudes that went into each sum."""
    if activation is not None and isinstance(x, torch.Tensor):
        x = QTensor.quantize(x.reshape(-1, x.shape[-1]), activation)
    left, right = operand(x), operand(weight)
    want = left @ right.T
    if bias is not None:
        want = want + array(bias)
    if out_acc is not None:
        want = want + array(out_acc).reshape(want.shape)
    return want, np.abs(left) @ np.abs(right).T + 1


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_reference_is_its_formula_rounded_once(case):
    args, options = LINEAR_CASES[case]()
    x, weight = args[:2]
    want, sizes = expected(*args, **options)
    got = linear.reference(*args, **options)
    wanted_dtype = options.get("out_dtype") or (BF16 if isinstance(x, QTensor) else x.dtype)
    assert got.dtype == wanted_dtype
    assert got.shape == (*x.shape[:-1], weight.shape[0])
    error = np.abs(array(got).reshape(want.shape) - want)
    assert (error <= ONE_ROUNDING[got.dtype] * np.abs(want) + 1e-6 * sizes).all()


@pytest.mark.parametrize("case", LINEAR_CASES)
def test_rows_of_every_output_are_32_bytes_apart(case):
    """Whichever implementation answers; and the accumulator is where the answer is."""
    args, options = LINEAR_CASES[case]()
    for weight in (args[1], prepare_weight(args[1])):
        got = linear(args[0], weight, *args[2:], **options)
        assert got.shape == (*args[0].shape[:-1], args[1].shape[0])
        if got.dim() > 1 and got.numel():
            assert got.stride(-2) * got.element_size() % 32 == 0
            assert got.stride(-1) == 1
        assert ("out_acc" in options) == (got is options.get("out_acc"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 33])
def test_the_dequantised_weight_is_the_same_product(rows, name):
    """Weight-only products of float32 inputs are those with the weight's numbers."""
    weight = QTensor.quantize(normal(72, 200, seed=1), FORMATS[name][0])
    x = normal(rows, 200)
    want = linear.reference(x, torch.from_numpy(numbers(weight)).float())
    torch.testing.assert_close(linear.reference(x, weight), want, rtol=1e-5, atol=1e-4)


def test_quantised_inputs_are_those_that_quantize_makes():
    """A QTensor and an activation format are two ways to ask for the same product, bit by bit."""
    x, weight = normal(7, 256, dtype=BF16), QTensor.quantize(normal(72, 256, seed=1), FP8_BLOCK)
    want = linear.reference(x, weight, activation=FP8_ROW)
    for layout in (ScaleLayout.ROW, ScaleLayout.COLUMN):
        got = linear.reference(QTensor.quantize(x, FP8_ROW, layout), weight)
        assert torch.equal(got, want)
    assert not torch.equal(linear.reference(x, weight), want), "the inputs are rounded"


def test_quantising_the_inputs_stays_within_the_formats_error():
    """e4m3 has 3 bits of mantissa: half a step is 2^-4 of a value, plus 2^-10 scales where values are subnormal."""
    x, weight = normal(33, 256), QTensor.quantize(normal(72, 256, seed=1), MXFP8_TILE)
    exact, _ = expected(x, weight)
    got = array(linear.reference(x, weight, activation=MXFP8))
    largest = np.abs(array(x)).reshape(33, 8, 32).max(-1).repeat(32, -1)
    step = np.maximum(np.abs(array(x)) * 2.0**-4, largest * 2.0**-7 * 2.0**-9)
    assert (np.abs(got - exact) <= step @ np.abs(numbers(weight)).T + 1e-5).all()
    assert np.abs(got - exact).max() > 1e-3


# --- outputs: DeepInfer's numbers


@pytest.mark.parametrize(
    ("features", "dtype", "physical"),
    [
        (1, FP32, 8),
        (1, BF16, 16),
        (20, BF16, 32),
        (33, FP32, 40),
        (576, BF16, 576),
        (129280, BF16, 129280),
    ],
)
@pytest.mark.parametrize("outer", [(3,), (1,), (0,), (2, 3), (2, 1, 3)])
def test_a15_outputs_are_padded_behind_their_shape(outer, features, dtype, physical):
    out = allocate_output((*outer, features), dtype, CPU)
    assert out.shape == (*outer, features)
    assert out.stride(-1) == 1
    assert out.stride(-2) == physical
    assert out.stride(-2) * dtype.itemsize % ALIGNMENT == 0
    flat = flatten_output(out)
    assert flat.shape == (int(np.prod(outer)), features)
    assert flat.stride() == (physical, 1)
    assert flat.data_ptr() == out.data_ptr()
    check_out_acc(out, out.shape, dtype, CPU)


def test_outputs_need_a_dimension():
    with pytest.raises(ValueError, match=r"at least one dimension, got the shape \[\]"):
        allocate_output((), BF16, CPU)


def test_flat_outputs_are_the_same_memory_in_the_same_order():
    out = allocate_output((2, 3, 4, 20), BF16, CPU)
    flatten_output(out).copy_(torch.arange(24.0)[:, None].expand(24, 20))
    assert out[..., 0].flatten().tolist() == list(range(24))
    assert (out == out[..., :1]).all()


def test_outputs_with_gaps_do_not_flatten():
    for out in (
        torch.zeros(2, 4, 16)[:, :3],
        torch.zeros(3, 2, 16).transpose(0, 1),
        every_other(torch.zeros(2, 3, 16)),
    ):
        with pytest.raises(ValueError, match="no rows at equal distances: make it with allocate_output"):
            flatten_output(out)


def test_inputs_are_flattened_without_a_copy_where_strides_allow():
    x = torch.zeros(2, 3, 64)[..., :32]
    assert flatten_rows(x).data_ptr() == x.data_ptr()
    assert flatten_rows(x).stride() == (64, 1)
    assert flatten_rows(x[0, 0]).shape == (1, 32)
    moved = x.transpose(0, 1)
    assert torch.equal(flatten_rows(moved), moved.reshape(6, 32))
    assert flatten_rows(torch.zeros(2, 0, 5)).shape == (0, 5)


# --- accumulators


@pytest.mark.parametrize("kind", ["plain", *FORMATS])
@pytest.mark.parametrize("bias", [False, True])
def test_accumulators_are_added_to_in_place(bias, kind):
    x, weight = normal(5, 64, dtype=BF16), normal(20, 64, seed=1)
    weight = weight.to(BF16) if kind == "plain" else QTensor.quantize(weight, FORMATS[kind][0])
    b = normal(20, dtype=BF16, seed=2) if bias else None
    acc = accumulator(5, 20)
    gap = acc.as_strided((5, 12), (32, 1), 20)
    gap.fill_(float("nan"))
    before = acc.clone()
    got = linear(x, weight, b, out_acc=acc)
    assert got is acc
    assert bool(gap.isnan().all()), "what lies between the rows is not ours"
    want, sizes = expected(x, weight, b, out_acc=before)
    assert (np.abs(array(got) - want) <= 2**-8 * np.abs(want) + 1e-6 * sizes).all()


def test_sums_with_an_accumulator_are_rounded_once():
    """256 + 0.75 + 0.75 in bfloat16: each addition alone would be rounded away."""
    x, weight, bias = (torch.tensor([[v]], dtype=BF16) for v in (0.75, 1.0, 0.75))
    acc = allocate_output((1, 1), BF16, CPU).fill_(256.0)
    assert linear(x, weight, bias[0], out_acc=acc).item() == 258.0


REFUSED = {
    "of_another_shape": (lambda: accumulator(4, 20), r"the output's shape \[5, 20\], got \[4, 20\]"),
    "flat": (lambda: accumulator(100), r"the output's shape \[5, 20\], got \[100\]"),
    "of_another_dtype": (lambda: accumulator(5, 20, dtype=FP32), r"output's dtype torch.bfloat16 \(see out_dtype\)"),
    "on_another_device": (lambda: torch.empty(5, 32, dtype=BF16, device="meta")[:, :20], "x's device cpu, got meta"),
    "with_unaligned_rows": (lambda: torch.zeros(5, 20, dtype=BF16), r"multiple of 32 bytes apart .* strides \[20, 1\]"),
    "by_columns": (lambda: torch.zeros(20, 16, dtype=BF16).t()[:5], r"unit stride in its last dimension"),
    "with_overlapping_rows": (lambda: torch.zeros(20, dtype=BF16).expand(5, 20), r"do not overlap"),
}


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_other_accumulators_are_refused_with_a_way_out(name, quantized):
    make, sentence = REFUSED[name]
    x, weight = normal(5, 64, dtype=BF16), normal(20, 64, dtype=BF16)
    weight = QTensor.quantize(weight, MXFP8) if quantized else weight
    with pytest.raises(ValueError, match=rf"out_acc must .*{sentence}.*make it with allocate_output, or pass aligned"):
        linear(x, weight, out_acc=make())


def test_accumulators_with_gaps_between_outer_dimensions_are_refused():
    x, weight = normal(2, 3, 64, dtype=BF16), normal(16, 64, dtype=BF16)
    for acc in (torch.zeros(2, 4, 16, dtype=BF16)[:, :3], torch.zeros(3, 2, 16, dtype=BF16).transpose(0, 1)):
        with pytest.raises(ValueError, match="out_acc must have no gaps between its outer dimensions"):
            linear(x, weight, out_acc=acc)


def test_an_aligned_copy_is_the_way_out():
    x, weight, acc = normal(5, 64, dtype=BF16), normal(20, 64, dtype=BF16), normal(5, 20, dtype=BF16)
    got = linear(x, weight, out_acc=aligned_copy(acc))
    want, sizes = expected(x, weight, out_acc=acc)
    assert (np.abs(array(got) - want) <= 2**-8 * np.abs(want) + 1e-6 * sizes).all()
    assert torch.equal(acc, normal(5, 20, dtype=BF16)), "the copy took the sum"


# --- prepared weights


ON_THIS_CPU = [
    (prepare, case)
    for prepare in prepare_weight.impls
    for case, make in WEIGHT_CASES.items()
    if prepare.backend in ("native", "cpu") and prepare.refuse(*make()[0]) is None
]


@pytest.mark.parametrize(("prepare", "case"), ON_THIS_CPU, ids=lambda value: getattr(value, "backend", value))
def test_unpacking_takes_preparing_back(prepare, case):
    (weight,), _ = WEIGHT_CASES[case]()
    prepared = prepare.fn(weight)
    assert isinstance(prepared, QTensor) == isinstance(weight, QTensor)
    found = unpack_weight(prepared)
    if isinstance(weight, QTensor):
        assert type(found) is QTensor
        assert found.format == weight.format
        assert torch.equal(found.values.view(torch.uint8), weight.values.view(torch.uint8))
        assert torch.equal(found.scales, weight.scales)
    else:
        assert torch.equal(found, weight)


@pytest.mark.parametrize("case", [case for case in LINEAR_CASES if case.startswith("native_") or "_7" in case])
def test_the_reference_takes_weights_of_every_layout(case):
    args, options = LINEAR_CASES[case]()
    want = linear.reference(*args, **options)
    got = linear.reference(args[0], prepare_weight(args[1]), *args[2:], **options)
    assert torch.equal(got, want)


def test_prepared_weights_meet_calls_that_their_implementation_refuses():
    x, weight = normal(5, 64), normal(32, 64, dtype=BF16)
    prepared, acc = prepare_weight(weight), accumulator(5, 32)
    want, _ = expected(x.to(BF16), weight)
    np.testing.assert_allclose(array(linear(x.to(BF16), prepared, out_dtype=FP32)), want, rtol=1e-5, atol=1e-4)
    with_acc, _ = expected(x.to(BF16), weight, out_acc=acc.clone())
    np.testing.assert_allclose(array(linear(x.to(BF16), prepared, out_acc=acc)), with_acc, rtol=2**-8, atol=1e-4)
    with pytest.raises(TypeError, match=r"x is torch.float32 and the weight torch.bfloat16"):
        linear(x, prepared)


def test_an_unknown_layout_is_said_so():
    class Elsewhere(QTensor):
        __slots__ = ()

    made = QTensor.quantize(normal(32, 64), MXFP8)
    foreign = Elsewhere(made.values, made.scales, made.format)
    with pytest.raises(TypeError, match=r"\(Elsewhere\) was laid out by .* not loaded here: load its backend, or pass"):
        linear(normal(2, 64), foreign)
    with pytest.raises(TypeError, match=r"\(Tensor\) was laid out by"):
        linear(normal(2, 64), torch.zeros(2, 3, 4))


# --- what does not fit


@pytest.mark.parametrize(
    ("args", "options", "error", "sentence"),
    [
        ((normal(2, 63), normal(5, 64)), {}, ValueError, r"got \[2, 63\] and \[5, 64\]"),
        ((torch.tensor(1.0), normal(5, 64)), {}, ValueError, r"got \[\] and \[5, 64\]"),
        ((normal(2, 64), normal(5, 64), normal(4)), {}, ValueError, r"the shape \[5\] of the out_features, got \[4\]"),
        ((normal(2, 64), normal(5, 64, dtype=BF16)), {}, TypeError, "float32 and the weight torch.bfloat16"),
        (
            (normal(2, 64), normal(5, 64)),
            {"activation": MXFP8},
            ValueError,
            "activation mxfp8 needs a quantised weight",
        ),
        (
            (QTensor.quantize(normal(2, 64), MXFP8), QTensor.quantize(normal(5, 64), MXFP4)),
            {"activation": FP8_ROW},
            ValueError,
            "quantised as mxfp8 and activation asks for fp8_row: leave activation out",
        ),
        (
            (torch.zeros(2, 64, dtype=torch.int32), QTensor.quantize(normal(5, 64), MXFP4)),
            {},
            TypeError,
            "x must be floating beside a quantised weight, got torch.int32",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(args, options, error, sentence):
    with pytest.raises(error, match=sentence):
        linear(*args, **options)


@pytest.mark.parametrize("prepared", [False, True])
def test_inputs_of_another_width_never_reach_a_kernel(prepared):
    weight = normal(32, 64, dtype=BF16)
    with pytest.raises((ValueError, RuntimeError)):
        linear(normal(2, 96, dtype=BF16), prepare_weight(weight) if prepared else weight)


# --- quantised weights on CPU, panel by panel


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda q: q.values.view(torch.uint8)[3].fill_(0x7F), "without NaN"),
        (lambda q: q.values.view(torch.uint8)[3].fill_(0xFF), "without NaN"),
        (lambda q: q.scales[1].fill_(3.0), "scales from 0 to 2, got"),
        (lambda q: q.scales[1].fill_(-1.0), "scales from 0 to 2, got"),
        (lambda q: q.scales[1].fill_(float("nan")), "scales from 0 to 2, got"),
    ],
)
def test_panels_are_for_weights_that_bfloat16_holds(spoil, sentence):
    weight = QTensor.quantize(normal(256, 256), FP8_BLOCK)
    assert refuse_decoding(weight) is None
    spoil(weight)
    assert sentence in refuse_decoding(weight)


@pytest.mark.parametrize("name", FORMATS)
def test_panels_of_a_weight_that_needs_several(name):
    """3000 x 256 values are three panels, the last one short; every code of the elements is there."""
    weight = QTensor.quantize(normal(3000, 256, seed=1) * 0.05, FORMATS[name][0])
    codes = torch.arange(256).repeat(3000 * weight.values.shape[1] // 256 + 1)[: weight.values.numel()]
    codes[(codes & 127) == 127] = 0
    weight.values.view(torch.uint8).copy_(codes.view(weight.values.shape))
    weight.scales.copy_(torch.randint(110, 124, weight.scales.shape) if weight.scales.dtype == torch.uint8 else 2.0**-9)
    x, bias = normal(5, 256, dtype=BF16), normal(3000, dtype=BF16, seed=2)
    out = allocate_output((5, 3000), BF16, CPU)
    panel_linear(x, PanelWeight(weight.values, weight.scales, weight.format), bias, None, out)
    want, sizes = expected(x, weight, bias)
    assert (np.abs(array(out) - want) <= 2**-8 * np.abs(want) + 1e-6 * sizes).all()


def test_rows_apart_reach_the_compiled_kernels_as_they_are():
    x = rows_apart(normal(37, 64, dtype=BF16))
    weight = normal(32, 64, dtype=BF16)
    torch.testing.assert_close(linear(x, prepare_weight(weight)), linear(x.contiguous(), prepare_weight(weight)))
