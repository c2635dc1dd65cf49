"""Plain products in groups by cuBLAS, for more rows than a few; see linear.py about its sums."""

from __future__ import annotations

from typing import Any

import torch

from rorqual.ops.grouped_linear import grouped_linear
from rorqual.ops.linear import Weight

FEW_ROWS = 16
"""Rows up to which the kernels of few rows are ahead, as measured on an H200."""
MOST_COLUMNS = 512
"""Columns up to which nothing is gained by splitting K, so that cuBLAS adds it up in order."""


def _refuse(x: torch.Tensor, weights: tuple[Weight, ...] | torch.Tensor, **options: Any) -> str | None:
    if any(value is not None for value in options.values()):
        return f"takes no {', '.join(options)}"
    if not isinstance(weights, torch.Tensor) or not isinstance(x, torch.Tensor):
        return "multiplies with plain weights in one tensor"
    if reason := _elsewhere(x, weights):
        return reason
    if x.dim() != 3 or x.dtype != weights.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies bfloat16 and float16 in groups, got {x.dtype} and {weights.dtype}"
    if x.stride(2) != 1 or weights.stride(2) != 1:
        return "needs rows without gaps"
    if x.shape[0] <= FEW_ROWS or x.shape[2] > MOST_COLUMNS:
        return f"is for more than {FEW_ROWS} rows of up to {MOST_COLUMNS} columns, got {list(x.shape)}"
    if x.requires_grad or weights.requires_grad:
        return "writes into an output, of which torch keeps no gradient"
    return None


def _elsewhere(*tensors: torch.Tensor) -> str | None:
    return next(
        (f"needs tensors on cuda, got one on {t.device.type}" for t in tensors if t.device.type != "cuda"), None
    )


@grouped_linear.impl("vendor", refuse=_refuse)
def grouped_linear_vendor(x: torch.Tensor, weights: tuple[Weight, ...] | torch.Tensor, **_options: Any) -> torch.Tensor:
    """One batched product, whose batch is the groups, written where it belongs."""
    assert isinstance(weights, torch.Tensor)
    out = x.new_empty((*x.shape[:2], weights.shape[1]))
    torch.bmm(x.transpose(0, 1), weights.transpose(1, 2), out=out.transpose(0, 1))
    return out
