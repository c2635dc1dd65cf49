"""Rotary position embedding on CPU: four passes over x; the batch's angles are looked up once for all layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from rorqual.batch import once
from rorqual.ops.rope import rotary_embedding


class _Angles(NamedTuple):
    """[num_tokens, 1, R] float32 each, so that x * cos + swap_halves(x) * sin rotates."""

    cos: torch.Tensor
    sin: torch.Tensor


def _refuse(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, **_kwargs: object) -> str | None:
    if x.device.type != "cpu":
        return f"needs CPU tensors, got {x.device.type}"
    if cos_sin.shape[-1] != x.shape[-1]:
        return f"rotates whole heads, got {cos_sin.shape[-1]} of {x.shape[-1]} channels"
    return None


@rotary_embedding.impl("cpu", refuse=_refuse)
def rotary_embedding_cpu(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> torch.Tensor:
    """See the reference."""
    name = ("rotary_embedding", id(positions), id(cos_sin))
    angles = once(scratch, name, lambda: _angles(positions, cos_sin))
    return torch.addcmul(x * angles.cos, x.roll(x.shape[-1] // 2, -1), angles.sin).to(x.dtype)


def _angles(positions: torch.Tensor, cos_sin: torch.Tensor) -> _Angles:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _Angles(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))
