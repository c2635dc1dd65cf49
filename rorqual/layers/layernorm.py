"""RMSNorm, alone or behind a residual addition."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rorqual.loader.layer import Layer, WantedTensor, weight_parameter
from rorqual.ops.rms_norm import add_rms_norm, rms_norm


class RMSNorm(Layer):
    """weight * x / rms(x) over the last `size` channels; see ops/rms_norm.py."""

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = weight_parameter(size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, eps=self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); without a residual, (norm(x), x)."""
        if residual is None:
            return rms_norm(x, self.weight, eps=self.eps), x
        return add_rms_norm(x, residual, self.weight, eps=self.eps)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The weight."""

        def copy(whole: torch.Tensor) -> None:
            self.weight.copy_(whole)

        yield WantedTensor(f"{prefix}.weight", tuple(self.weight.shape), copy)
