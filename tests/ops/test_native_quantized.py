"""The compiled kernels on quantised weights: what they decode, how they round inputs, and that rows are independent."""

from __future__ import annotations

import re

import pytest
import torch

from rorqual.ops.linear import linear, prepare_weight, unpack_weight
from rorqual.ops.native._quantized_linear import PairedWeight, _rounded
from rorqual.ops.native.library import kernels, usable_isas, using
from rorqual.ops.registry import load_backends
from rorqual.quantization import FP8_ROW, FP8_ROW_UE8M0, MXFP8, QTensor
from tests.ops.linear_cases import FORMATS
from tests.ops.quantize_cases import activations, boundaries, ties
from tests.ops.values import normal

load_backends("native", "cpu")
BF16 = torch.bfloat16
ISAS = pytest.mark.parametrize("isa", usable_isas())


def of_every_code(name: str, rows: int = 48, columns: int = 256) -> QTensor:
    """A weight that holds every code but NaN, with scales of many sizes."""
    weight = QTensor.quantize(normal(rows, columns), FORMATS[name][0])
    codes = torch.arange(weight.values.numel()) % 256
    if weight.format.element == "e4m3":
        codes[(codes & 127) == 127] = 0
    weight.values.view(torch.uint8).copy_(codes.view(weight.values.shape))
    draw = torch.Generator().manual_seed(0)
    if weight.scales.dtype == torch.uint8:
        weight.scales.copy_(torch.randint(90, 129, weight.scales.shape, generator=draw))
    else:
        weight.scales.copy_(torch.rand(weight.scales.shape, generator=draw))
    return weight


@ISAS
@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_decoded(isa, name):
    """Times unit vectors: the weight's own numbers, rounded to bfloat16 once."""
    weight = of_every_code(name)
    with using(isa):
        prepared = prepare_weight(weight)
        assert isinstance(prepared, PairedWeight)
        got = linear(torch.eye(256, dtype=BF16), prepared)
    assert torch.equal(got.t(), weight.dequantize(BF16))


@ISAS
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_product_of_a_row_is_the_same_in_any_company_and_on_any_threads(isa, name, threads):
    """8192 inputs: two blocks of outputs are decoded at a time, and of seven the last one is alone."""
    weight, activation = QTensor.quantize(normal(112, 8192, seed=1), FORMATS[name][0]), FORMATS[name][1]
    x, bias = normal(40, 8192, dtype=BF16), normal(112, dtype=BF16)
    before = torch.get_num_threads()
    with using(isa):
        packed = prepare_weight(weight)
        alone = torch.cat([linear(x[i : i + 1], packed, bias, activation=activation) for i in range(len(x))])
        torch.set_num_threads(threads)
        try:
            for stop in (2, 5, 16, 17, 33, 40):
                assert torch.equal(linear(x[:stop], packed, bias, activation=activation), alone[:stop]), stop
        finally:
            torch.set_num_threads(before)


@ISAS
@pytest.mark.parametrize("format", [FP8_ROW, FP8_ROW_UE8M0, MXFP8], ids=lambda format: format.name)
def test_inputs_are_rounded_as_quantize_rounds_them(isa, format):
    """Bit by bit: values of many sizes, on the edges of scales and halfway between codes, and no numbers."""
    odd = normal(5, 256)
    odd[0], odd[1, 3], odd[2, 200] = 0.0, float("nan"), float("inf")
    odd[3], odd[4, ::2] = 3e38, -3e38
    x = torch.cat((activations(40, 256), boundaries(), ties(), odd)).to(BF16)
    want = QTensor.quantize(x, format).dequantize(BF16)
    with using(isa):
        for given in (x, torch.cat((x, x), 1)[:, :256]):
            got = _rounded(kernels(), given, format)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_packed(name):
    """As many bytes of values as before; scales for every row, which is a byte or four for each group of a row."""
    weight = QTensor.quantize(normal(256, 512), FORMATS[name][0])
    prepared = prepare_weight(weight)
    assert isinstance(prepared, PairedWeight)
    assert prepared.shape == weight.shape
    assert prepared.values.nbytes == weight.values.nbytes
    groups = 512 // weight.format.block[1]
    assert prepared.scales.nbytes == 256 * groups * weight.scales.element_size()
    back = unpack_weight(prepared)
    assert torch.equal(back.values.view(torch.uint8), weight.values.view(torch.uint8))
    assert torch.equal(back.scales, weight.scales)


@pytest.mark.parametrize(
    ("rows", "columns", "name", "sentence"),
    [
        (40, 256, "mxfp8", r"multiples of 16 output and 32 input features, got \[40, 256\]"),
        (48, 240, "mxfp8", r"multiples of 16 output and 32 input features, got \[48, 240\]"),
        (48, 160, "fp8_block", r"whole blocks of 128 input features, got \[48, 160\]"),
    ],
)
def test_other_sizes_are_refused_in_a_sentence(rows, columns, name, sentence):
    weight = QTensor.quantize(normal(rows, columns), FORMATS[name][0])
    assert re.search(sentence, prepare_weight.explain(weight)["native"])
