"""Draws and most likely tokens on NVIDIA GPUs: a pass over the logits, in pieces of a row, and one over the pieces.

Scores of a draw are float64 (`rorqual.ops.sample`), whose logarithms cost ten times what reading a logit does. So the
first pass estimates them in float32, and the second computes those of the pieces that may hold the best one.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.sample import FMIX32, LOWBIAS32, LastKept, RowMax, gumbel_argmax, row_max
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._interpreter import bound
from rorqual.ops.triton.launch import refuses

_PIECE = 2048
"""Tokens of a row whose scores are computed exactly if one of them may be drawn."""
_PIECES = 4
"""Pieces that one program looks at: starting a program costs as much as reading one."""
_NOISE_OFF = tl.constexpr(2.0**-12)
"""Float32 noise is off by 7e-5 at most: a logarithm to 2^-22, taken of a number of 2^-7.5 or more."""
_STEPS = tuple(tl.constexpr(number) for steps in (LOWBIAS32, FMIX32) for step in steps for number in step)
_S0, _M0, _S1, _M1, _S2, _M2, _S3, _M3, _S4, _M4, _S5, _M5 = _STEPS
_NOBODY = tl.constexpr(torch.iinfo(torch.int64).max)
_NO_COLUMN = tl.constexpr(torch.iinfo(torch.int32).max)


@triton.jit
def _mixed(x, SHIFT: tl.constexpr, MULTIPLIER: tl.constexpr):
    return (x ^ (x >> SHIFT)) * tl.full([1], MULTIPLIER, tl.uint32)


@triton.jit
def _bits(token_ids, key0, key1):
    """`noise_bits` of rorqual.ops.sample, of uint32 token ids and keys."""
    x = _mixed(_mixed(_mixed(token_ids ^ key0, _S0, _M0), _S1, _M1), _S2, _M2)
    return _mixed(_mixed(_mixed(x ^ key1, _S3, _M3), _S4, _M4), _S5, _M5)


@triton.jit
def _noise(token_ids, key0, key1):
    """float64 Gumbel noise of rorqual.ops.sample, of uint32 token ids and keys."""
    v = (_bits(token_ids, key0, key1).to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    return -tl.log(-tl.log(1.0 - v))  # 1 - v is exact: 33 bits


@triton.jit
def _best(scores, ids):
    """The largest score of a tile, and the lowest of the ids that have it."""
    most = tl.max(scores, 0)
    return most, tl.min(tl.where(scores == most, ids, _NOBODY), 0)


@triton.jit
def _estimated_noise(token_ids, key0, key1):
    """`_noise` in float32, off by less than _NOISE_OFF."""
    x = _bits(token_ids, key0, key1)
    v = (x.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    others = x ^ tl.full([1], 0xFFFFFFFF, tl.uint32)
    rest = (others.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)  # 1 - v, as precise as v
    small = v * (1.0 + v * (0.5 + v * (1.0 / 3.0)))  # the logarithm's series: it has few digits near 1
    return -tl.log(tl.where(v < 0.00390625, small, -tl.log(rest)))


@triton.jit
def may_be_drawn(logit, column, columns, row, last_values, last_ids, LAST: tl.constexpr):
    """Which tokens of a row may be drawn."""
    there = column < columns
    if LAST:
        last, last_id = tl.load(last_values + row), tl.load(last_ids + row)
        logit = logit.to(tl.float32)
        there &= (logit > last) | ((logit == last) & (column <= last_id))
    return there


@triton.jit
def _estimate_kernel(logits, temperature, keys, last_values, last_ids, estimates, columns, pieces, logits_row,
                     logits_column, LAST: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """estimates float32 [rows, pieces]: each piece's largest score, nearly; -inf if no token of it may be drawn."""
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECES * PIECE + tl.arange(0, PIECES * PIECE)
    logit = tl.load(logits + row * logits_row + column.to(tl.int64) * logits_column, mask=column < columns, other=0.0)
    scores = logit.to(tl.float32)
    t = tl.load(temperature + row)
    if t > 0:  # else the best is taken
        key0, key1 = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
        scores = scores * tl.minimum(1.0 / t, 3e38).to(tl.float32) + _estimated_noise(column.to(tl.uint32), key0, key1)
    kept = may_be_drawn(logit, column, columns, row, last_values, last_ids, LAST)
    scores = tl.where(kept, tl.maximum(scores, -3e38), float("-inf"))
    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)
    tl.store(estimates + row * pieces + piece, tl.max(tl.reshape(scores, (PIECES, PIECE)), 1), mask=piece < pieces)


@triton.jit
def _off(estimate):
    """More than what an estimated score is off by: rounding of logits / T, and the noise."""
    return (tl.abs(estimate) + 24.0) * 0.000000476837158203125 + _NOISE_OFF


