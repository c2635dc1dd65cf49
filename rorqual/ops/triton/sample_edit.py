"""Biases, masks and penalties on NVIDIA GPUs: one pass over the logits; rows that have none are only copied."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.sample import edit_logits, mask_logits
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton.launch import refuses

_PIECE = 2048
"""Tokens of a row that one program edits."""


@triton.jit
def _edit_kernel(logits, table_rows, bias, in_prompt, output_counts, repetition, frequency, presence, out, columns,
                 logits_row, logits_column, PIECE: tl.constexpr):  # fmt: skip
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    there = column < columns
    logit = tl.load(logits + row * logits_row + column.to(tl.int64) * logits_column, mask=there).to(tl.float32)
    table_row = tl.load(table_rows + row)
    if table_row > 0:
        at = table_row * columns + column
        logit += tl.load(bias + at, mask=there)
        count = tl.load(output_counts + at, mask=there)
        seen = (tl.load(in_prompt + at, mask=there).to(tl.int32) != 0) | (count > 0)
        factor = tl.load(repetition + row)
        repeated = tl.where(logit > 0, tl.div_rn(logit, tl.broadcast_to(factor, logit.shape)), logit * factor)
        logit = tl.where(seen, repeated, logit)
        logit -= tl.load(frequency + row) * count.to(tl.float32)
        logit -= tl.load(presence + row) * (count > 0).to(tl.float32)
    tl.store(out + row * columns + column, logit, mask=there)


def _refuse(logits: torch.Tensor, rows: torch.Tensor, **tensors: torch.Tensor) -> str | None:
    if not all(tensor.is_contiguous() for tensor in (rows, *tensors.values())):
        return "needs tables and penalties without gaps"
    return refuses(logits, rows, *tensors.values())


@edit_logits.impl("triton", refuse=_refuse)
def edit_logits_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    *,
    bias: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """See the reference."""
    num_rows, columns = logits.shape
    out = torch.empty((num_rows, columns), dtype=torch.float32, device=logits.device)
    if num_rows:
        _edit_kernel[-(-columns // _PIECE), num_rows](
            logits,
            rows,
            bias,
            in_prompt,
            output_counts,
            repetition,
            frequency,
            presence,
            out,
            columns,
            *logits.stride(),
            PIECE=_PIECE,
            num_warps=4,
            enable_fp_fusion=False,  # the reference rounds each product
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return out


@triton.jit
def _mask_kernel(logits, rows, bitmask, out, columns, words, logits_row, logits_column, PIECE: tl.constexpr):
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    there = column < columns
    logit = tl.load(logits + row * logits_row + column.to(tl.int64) * logits_column, mask=there).to(tl.float32)
    mask_row = tl.load(rows + row)
    if mask_row >= 0:
        word = tl.load(bitmask + mask_row * words + column // 32, mask=there, other=0)
        logit = tl.where(((word >> (column % 32)) & 1) == 1, logit, float("-inf"))
    tl.store(out + row * columns + column, logit.to(out.dtype.element_ty), mask=there)


def _refuse_mask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> str | None:
    if not (rows.is_contiguous() and bitmask.is_contiguous()):
        return "needs rows and a mask without gaps"
    return refuses(logits, rows, bitmask)


@mask_logits.impl("triton", refuse=_refuse_mask)
def mask_logits_triton(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """See the reference."""
    num_rows, columns = logits.shape
    out = torch.empty((num_rows, columns), dtype=logits.dtype, device=logits.device)
    if num_rows:
        _mask_kernel[-(-columns // _PIECE), num_rows](
            logits,
            rows,
            bitmask,
            out,
            columns,
            bitmask.shape[1],
            *logits.stride(),
            PIECE=_PIECE,
            num_warps=4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return out
