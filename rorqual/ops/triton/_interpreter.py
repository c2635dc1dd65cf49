"""Loops and products in a form that Triton's interpreter gets right too."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._number_formats import e4m3_value
from rorqual.ops.triton.launch import INTERPRETING

_INTERPRETING = tl.constexpr(INTERPRETING)


@triton.jit
def bound(x):
    """x, for `tl.range`: the interpreter's numbers are arrays, of which Python makes no range."""
    if _INTERPRETING:
        return x.handle.data.item() if hasattr(x, "handle") else x
    return x


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = None):
    """acc + a @ b."""
    if _INTERPRETING:  # which multiplies the bits of bfloat16, and loses FP8's subnormals
        return tl.dot(_wide(a), _wide(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _wide(a):
    if a.dtype == tl.float8e4nv:
        return e4m3_value(a.to(tl.uint8, bitcast=True))
    return a.to(tl.float32)
