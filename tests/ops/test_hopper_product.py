"""Hopper's products of some rows on a GPU: the bits of the other kernels, which add up K in the same order."""

from __future__ import annotations

import pytest
import torch

from rorqual.ops.linear import linear
from rorqual.ops.registry import load_backends
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.ops.triton.launch import INTERPRETING, available
from tests.ops.values import normal

if INTERPRETING or not available():
    pytest.skip("needs a GPU: the interpreter knows no Gluon", allow_module_level=True)
pytestmark = pytest.mark.gpu
load_backends("vendor", "triton")

from rorqual.ops.triton import _hopper_product  # noqa: E402
from tests.ops.test_hopper_product_sm90 import TILES  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products_equal_those_of_other_kernels(tile, dtype):
    for rows, features, columns in ((17, 1040, 1048), (100, 1024, 3072), (256, 72, 64), (250, 4096, 1024)):
        x = normal(rows, columns + 8, dtype=dtype).cuda()[:, :columns]  # rows apart from each other
        weight = (normal(2 * features, columns, seed=1) / columns**0.5).to("cuda", dtype)
        bias = normal(2 * features, seed=2).to("cuda", dtype)
        for given in (None, bias):
            want = linear(x, weight, given)
            out = torch.full((rows + 1, 2 * features), 7.0, dtype=dtype, device="cuda")
            if not _hopper_product.takes_product(x, weight, out):
                pytest.skip("this GPU is not a Hopper")
            for _ in "ab":  # one after the other: the second may start early
                _hopper_product.multiply(x, weight, given, out[:rows], tile)
            assert torch.equal(out[:rows], want)
            assert (out[rows] == 7).all()
            gated = torch.full((rows + 1, features), 7.0, dtype=dtype, device="cuda")
            _hopper_product.multiply(x, weight, given, gated[:rows], tile, gated=True)
            assert torch.equal(gated[:rows], silu_and_mul(want))
            assert (gated[rows] == 7).all()
