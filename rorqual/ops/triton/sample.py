"""Draws and most likely tokens on NVIDIA GPUs: a pass over the logits, in pieces of a row, and one over the pieces."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.sample import FMIX32, LOWBIAS32, LastKept, RowMax, gumbel_argmax, row_max
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton.launch import refuses

_PIECE = 2048
"""Tokens of a row that one program scores."""
_STEPS = tuple(tl.constexpr(number) for steps in (LOWBIAS32, FMIX32) for step in steps for number in step)
_S0, _M0, _S1, _M1, _S2, _M2, _S3, _M3, _S4, _M4, _S5, _M5 = _STEPS
_NOBODY = tl.constexpr(torch.iinfo(torch.int64).max)


@triton.jit
def _mixed(x, SHIFT: tl.constexpr, MULTIPLIER: tl.constexpr):
    return (x ^ (x >> SHIFT)) * tl.full([1], MULTIPLIER, tl.uint32)


@triton.jit
def _noise(token_ids, key0, key1):
    """float64 Gumbel noise of rorqual.ops.sample, of uint32 token ids and keys."""
    x = _mixed(_mixed(_mixed(token_ids ^ key0, _S0, _M0), _S1, _M1), _S2, _M2)
    x = _mixed(_mixed(_mixed(x ^ key1, _S3, _M3), _S4, _M4), _S5, _M5)
    v = (x.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(1.0 - v))  # 1 - v is exact: 33 bits


@triton.jit
def _best(scores, ids):
    """The largest score of a tile, and the lowest of the ids that have it."""
    most = tl.max(scores, 0)
    return most, tl.min(tl.where(scores == most, ids, _NOBODY), 0)


@triton.jit
def _draw_kernel(logits, temperature, keys, last_values, last_ids, best, best_ids, columns, logits_row, logits_column,
                 LAST: tl.constexpr, PIECE: tl.constexpr):  # fmt: skip
    """best, best_ids [rows, pieces]."""
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    there = column < columns
    at = logits + row * logits_row + column.to(tl.int64) * logits_column
    logit = tl.load(at, mask=there, other=float("-inf"))
    if LAST:
        last, last_id = tl.load(last_values + row), tl.load(last_ids + row)
        there &= (logit.to(tl.float32) > last) | ((logit.to(tl.float32) == last) & (column <= last_id))
    scores = logit.to(tl.float64)
    ids = column.to(tl.int64)
    t = tl.load(temperature + row)
    if (t > 0) & (tl.max(there.to(tl.int32), 0) > 0):  # else the best is taken, or nothing
        key0, key1 = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
        scores = scores / t + _noise(column.to(tl.uint32), key0, key1)
    most, lowest = _best(tl.where(there, scores, float("-inf")), tl.where(there, ids, _NOBODY))
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, most)
    tl.store(best_ids + at, lowest)


@triton.jit
def _finish_kernel(best, best_ids, values, out, pieces, columns, VALUES: tl.constexpr, PIECES: tl.constexpr):
    """The best of each row's pieces. Where one is NaN, the first such one."""
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    there = piece < pieces
    score = tl.load(best + row * pieces + piece, mask=there, other=float("-inf"))
    ids = tl.load(best_ids + row * pieces + piece, mask=there, other=_NOBODY)
    most, lowest = _best(score, ids)
    broken = tl.min(tl.where(score != score, ids, _NOBODY), 0)
    tl.store(out + row, tl.minimum(tl.where(broken != _NOBODY, broken, lowest), columns - 1))
    if VALUES:
        tl.store(values + row, tl.where(broken != _NOBODY, float("nan"), most))


@triton.jit
def _row_max_kernel(logits, best, best_ids, columns, logits_row, logits_column, PIECE: tl.constexpr):
    """best float32, best_ids [rows, pieces]."""
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    there = column < columns
    logit = tl.load(
        logits + row * logits_row + column.to(tl.int64) * logits_column, mask=there, other=float("-inf")
    ).to(tl.float32)
    ids = column.to(tl.int64)
    most, lowest = _best(tl.where(logit == logit, logit, float("-inf")), tl.where(there, ids, _NOBODY))
    broken = tl.min(tl.where(logit != logit, ids, _NOBODY), 0)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, tl.where(broken != _NOBODY, float("nan"), most))
    tl.store(best_ids + at, tl.where(broken != _NOBODY, broken, lowest))


def _refuse_draw(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *, last: LastKept | None = None
) -> str | None:
    return refuses(logits, temperature, keys, *(last or ()))


@gumbel_argmax.impl("triton", refuse=_refuse_draw)
def gumbel_argmax_triton(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *, last: LastKept | None = None
) -> torch.Tensor:
    """See the reference."""
    rows, columns = logits.shape
    pieces = -(-columns // _PIECE)
    best, best_ids = _pieces(rows, pieces, torch.float64, logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    _draw_kernel[pieces, rows](
        logits,
        temperature,
        keys.contiguous(),
        *((temperature, temperature) if last is None else last),
        best,
        best_ids,
        columns,
        *logits.stride(),
        LAST=last is not None,
        PIECE=_PIECE,
        num_warps=4,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    _finish(best, best_ids, None, out, columns)
    return out


@row_max.impl("triton", refuse=refuses)
def row_max_triton(logits: torch.Tensor) -> RowMax:
    """See the reference."""
    rows, columns = logits.shape
    pieces = -(-columns // _PIECE)
    best, best_ids = _pieces(rows, pieces, torch.float32, logits.device)
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _row_max_kernel[pieces, rows](
            logits,
            best,
            best_ids,
            columns,
            *logits.stride(),
            PIECE=_PIECE,
            num_warps=4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
        _finish(best, best_ids, values, out, columns)
    return RowMax(values, out)


def _pieces(rows: int, pieces: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    best = torch.empty((rows, pieces), dtype=dtype, device=device)
    return best, torch.empty((rows, pieces), dtype=torch.int64, device=device)


def _finish(
    best: torch.Tensor, best_ids: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor, columns: int
) -> None:
    rows, pieces = best.shape
    _finish_kernel[(rows,)](
        best,
        best_ids,
        best if values is None else values,
        out,
        pieces,
        columns,
        VALUES=values is not None,
        PIECES=1 << (pieces - 1).bit_length(),
        num_warps=1,
        launch_pdl=DEPENDENT_LAUNCH,
    )
