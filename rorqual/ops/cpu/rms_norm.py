"""RMSNorm on CPU, with torch's own fused function."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rorqual.ops.rms_norm import add_rms_norm, rms_norm


def _refuse(x: torch.Tensor, *_args: torch.Tensor, eps: float) -> str | None:
    return None if x.device.type == "cpu" else f"needs a CPU tensor, got one on {x.device.type}"


@rms_norm.impl("cpu", refuse=_refuse)
def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """One call; multiplies by the weight before it rounds, so bfloat16 may differ from the reference by one step."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@add_rms_norm.impl("cpu", refuse=_refuse)
def add_rms_norm_cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, then one call."""
    total = x + residual
    return rms_norm_cpu(total, weight, eps=eps), total
