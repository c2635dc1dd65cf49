"""Sums of several tensors in one pass: each is read once, and the sum is written."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.sum_in_order import sum_in_order
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import round_to
from rorqual.ops.triton.launch import refuses

_BLOCK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_AHEAD = tl.constexpr(8)
"""Parts that are read before the first is added."""


@triton.jit(do_not_specialize=["values"])
def _sum_in_order_kernel(parts, out, values, part_stride, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """parts [PARTS, values] -> out [values]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < values
    wait_for_earlier_kernels()
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, PARTS, _AHEAD):
        for i in tl.static_range(_AHEAD):
            part = first + i
            there = here & (part < PARTS)
            total += tl.load(parts + part * part_stride + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, round_to(total, out.dtype.element_ty), mask=here)


def _refuse(parts: torch.Tensor) -> str | None:
    if reason := refuses(parts):
        return reason
    if parts.dtype not in _DTYPES or parts.dim() != 3:
        return f"needs bfloat16, float16 or float32 [parts, rows, size], got {parts.dtype} {list(parts.shape)}"
    return None


@sum_in_order.impl("triton", refuse=_refuse)
def sum_in_order_triton(parts: torch.Tensor) -> torch.Tensor:
    """One launch. Parts that have gaps within them are copied first."""
    count, rows, size = parts.shape
    out = torch.empty((rows, size), dtype=parts.dtype, device=parts.device)
    if out.numel() == 0:
        return out
    flat = parts.flatten(1)  # in place, unless a part has gaps
    flat = flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
    block = min(_BLOCK, triton.next_power_of_2(out.numel()))
    _sum_in_order_kernel[(triton.cdiv(out.numel(), block),)](
        flat,
        out,
        out.numel(),
        flat.stride(0),
        PARTS=count,
        BLOCK=block,
        num_warps=4,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    return out
