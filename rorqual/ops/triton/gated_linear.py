"""A product of few rows and the gate over its halves in one launch."""

from __future__ import annotations

from typing import Any

import torch

from rorqual.ops._hopper_tiles import hopper_tile
from rorqual.ops.gated_linear import gated_linear
from rorqual.ops.linear import Weight, flatten_rows
from rorqual.ops.triton._hopper_product import multiply_by_tiles
from rorqual.ops.triton._plain_product import FEW_ROWS, multiply_plain, refuse_plain
from rorqual.ops.triton.launch import refuses
from rorqual.quantization import QTensor


def _refuse(x: torch.Tensor | QTensor, weight: Weight, bias: torch.Tensor | None = None, **options: Any) -> str | None:
    if not isinstance(x, torch.Tensor) or not isinstance(weight, torch.Tensor):
        return "multiplies plain inputs with plain weights"
    if any(value is not None for value in options.values()):
        return "knows no options"
    if reason := refuses(x, weight, bias):
        return reason
    return None if hopper_tile(x, weight, bias, gated=True) else refuse_plain(x, weight, most_rows=FEW_ROWS)


@gated_linear.impl("triton", refuse=_refuse)
def gated_linear_triton(
    x: torch.Tensor | QTensor, weight: Weight, bias: torch.Tensor | None = None, **_options: Any
) -> torch.Tensor:
    """See the reference."""
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    rows = flatten_rows(x)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((rows.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    if (tile := hopper_tile(x, weight, bias, gated=True)) is not None:
        multiply_by_tiles(rows, weight, out, tile, gated=True)
    elif out.numel():
        multiply_plain(rows, weight, bias, out, gated=True)
    return out.view(*x.shape[:-1], out.shape[1])
