"""Products with integer weights: their definition, and that every compiled kernel has its answers to the bit."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from rorqual.ops._integer_product import multiply_add, round_groups
from rorqual.ops.embedding import embedding
from rorqual.ops.linear import aligned_copy, linear, prepare_weight, unpack_weight
from rorqual.ops.native._integer_linear import PackedIntegers
from rorqual.ops.native.library import usable_isas, using
from rorqual.ops.registry import load_backends
from rorqual.quantization import MXFP8, QTensor
from rorqual.quantization.integer import (
    Q4_0,
    Q4_1,
    Q6_K,
    Q8_0,
    IntegerFormat,
    IntegerStack,
    IntegerWeight,
)
from tests.ops.integer_cases import ALL_FORMATS, expected, inputs, integers_of, most_of, stack_of
from tests.ops.values import every_other, normal, rows_apart

load_backends("native", "cpu")
BF16 = torch.bfloat16
ISAS = pytest.mark.parametrize("isa", usable_isas())
FORMATS = pytest.mark.parametrize("format", ALL_FORMATS, ids=lambda format: format.name)
NUMBERS_OF_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 16, 17, 24, 33, 64, 100)
WITHOUT_FMA = "generic"
MIXED = ("q4_1", "q6_k", "q8_0", "q4_k")


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_same(got: torch.Tensor, want: torch.Tensor, isa: str, what: object = None) -> None:
    """Equal to the bit, or, where products and sums are rounded one after the other, to a step of bfloat16."""
    tolerance = {"rtol": 2**-7, "atol": 0.02} if isa == WITHOUT_FMA else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(got, want, **tolerance, equal_nan=True, msg=lambda m: f"{what}: {m}")


# --- the definition


@FORMATS
@pytest.mark.parametrize("dynamic", [True, False])
def test_reference_is_the_sum_in_float64(format, dynamic):
    """Each of K / group additions to acc and acc2 rounds once: 2^-24 of what was added up to then, at most."""
    weight, x, bias = integers_of(format, 48, 576, dynamic=dynamic), inputs(40, 576), normal(48)
    x = x.float() if dynamic else x
    got = linear.reference(x, weight, bias, out_dtype=torch.float32).double().numpy()
    if not dynamic:  # weights are rounded to x's dtype first
        want = x.double().numpy() @ weight.dequantize(BF16).double().numpy().T
        sizes = np.abs(x.double().numpy()) @ np.abs(weight.dequantize(BF16).double().numpy()).T
    else:
        want, sizes = expected(x, weight)
        if weight.minima is not None:  # code * scale and minimum may cancel, in acc + acc2 only
            sizes = expected(x.abs(), replace(weight, scales=weight.scales.abs(), minima=weight.minima.abs()))[0]
    want += bias.double().numpy()
    sizes += np.abs(bias.double().numpy())
    assert (np.abs(got - want) <= (576 // format.group + 4) * 2**-23 * sizes + 1e-37).all()


def test_reference_takes_every_option():
    weight, x, bias, acc = integers_of(Q4_1, 48, 96), normal(5, 96), normal(48), normal(5, 48, dtype=BF16)
    plain, _ = expected(x, weight)
    got = linear(every_other(x), weight, bias.to(BF16), out_dtype=torch.float16)
    np.testing.assert_allclose(got.double().numpy(), plain + bias.to(BF16).double().numpy(), rtol=2**-10, atol=1e-3)
    target = aligned_copy(acc)
    assert linear(x, weight, bias, out_dtype=BF16, out_acc=target) is target
    want = plain + bias.double().numpy() + acc.double().numpy()
    np.testing.assert_allclose(target.double().numpy(), want, rtol=2**-8, atol=1e-3)
    assert linear(x.view(5, 1, 96), weight).shape == (5, 1, 48)
    assert linear(x[:0], weight).shape == (0, 48)


def test_multiply_add_rounds_once():
    """By fractions: sums just beside the middle of two float32, where two roundings would go the other way."""
    middle = [(1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**i * sign) for i in range(-80, 4) for sign in (1, -1)]
    middle += [(2.0**-24, 1.0, 1.0), (2.0**-24, 1.0, 1.0 + 2.0**-23), (2.0**-24 * (1 + 2.0**-23), 1.0, 1.0)]
    # An odd multiple of 2^-24 that float64 would round to, off by less than it holds.
    middle += [(2.0**-24 * (1 + 2.0**-22), 1 - 2.0**-22 + 2.0**-23, 1.0 + sign * 2.0**-23) for sign in (0, 1)]
    middle += [((1 + 2.0**-20) * 2.0**-24, (1 - 2.0**-20), sign * 1.0) for sign in (1, -1)]
    numbers = np.array(middle, np.float32)
    numbers = np.concatenate([numbers, normal(3000, 3).numpy() * np.exp2(np.arange(3000) % 40)[:, None]])
    numbers = numbers.astype(np.float32)
    a, b, c = (torch.from_numpy(column.copy()) for column in numbers.T)
    for got, (x, y, z) in zip(multiply_add(a, b, c).tolist(), numbers.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = [float(n) for n in (np.nextafter(np.float32(got), np.float32(s)) for s in (-np.inf, np.inf))]
        miss = abs(Fraction(got) - exact)
        assert all(miss <= abs(Fraction(other) - exact) for other in near), (x, y, z)
        if any(miss == abs(Fraction(other) - exact) for other in near):  # a tie: to even
            assert np.float32(got).view(np.int32) % 2 == 0, (x, y, z)
    assert multiply_add(*torch.tensor([[np.nan], [1.0], [np.inf]])).isnan()
    assert multiply_add(*torch.tensor([[1.0], [1.0], [np.inf]])).item() == np.inf


def test_inputs_are_rounded_in_groups():
    x = torch.zeros(5, 64)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    x[1, 40], x[1, 41] = -254.0, 3.0
    x[2, 3], x[2, 40] = float("inf"), 1.0
    x[3, 5] = float("nan")
    x[4] = 2.0**-140
    q, scales = round_groups(x)
    assert q[0, 0, :4].tolist() == [127, 0, 2, -2]
    assert q[1, 1, 8:10].tolist() == [-127, 2]
    assert scales[:2].tolist() == [[1.0, 0.0], [0.0, 2.0]]
    assert q[2].abs().sum(-1).tolist() == [0, 127]
    assert scales[2:4].isnan().tolist() == [[True, False], [True, False]]
    assert not q[3:].any()
    assert (scales[4] >= 0).all()
    assert (scales[4] < 1e-37).all()


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda w: linear(normal(2, 64), w), ValueError, r"got \[2, 64\] and \[48, 96\]"),
        (lambda w: linear(QTensor.quantize(normal(2, 96), MXFP8), w), TypeError, "floating tensor .* got mxfp8"),
        (lambda w: linear(torch.ones(2, 96, dtype=torch.int32), w), TypeError, "floating tensor .* got torch.int32"),
        (lambda w: linear(normal(2, 96), w, activation=MXFP8), ValueError, "activation mxfp8 is for FP8 and FP4"),
        (lambda w: linear(normal(2, 96), w, normal(47)), ValueError, r"bias must have the shape \[48\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused_in_a_sentence(call, error, sentence):
    weight = integers_of(Q4_0, 48, 96)
    for given in (weight, IntegerStack([weight]), prepare_weight(weight)):
        with pytest.raises(error, match=sentence):
            call(given)


def test_groups_of_sixteen_that_cut_the_inputs_groups_are_for_plain_inputs():
    weight, x = integers_of(Q6_K, 32, 48), normal(3, 48, dtype=BF16)
    with pytest.raises(ValueError, match=r"in groups of 32 columns, got 48: make the weight with dynamic=False"):
        linear(x, weight)
    got = linear(x, replace(weight, dynamic=False))
    torch.testing.assert_close(got, x @ weight.dequantize(BF16).t(), rtol=2**-7, atol=1e-3)


# --- the kernels


@functools.cache
def answers(format: IntegerFormat, columns: int) -> tuple[IntegerWeight, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(weight of five blocks of rows, 100 inputs, bias, what the reference makes of them)"""
    weight, x = integers_of(format, 80, columns), inputs(100, columns)
    bias = normal(80, dtype=BF16)
    return weight, x, bias, linear.reference(x, weight, bias)


