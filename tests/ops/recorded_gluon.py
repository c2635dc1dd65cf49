"""Gluon kernels compiled for SM90, without a GPU, from how they would be launched."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from tests.ops.test_triton_linear_sm90 import POINTERS


class Recorded:
    """In a kernel's place: compiles what it is launched with, specialised as a launch would."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*args: Any, num_warps: int, launch_pdl: bool = False, **constants: Any) -> None:
            names, signature, aligned = self._kernel.arg_names, {}, {}
            kept = {p.name for p in self._kernel.params if p.do_not_specialize}
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
            source = GluonASTSource(self._kernel, signature, values, aligned)
            self.compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})

        return launch
