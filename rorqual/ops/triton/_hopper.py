"""What the launches of Hopper's own kernels share. Gluon, which they are written in, is imported where it is used."""

# mypy: ignore-errors

from __future__ import annotations

import functools
from typing import Any

import torch


def boxes(values: torch.Tensor, *box: int) -> Any:
    """A tensor of 16-bit values as TMA copies it: in boxes, which lie in shared memory 64 columns after 64."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(values, [*values.shape], [*values.stride()], [*box], _layout(values.ndim))


@functools.cache
def _layout(rank: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs of a persistent kernel there should be."""
    return torch.cuda.get_device_properties(device).multi_processor_count