@ISAS
@FORMATS
@pytest.mark.parametrize("columns", [32, 160, 576, 1536])
def test_kernels_have_the_answers_of_the_reference_whatever_the_number_of_rows(isa, format, columns):
    weight, x, bias, want = answers(format, columns)
    with using(isa):
        packed = prepare_weight(weight)
        assert isinstance(packed, PackedIntegers)
        for rows in NUMBERS_OF_ROWS:
            assert_same(linear(x[:rows], packed, bias), want[:rows], isa, rows)
        assert_same(linear(x[50:51], packed, bias), want[50:51], isa)
        assert_same(linear(rows_apart(x), packed, bias), want, isa)
        assert_same(linear(every_other(x), packed, bias), want, isa)
        assert_same(linear(x.view(5, 20, columns), packed, bias), want.view(5, 20, 80), isa)
        assert linear(x[:0], packed, bias).shape == (0, 80)


@ISAS
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("dynamic", [True, False])
def test_product_of_a_row_is_the_same_in_any_company_and_on_any_threads(isa, count, dynamic):
    """Parts in four formats, which threads cut wherever it falls; 576 inputs, which many rows share a barrier for."""
    weight, x, bias = stack_of(MIXED, 576, dynamic=dynamic), inputs(40, 576), normal(288, dtype=BF16)
    with using(isa):
        packed = prepare_weight(weight)
        alone = torch.cat([linear(x[i : i + 1], packed, bias) for i in range(len(x))])
        with threads(count):
            for stop in (1, 2, 5, 14, 15, 16, 17, 33, 40):
                assert torch.equal(linear(x[:stop], packed, bias), alone[:stop]), stop