@triton.jit
def _decide_kernel(logits, temperature, keys, last_values, last_ids, estimates, out, columns, pieces, logits_row,
                   logits_column, LAST: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """The best of a row, from the exact scores of those pieces that may hold it: mostly a single one."""
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    estimate = tl.load(estimates + row * pieces + piece, mask=piece < pieces, other=float("-inf"))
    highest = tl.max(estimate, 0)
    beaten = estimate + _off(estimate) < highest - _off(highest)  # false beside infinities: nothing is ruled out then
    open_pieces = (piece < pieces) & (estimate > float("-inf")) & ~beaten
    t = tl.load(temperature + row)
    key0, key1 = tl.load(keys + 2 * row).to(tl.uint32), tl.load(keys + 2 * row + 1).to(tl.uint32)
    most = tl.full([], float("-inf"), tl.float64)
    lowest = tl.full([], _NOBODY, tl.int64)
    for _ in tl.range(0, bound(tl.sum(open_pieces.to(tl.int32), 0))):
        which = tl.min(tl.where(open_pieces, piece, PIECES), 0)
        open_pieces &= piece != which
        column = which * PIECE + tl.arange(0, PIECE)
        at = logits + row * logits_row + column.to(tl.int64) * logits_column
        logit = tl.load(at, mask=column < columns, other=0.0)
        scores = logit.to(tl.float64)
        if t > 0:
            scores = scores / t + _noise(column.to(tl.uint32), key0, key1)
        there = may_be_drawn(logit, column, columns, row, last_values, last_ids, LAST)
        here, first = _best(tl.where(there, scores, float("-inf")), tl.where(there, column.to(tl.int64), _NOBODY))
        lowest = tl.where(here > most, first, lowest)  # pieces come in ascending order: among equals the first stays
        most = tl.maximum(most, here)
    tl.store(out + row, tl.minimum(lowest, columns - 1))


@triton.jit
def _row_max_kernel(logits, best, best_ids, columns, logits_row, logits_column, PIECE: tl.constexpr):
    """best float32, best_ids int64 [rows, pieces]."""
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    there = column < columns
    at = logits + row * logits_row + column.to(tl.int64) * logits_column
    logit = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
    most = tl.max(tl.where(logit == logit, logit, float("-inf")), 0)
    lowest = tl.min(tl.where((logit == most) & there, column, _NO_COLUMN), 0)
    broken = tl.max((logit != logit).to(tl.int32), 0) > 0
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + at, tl.where(broken, float("nan"), most))
    tl.store(best_ids + at, lowest.to(tl.int64))


@triton.jit
def _finish_kernel(best, best_ids, values, out, pieces, PIECES: tl.constexpr):
    """The best of each row's pieces; -1 where none is finite, or one is NaN or infinite."""
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    there = piece < pieces
    score = tl.load(best + row * pieces + piece, mask=there, other=float("-inf"))
    ids = tl.load(best_ids + row * pieces + piece, mask=there, other=_NOBODY)
    most, lowest = _best(score, ids)
    broken = tl.max((score != score).to(tl.int32), 0) > 0
    most = tl.where(broken, float("nan"), most)
    tl.store(out + row, tl.where(most - most == 0.0, lowest, -1))
    tl.store(values + row, most)


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
    estimates = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    given = (logits, temperature, keys.contiguous(), *((temperature, temperature) if last is None else last), estimates)
    options = {"LAST": last is not None, "PIECE": _PIECE, "launch_pdl": DEPENDENT_LAUNCH}
    _estimate_kernel[-(-pieces // _PIECES), rows](
        *given, columns, pieces, *logits.stride(), PIECES=_PIECES, num_warps=8, **options
    )
    padded = 1 << (pieces - 1).bit_length()
    _decide_kernel[(rows,)](*given, out, columns, pieces, *logits.stride(), PIECES=padded, num_warps=8, **options)
    return out


@row_max.impl("triton", refuse=refuses)
def row_max_triton(logits: torch.Tensor) -> RowMax:
    """See the reference."""
    rows, columns = logits.shape
    pieces = -(-columns // (_PIECE * _PIECES))
    best = torch.empty((rows, pieces), dtype=torch.float32, device=logits.device)
    best_ids = torch.empty((rows, pieces), dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _row_max_kernel[pieces, rows](
            logits,
            best,
            best_ids,
            columns,
            *logits.stride(),
            PIECE=_PIECE * _PIECES,
            num_warps=8,
            launch_pdl=DEPENDENT_LAUNCH,
        )
        padded = 1 << (pieces - 1).bit_length()
        _finish_kernel[(rows,)](
            best, best_ids, values, out, pieces, PIECES=padded, num_warps=1, launch_pdl=DEPENDENT_LAUNCH
        )
    return RowMax(values, out)
