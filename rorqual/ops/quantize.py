"""Quantising activations."""

from __future__ import annotations

import torch

from rorqual.ops.registry import op
from rorqual.quantization import QTensor, QuantFormat, ScaleLayout


@op
def quantize(x: torch.Tensor, *, format: QuantFormat, layout: ScaleLayout = ScaleLayout.ROW) -> QTensor:
    """Round x [M, N] (bfloat16, float16 or float32) to `format`, each scale for one row: `QTensor.quantize`.

    Raises ValueError unless x has two dimensions and the format's blocks one row.
    """
    if x.dim() != 2:
        raise ValueError(f"quantize takes [rows, columns], got shape {tuple(x.shape)}; flatten the leading dimensions")
    if format.block[0] != 1:
        raise ValueError(
            f"quantize takes formats whose blocks have one row, {format.name} has {format.block[0]}; "
            f"weights go through QTensor.quantize"
        )
    return QTensor.quantize(x, format, layout)