@ISAS
@FORMATS
def test_the_largest_sums_of_integers_fit(isa, format):
    """All codes as large as the format allows, all inputs as large as their group's largest, of either sign."""
    weight = integers_of(format, 48, 96)
    codes = 255 if format.bits == 4 else most_of(format)
    weight = replace(weight, codes=torch.full_like(weight.codes, codes))
    x = torch.ones(20, 96, dtype=BF16)
    x[1::2] = -1.0
    x[2::4, 1::2] = -1.0
    want = linear.reference(x, weight)
    with using(isa):
        packed = prepare_weight(weight)
        for rows in (1, 2, 4, 20):
            assert_same(linear(x[:rows], packed), want[:rows], isa, rows)


@ISAS
def test_many_rows_pass_in_panels(isa):
    """70 rows of 16384 inputs are more than stay in the cache beside the weight."""
    weight, x = integers_of(Q4_0, 32, 16384), normal(70, 16384, dtype=BF16)
    with using(isa):
        packed = prepare_weight(weight)
        alone = torch.cat([linear(x[i : i + 1], packed) for i in range(len(x))])
        assert torch.equal(linear(x, packed), alone)


@ISAS
@pytest.mark.parametrize("count", [2, 3])
def test_threads_share_many_rows_of_few_features(isa, count):
    x = inputs(1100, 96)
    mixed = IntegerStack([*stack_of(("q4_1", "q6_k"), 96), integers_of(Q8_0, 48, 96, dynamic=False)])
    with using(isa):
        for weight in (prepare_weight(mixed), prepare_weight(normal(48, 96, dtype=BF16))):
            bias = normal(weight.out_features if isinstance(weight, PackedIntegers) else 48, dtype=BF16)
            pieces = torch.cat([linear(x[start : start + 100], weight, bias) for start in range(0, 1100, 100)])
            with threads(count):
                assert torch.equal(linear(x, weight, bias), pieces)


@ISAS
def test_stacked_parts_are_one_weight(isa):
    x, bias = inputs(20, 160), normal(288, dtype=BF16)
    mixed = stack_of(MIXED, 160)
    mixed = IntegerStack([mixed[0], replace(mixed[1], dynamic=False), *mixed[2:]])
    with using(isa):
        packed = prepare_weight(mixed)
        assert isinstance(packed, PackedIntegers)
        assert packed.shape == (288, 160)
        parts = [linear(x, prepare_weight(part)) for part in mixed]
        assert torch.equal(linear(x, packed), torch.cat(parts, 1))
        starts = [0, 48, 112, 192]
        with_bias = [
            linear(x, prepare_weight(part), bias[start : start + part.shape[0]])
            for part, start in zip(mixed, starts, strict=True)
        ]
        assert torch.equal(linear(x, packed, bias), torch.cat(with_bias, 1))
        assert torch.equal(linear(x, packed), torch.cat(parts, 1)), "a bias stayed"
        want = linear.reference(x, mixed, bias)
        torch.testing.assert_close(linear(x, packed, bias), want, rtol=2**-7, atol=1e28, equal_nan=True)
        assert_same(linear(x, packed, bias)[:, :48], want[:, :48], isa)


