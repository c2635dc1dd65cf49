"""Launch of Hopper's experts' products. Gluon, which the kernel is written in, is imported where it is used."""

# mypy: ignore-errors

from __future__ import annotations

import torch

from rorqual.ops._hopper_tiles import is_hopper
from rorqual.ops.triton._hopper import boxes, num_multiprocessors

ROWS, LINES, COLUMNS = 128, 128, 64
"""What TMA copies at once: rows, or lines of the weight, of 128 bytes. A tile has ROWS rows and 2 * LINES lines."""

LEAD = 0
"""Steps by which one of a program's two groups is ahead of the other, less than the stages: one then multiplies while
the other writes, but fewer steps are held for what is to come."""


def takes_product(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether `hopper_experts_kernel` is for these: the card, the dtype, and addresses that TMA and 16-byte copies can
    have."""
    return (
        x.dtype is torch.bfloat16
        and w.shape[2] % COLUMNS == 0
        and x.stride(0) % 16 == 0
        and (x.data_ptr() | w.data_ptr()) % 16 == 0
        and is_hopper(x.device)
    )


def multiply(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor,
    tiles: torch.Tensor,
    top_k: int,
    stages: int,
    *,
    gated: bool,
) -> None:
    """One product, as `experts_kernel` would; a program for each multiprocessor."""
    from rorqual.ops.triton._hopper_experts_kernel import hopper_experts_kernel

    features, columns, max_tiles = out.shape[1], w.shape[2], tiles.shape[1]
    parts = -(-features // (LINES if gated else 2 * LINES))
    # Of a multiprocessor's 512 for each of a warp's lanes: two groups that multiply, and the warps that copy.
    multiplying, copying = (208, 88) if gated else (240, 24)
    hopper_experts_kernel[(min(num_multiprocessors(x.device), max_tiles * parts),)](
        x if gated else boxes(x, ROWS, COLUMNS),
        boxes(w.view(-1, columns), LINES, COLUMNS),
        out,
        order,
        tiles,
        features,
        parts,
        columns,
        x.stride(0),
        top_k,
        max_tiles,
        GATED=gated,
        GATHER=gated,
        STAGES=stages,
        LEAD=LEAD,
        REGISTERS=multiplying,
        PRODUCER_REGISTERS=copying,
        num_warps=4,  # of one group: the kernel says how many there are
    )
