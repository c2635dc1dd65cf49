"""RMSNorm, alone and behind a residual addition."""

from __future__ import annotations

import torch

from rorqual.ops.registry import op


@op
def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
    """y = weight * (x / sqrt(mean(x^2) + eps)), over the last dimension.

    Statistics in float32; the normalised value is rounded to x's dtype before it is multiplied by the weight, as Llama
    and Qwen do. x [..., n], weight [n]; returns x's shape and dtype. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight


@op
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to x's dtype first. Shapes as in `rms_norm`."""
    total = x + residual
    return rms_norm.reference(total, weight, eps=eps), total