@ISAS
@FORMATS
def test_plain_inputs_meet_the_dequantised_weight(isa, format):
    """Equal to the bit to the product with the weight that `dequantize` makes, which is rounded to bfloat16 once."""
    weight, x, bias = (
        integers_of(format, 112, 1056, dynamic=False),
        normal(40, 1056, dtype=BF16),
        normal(112, dtype=BF16),
    )
    with using(isa):
        packed, plain = prepare_weight(weight), prepare_weight(weight.dequantize(BF16))
        for rows in (1, 3, 16, 17, 40):
            assert torch.equal(linear(x[:rows], packed, bias), linear(x[:rows], plain, bias)), rows


@ISAS
def test_rows_with_no_numbers_say_so(isa):
    x = normal(20, 96, dtype=BF16)
    x[3, 5], x[7, 40], x[18, 70] = float("nan"), float("inf"), -float("inf")
    with using(isa):
        for format in (Q4_0, Q4_1, Q6_K):
            got = linear(x, prepare_weight(integers_of(format, 48, 96)))
            assert got.isnan().all(1).nonzero().flatten().tolist() == [3, 7, 18]
            assert not got[[0, 4, 19]].isnan().any()


# --- weights that are laid out


@FORMATS
@pytest.mark.parametrize("columns", [32, 96, 4128])
def test_unpacking_takes_preparing_back(format, columns):
    weight = replace(integers_of(format, 48, columns), dynamic=columns != 96)
    packed = prepare_weight(weight)
    assert isinstance(packed, PackedIntegers)
    assert (packed.shape, packed.ndim, packed.device) == (weight.shape, 2, weight.device)
    assert packed.nbytes == weight.nbytes
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert torch.equal(packed.slice_rows(slice(5, 40)).dequantize(), weight.dequantize()[5:40])
    back = unpack_weight(packed)
    assert type(back) is IntegerWeight
    assert_equal_weights(back, weight)


def assert_equal_weights(got: IntegerWeight, want: IntegerWeight) -> None:
    assert (got.format, got.dynamic) == (want.format, want.dynamic)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.scales, want.scales)
    assert (got.minima is None) == (want.minima is None)
    assert want.minima is None or torch.equal(got.minima, want.minima)


@ISAS
@FORMATS
def test_parts_of_other_weights_are_laid_out_where_they_are(isa, format):
    """Rows and columns of a larger weight, and factors that are not row by row."""
    whole = integers_of(format, 128, 128)
    part = whole.slice_rows(slice(16, 112)).slice_columns(slice(32, 96))
    turned = replace(whole, scales=whole.scales.t().contiguous().t())
    with using(isa), threads(3):
        for weight in (part, turned):
            assert_equal_weights(unpack_weight(prepare_weight(weight)), weight)


def test_unpacking_a_stack_gives_a_stack():
    for weight in (stack_of(MIXED, 96), stack_of(("q4_1",), 96)):
        back = unpack_weight(prepare_weight(weight))
        assert type(back) is IntegerStack
        for got, want in zip(back, weight, strict=True):
            assert_equal_weights(got, want)


def test_a_copy_has_memory_of_its_own():
    x = inputs(3, 96)
    for weight in (stack_of(MIXED, 96), normal(48, 96, dtype=BF16)):
        packed = prepare_weight(weight)
        want = linear(x, packed)
        copied = copy.deepcopy(packed)
        for data in packed.blocks if isinstance(packed, PackedIntegers) else [packed]:
            data.zero_()
        assert torch.equal(linear(x, copied), want)
        assert not torch.equal(linear(x, packed), want)


