"""Every tile of the experts' products compiles for SM90, without a GPU: instructions, memory, no spilled registers."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from rorqual.ops.moe import TokenTable
from rorqual.ops.triton.launch import INTERPRETING
from rorqual.quantization import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, QTensor
from tests.ops.test_triton_linear_sm90 import SHARED_MEMORY, Recorded, stack_bytes

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from rorqual.ops.triton import _moe_quantized as quantized  # noqa: E402
from rorqual.ops.triton import moe  # noqa: E402
from rorqual.ops.triton._prepared_weight import lay_out  # noqa: E402

HIDDEN, INNER = 2048, 768


@pytest.mark.parametrize("gated", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize(
    ("most", "num_tokens"),
    [(min(moe.TILES), 1), *((most, 300) for most, tiles in moe.TILES.items() if tiles is not moe.SPECIALIZED)],
)
def test_tile_compiles_for_sm90(most, num_tokens, gated, monkeypatch, tmp_path):
    kernel = Recorded(moe._moe_kernels.experts_kernel)
    monkeypatch.setattr(moe, "_moe_kernels", SimpleNamespace(experts_kernel=kernel))
    tile = moe.TILES[most].gate_up if gated else moe.TILES[most].down
    columns, features = (HIDDEN, INNER) if gated else (INNER, HIDDEN)
    x, out = (torch.zeros(8 * num_tokens, n, dtype=torch.bfloat16) for n in (columns, features))
    weight = torch.empty(128, 2 * features if gated else features, columns, dtype=torch.bfloat16, device="meta")
    if num_tokens == 1:
        order, table = None, torch.zeros(1, 8, dtype=torch.int64)
    else:
        order, table = torch.zeros(8 * num_tokens, dtype=torch.int32), torch.zeros(3, 400, dtype=torch.int32)
    moe._multiply(x, weight, out, order, table, 8, tile, gated=gated)
    compiled = kernel.compiled()
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
    code = compiled.asm["ptx"]
    assert "cp.async" in code  # read ahead
    # One kind of instruction for all, so that a row gets the same from every tile.
    assert re.search(rf"wgmma\S*m64n{tile.block_m}k16\S*bf16", code)
    assert "mma.sync" not in code


_FAMILIES = {
    "fp8": (FP8_BLOCK, FP8_ROW),
    "fp8_weight": (FP8_BLOCK, None),
    "mxfp4": (MXFP4, None),
    "mxfp4_scaled": (MXFP4, FP8_ROW),
}


@pytest.mark.parametrize("gated", [True, False], ids=["gate_up", "down"])
@pytest.mark.parametrize(
    ("family", "most"), [(family, most) for family, tiles in quantized.QUANTIZED_TILES.items() for most in tiles]
)
def test_tile_of_quantised_experts_compiles_for_sm90(family, most, gated, monkeypatch, tmp_path):
    kernel = Recorded(quantized.kernels.quantized_experts_kernel)
    monkeypatch.setattr(quantized, "kernels", SimpleNamespace(quantized_experts_kernel=kernel))
    format, activation = _FAMILIES[family]
    columns, features = (HIDDEN, INNER) if gated else (INNER, HIDDEN)
    first = lay_out(QTensor.quantize(torch.zeros(2 * features if gated else features, columns), format))
    stack = quantized.QuantizedStack(first, 128, first.values.numel(), first.scales.numel())
    assert quantized.family_of(stack, activation) == family
    values = torch.zeros(2400, columns, dtype=torch.float8_e4m3fn if family == "fp8" else torch.bfloat16)
    scales = None if activation is None else torch.zeros(2400, columns // 128)
    x = quantized.Inputs(values, scales, 0 if scales is None else 128)
    out, order = torch.zeros(2400, features, dtype=torch.bfloat16), torch.zeros(2400, dtype=torch.int32)
    tile, table = quantized.QUANTIZED_TILES[family][most].gate_up, torch.zeros(3, 400, dtype=torch.int32)
    together = tile.block_n // 2 if gated else tile.block_n
    quantized.multiply_quantized(x, stack, out, order, table, 8, tile, together, gated=gated, limit=10.0)
    compiled = kernel.compiled()
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
    code = compiled.asm["ptx"]
    assert "cp.async" in code  # read ahead
    if family == "fp8":
        assert re.search(rf"wgmma\S*m64n{tile.block_m}k32\S*e4m3", code)
    else:
        assert re.search(r"(wgmma|mma\.sync)\S*bf16", code)
        assert ("wgmma" in code) is (tile.warps >= 4 and tile.block_m >= 16)


@pytest.mark.parametrize(
    ("scoring", "num_experts", "num_groups", "by_table"),
    [("sigmoid", 256, 8, False), ("sqrtsoftplus", 384, 1, False), ("sqrtsoftplus", 256, 1, True)],
)
def test_routing_by_scores_compiles_for_sm90(scoring, num_experts, num_groups, by_table, monkeypatch, tmp_path):
    kernel = Recorded(moe._routing_kernels.route_scores_kernel)
    monkeypatch.setattr(moe, "_routing_kernels", SimpleNamespace(route_scores_kernel=kernel))
    ids = torch.zeros(99, 6, dtype=torch.int32)
    moe.route_scores_triton(
        torch.zeros(4, num_experts),
        scoring=scoring,
        top_k=6,
        renormalize=True,
        scale=2.5,
        bias=None if by_table else torch.zeros(num_experts),
        num_groups=num_groups,
        top_groups=-(-num_groups // 2),
        table=TokenTable(ids, torch.zeros(4, dtype=torch.int64)) if by_table else None,
    )
    assert stack_bytes(kernel.compiled().asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize(("format", "activation"), [(MXFP4, MXFP8), (MXFP4, FP8_ROW), (FP8_BLOCK, FP8_ROW)])
def test_rounding_of_experts_inputs_compiles_for_sm90(format, activation, monkeypatch, tmp_path):
    kernel = Recorded(quantized.kernels.round_rows_kernel)
    monkeypatch.setattr(quantized, "kernels", SimpleNamespace(round_rows_kernel=kernel))
    stack = quantized.QuantizedStack(lay_out(QTensor.quantize(torch.zeros(64, 256), format)), 1, 1, 1)
    quantized.round_inputs(torch.zeros(4, 256, dtype=torch.bfloat16), stack, activation)
    assert stack_bytes(kernel.compiled().asm["cubin"], tmp_path) == 0
