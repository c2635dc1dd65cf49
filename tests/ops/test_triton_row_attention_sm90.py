"""The kernel of attention over rows compiles for SM90, without a GPU: instructions and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.ops.triton.launch import INTERPRETING
from tests.ops.test_triton_linear_sm90 import POINTERS, SHARED_MEMORY

triton = pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from rorqual.ops.triton import row_attention as launches  # noqa: E402
from tests.ops.row_attention_cases import row_attention_case  # noqa: E402

V3 = {"width": 576, "value_dim": 512, "heads": 128}
V4 = {"width": 512, "value_dim": 512, "heads": 64, "window": 128, "ratio": 4, "sinks": True}


class Recorded:
    """In a kernel's place: compiles what it is launched with, specialised as a launch would."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, num_warps: int, launch_pdl: bool, **constants: Any) -> None:
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
            source = ASTSource(self.kernel, signature, values, hints)
            options = {"num_warps": num_warps}
            self.compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

        return launch


@pytest.mark.parametrize(
    ("query_lens", "contexts", "case"),
    [([1], [900], V3), ([1], [300], V3), ([1], [900], V3 | {"listed": 800}), ([1], [40], V4 | {"listed": 512})],
    ids=["dense in spans", "dense", "list in spans", "window and list"],
)
def test_kernels_compile_for_sm90(
    query_lens: list[int], contexts: list[int], case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args, options = row_attention_case(query_lens, contexts, dtype=torch.bfloat16, rows_per_block=16, **case)
    rows, merge = (Recorded(getattr(launches, name)) for name in ("rows_kernel", "merge_kernel"))
    monkeypatch.setattr(launches, "rows_kernel", rows)
    monkeypatch.setattr(launches, "merge_kernel", merge)
    launches.row_attention_triton(*args, **options)
    assert rows.compiled.metadata.shared <= SHARED_MEMORY
    code = rows.compiled.asm["ptx"]
    assert "cp.async" in code  # rows are read ahead
    assert "wgmma" in code
    assert "mma.sync" not in code
