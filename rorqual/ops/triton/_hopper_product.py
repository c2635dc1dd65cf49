"""Launch of Hopper's products of some rows. Gluon, which the kernel is written in, is imported where it is used."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from rorqual.ops._hopper_tiles import HopperTile
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._hopper import boxes


def multiply_by_tiles(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: HopperTile, *, gated: bool = False
) -> None:
    """x [rows, columns] times a weight into out [rows, features], as `multiply_plain` would, to the bit.

    Operands are as `hopper_tile` wants them. The weight is read while earlier kernels still run: none of them may be
    writing it that lets the next one start early.
    """
    from rorqual.ops.triton._hopper_product_kernel import hopper_product_kernel

    rows, features = out.shape
    hopper_product_kernel[(-(-features // tile.lines) * -(-rows // tile.rows),)](
        boxes(x, tile.rows, tile.step),
        _boxes_of_weight(weight, tile.lines, tile.step),
        out,
        rows,
        features,
        x.shape[1],
        out.stride(0),
        GATED=gated,
        LINES=tile.lines,
        BLOCK_M=tile.rows,
        STEP=tile.step,
        STAGES=tile.stages,
        EARLY=tile.early,
        num_warps=tile.warps,
        launch_pdl=DEPENDENT_LAUNCH,
    )


_described = WeakIdKeyDictionary()
"""Weight -> (height, width) of a box -> its descriptor, which takes longer to make than to use."""


def _boxes_of_weight(weight: torch.Tensor, height: int, width: int) -> Any:
    known = _described.setdefault(weight, {})
    found = known.get((height, width))
    if found is None or found.base.data_ptr() != weight.data_ptr():
        # Of a tensor of its own, which shares the memory: the weight itself would be held for ever.
        found = known[height, width] = boxes(weight.detach(), height, width)
    return found
