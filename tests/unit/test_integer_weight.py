"""Matrices of integers: what rounding to them does, and how they are cut and joined."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.quantization.integer import INTEGER_FORMATS, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, IntegerStack, IntegerWeight


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_weight(format, rows: int = 6, columns: int = 64, seed: int = 0) -> IntegerWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns * format.bits // 8), generator=generator, dtype=torch.uint8)
    scales = normal(rows, columns // format.group, seed=seed).to(format.scale_dtype)
    return IntegerWeight(codes, scales, scales * -3 if format.has_minima else None, format)


@pytest.mark.parametrize("format", INTEGER_FORMATS.values(), ids=lambda format: format.name)
def test_values_are_what_the_formula_says(format):
    weight = random_weight(format)
    found = weight.dequantize()
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            byte = int(weight.codes[row, column * format.bits // 8])
            code = byte if format.bits == 8 else (byte >> 4 if column % 2 else byte & 15)
            group = column // format.group
            want = np.float32(code - format.offset) * np.float32(weight.scales[row, group])
            if weight.minima is not None:
                want += np.float32(weight.minima[row, group])
            assert found[row, column].item() == want
    assert weight.nbytes == format.num_bytes(found.numel())


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 300.0])
def test_q8_0_rounds_to_the_nearest_step_of_the_largest_magnitude(magnitude):
    weight = normal(5, 96) * magnitude
    kept = IntegerWeight.quantize(weight, Q8_0)
    groups = weight.view(5, 3, 32).double().numpy()
    scales = (np.abs(groups).max(-1).astype(np.float32) / np.float32(127)).astype(np.float16)
    assert np.array_equal(kept.scales.numpy(), scales)
    error = np.abs(kept.dequantize().view(5, 3, 32).double().numpy() - groups)
    assert (
        error <= scales[..., None].astype(np.float64) * 0.5 * (1 + 1e-5) + 127 * np.spacing(scales)[..., None]
    ).all()
    assert np.abs(kept.integers().int().numpy() - 128).max() == 127


def test_q4_1_rounds_to_fifteen_steps_from_the_smallest_to_the_largest():
    weight = normal(5, 96) + 3
    kept = IntegerWeight.quantize(weight, Q4_1)
    groups = weight.view(5, 3, 32).double().numpy()
    low = groups.min(-1).astype(np.float16)
    steps = ((groups.max(-1) - groups.min(-1)).astype(np.float32) / np.float32(15)).astype(np.float16)
    assert np.array_equal(kept.minima.numpy(), low)
    assert np.abs(kept.scales.double().numpy() - steps).max() <= np.spacing(steps).max()
    error = np.abs(kept.dequantize().view(5, 3, 32).double().numpy() - groups)
    slack = 15 * np.spacing(steps) + np.spacing(low)  # of scale and minimum in float16
    assert (error <= (steps.astype(np.float64) * 0.5 + slack)[..., None]).all()


@pytest.mark.parametrize("format", [Q8_0, Q4_1])
def test_constant_groups_and_bfloat16_are_rounded(format):
    weight = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight[0, :32], weight[1, 5] = 0.75, -2
    kept = IntegerWeight.quantize(weight, format, dynamic=False)
    assert not kept.dynamic
    assert torch.allclose(kept.dequantize(), weight.float(), rtol=2**-10, atol=2**-10)  # of float16 scales
    assert kept.dequantize()[0, 32:].abs().max() == 0


@pytest.mark.parametrize("format", [Q8_0, Q4_1])
def test_large_matrices_are_rounded_as_their_rows_are(format, monkeypatch):
    weight = normal(70, 64)
    whole = IntegerWeight.quantize(weight, format)
    monkeypatch.setattr("rorqual.quantization.integer._PANEL", 9 * 64)
    panels = IntegerWeight.quantize(weight, format)
    for kind in ("codes", "scales", "minima"):
        mine, theirs = getattr(whole, kind), getattr(panels, kind)
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    assert IntegerWeight.quantize(weight[:0], format).shape == (0, 64)


@pytest.mark.parametrize(
    ("weight", "format", "sentence"),
    [
        (torch.ones(2, 40), Q8_0, r"q8_0 has groups of 32 columns, got a weight of shape \[2, 40\]"),
        (torch.ones(64), Q4_1, r"got a weight of shape \[64\]"),
        (torch.ones(2, 64), Q4_0, "rounded to q8_0 or q4_1, not to q4_0"),
        (torch.full((2, 64), torch.nan), Q8_0, "q8_0 cannot hold"),
        (torch.full((2, 64), 1e8), Q4_1, "q4_1 cannot hold"),
    ],
)
def test_what_cannot_be_rounded_is_refused(weight, format, sentence):
    with pytest.raises(ValueError, match=sentence):
        IntegerWeight.quantize(weight, format)


@pytest.mark.parametrize("format", INTEGER_FORMATS.values(), ids=lambda format: format.name)
def test_rows_and_columns_are_cut_and_joined_without_loss(format):
    weight = random_weight(format, rows=7, columns=96)
    values = weight.dequantize()
    assert torch.equal(weight.slice_rows(slice(2, 5)).dequantize(), values[2:5])
    assert torch.equal(weight.slice_columns(slice(32, 96)).dequantize(), values[:, 32:])
    joined = IntegerWeight.cat_rows([weight.slice_rows(slice(0, 3)), weight.slice_rows(slice(3, 7))])
    assert torch.equal(joined.dequantize(), values)
    with pytest.raises(ValueError, match="cut at multiples of"):
        weight.slice_columns(slice(8, 96))


def test_a_stack_is_its_parts_one_below_the_other():
    parts = [random_weight(Q4_K, 3), random_weight(Q6_K, 2), random_weight(Q8_0, 4)]
    stack = IntegerStack(parts)
    values = torch.cat([part.dequantize() for part in parts])
    assert stack.shape == (9, 64)
    assert stack.nbytes == sum(part.nbytes for part in parts)
    assert torch.equal(stack.dequantize(), values)
    for start in range(10):
        for stop in range(start, 10):
            cut = stack.slice_rows(slice(start, stop))
            assert torch.equal(cut.dequantize(), values[start:stop])
            assert all(part.shape[0] for part in cut) or start == stop
