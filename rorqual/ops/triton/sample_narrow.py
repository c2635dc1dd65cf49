"""Where min_p, top_k and top_p cut, and the most likely tokens, on NVIDIA GPUs, without sorting rows.

Counts and masses up to a few logits of each row say between which of them the cut lies; the tokens there are collected,
and halving finds it among them. Counts and masses are integers, so that programs may add them up in any order.
Operations on float64 are single ones, not fused, so that they are those of the reference.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.sample import (
    EXP_TERMS,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    LOWEST_EXPONENT,
    MASK32,
    MASS_BITS,
    Candidates,
    LastKept,
    narrow,
    top_candidates,
)
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._interpreter import bound
from rorqual.ops.triton.launch import refuses
from rorqual.ops.triton.sample import may_be_drawn, row_max_triton

_PIECE = 2048
"""Tokens of a row that one program counts or collects."""
_TILE = 2048
"""Tokens that the search keeps in registers."""
_BINS = 16
"""Parts of a row between which the cut is looked for: the first `_BINS - 1` end at a logit each, the last at none."""

_NUM_BINS = tl.constexpr(_BINS)
_NOBODY = tl.constexpr(torch.iinfo(torch.int64).max)
_ALL_IDS = tl.constexpr(0xFFFF_FFFF)
_LOG2_E, _LN2_HIGH, _LN2_LOW = tl.constexpr(LOG2_E), tl.constexpr(LN2_HIGH), tl.constexpr(LN2_LOW)
_LOWEST, _EXPONENT = tl.constexpr(LOWEST_EXPONENT), tl.constexpr(MASS_BITS + 1023)
_E10, _E9, _E8, _E7, _E6, _E5, _E4, _E3, _E2, _E1, _E0 = (tl.constexpr(term) for term in EXP_TERMS)


@triton.jit
def _step(value, x, TERM: tl.constexpr):
    return value * x + tl.full([1], TERM, tl.float64)


@triton.jit
def _masses(relative):
    """`masses` of rorqual.ops.sample."""
    x = tl.maximum(relative, tl.full([1], _LOWEST, tl.float64))
    whole = tl.floor(x * tl.full([1], _LOG2_E, tl.float64) + 0.5)
    x = (x - whole * tl.full([1], _LN2_HIGH, tl.float64)) - whole * tl.full([1], _LN2_LOW, tl.float64)
    value = _step(_step(_step(x * 0.0 + tl.full([1], _E10, tl.float64), x, _E9), x, _E8), x, _E7)
    value = _step(_step(_step(_step(value, x, _E6), x, _E5), x, _E4), x, _E3)
    value = _step(_step(_step(value, x, _E2), x, _E1), x, _E0)
    scale = ((whole.to(tl.int64) + _EXPONENT) << 52).to(tl.float64, bitcast=True)
    return tl.floor(value * scale + 0.5).to(tl.int64)


@triton.jit
def _order(logit):
    """int32 that ascends where float32 logits descend; 0.0 and -0.0 are equal."""
    bits = (0.0 - logit).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _keys(logit, ids):
    """int64 that ascends in the order of tokens; no two alike."""
    return (_order(logit).to(tl.int64) << 32) + ids


@triton.jit
def _edge(highest, t, bin):
    """The order of the logit with which a bin ends: the further down, the wider they are."""
    return _order((highest.to(tl.float64) + t * ((bin + 1) * (bin + 1) * -0.125)).to(tl.float32))


@triton.jit
def _limit(top_p, total):
    """The mass that is enough."""
    return tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def _narrows(log_min_p, top_k, top_p, columns):
    return (log_min_p > float("-inf")) | (top_k < columns) | (top_p < 1)


@triton.jit
def _tally_kernel(logits, highest, temperature, log_min_p, top_k, top_p, counts, masses, columns, logits_row,
                  logits_column, PIECE: tl.constexpr):  # fmt: skip
    """counts, masses int64 [rows, _BINS], zero before: of the tokens that min_p keeps, up to the end of each bin."""
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    least, k, p = tl.load(log_min_p + row), tl.load(top_k + row), tl.load(top_p + row)
    if _narrows(least, k, p, columns):
        column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
        there = column < columns
        at = logits + row * logits_row + column.to(tl.int64) * logits_column
        logit = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
        t, best = tl.load(temperature + row), tl.load(highest + row)
        relative = logit.to(tl.float64) / t - best.to(tl.float64) / t
        kept = there & (relative >= least)
        order = _order(logit)
        mass = kept.to(tl.int64)
        if p < 1:
            mass = tl.where(kept, _masses(relative), 0)
        for bin in tl.static_range(_NUM_BINS):
            inside = kept
            if bin < _NUM_BINS - 1:
                inside = kept & (order <= _edge(best, t, bin))
            count = tl.sum(inside.to(tl.int64), 0)
            tl.atomic_add(counts + row * _NUM_BINS + bin, count, mask=count > 0)
            tl.atomic_add(masses + row * _NUM_BINS + bin, tl.sum(tl.where(inside, mass, 0), 0), mask=count > 0)


@triton.jit
def _bounds(counts, masses, highest, temperature, top_k, top_p, row):
    """Where the cut lies: behind which order and up to which; what comes before; what there is in all.

    Returns (after, upto, count before, mass before, tokens that top_k keeps, whether it drops any, mass of all).
    """
    bins = tl.arange(0, _NUM_BINS)
    count, mass = tl.load(counts + row * _NUM_BINS + bins), tl.load(masses + row * _NUM_BINS + bins)
    p, best, t = tl.load(top_p + row), tl.load(highest + row), tl.load(temperature + row)
    all_of_it = tl.max(count, 0)
    k = tl.minimum(tl.load(top_k + row), all_of_it)
    cuts = k < all_of_it
    total = tl.max(mass, 0)
    last = tl.minimum(tl.min(tl.where(count >= k, bins, _NUM_BINS), 0), _NUM_BINS - 1)
    first = last
    if p < 1:
        # Of what top_k keeps, at least the bins before its last one count for top_p.
        surely = tl.where(cuts, tl.max(tl.where(bins < last, mass, 0), 0), total)
        enough = tl.maximum(_limit(p, surely), 1)
        first = tl.minimum(tl.min(tl.where(mass >= enough, bins, _NUM_BINS), 0), last)
        last = tl.where(cuts, last, first)
    after = tl.where(first > 0, _edge(best, t, first - 1), -0x80000000)
    upto = tl.where(last < _NUM_BINS - 1, _edge(best, t, last), 0x7F800000)  # the order of -inf
    before = bins < first
    return (after.to(tl.int64), upto.to(tl.int64), tl.max(tl.where(before, count, 0), 0),
            tl.max(tl.where(before, mass, 0), 0), k, cuts, total)  # fmt: skip


@triton.jit
def _collect_kernel(logits, highest, temperature, log_min_p, top_k, top_p, counts, masses, found, num_found, columns,
                    logits_row, logits_column, PIECE: tl.constexpr):  # fmt: skip
    """found int32 [rows, columns]: the ids between the bounds, in any order; num_found int32 [rows], zero before."""
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    least, k, p = tl.load(log_min_p + row), tl.load(top_k + row), tl.load(top_p + row)
    if _narrows(least, k, p, columns):
        after, upto, _, _, _, _, _ = _bounds(counts, masses, highest, temperature, top_k, top_p, row)
        column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
        there = column < columns
        at = logits + row * logits_row + column.to(tl.int64) * logits_column
        logit = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
        t = tl.load(temperature + row)
        relative = logit.to(tl.float64) / t - tl.load(highest + row).to(tl.float64) / t
        order = _order(logit)
        inside = there & (relative >= least) & (order > after) & (order <= upto)
        number = tl.sum(inside.to(tl.int32), 0)
        start = tl.atomic_add(num_found + row, number)
        place = start + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(found + row * columns + place, column, mask=inside)


@triton.jit
def _load_found(found, there, logits, logits_column, t, best, MASS: tl.constexpr):
    """The ids, keys and amounts (1 or mass) of collected tokens."""
    ids = tl.load(found, mask=there, other=0)
    logit = tl.load(logits + ids.to(tl.int64) * logits_column, mask=there, other=float("-inf")).to(tl.float32)
    amount = there.to(tl.int64)
    if MASS:
        amount = tl.where(there, _masses(logit.to(tl.float64) / t - best), 0)
    return ids, tl.where(there, _keys(logit, ids), _NOBODY), amount


@triton.jit
def _sum_found(found, number, lo, hi, logits, logits_column, t, best, MASS: tl.constexpr, TILE: tl.constexpr):
    """How many collected tokens have keys in (lo, hi], and the sum of their amounts."""
    count, total = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for start in range(0, bound(number), TILE):
        place = start + tl.arange(0, TILE)
        _, key, amount = _load_found(found + place, place < number, logits, logits_column, t, best, MASS)
        inside = (key > lo) & (key <= hi)
        count += tl.sum(inside.to(tl.int64), 0)
        total += tl.sum(tl.where(inside, amount, 0), 0)
    return count, total


@triton.jit
def _middle(lo, hi):
    return (lo >> 1) + (hi >> 1) + (lo & hi & 1)  # their difference may not fit 64 bits


@triton.jit
def _find(found, number, spare, lo, hi, wanted, logits, logits_column, t, best, MASS: tl.constexpr,
          TILE: tl.constexpr):  # fmt: skip
    """The lowest key in (lo, hi] up to which collected tokens amount to what is wanted; hi if none does."""
    inside = number.to(tl.int64)
    while (inside > TILE) & (lo + 1 < hi):
        middle = _middle(lo, hi)
        count, amount = _sum_found(found, number, lo, middle, logits, logits_column, t, best, MASS, TILE)
        if amount >= wanted:
            hi = middle
            inside = count
        else:
            lo = middle
            wanted -= amount
            inside -= count
    left = tl.zeros([], tl.int32)
    for start in range(0, bound(number), TILE):
        place = start + tl.arange(0, TILE)
        ids, key, _ = _load_found(found + place, place < number, logits, logits_column, t, best, False)
        chosen = (key > lo) & (key <= hi)
        at = left + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(spare + at, ids, mask=chosen & (at < TILE))
        left += tl.sum(chosen.to(tl.int32), 0)
    tl.debug_barrier()
    place = tl.arange(0, TILE)
    _, key, amount = _load_found(spare + place, place < left, logits, logits_column, t, best, MASS)
    while lo + 1 < hi:
        middle = _middle(lo, hi)
        if tl.sum(tl.where(key <= middle, amount, 0), 0) >= wanted:
            hi = middle
        else:
            lo = middle
    tl.debug_barrier()
    return hi


@triton.jit
def _cut_kernel(logits, highest, temperature, log_min_p, top_k, top_p, counts, masses, found, num_found, spare, values,
                ids, columns, logits_row, logits_column, TILE: tl.constexpr):  # fmt: skip
    """spare int32 [rows, TILE]. Writes values and ids."""
    wait_for_earlier_kernels()
    row = tl.program_id(0).to(tl.int64)
    least, p = tl.load(log_min_p + row), tl.load(top_p + row)
    value, last = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.int64) + columns - 1
    if _narrows(least, tl.load(top_k + row), p, columns):
        after, upto, count, mass, k, cuts, total = _bounds(counts, masses, highest, temperature, top_k, top_p, row)
        lo, hi = (after << 32) + _ALL_IDS, (upto << 32) + _ALL_IDS
        t = tl.load(temperature + row)
        best = tl.load(highest + row).to(tl.float64) / t
        number = tl.load(num_found + row)
        logits += row * logits_row
        found += row * columns
        spare += row * TILE
        if cuts | (p == 1):
            hi = _find(found, number, spare, lo, hi, k - count, logits, logits_column, t, best, False, TILE)
        if p < 1:
            if cuts:
                _, within = _sum_found(found, number, lo, hi, logits, logits_column, t, best, True, TILE)
                total = mass + within
            wanted = _limit(p, total) - mass
            hi = _find(found, number, spare, lo, hi, wanted, logits, logits_column, t, best, True, TILE)
        last = tl.minimum(hi & _ALL_IDS, columns - 1)
        value = tl.load(logits + last * logits_column).to(tl.float32) + 0.0
    tl.store(values + row, value)
    tl.store(ids + row, last)


def _refuse(logits: torch.Tensor, *tensors: torch.Tensor, **options: torch.Tensor) -> str | None:
    if not all(tensor.is_contiguous() for tensor in (*tensors, *options.values())):
        return "needs numbers of rows without gaps"
    return refuses(logits, *tensors, *options.values())


@narrow.impl("triton", refuse=_refuse)
def narrow_triton(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    *,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> LastKept:
    """See the reference."""
    rows, columns = logits.shape
    device = logits.device
    made = LastKept(
        torch.empty(rows, dtype=torch.float32, device=device), torch.empty(rows, dtype=torch.int64, device=device)
    )
    if rows == 0:
        return made
    sums = torch.zeros(2 * rows * _BINS + rows, dtype=torch.int64, device=device)
    counts, masses, num_found = sums.split([rows * _BINS, rows * _BINS, rows])
    num_found = num_found.view(torch.int32)
    found = torch.empty((rows, columns), dtype=torch.int32, device=device)
    spare = torch.empty((rows, _TILE), dtype=torch.int32, device=device)
    given = (logits, highest, temperature, log_min_p, top_k, top_p, counts, masses)
    shape = (columns, *logits.stride())
    exact = {"enable_fp_fusion": False, "launch_pdl": DEPENDENT_LAUNCH}
    pieces = (-(-columns // _PIECE), rows)
    _tally_kernel[pieces](*given, *shape, PIECE=_PIECE, num_warps=4, **exact)
    _collect_kernel[pieces](*given, found, num_found, *shape, PIECE=_PIECE, num_warps=4, **exact)
    _cut_kernel[(rows,)](*given, found, num_found, spare, *made, *shape, TILE=_TILE, num_warps=8, **exact)
    return made


@triton.jit
def _gather_kernel(logits, last_values, last_ids, keys, num_found, columns, logits_row, logits_column, count,
                   PIECE: tl.constexpr):  # fmt: skip
    """keys int64 [rows, count], in any order, of the tokens up to the last; num_found int32 [rows], zero before."""
    wait_for_earlier_kernels()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    at = logits + row * logits_row + column.to(tl.int64) * logits_column
    logit = tl.load(at, mask=column < columns, other=float("-inf")).to(tl.float32)
    kept = may_be_drawn(logit, column, columns, row, last_values, last_ids, True)
    start = tl.atomic_add(num_found + row, tl.sum(kept.to(tl.int32), 0))
    place = start + tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(keys + row * count + place, _keys(logit, column), mask=kept & (place < count))


def _refuse_top(logits: torch.Tensor, *, count: int) -> str | None:
    return refuses(logits)


@top_candidates.impl("triton", refuse=_refuse_top)
def top_candidates_triton(logits: torch.Tensor, *, count: int) -> Candidates:
    """See the reference; only what is kept is sorted."""
    rows, columns = logits.shape
    last = narrow_triton(
        logits,
        row_max_triton(logits).values,
        logits.new_ones(rows, dtype=torch.float64),
        log_min_p=logits.new_full((rows,), -torch.inf, dtype=torch.float64),
        top_k=logits.new_full((rows,), count, dtype=torch.int64),
        top_p=logits.new_ones(rows, dtype=torch.float64),
    )
    keys = logits.new_zeros((rows, count), dtype=torch.int64)
    if rows:
        num_found = logits.new_zeros(rows, dtype=torch.int32)
        _gather_kernel[-(-columns // _PIECE), rows](
            logits,
            *last,
            keys,
            num_found,
            columns,
            *logits.stride(),
            count,
            PIECE=_PIECE,
            num_warps=4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    ids = keys.sort(1).values & MASK32
    return Candidates(logits.gather(1, ids).float(), ids)
