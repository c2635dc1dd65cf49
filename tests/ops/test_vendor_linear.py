"""What cuBLAS is asked for, seen without a GPU: plain products run on the CPU, FP8 ones against cuBLASLt's demands."""

from __future__ import annotations

import copy
import importlib
import sys

import pytest
import torch
import torch.nn.functional as F

from rorqual.ops import _hopper_tiles
from rorqual.ops.linear import linear
from rorqual.quantization import FP8_ROW, FP8_ROW_UE8M0, QTensor, ScaleLayout
from tests.ops.gemm_cases import NOT_FOR_CUBLASLT, TAKEN_BY_HOPPER_TILES
from tests.ops.linear_cases import FORMATS, LINEAR_CASES, PLAIN
from tests.ops.values import normal

MODULE = "rorqual.ops.vendor.linear"


@pytest.fixture
def vendor():
    """The module, and no trace of it afterwards where it was not loaded before."""
    loaded, before = MODULE in sys.modules, list(linear.impls)
    yield importlib.import_module(MODULE)
    if not loaded:
        linear.impls[:] = before
        del sys.modules[MODULE]


@pytest.mark.parametrize("case", [case for case in PLAIN if not case.startswith("native_w")])
def test_plain_products(case, vendor):
    args, options = PLAIN[case]()
    if "out_dtype" in options and options["out_dtype"] != args[0].dtype:
        pytest.skip("the CPU knows no product of another dtype than its operands'")
    want = linear.reference(*args, **copy.deepcopy(options))  # which keeps strides
    got = vendor.linear_vendor(*args, **options)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert got.dim() < 2 or got.stride(-2) * got.element_size() % 32 == 0 or got.shape[-2] == 1
    assert "out_acc" not in options or got is options["out_acc"]
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2e-2)


def demanding_scaled_mm(x, weight, *, scale_a, scale_recipe_a, scale_b, scale_recipe_b, output_dtype):
    """torch's scaled_mm for 1 x 128 by 128 x 128 blocks: its demands on sizes and strides, and the sum in float64."""
    assert (scale_recipe_a, scale_recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    (rows, columns), features = x.shape, weight.shape[1]
    blocks, groups = -(-features // 128), -(-columns // 128)
    apart = -(-groups // 4) * 4
    assert x.stride() == (columns, 1)
    assert weight.stride(0) == 1
    assert columns % 16 == features % 16 == rows % 4 == 0
    assert scale_a.shape == (rows, groups)
    assert scale_a.stride() == (1, rows)
    assert scale_b.shape == (apart, blocks)
    assert scale_b.stride() == (1, apart)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    left = x.double() * scale_a.double().repeat_interleave(128, 1)[:, :columns]
    of_weight = scale_b.double()[:groups].repeat_interleave(128, 0)[:columns].repeat_interleave(128, 1)[:, :features]
    return (left @ (weight.double() * of_weight)).to(output_dtype)


@pytest.mark.parametrize("rows", [65, 66, 68, 130])
@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_ue8m0"])
def test_blocks_of_fp8(name, rows, vendor, monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", demanding_scaled_mm)
    format, activation = FORMATS[name]
    x, weight = normal(rows, 640), QTensor.quantize(normal(256, 640, seed=1) / 25, format)
    bias = normal(256, seed=2)
    for operand, options in (
        (x.to(torch.bfloat16), {"activation": activation}),
        (x, {"activation": activation, "out_dtype": torch.float32}),
        (QTensor.quantize(x, activation, ScaleLayout.COLUMN), {}),
        (QTensor.quantize(x, activation), {"out_dtype": torch.float16}),
    ):
        for added in (None, bias):
            want = linear.reference(operand, weight, added, **options)
            got = vendor.linear_vendor(operand, weight, added, **options)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2 if got.dtype != torch.float32 else 1e-5)


def test_blocks_of_fp8_with_outer_dimensions(vendor, monkeypatch):
    monkeypatch.setattr(F, "scaled_mm", demanding_scaled_mm)
    weight = QTensor.quantize(normal(128, 256, seed=1) / 16, FORMATS["fp8_block"][0])
    x = normal(2, 33, 256)
    for operand, options in (
        (QTensor.quantize(x, FP8_ROW), {}),
        (QTensor.quantize(x, FP8_ROW_UE8M0), {}),
        (x, {"activation": FP8_ROW}),
    ):
        want = linear.reference(operand, weight, **options)
        torch.testing.assert_close(vendor.linear_vendor(operand, weight, **options), want, rtol=2**-7, atol=1e-2)


def test_few_rows_and_other_formats_are_refused(vendor, monkeypatch):
    monkeypatch.setattr(vendor, "_elsewhere", lambda *tensors: None)
    monkeypatch.setattr(vendor, "_refuse_gpu", lambda: None)
    x, weight = normal(65, 256), QTensor.quantize(normal(128, 256), FORMATS["fp8_block"][0])
    assert vendor._refuse(x, weight, activation=FP8_ROW) is None
    assert "is for 65 rows or more" in vendor._refuse(x[:64], weight, activation=FP8_ROW)
    assert "needs x in fp8_row" in vendor._refuse(x, weight)
    assert "whole blocks" in vendor._refuse(x, weight.slice_rows(slice(0, 100)), activation=FP8_ROW)
    assert "out_acc" in vendor._refuse(x, weight, activation=FP8_ROW, out_acc=torch.zeros(65, 128))
    other = QTensor.quantize(normal(128, 256), FORMATS["mxfp4"][0])
    assert "got mxfp4" in vendor._refuse(x, other, activation=FP8_ROW)


def test_tensors_on_the_cpu_are_refused(vendor):
    for case in ("one", "float32", "fp8_block_dynamic_130"):
        args, options = LINEAR_CASES[case]()
        assert "needs tensors on cuda" in vendor._refuse(*args, **options)


def test_the_listed_cases_are_those_that_it_takes(vendor, monkeypatch):
    """On a GPU the parity tests rely on the list."""
    from tests.ops.cases import CASES

    monkeypatch.setattr(vendor, "_elsewhere", lambda *tensors: None)
    monkeypatch.setattr(vendor, "_refuse_gpu", lambda: None)
    for on_hopper, others in ((False, set()), (True, TAKEN_BY_HOPPER_TILES)):
        monkeypatch.setattr(_hopper_tiles, "is_hopper", lambda device, there=on_hopper: there)
        taken = set()
        for case, make in CASES["linear"].items():
            args, options = make()
            if vendor._refuse(*args, **options) is None:
                taken.add(case)
        assert taken == CASES["linear"].keys() - NOT_FOR_CUBLASLT - others
