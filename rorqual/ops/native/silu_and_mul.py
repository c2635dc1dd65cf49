"""The gate of a SwiGLU block on CPU in one pass."""

from __future__ import annotations

import functools
import math

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.silu_and_mul import silu_and_mul


@functools.cache
def limit_in_bfloat16(limit: float | None) -> float:
    """The limit as values in bfloat16 have it; infinity for none."""
    return math.inf if limit is None else torch.tensor(limit, dtype=torch.bfloat16).item()


def _refuse(gate_up: torch.Tensor, *, limit: float | None = None) -> str | None:
    if gate_up.device.type != "cpu":
        return f"needs a CPU tensor, got one on {gate_up.device.type}"
    if gate_up.dtype != torch.bfloat16 or gate_up.dim() != 2:
        return f"needs rows of bfloat16, got {gate_up.dim()} dimensions of {gate_up.dtype}"
    return missing()


@silu_and_mul.impl("native", refuse=_refuse)
def silu_and_mul_native(gate_up: torch.Tensor, *, limit: float | None = None) -> torch.Tensor:
    """See the reference."""
    found = kernels()
    assert found is not None
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=torch.bfloat16)
    found.silu_and_mul(
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        rows,
        size,
        limit_in_bfloat16(limit),
        threads_for(out.numel()),
    )
    return out
