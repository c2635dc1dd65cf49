"""The kernels of attention over rows compile for SM90, without a GPU: instructions, memory, no spilled registers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual.ops.triton.launch import INTERPRETING
from tests.ops.test_triton_linear_sm90 import POINTERS, SHARED_MEMORY

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from rorqual.ops.triton import _hopper_row_attention_kernel as hopper  # noqa: E402
from rorqual.ops.triton import row_attention as launches  # noqa: E402
from rorqual.quantization.kv_record import V4 as V4_RECORD  # noqa: E402
from tests.ops.row_attention_cases import row_attention_case  # noqa: E402

V3 = {"width": 576, "value_dim": 512, "heads": 128}
V4 = {"width": 512, "value_dim": 512, "heads": 64, "window": 128, "ratio": 4, "sinks": True}


class Recorded:
    """In a kernel's place: compiles what it is launched with, specialised as a launch would."""

    def __init__(self, kernel: Any, source: Any = ASTSource) -> None:
        self.kernel, self.source = kernel, source

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, launch_pdl: bool = False, **constants: Any) -> None:
            names, signature, hints = self.kernel.arg_names, {}, {}
            kept = {p.name for p in self.kernel.params if p.do_not_specialize}
            for position, (name, value) in enumerate(zip(names, args, strict=False)):
                if isinstance(value, torch.Tensor):
                    signature[name] = POINTERS[value.dtype]
                else:
                    signature[name] = "fp32" if isinstance(value, float) else "i32"
                aligned = value.data_ptr() % 16 == 0 if isinstance(value, torch.Tensor) else value % 16 == 0
                if aligned and name not in kept and not isinstance(value, float):
                    hints[(position,)] = [["tt.divisibility", 16]]
            signature |= dict.fromkeys(constants, "constexpr")
            values = {(names.index(name),): value for name, value in constants.items()}
            source = self.source(self.kernel, signature, values, hints)
            options = {"num_warps": num_warps}
            self.compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

        return launch


CASES = {
    "dense in spans": ([1], [900], V3),
    "dense": ([1], [300], V3),
    "list in spans": ([1], [900], V3 | {"listed": 800}),
    "window and list": ([1], [40], V4 | {"listed": 512}),
    "window and entries in spans": ([1], [4000], V4),
    "records": ([1], [40], V4 | {"listed": 512, "record": V4_RECORD}),
    "records in spans": ([1], [4000], V4 | {"record": V4_RECORD}),
}


def launch(name: str) -> None:
    query_lens, contexts, case = CASES[name]
    args, options = row_attention_case(query_lens, contexts, dtype=torch.bfloat16, rows_per_block=16, **case)
    launches.row_attention_triton(*args, **options)


@pytest.mark.parametrize("name", [name for name in CASES if name != "window and entries in spans"])
def test_kernels_compile_for_sm90(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, merge = (Recorded(getattr(launches, name)) for name in ("rows_kernel", "merge_kernel"))
    monkeypatch.setattr(launches, "rows_kernel", rows)
    monkeypatch.setattr(launches, "merge_kernel", merge)
    launch(name)
    assert rows.compiled.metadata.shared <= SHARED_MEMORY
    code = rows.compiled.asm["ptx"]
    assert "cp.async" in code  # rows are read ahead
    assert "wgmma" in code
    assert "mma.sync" not in code


@pytest.mark.parametrize("name", CASES)
def test_hopper_kernel_compiles_for_sm90(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = Recorded(hopper.hopper_rows_kernel, GluonASTSource)
    monkeypatch.setattr(hopper, "hopper_rows_kernel", rows)
    monkeypatch.setattr(launches, "merge_kernel", Recorded(launches.merge_kernel))
    monkeypatch.setattr(launches, "is_hopper", lambda device: True)
    launch(name)
    assert rows.compiled.metadata.shared <= SHARED_MEMORY
    code = rows.compiled.asm["ptx"]
    if "records" in name:
        assert "ld.global.v2.b32" in code  # 8 bytes at a time
    else:
        assert "cp.async.cg" in code  # 16 bytes at a time
    assert "cp.async.ca" not in code
    (tmp_path / "kernel.ptx").write_text(code)
    assembler = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    command = [assembler, "-arch=sm_90a", "-v", "-o", str(tmp_path / "kernel.cubin"), str(tmp_path / "kernel.ptx")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in told  # products that wait for one another
    spilled = [line for line in told.splitlines() if "bytes spill stores" in line]
    assert len(spilled) == 1
    assert int(spilled[0].split(",")[1].split()[0]) <= 32, spilled