def test_prepared_weights_meet_calls_that_the_kernels_refuse():
    weight, x = integers_of(Q8_0, 48, 96), normal(5, 96)
    packed = prepare_weight(weight)
    assert torch.equal(linear(x, packed), linear.reference(x, weight))
    got = linear(x.to(BF16), packed, out_dtype=torch.float32)
    assert torch.equal(got, linear.reference(x.to(BF16), weight, out_dtype=torch.float32))
    target = aligned_copy(normal(5, 48, dtype=BF16))
    assert linear(x.to(BF16), packed, out_acc=target) is target


def test_without_compiled_kernels_the_reference_multiplies():
    weight, x = stack_of(MIXED, 96), inputs(5, 96)
    with using(None):
        packed = prepare_weight(weight)
        assert packed is weight
        assert unpack_weight(packed) is weight
        got = linear(x, packed)
    assert torch.equal(got, torch.cat([linear.reference(x, part) for part in weight], 1))


@pytest.mark.parametrize(
    ("weight", "sentence"),
    [
        (integers_of(Q4_0, 40, 96), r"multiples of 16 output and 32 input features, got \[40, 96\]"),
        (integers_of(Q6_K, 48, 48), r"multiples of 16 output and 32 input features, got \[48, 48\]"),
        (IntegerStack([integers_of(Q4_0, 48, 96), integers_of(Q4_1, 40, 96)]), r"got \[40, 96\]"),
        (
            integers_of(IntegerFormat("q4_16", 4, 16, 8, has_minima=False, scale_dtype=torch.float16), 48, 96),
            "no kernel for 4 bits in groups of 16 as in q4_16",
        ),
        (
            integers_of(IntegerFormat("q8_1", 8, 32, 0, has_minima=True, scale_dtype=torch.float16), 48, 96),
            "codes up to 127 in q8_1, got 255",
        ),
        (replace(integers_of(Q4_0, 48, 96), scales=torch.full((48, 3), float("inf")).half()), "finite scales"),
        (
            replace(integers_of(Q4_1, 48, 96), minima=torch.tensor([[0, float("nan"), 1]]).half().repeat(48, 1)),
            "finite scales and min",
        ),
        (prepare_weight(integers_of(Q4_0, 48, 96)), "laid out already"),
    ],
)
def test_other_weights_are_refused_in_a_sentence(weight, sentence):
    assert re.search(sentence, prepare_weight.explain(weight)["native"])
    assert prepare_weight(weight) is weight


# --- embeddings


@pytest.mark.parametrize("ids", [[0, 48], [-1, 3], [112]])
def test_ids_outside_the_table_are_an_error(ids):
    given = torch.tensor(ids)
    weight = integers_of(Q4_1, 48, 96)
    with pytest.raises(IndexError, match="from 0 to 47, got"):
        embedding(given, weight, dtype=BF16)
    with pytest.raises(IndexError):
        embedding.reference(given, weight, dtype=BF16)
    if ids != [0, 48]:
        with pytest.raises(IndexError, match="from 0 to 111, got"):
            embedding(given, stack_of(("q4_1", "q6_k"), 96), dtype=BF16)
    with pytest.raises(ValueError, match=r"\[num_tokens\] of int64 or int32, got \[1, \d\] of torch.int64"):
        embedding(given[None], weight, dtype=BF16)


@ISAS
@FORMATS
def test_rows_are_looked_up_in_a_weight_that_is_laid_out(format, isa):
    weight, ids = integers_of(format, 48, 96), torch.tensor([5, 47, 5, 0, 16])
    with using(isa):
        table = prepare_weight(weight)
        assert embedding.explain(ids, table, dtype=BF16)["native"] == "ok"
        assert torch.equal(embedding(ids, table, dtype=BF16), weight.dequantize()[ids].bfloat16())
        assert embedding(ids[:0], table, dtype=BF16).shape == (0, 96)
        with pytest.raises(IndexError, match="from 0 to 47, got"):
            embedding(torch.tensor([48]), table, dtype=BF16)


def test_rows_of_several_weights_that_are_laid_out_are_right_too():
    weight, ids = stack_of(("q4_1", "q6_k"), 96), torch.tensor([5, 47, 5, 100])
    got = embedding(ids, prepare_weight(weight), dtype=BF16)
    assert torch.equal(got, weight.dequantize()[ids].bfloat16())
