"""Rotary position embedding on CPU in one pass."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.rope import RotaryOutput, check, rotary_embedding

INTERLEAVED, _CONJUGATE, _INT32_POSITIONS = 1, 2, 4


def _refuse(
    query: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    key: torch.Tensor | None = None,
    inplace: bool = False,
    **_: object,
) -> str | None:
    if query.dtype != torch.bfloat16:
        return f"needs bfloat16, got {query.dtype}"
    if not (query.is_cpu and positions.is_cpu and cos_sin.is_cpu and (key is None or key.is_cpu)):
        return f"needs CPU tensors, got a query on {query.device.type} and a table on {cos_sin.device.type}"
    if inplace and (query.stride(-1) != 1 or (key is not None and key.stride(-1) != 1)):
        return "needs channels that lie side by side to rotate them in place"
    return missing()


@rotary_embedding.impl("native", refuse=_refuse)
def rotary_embedding_native(
    query: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    key: torch.Tensor | None = None,
    interleaved: bool = False,
    offset: int = 0,
    conjugate: bool = False,
    inplace: bool = False,
    scratch: dict[Hashable, Any] | None = None,
) -> RotaryOutput:
    """See the reference."""
    check(query, positions, cos_sin, key, offset)
    found = kernels()
    assert found is not None
    positions, cos_sin = positions.contiguous(), cos_sin.contiguous()
    query, query_out, query_args = _prepared(query, inplace)
    if key is None:
        key_out, key_args, num_values = None, (0, 0, 0, 0, 0), query.numel()
    else:
        key, key_out, key_args = _prepared(key, inplace)
        num_values = query.numel() + key.numel()
    flags = INTERLEAVED * interleaved + _CONJUGATE * conjugate + _INT32_POSITIONS * (positions.dtype == torch.int32)
    rows, width = cos_sin.shape
    outside = found.rope(
        *query_args,
        *key_args,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        rows,
        width,
        offset,
        query.shape[2],
        query.shape[0],
        flags,
        threads_for(num_values),
    )
    if outside:
        raise IndexError(
            f"positions must lie in [0, {rows}), the table's rows, got {positions.min()} to {positions.max()}"
        )
    return RotaryOutput(query_out, key_out)


def _prepared(x: torch.Tensor, inplace: bool) -> tuple[torch.Tensor, torch.Tensor, tuple[int, int, int, int, int]]:
    """(x as the kernel can read it, where the result goes, the kernel's arguments for the two)."""
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    return x, out, (x.data_ptr(), out.data_ptr(), x.shape[1], x.stride(0), x.stride(1))
