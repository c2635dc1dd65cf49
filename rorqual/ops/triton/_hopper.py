"""What the launches of Hopper's own kernels share. Gluon, which they are written in, is imported where it is used."""

# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import Any

import torch


def boxes(rows: torch.Tensor, height: int, width: int) -> Any:
    """A matrix of 16-bit values as TMA reads it: boxes of so many rows and columns, 64 of which it stores at a time."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(rows, [*rows.shape], [*rows.stride()], [height, width], _layout())


@functools.cache
def _layout() -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent kernel there should be."""
    return torch.cuda.get_device_properties(device).multi_processor_count
