"""Arguments that cases are made of: values that are the same each time, behind strides of several kinds."""

from __future__ import annotations

from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values around zero, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_other(x: torch.Tensor) -> torch.Tensor:
    """The same values behind strides that no dimension's size explains."""
    fill = float("nan") if x.is_floating_point() else 0
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), fill, dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each row, as a slice of a wider output has."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def cut(x: torch.Tensor) -> torch.Tensor:
    """Logits of which every third excludes its token."""
    x = x.clone()
    x[:, ::3] = float("-inf")
    return x
