"""Which products of plain weights Hopper's own kernel takes from cuBLAS, and by what tile.

`ops/vendor` refuses what `ops/triton` takes, so both ask here. The lines below are those in which the kernel was ahead
on an H200, in decode steps of models of 0.6 and 8 billion parameters whose weights come from memory. They follow two
sizes: all programs must find a place on the multiprocessors at once, as those of a second wave would begin when the
first have ended; and from 65 rows on, K must be short, as cuBLAS's larger tiles need fewer bytes for a step of K, and
what the kernel saves is the time before the first.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch

MOST_HOPPER_ROWS = 256


class HopperTile(NamedTuple):
    """What one program computes, and how it is made."""

    lines: int
    """Features."""
    rows: int
    step: int
    """Columns of K that are asked for at once."""
    stages: int
    """Steps that are held at a time."""
    early: bool = True
    """Whether the next kernel's programs may take their places at once."""

    @property
    def warps(self) -> int:
        """One for 16 features, which are the rows of the tensor cores' product."""
        return self.lines // 16


class _Line(NamedTuple):
    """Products for a tile; the first line that a product fits counts."""

    from_rows: int
    to_rows: int
    most_columns: int
    tile: HopperTile
    places: int = 1
    """Programs that find room on one multiprocessor."""


_MULTIPROCESSORS = 132
_PLAIN = (
    _Line(17, 32, 12288, HopperTile(64, 32, 128, 8)),
    _Line(33, 64, 12288, HopperTile(64, 64, 128, 6)),
    _Line(65, 256, 6144, HopperTile(64, 64, 128, 6)),
    _Line(129, 192, 1024, HopperTile(64, 64, 64, 6), places=2),
    _Line(193, 256, 1024, HopperTile(64, 128, 128, 4)),
)
_GATED = (
    _Line(17, 32, 4096, HopperTile(64, 32, 64, 8)),
    _Line(33, 64, 4096, HopperTile(64, 64, 64, 6)),
    _Line(17, 64, 4096, HopperTile(128, 64, 64, 4)),
    _Line(65, 128, 1024, HopperTile(64, 64, 64, 6, early=False)),
    _Line(193, 256, 1024, HopperTile(64, 128, 64, 4)),
)


def choose_tile(rows: int, features: int, columns: int, *, gated: bool) -> HopperTile | None:
    """The tile for so many rows and features, which are half of the weight's where it is gated; None: others' work."""
    for line in _GATED if gated else _PLAIN:
        if line.from_rows <= rows <= line.to_rows and columns <= line.most_columns:
            programs = -(-features // line.tile.lines) * -(-rows // line.tile.rows)
            if programs <= line.places * _MULTIPROCESSORS:
                return line.tile
    return None


def hopper_tile(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
    gated: bool = False,
) -> HopperTile | None:
    """The tile for a call of `linear`, or of `gated_linear`; None where others multiply.

    The kernel is for bfloat16 or float16 alone, adds nothing, and reads addresses and distances that TMA can have.
    """
    if bias is not None or out_acc is not None or out_dtype not in (None, x.dtype):
        return None
    if weight.dim() != 2 or x.dim() < 2 or x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    features, columns = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    if x.shape[-1] != columns or 0 in (features, columns) or not (x.dim() == 2 or x.is_contiguous()):
        return None
    tile = choose_tile(x.numel() // columns, features, columns, gated=gated)
    return tile if tile is not None and is_hopper(x.device) and _suits_tma(x) and _suits_tma(weight) else None


def _suits_tma(matrix: torch.Tensor) -> bool:
    """Whether values lie side by side in rows that start on 16 bytes."""
    apart, inner = matrix.stride()[-2:]
    return inner == 1 and apart >= matrix.shape[-1] and apart % 8 == 0 and matrix.data_ptr() % 16 == 0


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether Hopper's own kernels run there."""
    interpreting = os.environ.get("TRITON_INTERPRET", "0") == "1"  # which knows no Gluon
    return not interpreting and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
