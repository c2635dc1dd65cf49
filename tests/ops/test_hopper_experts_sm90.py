"""Hopper's experts' products compile for SM90, without a GPU: they overlap, and no registers are spilled."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.ops.triton.launch import INTERPRETING
from tests.ops.test_triton_linear_sm90 import POINTERS, SHARED_MEMORY

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from rorqual.ops.triton import _hopper_experts, _hopper_experts_kernel, moe  # noqa: E402

KERNEL = _hopper_experts_kernel.hopper_experts_kernel


class Recorded:
    """In the kernel's place: compiles what it is launched with, specialised as a launch would."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            names, signature, aligned = KERNEL.arg_names, {}, {}
            kept = {p.name for p in KERNEL.params if p.do_not_specialize}
            for position, (name, value) in enumerate(zip(names, args, strict=False)):
                if isinstance(value, torch.Tensor):
                    signature[name] = POINTERS[value.dtype]
                elif isinstance(value, int):
                    signature[name] = "i32"
                else:
                    signature[name] = f"tensordesc<bf16{value.block_shape},{value.layout!r}>"
                if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and name not in kept):
                    aligned[(position,)] = [["tt.divisibility", 16]]
            signature |= dict.fromkeys(constants, "constexpr")
            values = {(names.index(name),): value for name, value in constants.items()}
            source = GluonASTSource(KERNEL, signature, values, aligned)
            self.compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})

        return launch


@pytest.mark.parametrize("lead", [0, 2])
@pytest.mark.parametrize("gated", [True, False], ids=["gate_up", "down"])
def test_product_compiles_for_sm90(gated: bool, lead: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorded, (hidden, inner) = Recorded(), (2048, 768)
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
