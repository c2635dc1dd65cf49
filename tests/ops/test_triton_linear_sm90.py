"""Every tile of the Triton products compiles for SM90, without a GPU: instructions, memory, no spilled registers."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rorqual.ops.linear import allocate_output
from rorqual.ops.triton.launch import INTERPRETING
from rorqual.quantization import QTensor, ScaleLayout
from tests.ops.linear_cases import FORMATS

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from rorqual.ops.triton import _linear_launch as launches  # noqa: E402
from rorqual.ops.triton._prepared_weight import lay_out  # noqa: E402

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on SM90."""
POINTERS = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
}


class Recorded:
    """In a kernel's place: keeps what it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, num_warps: int, num_stages: int = 3, launch_pdl: bool = False, **constants: Any) -> None:
            self.options = {"num_warps": num_warps, "num_stages": num_stages}
            self.arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | constants

        return launch

    def compiled(self) -> Any:
        """The kernel for SM90, specialised as a launch would."""
        runtime = {p.name for p in self.kernel.params if not p.is_constexpr}
        kept = {p.name for p in self.kernel.params if p.do_not_specialize}
        signature, constants, hints = {}, {}, {}
        for position, name in enumerate(self.kernel.arg_names):
            value = self.arguments[name]
            if isinstance(value, tuple):
                signature[name] = tuple(POINTERS[each.dtype] for each in value)
                hints |= {(position, i): [["tt.divisibility", 16]] for i in range(len(value))}
                continue
            if name not in runtime or value is None or (isinstance(value, int) and value == 1 and name not in kept):
                signature[name], constants[(position,)] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = POINTERS[value.dtype]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0 and name not in kept):
                hints[(position,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, hints)
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=self.options)


def stack_bytes(binary: bytes, folder: Path) -> int:
    """What a thread keeps in memory for want of registers."""
    (folder / "kernel.cubin").write_bytes(binary)
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    command = [tool, "--dump-resource-usage", str(folder / "kernel.cubin")]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", listing)[1])


TILES = [(family, most) for family, entries in launches.TILES.items() for most in entries]


@pytest.mark.parametrize(("family", "most"), TILES)
def test_tile_compiles_for_sm90(family, most, monkeypatch, tmp_path):
    name = "block_scaled_kernel" if not family.endswith("_weight") else "weight_only_kernel"
    kernel = Recorded(getattr(launches._linear_kernels, name))
    monkeypatch.setattr(launches, "_linear_kernels", SimpleNamespace(**{name: kernel}))
    format, activation = FORMATS[{"fp8": "fp8_block", "fp8_weight": "fp8_block"}.get(family, family[:5])]
    rows = most if most <= launches.SKINNY else 4096
    weight = lay_out(QTensor.quantize(torch.zeros(128, 4096), format))
    x = torch.zeros(rows, 4096, dtype=torch.bfloat16)
    out = allocate_output((rows, 128), torch.bfloat16, x.device)
    if family.endswith("_weight"):
        launches.multiply_weight_only(x, weight, None, out, accumulate=False)
    else:
        layout = ScaleLayout.COLUMN_PACKED if family == "mxfp8" else ScaleLayout.COLUMN
        launches.multiply_scaled(QTensor.quantize(x, activation, layout), weight, None, out, accumulate=False)
    compiled = kernel.compiled()
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
    # The weight is read ahead: copies into shared memory that are not waited for, and no other loads in the loop.
    code = compiled.asm["ptx"]
    assert "cp.async" in code
    operation = {"fp8": "e4m3", "mxfp8": "e4m3"}.get(family, "bf16")
    tile = launches.tile_of(family, rows)
    wgmma = tile.warps >= 4 and (tile.block_n if rows <= launches.SKINNY else tile.block_m) >= 64
    assert re.search(rf"{'wgmma' if wgmma else 'mma.sync'}\S*{operation}", code)
