"""Launch of Hopper's products of some rows. Gluon, which the kernel is written in, is imported where it is used."""

# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton.launch import INTERPRETING


class HopperTile(NamedTuple):
    """What one program computes, and how it is made."""

    lines: int
    """Features."""
    rows: int
    step: int
    """Columns of K that are asked for at once."""
    stages: int
    """Steps that are held at a time."""
    weight_first: bool = True
    """Whether features are the tensor cores' 64 rows, or x's rows are."""
    early: bool = False
    """Whether the next kernel's programs may take their places at once."""

    @property
    def warps(self) -> int:
        """One for 16 rows of the tensor cores' product, 8 at most."""
        return min(8, (self.lines if self.weight_first else self.rows) // 16)


def takes_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether `multiply` is for these matrices: the card, the dtypes, and addresses that TMA can have."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == weight.dtype == out.dtype
        and x.stride(1) == weight.stride(1) == out.stride(1) == 1
        and all(t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1] and t.data_ptr() % 16 == 0 for t in (x, weight))
        and _is_hopper(x.device)
    )


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    tile: HopperTile,
    *,
    gated: bool = False,
) -> None:
    """x [rows, columns] times a weight into out [rows, features], as `multiply_plain` would, to the bit."""
    from rorqual.ops.triton._hopper_product_kernel import hopper_product_kernel

    rows, features = out.shape
    hopper_product_kernel[(-(-features // tile.lines) * -(-rows // tile.rows),)](
        _boxes(x, tile.rows, tile.step),
        _boxes(weight, tile.lines, tile.step),
        bias,
        out,
        rows,
        features,
        x.shape[1],
        out.stride(0),
        GATED=gated,
        WEIGHT_FIRST=tile.weight_first,
        LINES=tile.lines,
        BLOCK_M=tile.rows,
        STEP=tile.step,
        STAGES=tile.stages,
        EARLY=tile.early,
        num_warps=tile.warps,
        launch_pdl=DEPENDENT_LAUNCH,
    )


def _boxes(matrix: torch.Tensor, height: int, width: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(matrix, [*matrix.shape], [*matrix.stride()], [height, width], layout)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return not INTERPRETING and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
