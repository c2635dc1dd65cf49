"""Hopper's products of some rows on a GPU: the bits of the other kernels, which add up K in the same order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rorqual.ops._hopper_tiles import hopper_tile
from rorqual.ops.gated_linear import gated_linear
from rorqual.ops.linear import linear
from rorqual.ops.registry import load_backends
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.ops.triton.launch import INTERPRETING, available
from tests.ops.values import normal

if INTERPRETING or not available():
    pytest.skip("needs a GPU: the interpreter knows no Gluon", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("this GPU is not a Hopper", allow_module_level=True)
pytestmark = pytest.mark.gpu
load_backends("vendor", "triton")  # which tells cuBLAS not to split K

from rorqual.ops.triton import _hopper_product  # noqa: E402
from tests.ops.test_hopper_product_sm90 import TILES  # noqa: E402


def operands(rows: int, features: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x, whose rows are apart from each other, and a weight."""
    x = normal(rows, columns + 8, dtype=dtype).cuda()[:, :columns]
    return x, (normal(features, columns, seed=1) / columns**0.5).to("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tile", "gated"), TILES, ids=str)
def test_products_equal_those_of_cublas(tile, gated, dtype):
    for rows, features, columns in ((17, 1040, 1048), (100, 1024, 3072), (256, 72, 64), (250, 4096, 1024)):
        x, weight = operands(rows, features * 2 if gated else features, columns, dtype)
        want = F.linear(x, weight)
        want = silu_and_mul(want) if gated else want
        out = torch.full((rows + 1, features), 7.0, dtype=dtype, device="cuda")
        for _ in "ab":  # one after the other: the second may start early
            _hopper_product.multiply_by_tiles(x, weight, out[:rows], tile, gated=gated)
        assert torch.equal(out[:rows], want)
        assert (out[rows] == 7).all()


@pytest.mark.parametrize("rows", [17, 31, 40, 64, 65, 100, 128, 150, 192, 200, 255, 256])
def test_ops_take_them_and_give_the_bits_of_cublas(rows):
    for features, columns in ((4096, 1024), (1024, 2048), (1024, 3072), (6144, 1024), (72, 136)):
        x, weight = operands(rows, features, columns, torch.bfloat16)
        want = F.linear(x, weight)
        vendor, triton = (linear.explain(x, weight)[backend] == "ok" for backend in ("vendor", "triton"))
        assert vendor or triton
        if hopper_tile(x, weight) is not None:
            assert (vendor, triton) == (False, True)
        assert torch.equal(linear(x, weight), want)
        assert torch.equal(linear(x.contiguous().view(1, rows, columns), weight), want[None])
        takes_gated = hopper_tile(x, weight, gated=True) is not None
        assert (gated_linear.explain(x, weight)["triton"] == "ok") == takes_gated
        assert torch.equal(gated_linear(x, weight), silu_and_mul(want))


def test_a_graph_replays_them_with_weights_of_its_own():
    """A chain as in a decode step, in which each product may ask for its weight before the one ahead has ended."""
    x, first = operands(64, 2048, 1024, torch.bfloat16)
    weights = [first, *(operands(64, n, k, torch.bfloat16)[1] for n, k in ((1024, 2048), (6144, 1024), (1024, 3072)))]

    def chain(given: torch.Tensor) -> torch.Tensor:
        out = linear(linear(given, weights[0]), weights[1])
        return linear(gated_linear(out, weights[2]), weights[3])

    want = chain(x)
    static = torch.zeros(64, 1024, dtype=torch.bfloat16, device="cuda")
    chain(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(static)
    static.copy_(x)
    for _ in range(20):
        graph.replay()
        assert torch.equal(out, want)
