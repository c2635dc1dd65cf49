"""RMSNorm on CPU in one pass over each row, alone and behind a residual addition."""

from __future__ import annotations

from typing import Any

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.rms_norm import NormOutput, more_than_plain, rms_norm


def _refuse(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, **options: Any
) -> str | None:
    if not x.is_cpu:  # eight times as quick as x.device.type
        return f"needs a CPU tensor, got one on {x.device.type}"
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"needs bfloat16, got {x.dtype} and a weight of {weight.dtype}"
    shape = x.shape
    if not 1 <= len(shape) <= 3 or weight.numel() != shape[-1]:
        return f"needs 1 to 3 dimensions and a weight per value, got {tuple(shape)} and {tuple(weight.shape)}"
    if residual is not None and (len(shape) != 2 or residual.dtype != torch.bfloat16 or residual.shape != shape):
        return (
            f"needs rows and a residual like them, got {tuple(shape)} and {tuple(residual.shape)} of {residual.dtype}"
        )
    if options and (more := more_than_plain(**options)):
        return more
    return missing()


@rms_norm.impl("native", refuse=_refuse)
def rms_norm_native(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, **_: Any
) -> NormOutput:
    """See the reference."""
    found = kernels()
    assert found is not None
    if x.stride(-1) != 1:
        x = x.contiguous()
    weight = weight.contiguous()
    shape = x.shape
    size, num_values = shape[-1], x.numel()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = None
    if residual is not None:
        if residual.stride(-1) != 1:
            residual = residual.contiguous()
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
    found.rms_norm(
        x.data_ptr(),
        x.stride(0) if len(shape) > 1 else size,
        x.stride(1) if len(shape) > 2 else 0,
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        None if total is None else total.data_ptr(),
        num_values // size if size else 0,
        shape[1] if len(shape) > 2 else 1,
        size,
        eps,
        threads_for(num_values),
    )
    return NormOutput(out, total)
