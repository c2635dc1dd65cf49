"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from rorqual.ops.registry import op


@op
def rotary_embedding(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> torch.Tensor:
    """Rotate the first R channels of every head by its position's angles; half-split (NeoX) pairs (i, i + R/2).

    x [num_tokens, num_heads, head_dim]; positions [num_tokens] int64; cos_sin [max_position, R] float32, one row
    [cos | sin] per position. The rotation is computed in float32 and rounded once. Returns a new tensor like x.
    `scratch` is the batch's, for what layers can share. Source: Su et al. 2021, arXiv:2104.09864.
    """
    width = cos_sin.shape[-1]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, R / 2]
    first, second = x[..., :width].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)
