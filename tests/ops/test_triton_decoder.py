"""What Triton fuses in a decoder layer: near to the references, whose ops run one after the other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch

from rorqual.batch import Batch, CacheView
from rorqual.ops.decoder_blocks import Norm, Rotation, rotate_and_store
from rorqual.ops.gated_linear import gated_linear
from rorqual.ops.linear import allocate_output, linear
from rorqual.ops.registry import load_backends
from rorqual.ops.store_kvcache import LayerKV
from rorqual.ops.triton.launch import INTERPRETING, available
from tests.ops.paged_cases import make_batch, make_caches
from tests.ops.values import normal, rows_apart

if not available():
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)
load_backends(*(() if INTERPRETING else ("vendor",)), "triton")
from rorqual.ops.triton import gated_linear as fused_gate  # noqa: E402
from rorqual.ops.triton import linear as products  # noqa: E402
from rorqual.ops.triton import rotate_and_store as fused_heads  # noqa: E402

pytestmark = [] if INTERPRETING else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETING else "cuda"
BF16 = torch.bfloat16


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    steps = {torch.float32: (1e-5, 1e-5), BF16: (2**-7, 2**-6), torch.float16: (2**-10, 2**-9)}
    if got.dtype == torch.float8_e4m3fn:
        got, want, (rtol, atol) = got.float(), want.float(), (2**-3, 2**-9)
    else:
        rtol, atol = steps[got.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


# --- heads


def heads(
    slots: Sequence[int],
    *,
    num_heads: int = 5,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    interleaved: bool = False,
    norms: bool = True,
    layout: str = "tokens",
) -> tuple[torch.Tensor, Batch, LayerKV, dict]:
    """Arguments of `rotate_and_store`, the projection's rows apart from each other."""
    qkv = rows_apart(normal(len(slots), (num_heads + 2 * kv_heads) * dim, dtype=dtype)).unflatten(1, (-1, dim))
    cache = make_caches(6, 4, kv_heads, dim, layout=layout, dtype=cache_dtype or dtype)
    view = CacheView(torch.tensor(slots, dtype=torch.int64, device=DEVICE), torch.zeros(1, 1, dtype=torch.int32))
    batch = make_batch([1] * len(slots), list(range(1, len(slots) + 1)), (view,))
    batch = dataclasses.replace(batch, positions=batch.positions.to(DEVICE))
    norm = {
        f"{name}_norm": Norm((1 + normal(dim, seed=seed, dtype=dtype) / 8).to(DEVICE), eps)
        for seed, (name, eps) in enumerate((("query", 1e-6), ("key", 1e-2)))
    }
    options = {
        "num_heads": num_heads,
        "rotation": Rotation(normal(40, dim, seed=3).to(DEVICE), interleaved, 0),
        **(norm if norms else {}),
    }
    moved = LayerKV(0, *(c.to(DEVICE) for c in cache))
    return qkv.to(DEVICE), batch, moved, options


HEADS = {
    "none": lambda: heads([]),
    "one": lambda: heads([3]),
    "some": lambda: heads([3, -1, 0, 22, -1, 9]),
    "nobody_writes": lambda: heads([-1, -1]),
    "no_norm": lambda: heads([1, 2, 5], norms=False),
    "interleaved": lambda: heads([1, 2, 5], interleaved=True),
    "interleaved_no_norm": lambda: heads([1, 2, 5], interleaved=True, norms=False),
    "wide": lambda: heads([1, 2, 5], num_heads=40, kv_heads=8, dim=128),
    "odd_head": lambda: heads([1, 2, 5, 8], dim=40, num_heads=3, kv_heads=3),
    "float32": lambda: heads([1, 2, 5, 8], dtype=torch.float32),
    "float16_other_layout": lambda: heads([1, 2, 5, 8], dtype=torch.float16, layout="heads"),
    "fp8_cache": lambda: heads([1, -1, 5, 8], cache_dtype=torch.float8_e4m3fn),
    "wider_cache": lambda: heads([1, -1, 5, 8], cache_dtype=torch.float32),
}


def clone(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.preserve_format)


@pytest.mark.parametrize("case", HEADS)
def test_heads_equal_norm_rotation_and_store(case):
    qkv, batch, cache, options = HEADS[case]()
    assert rotate_and_store.explain(qkv, batch, cache, **options)["triton"] == "ok"
    theirs = LayerKV(0, clone(cache.key), clone(cache.value))
    want = rotate_and_store.reference(clone(qkv), batch, theirs, **options)
    got = fused_heads.rotate_and_store_triton(qkv, batch, cache, **options)
    close(got, want)
    for ours, reference in ((cache.key, theirs.key), (cache.value, theirs.value)):
        wider = ours.dtype.itemsize > qkv.dtype.itemsize  # which holds what was rounded to qkv's dtype
        close(*((t.to(qkv.dtype) if wider else t) for t in (ours, reference)))


def test_a_token_is_the_same_alone_and_in_company():
    slots = [3, 7, 0, 22, 11, 9]
    qkv, batch, cache, options = heads(slots, num_heads=16, kv_heads=8, dim=128)
    alone = LayerKV(0, clone(cache.key), clone(cache.value))
    one = clone(qkv[2:3])
    together = fused_heads.rotate_and_store_triton(qkv, batch, cache, **options)[2]
    view = CacheView(batch.caches[0].slot_mapping[2:3], batch.caches[0].block_tables)
    lone = make_batch([1], [3], (view,))
    lone = dataclasses.replace(lone, positions=batch.positions[2:3])
    assert torch.equal(fused_heads.rotate_and_store_triton(one, lone, alone, **options)[0], together)
    assert torch.equal(alone.key[0, 0], cache.key[0, 0])
    assert torch.equal(alone.value[0, 0], cache.value[0, 0])


