"""RMSNorm on CPU through torch's own rms_norm, alone and behind a residual addition."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from rorqual.ops.rms_norm import DTYPES, NormOutput, more_than_plain, rms_norm


def _refuse(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, **options: Any
) -> str | None:
    if not x.is_cpu:
        return f"needs a CPU tensor, got one on {x.device.type}"
    if weight.dtype != x.dtype or x.dtype not in DTYPES:
        return f"needs floating values and a weight of their dtype, got {x.dtype} and {weight.dtype}"
    if not 1 <= x.dim() <= 3 or weight.shape != x.shape[-1:]:
        return f"needs 1 to 3 dimensions and a weight per value, got {tuple(x.shape)} and {tuple(weight.shape)}"
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        return f"needs a residual as x, got {tuple(residual.shape)} of {residual.dtype}"
    return more_than_plain(**options) if options else None


@rms_norm.impl("cpu", refuse=_refuse)
def rms_norm_cpu(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None, **_: Any
) -> NormOutput:
    """See the reference."""
    total = None if residual is None else x + residual
    return NormOutput(F.rms_norm(x if total is None else total, weight.shape, weight, eps), total)
