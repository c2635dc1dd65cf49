"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from rorqual.ops.registry import op


class RotaryOutput(NamedTuple):
    """What was given, rotated: new tensors, or with `inplace` the given ones."""

    query: torch.Tensor
    key: torch.Tensor | None = None


@op
def rotary_embedding(
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
    """Rotate channels [offset, offset + R) of every head by its position's angles; leave the others alone.

    With (x0, x1) a pair of channels and (c, s) its cosine and sine, in float32 with one fused multiply-add each and one
    rounding to the heads' dtype at the end:

        y0 = fma(x0, c, -(x1 s))    y1 = fma(x1, c, x0 s)       conjugate: s with the other sign

    The conjugate undoes the rotation; where the table's cosines and sines carry a factor m, it undoes it up to m^2.

    Args:
        query: [num_tokens, num_heads, head_dim], any strides: heads may be slices of a merged projection.
        positions: [num_tokens] int32 or int64, rows of the table. One outside it raises IndexError on a CPU; on a GPU,
            which cannot raise, Triton answers NaN.
        cos_sin: [max_position, R] float32, one row [cos | sin] per position; R even, offset + R <= head_dim.
        key: [num_tokens, num_kv_heads, head_dim] of the query's dtype, rotated in the same pass; or None.
        interleaved: pairs are (2i, 2i + 1) from the offset on, instead of the half-split (NeoX) (i, i + R / 2).
        inplace: write into query and key, and return them. No two of their elements may share memory.
        scratch: the batch's, for what layers can share.

    Raises: ValueError for shapes, dtypes or an offset that do not fit together.

    Source: Su et al. 2021, arXiv:2104.09864; the order of operations and the conjugate are DeepInfer's.
    """
    check(query, positions, cos_sin, key, offset)
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [num_tokens, 1, R / 2]
    if conjugate:
        sin = -sin

    def turn(x: torch.Tensor) -> torch.Tensor:
        channels = slice(offset, offset + 2 * half)
        part = x[..., channels].float()
        first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, dim=-1)
        pair = _fma(first, cos, -(second * sin)), _fma(second, cos, first * sin)
        out = x if inplace else x.clone(memory_format=torch.contiguous_format)
        out[..., channels] = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
        return out

    return RotaryOutput(turn(query), None if key is None else turn(key))


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c for float32, rounded once: a product of two float32 is exact in float64."""
    return (a.double() * b.double() + c.double()).float()


def check(
    query: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, key: torch.Tensor | None, offset: int
) -> None:
    """Raise ValueError for arguments of `rotary_embedding` that do not fit together."""
    if query.dim() != 3 or cos_sin.dim() != 2:
        raise ValueError(
            "rotary_embedding takes query [num_tokens, num_heads, head_dim] and cos_sin [max_position, R], "
            f"got shapes {list(query.shape)} and {list(cos_sin.shape)}"
        )
    tokens, _, head_dim = query.shape
    width = cos_sin.shape[1]
    if width < 2 or width % 2 or cos_sin.dtype != torch.float32:
        raise ValueError(f"cos_sin must be float32 with an even number of columns, got {cos_sin.dtype} with {width}")
    if not 0 <= offset <= head_dim - width:
        raise ValueError(
            f"the rotated channels [offset, offset + R) must lie within the head's {head_dim}, got offset {offset} and "
            f"R = {width}, the columns of cos_sin"
        )
    if positions.shape != (tokens,) or positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"positions must be int32 or int64 of shape [{tokens}], one per token of query, "
            f"got {positions.dtype} of shape {list(positions.shape)}"
        )
    if key is not None and (key.dim() != 3 or key.shape[::2] != query.shape[::2] or key.dtype != query.dtype):
        raise ValueError(
            f"key must be [{tokens}, num_kv_heads, {head_dim}] and {query.dtype} like query, "
            f"got {list(key.shape)} and {key.dtype}"
        )
