"""Greedy tokens on CPU: one pass over logits as they are."""

from __future__ import annotations

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.sample import RowMax, row_max


def _refuse(logits: torch.Tensor) -> str | None:
    if logits.device.type != "cpu":
        return f"takes CPU tensors, got one on {logits.device}"
    if logits.dtype not in (torch.bfloat16, torch.float32):
        return f"takes bfloat16 and float32, got {logits.dtype}"
    return missing()


@row_max.impl("native", refuse=_refuse)
def row_max_native(logits: torch.Tensor) -> RowMax:
    """See the reference."""
    found = kernels()
    assert found is not None
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, size = logits.shape
    made = RowMax(torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64))
    found.row_max(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        size,
        logits.dtype is torch.float32,
        made.values.data_ptr(),
        made.token_ids.data_ptr(),
        threads_for(logits.numel()),
    )
    return made
