"""Rotary position embedding on CPU in one pass."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.rope import rotary_embedding


def _refuse(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, **_kwargs: object) -> str | None:
    if x.device.type != "cpu":
        return f"needs CPU tensors, got {x.device.type}"
    if x.dtype != torch.bfloat16:
        return f"needs bfloat16, got {x.dtype}"
    return missing()


@rotary_embedding.impl("native", refuse=_refuse)
def rotary_embedding_native(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> torch.Tensor:
    """See the reference."""
    found = kernels()
    assert found is not None
    if x.stride(2) != 1:
        x = x.contiguous()
    positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    found.rope(
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        out.data_ptr(),
        *x.shape,
        threads_for(x.numel()),
    )
    return out