def test_positions_outside_the_table_are_nan():
    qkv, batch, cache, options = heads([1, 2])
    options["rotation"] = Rotation(options["rotation"].cos_sin[:1], False, 0)
    got = fused_heads.rotate_and_store_triton(qkv, batch, cache, **options)
    assert not got[0].isnan().any()
    assert got[1].isnan().all()


def test_partial_rotations_are_left_to_the_ops_themselves():
    qkv, batch, cache, options = heads([1, 2])
    options["rotation"] = Rotation(normal(40, 8).to(DEVICE), False, 0)
    assert "whole heads" in rotate_and_store.explain(qkv, batch, cache, **options)["triton"]
    rotate_and_store(qkv, batch, cache, **options)


# --- products of few rows

SHAPES = [(1, 16, 256), (3, 20, 100), (8, 64, 512), (9, 33, 257), (16, 1, 300), (17, 70, 130), (100, 64, 96)]
FEW = [shape for shape in SHAPES if shape[0] <= 16]


def operands(rows: int, features: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(rows, columns, dtype=dtype).to(DEVICE), (normal(features, columns, seed=1) / columns**0.5).to(
        DEVICE, dtype
    )


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_the_reference(shape, dtype):
    x, weight = operands(*shape, dtype)
    bias = normal(shape[1], seed=2).to(DEVICE, dtype)
    close(products.linear_triton(x, weight), linear.reference(x, weight))
    for given, wide in itertools.product((None, bias), (None, torch.float32)):
        options = {"out_dtype": wide}
        close(products.linear_triton(x, weight, given, **options), linear.reference(x, weight, given, **options))
        out = allocate_output((shape[0], shape[1]), wide or dtype, x.device)
        out.copy_(normal(shape[0], shape[1], seed=5))
        want = linear.reference(x, weight, given, **options, out_acc=clone_padded(out))
        assert products.linear_triton(x, weight, given, **options, out_acc=out) is out
        close(out, want)


def clone_padded(out: torch.Tensor) -> torch.Tensor:
    return allocate_output(out.shape, out.dtype, out.device).copy_(out)


@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_products_equal_the_reference(shape, with_bias):
    rows, features, columns = shape
    x, weight = operands(rows, 2 * features, columns, BF16)
    bias = normal(2 * features, seed=2).to(DEVICE, BF16) if with_bias else None
    assert gated_linear.explain(x, weight, bias)["triton"] == "ok"
    close(fused_gate.gated_linear_triton(x, weight, bias), gated_linear.reference(x, weight, bias))


def test_inputs_of_any_strides_and_dimensions():
    x, weight = operands(6, 20, 100, BF16)
    want = linear.reference(x, weight)
    close(products.linear_triton(rows_apart(x), weight), want)
    close(products.linear_triton(x.view(2, 3, 100), weight), want.view(2, 3, 20))
    close(products.linear_triton(x[0], weight), want[0])
    spread = x.repeat_interleave(2, 1)[:, ::2]
    close(products.linear_triton(spread, weight), want)
    assert products.linear_triton(x[:0], weight).shape == (0, 20)
    assert fused_gate.gated_linear_triton(x[:0], weight).shape == (0, 10)
    close(fused_gate.gated_linear_triton(x.view(2, 3, 100), weight), gated_linear.reference(x, weight).view(2, 3, 10))


def test_many_rows_and_other_operands_are_refused():
    x, weight = operands(129, 1000, 100, BF16)
    assert "up to 128 rows" in linear.explain(x, weight)["triton"]
    assert "up to 512 rows" in linear.explain(*operands(513, 20, 100, BF16))["triton"]
    assert "up to 16 rows" in gated_linear.explain(x[:17], weight)["triton"]
    assert "float32" in linear.explain(x.float(), weight.float())["triton"]
    assert "without gaps" in linear.explain(x[:4], weight.t().contiguous().t())["triton"]
    assert "options" in gated_linear.explain(x[:1], weight, out_dtype=torch.float32)["triton"]


@pytest.mark.skipif(INTERPRETING, reason="the interpreter's products add up as the CPU's library does")
@pytest.mark.parametrize("shape", [(1024, 3072), (4096, 1024), (2048, 2048), (1000, 520), (4096, 12288), (128, 2048)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_row_is_the_same_in_any_number_of_rows(shape, dtype):
    """Across kernels: cuBLAS's, and ours of all tiles. Bits, since K is added up in order everywhere."""
    x, weight = operands(3000, *shape, dtype)
    whole = linear(x, weight)
    some = (17, 31, 32, 33, 48, 64, 65, 100, 127, 128, 129, 160, 192, 193, 200, 224, 255, 256)
    for rows in (1, 2, 7, 8, 9, 16, *some, 257, 300, 512, 1024, 2000):
        assert torch.equal(linear(x[:rows], weight), whole[:rows]), rows
    for rows in (1, 16, 17, 128):
        assert torch.equal(products.linear_triton(x[:rows], weight), whole[:rows]), rows
    gated = gated_linear(x, weight)
    for rows in (1, 8, 16, *some, 257):
        assert torch.equal(gated_linear(x[:rows], weight), gated[:rows]), rows
