"""RMSNorm on CPU.

torch's rms_norm is a chain of eight kernels here, its layer_norm is one. The layer norm of (x, -x) has mean 0 and
variance mean(x^2), so its first half is the RMS norm of x: three kernels, half the time for few rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rorqual.ops.rms_norm import add_rms_norm, rms_norm


def _refuse(x: torch.Tensor, *_args: torch.Tensor, eps: float) -> str | None:
    return None if x.device.type == "cpu" else f"needs a CPU tensor, got one on {x.device.type}"


_FEW_ELEMENTS = 1 << 16
"""Beyond this the doubled input costs more than the launches that it saves."""


@rms_norm.impl("cpu", refuse=_refuse)
def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Multiplies by the weight before it rounds, so bfloat16 may differ from the reference by one step."""
    size = x.shape[-1]
    if 0 < x.numel() < _FEW_ELEMENTS:
        doubled = F.layer_norm(torch.cat((x, -x), dim=-1), (2 * size,), torch.cat((weight, weight)), None, eps)
        return doubled[..., :size]
    return F.rms_norm(x, (size,), weight, eps)


@add_rms_norm.impl("cpu", refuse=_refuse)
def add_rms_norm_cpu(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum, then its norm."""
    total = x + residual
    return rms_norm_cpu(total, weight, eps=eps), total
