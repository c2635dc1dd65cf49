"""Hopper's experts' products compile for SM90, without a GPU: they overlap, and no registers are spilled."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rorqual.ops.triton.launch import INTERPRETING
from tests.ops.test_triton_linear_sm90 import SHARED_MEMORY

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from rorqual.ops.triton import _hopper_experts, _hopper_experts_kernel, moe  # noqa: E402
from tests.ops.recorded_gluon import Recorded  # noqa: E402

KERNEL = _hopper_experts_kernel.hopper_experts_kernel


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("gated", [True, False], ids=["gate_up", "down"])
def test_product_compiles_for_sm90(gated: bool, lead: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded, (hidden, inner) = Recorded(KERNEL), (2048, 768)
    monkeypatch.setattr(_hopper_experts_kernel, "hopper_experts_kernel", recorded)
    monkeypatch.setattr(_hopper_experts, "LEAD", lead)
    monkeypatch.setattr(_hopper_experts, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(_hopper_experts, "takes_product", lambda x, w: True)
    monkeypatch.setattr(moe, "_moe_kernels", SimpleNamespace())
    columns, features = (hidden, inner) if gated else (inner, hidden)
    x, out = (torch.zeros(64, n, dtype=torch.bfloat16) for n in (columns, features))
    weight = torch.zeros(4, 2 * features if gated else features, columns, dtype=torch.bfloat16)
    order, table = torch.zeros(64, dtype=torch.int32), torch.zeros(3, 20, dtype=torch.int32)
    tile = moe.SPECIALIZED.gate_up if gated else moe.SPECIALIZED.down
    moe._multiply(x, weight, out, order, table, 8, tile, gated=gated)
    kernel = recorded.compiled
    assert kernel.metadata.shared <= SHARED_MEMORY
    code = kernel.asm["ptx"]
    assert "cp.async.bulk.tensor" in code
    assert ("cp.async.cg" in code) is gated  # rows of tokens
    assert "m64n256k16" in code
    (tmp_path / "kernel.ptx").write_text(code)
    assembler = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    command = [assembler, "-arch=sm_90a", "-v", "-o", str(tmp_path / "kernel.cubin"), str(tmp_path / "kernel.ptx")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in told  # products that wait for one another
    assert "0 bytes spill stores" in told
