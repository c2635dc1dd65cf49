"""RMSNorm on CPU in one pass over each row, alone and behind a residual addition."""

from __future__ import annotations

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.rms_norm import add_rms_norm, rms_norm


def _refuse(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> str | None:
    if x.device.type != "cpu":
        return f"needs a CPU tensor, got one on {x.device.type}"
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"needs bfloat16, got {x.dtype} and a weight of {weight.dtype}"
    if not 1 <= x.dim() <= 3:
        return f"needs 1 to 3 dimensions, got {x.dim()}"
    return missing()


def _refuse_add(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float) -> str | None:
    if x.dim() != 2 or x.dtype != residual.dtype:
        return f"needs rows of one dtype, got {x.dim()} dimensions of {x.dtype} and {residual.dtype}"
    return _refuse(x, weight, eps=eps)


@rms_norm.impl("native", refuse=_refuse)
def rms_norm_native(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """See the reference."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _run(x, None, weight, out, None, eps)
    return out


@add_rms_norm.impl("native", refuse=_refuse_add)
def add_rms_norm_native(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the reference."""
    out, total = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in "12")
    _run(x, residual, weight, out, total, eps)
    return out, total


def _run(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    found = kernels()
    assert found is not None
    if x.stride(-1) != 1:
        x = x.contiguous()
    if residual is not None and residual.stride(-1) != 1:
        residual = residual.contiguous()
    size = x.shape[-1]
    found.rms_norm(
        x.data_ptr(),
        x.stride(0) if x.dim() > 1 else size,
        x.stride(1) if x.dim() > 2 else 0,
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.contiguous().data_ptr(),
        out.data_ptr(),
        None if total is None else total.data_ptr(),
        x.numel() // size if size else 0,
        x.shape[1] if x.dim() > 2 else 1,
        size,
        eps,
        threads_for(x.numel()),
    )
