"""Hopper's products of some rows compile for SM90, without a GPU: TMA and wgmma, the memory there is, no spills."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rorqual.ops.triton.launch import INTERPRETING
from tests.ops.test_triton_linear_sm90 import SHARED_MEMORY, stack_bytes

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from rorqual.ops import _hopper_tiles  # noqa: E402
from rorqual.ops._hopper_tiles import HopperTile  # noqa: E402
from rorqual.ops.triton import _hopper_product, _hopper_product_kernel  # noqa: E402
from tests.ops.recorded_gluon import Recorded  # noqa: E402

KERNEL = _hopper_product_kernel.hopper_product_kernel
TILES = sorted(
    {
        (line.tile, gated)
        for gated in (False, True)
        for line in (_hopper_tiles._GATED if gated else _hopper_tiles._PLAIN)
    }
)
"""All that a product can get, and whether it is gated."""


@pytest.mark.parametrize(("tile", "gated"), TILES, ids=str)
def test_tile_compiles_for_sm90(tile: HopperTile, gated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded = Recorded(KERNEL)
    monkeypatch.setattr(_hopper_product_kernel, "hopper_product_kernel", recorded)
    x, weight, out = (torch.zeros(n, c, dtype=torch.bfloat16) for n, c in ((256, 1024), (1024, 1024), (256, 1024)))
    _hopper_product.multiply_by_tiles(x, weight, out[:, :512] if gated else out, tile, gated=gated)
    kernel = recorded.compiled
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(kernel.asm["cubin"], tmp_path) == 0
    code = kernel.asm["ptx"]
    assert re.search(rf"wgmma\S*m64n{tile.rows}k16\S*bf16", code)
    # The weight is asked for, then the kernels before are waited for, then x is.
    before, after = code.split("griddepcontrol.wait")
    assert "cp.async.bulk.tensor" in before
    assert "cp.async.bulk.tensor" in after
    assert "wgmma" not in before


def test_gated_steps_of_more_than_64_columns_do_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper_product_kernel, "hopper_product_kernel", Recorded(KERNEL))
    x, weight, out = (torch.zeros(n, c, dtype=torch.bfloat16) for n, c in ((64, 256), (128, 256), (64, 64)))
    with pytest.raises(triton.CompilationError, match="steps of 64 columns"):
        _hopper_product.multiply_by_tiles(x, weight, out, HopperTile(64, 64, 128, 3), gated=True)
