"""Greedy tokens, and where filters cut a row, on CPU: passes over logits as they are."""

from __future__ import annotations

from typing import Any

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.sample import LastKept, RowMax, narrow, row_max


def _refuse(logits: torch.Tensor, *_args: Any, **_options: Any) -> str | None:
    if logits.device.type != "cpu":
        return f"takes CPU tensors, got one on {logits.device}"
    if logits.dtype not in (torch.bfloat16, torch.float32):
        return f"takes bfloat16 and float32, got {logits.dtype}"
    return missing()


def _by_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


@row_max.impl("native", refuse=_refuse)
def row_max_native(logits: torch.Tensor) -> RowMax:
    """See the reference."""
    found = kernels()
    assert found is not None
    logits = _by_rows(logits)
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


@narrow.impl("native", refuse=_refuse)
def narrow_native(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    *,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> LastKept:
    """See the reference."""
    found = kernels()
    assert found is not None
    logits = _by_rows(logits)
    rows, size = logits.shape
    numbers = [x.contiguous() for x in (highest, temperature, log_min_p, top_k, top_p)]
    made = LastKept(torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64))
    found.narrow(
        logits.data_ptr(),
        logits.stride(0),
        rows,
        size,
        logits.dtype is torch.float32,
        *(x.data_ptr() for x in numbers),
        made.values.data_ptr(),
        made.token_ids.data_ptr(),
        threads_for(logits.numel()),
    )
    return made
