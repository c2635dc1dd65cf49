"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

Its programs take the multiprocessors as they become free, compute their addresses, and wait where they first need what
earlier kernels wrote; launch and ramp then hide behind the previous kernel's end. A kernel launched without the option
waits as always; one launched with it must call `wait_for_earlier_kernels` in every program, before it reads or writes
anything that another kernel may write or read. Products of quantised weights do without, and those of plain ones let
the next kernel start late (`let_next_kernel_start`): their programs fill the multiprocessors in one wave, and those of
the kernels behind, coming early, would lie unevenly on them. Hopper and later.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rorqual.ops.triton.launch import INTERPRETING

DEPENDENT_LAUNCH: bool = not INTERPRETING and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
"""The launch option `launch_pdl` of every kernel."""
_DEPENDENT_LAUNCH = tl.constexpr(DEPENDENT_LAUNCH)


@triton.jit
def wait_for_earlier_kernels():
    """Let the next kernel's programs start, and wait until what earlier kernels wrote is visible."""
    if _DEPENDENT_LAUNCH:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_only():
    """Wait until what earlier kernels wrote is visible; the next kernel starts when `let_next_kernel_start` says so."""
    if _DEPENDENT_LAUNCH:
        gdc_wait()


@triton.jit
def let_next_kernel_start():
    """Let the next kernel's programs start, once every program has come here."""
    if _DEPENDENT_LAUNCH:
        gdc_launch_dependents()
