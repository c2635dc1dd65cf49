"""Hopper's attention kernel compiles for SM90, without a GPU: its products overlap, and no registers are spilled."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rorqual.ops.triton.launch import INTERPRETING

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton.experimental.gluon.language import NVMMASharedLayout  # noqa: E402

from rorqual.ops.triton._hopper_attention import BOX_COLUMNS, HOPPER_TILE  # noqa: E402
from rorqual.ops.triton._hopper_attention_kernel import hopper_chunk_kernel  # noqa: E402

SHARED_MEMORY = 227 << 10
"""Bytes that a program may have on SM90."""
ALIGNED = [["tt.divisibility", 16]]


def compiled(group: int, dims: int, block_size: int, *, soft_cap: bool = False, sinks: bool = False) -> Any:
    kernel, tile = hopper_chunk_kernel, dict(HOPPER_TILE)
    options = {"num_warps": tile.pop("num_warps")}
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    cache = f"tensordesc<bf16[{block_size}, {BOX_COLUMNS}],{layout!r}>"
    types = {"query": "*bf16", "out": "*bf16", "sinks": "*fp32", "key_cache": cache, "value_cache": cache}
    types |= dict.fromkeys(("block_tables", "context_lens", "cu_seqlens", "tiles", "counters"), "*i32")
    types |= dict.fromkeys(("scale", "cap"), "fp32")
    constants = {"GROUP": group, "D": dims, "BLOCK_SIZE": block_size, "CAPPED": soft_cap, "SINKS": sinks} | tile
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [n for n in names if signature[n].startswith("*") or n in ("query_token", "query_head", "out_token")]
    source = GluonASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): ALIGNED for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize(("group", "dims", "block_size"), [(4, 128, 16), (1, 128, 8), (8, 128, 128), (16, 64, 32)])
def test_chunk_kernel_compiles_for_sm90(group: int, dims: int, block_size: int, tmp_path: Path) -> None:
    kernel = compiled(group, dims, block_size)
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    (tmp_path / "kernel.ptx").write_text(kernel.asm["ptx"])
    assembler = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "ptxas")
    command = [assembler, "-arch=sm_90a", "-v", "-o", str(tmp_path / "kernel.cubin"), str(tmp_path / "kernel.ptx")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "serialized" not in told  # products that wait for one another
    spilled = [line for line in told.splitlines() if "bytes spill stores" in line]
    assert len(spilled) == 1
    assert int(spilled[0].split(",")[1].split()[0]) <= 16, spilled


def test_soft_cap_and_sinks_compile_for_sm90() -> None:
    assert "wgmma" in compiled(4, 128, 16, soft_cap=True, sinks=True).asm["ptx"]
