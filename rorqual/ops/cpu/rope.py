"""Rotary position embedding on CPU: four passes over x; the batch's angles are looked up once for all layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from rorqual.batch import once
from rorqual.ops.rope import RotaryOutput, check, rotary_embedding


class _Angles(NamedTuple):
    """[num_tokens, 1, R] float32 each, so that x * cos + partner(x) * sin rotates."""

    cos: torch.Tensor
    sin: torch.Tensor
    of: tuple[torch.Tensor, torch.Tensor]
    """The positions and the table, held so that no other tensor can come to bear their ids."""


def _refuse(
    query: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, key: torch.Tensor | None = None, **_: object
) -> str | None:
    for tensor in (query, positions, cos_sin, key):
        if tensor is not None and tensor.device.type != "cpu":
            return f"needs CPU tensors, got one on {tensor.device.type}"
    return None


@rotary_embedding.impl("cpu", refuse=_refuse)
def rotary_embedding_cpu(
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
    name = ("rotary_embedding", id(positions), id(cos_sin), interleaved, conjugate)
    angles = once(scratch, name, lambda: _angles(positions, cos_sin, interleaved=interleaved, conjugate=conjugate))
    width = cos_sin.shape[1]

    def turn(x: torch.Tensor) -> torch.Tensor:
        part = x if width == x.shape[2] else x[..., offset : offset + width]
        partner = (
            part.reshape(*part.shape[:2], width // 2, 2).flip(-1).flatten(-2)
            if interleaved
            else part.roll(width // 2, -1)
        )
        turned = torch.addcmul(partner * angles.sin, part, angles.cos)
        if part is x and not inplace:
            return turned.to(x.dtype)
        out = x if inplace else x.clone(memory_format=torch.contiguous_format)
        out[..., offset : offset + width] = turned
        return out

    return RotaryOutput(turn(query), None if key is None else turn(key))


def _angles(positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool, conjugate: bool) -> _Angles:
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    signed = (sin, -sin) if conjugate else (-sin, sin)
    if interleaved:
        return _Angles(cos.repeat_interleave(2, dim=-1), torch.stack(signed, dim=-1).flatten(-2), (positions, cos_sin))
    return _Angles(torch.cat((cos, cos), dim=-1), torch.cat(signed, dim=-1), (positions, cos_sin))
