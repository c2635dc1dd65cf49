"""RMSNorm, alone, behind a residual addition, and with a quantised result for the product that follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rorqual.loader.layer import Layer, WantedTensor, weight_parameter
from rorqual.ops.decoder_blocks import Norm
from rorqual.ops.rms_norm import NormOutput, UtccpTarget, rms_norm
from rorqual.quantization import QuantFormat, ScaleLayout


class RMSNorm(Layer):
    """weight * out_scale * x / rms(x) over the last `size` channels; see ops/rms_norm.py."""

    def __init__(
        self, size: int, *, eps: float, dtype: torch.dtype, device: torch.device, out_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.eps = eps
        self.out_scale = out_scale
        self.weight = weight_parameter(size, dtype=dtype, device=device)
        # An option at its default is left out: on a CPU, looking at it would cost more than the norm of a short row.
        self._options: dict[str, Any] = {"eps": eps} if out_scale == 1.0 else {"eps": eps, "out_scale": out_scale}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] of 1 to 3 dimensions -> the same shape and dtype."""
        out = rms_norm(x, self.weight, **self._options).out
        assert isinstance(out, torch.Tensor)
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), the sum rounded first; without a residual, (norm(x), x)."""
        if residual is None:
            return self.forward(x), x
        out, total, _ = rms_norm(x, self.weight, residual=residual, **self._options)
        assert isinstance(out, torch.Tensor)
        assert total is not None
        return out, total

    def norm(self) -> Norm:
        """This norm, for an op of several. Raises ValueError for one with an out_scale, which such ops do not know."""
        if self.out_scale != 1.0:
            raise ValueError(f"a norm inside another op has no out_scale, got {self.out_scale}")
        return Norm(self.weight, self.eps)

    def quantised(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        format: QuantFormat,
        layout: ScaleLayout = ScaleLayout.ROW,
        *,
        copy: bool = False,
        utccp: UtccpTarget | None = None,
    ) -> NormOutput:
        """norm(x + residual) as a QTensor, x + residual, and the norm in bfloat16 if `copy`; x has 2 or 3 dimensions.

        Raises ValueError as `rms_norm` does.
        """
        return rms_norm(
            x, self.weight, residual=residual, format=format, layout=layout, copy=copy, utccp=utccp, **self._options
        )

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The weight."""

        def copy(whole: torch.Tensor) -> None:
            self.weight.copy_(whole)

        yield WantedTensor(f"{prefix}.weight", tuple(self.weight.shape), copy)
