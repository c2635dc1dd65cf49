"""Sampling on CPU: row by row in NumPy, whose unsigned shifts, argmax and partition are vectorised; torch's are not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rorqual.ops import sample as reference
from rorqual.ops.sample import FMIX32, LOWBIAS32, Candidates, LastKept, RowMax

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

SHORT_ROW = 4096
"""Below this the reference, which takes all rows at once, is quicker."""
FIRST_HEAD = 256
"""Candidates tried first where top_p alone says how many are needed."""
HEAD_GROWTH = 16
"""How many times more the next try takes where those were not enough."""
_LEAST = float(np.finfo(np.float32).min)
_BLOCK = 8192
"""Tokens whose masses are computed at once: their intermediates stay in the core's cache."""
_LOWEST_SCORE = -26.5
"""Noise lies in [-3.14, 22.88]: a token whose scaled logit is further than that below the best one's cannot win."""
_SLACK = 1 - 1e-4
"""More than float32 loses on the way to a score's upper bound."""


def _not_on_cpu(logits: torch.Tensor, *_args: Any, **_options: Any) -> str | None:
    return None if logits.device.type == "cpu" else f"takes CPU tensors, got one on {logits.device}"


def _not_long_rows(logits: torch.Tensor, *args: Any, **_options: Any) -> str | None:
    if logits.shape[1] < SHORT_ROW:
        return f"takes rows of {SHORT_ROW} logits or more, got {logits.shape[1]}"
    return _not_on_cpu(logits, *args)


def _rows(logits: torch.Tensor) -> Floats:
    """Float32 rows [num_rows, num_tokens]: a view where they are that already."""
    return logits.detach().float().numpy()


def _scramble(x: Words, steps: tuple[tuple[int, int], ...], spare: Words) -> None:
    for shift, multiplier in steps:
        np.right_shift(x, np.uint32(shift), out=spare)
        x ^= spare
        if multiplier != 1:
            x *= np.uint32(multiplier)


def noise_bits(token_ids: Words, key: tuple[int, int]) -> Words:
    """One row of the reference's `noise_bits`: uint32 ids -> uint32 [num_tokens]."""
    x = token_ids ^ np.uint32(key[0])
    spare = np.empty_like(x)
    _scramble(x, LOWBIAS32, spare)
    x ^= np.uint32(key[1])
    _scramble(x, FMIX32, spare)
    return x


def _exact_scores(logits: npt.NDArray[Any], temperature: float, bits: Words) -> npt.NDArray[np.float64]:
    v = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return logits.astype(np.float64) / temperature - np.log(-np.log1p(-v))


def _draw(logits: Floats, temperature: float, key: tuple[int, int], ids: Words) -> int:
    """The reference's draw from some tokens. Float32 finds the few that can win, float64 decides between them.

    With w = exp((logit - max) / T), the score is log(w / E), where E = -log1p(-v) >= v: so w / v is an upper bound that
    costs no logarithm, and whoever stays below the true w / E of one token has lost.
    """
    inverse = np.float32(min(max(1 / temperature, 1e-44), 3e38))  # keeps products of 0 and infinity from being NaN
    highest = logits.max()
    if not np.isfinite(highest):
        return 0
    with np.errstate(over="ignore"):
        scaled = logits - highest
        scaled *= inverse
    near = scaled >= _LOWEST_SCORE
    if np.count_nonzero(near) * 8 < len(scaled):  # a confident model: most of the vocabulary needs no noise
        kept = np.flatnonzero(near)
        logits, ids, scaled = logits[kept], ids[kept], scaled[kept]
    else:
        np.maximum(scaled, _LOWEST_SCORE - 4, out=scaled)  # no denormals, which are slow
    bits = noise_bits(ids, key)
    bound = bits.astype(np.float32)
    bound += np.float32(0.5)
    weights = np.exp(scaled, out=scaled)
    np.divide(weights, bound, out=bound)  # w / v in units of 2**32
    leader = int(bound.argmax())
    v = (float(bits[leader]) + 0.5) * 2.0**-32
    reached = float(weights[leader]) / -np.log1p(-v) * 2.0**-32
    finalists = np.flatnonzero(bound >= np.float32(reached * _SLACK))
    scores = _exact_scores(logits[finalists], temperature, bits[finalists])
    return int(ids[finalists[scores.argmax()]])  # finalists ascend, argmax takes the first: ties go to the lowest id


def _draw_kept(row: Floats, t: float, key: tuple[int, int], ids: Words, last: float, last_id: int) -> int:
    """The draw from a whole row, up to the last token that may be drawn."""
    if last > -math.inf:
        ids = np.flatnonzero(row >= np.float32(last)).astype(np.uint32)
        ids = ids[(row[ids] > np.float32(last)) | (ids <= last_id)]
        row = row[ids]
    return _draw(row, t, key, ids) if t else int(ids[row.argmax()])


@reference.gumbel_argmax.impl("cpu", refuse=_not_long_rows)
def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *, last: LastKept | None = None
) -> torch.Tensor:
    """See the reference."""
    all_ids = np.arange(logits.shape[1], dtype=np.uint32)
    ends = [(-math.inf, len(all_ids))] * len(logits)
    if last is not None:
        ends = list(zip(last.values.tolist(), last.token_ids.tolist(), strict=True))
    jobs = zip(_rows(logits), temperature.tolist(), keys.tolist(), ends, strict=True)
    drawn = [_draw_kept(row, t, (key[0], key[1]), all_ids, *end) for row, t, key, end in jobs]
    return torch.tensor(drawn, dtype=torch.int64)


@reference.row_max.impl("cpu", refuse=_not_on_cpu)
def row_max(logits: torch.Tensor) -> RowMax:
    """See the reference."""
    rows = _rows(logits)
    ids = rows.argmax(1)
    values = rows[np.arange(len(rows)), ids]
    return RowMax(torch.from_numpy(values), torch.from_numpy(np.where(np.isfinite(values), ids, -1)))


def _floor(row: Floats, count: int) -> np.float32:
    """A value that at least `count` of the row reach, close to the count-th largest."""
    groups = 8 * count
    if groups * 4 > len(row):
        return np.partition(row, len(row) - count)[len(row) - count]  # type: ignore[no-any-return]
    whole = len(row) // groups * groups
    largest = row[:whole].reshape(-1, groups).max(0)  # one per group: `count` of them are `count` different tokens
    return np.partition(largest, groups - count)[groups - count]  # type: ignore[no-any-return]


def _top(row: Floats, count: int) -> npt.NDArray[np.int64]:
    floor = _floor(row, count)
    reach = np.flatnonzero(row >= floor) if floor > -np.inf else np.flatnonzero(row > floor)
    keys = reference.sort_keys(torch.from_numpy(row[reach]), torch.from_numpy(reach)).numpy()
    keys.sort()
    ids = keys[:count] & reference.MASK32
    if len(ids) < count:  # the rest is -inf
        ids = np.concatenate([ids, np.flatnonzero(row == -np.inf)[: count - len(ids)]])
    return ids


@reference.top_candidates.impl("cpu", refuse=_not_on_cpu)
def top_candidates(logits: torch.Tensor, *, count: int) -> Candidates:
    """See the reference."""
    rows = _rows(logits)
    ids = np.empty((len(rows), count), np.int64)
    for row, out in zip(rows, ids, strict=True):
        out[:] = _top(row, count)
    return Candidates(torch.from_numpy(np.take_along_axis(rows, ids, 1)), torch.from_numpy(ids))


@reference.narrow.impl("cpu", refuse=_not_on_cpu)
def narrow(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    *,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> LastKept:
    """See the reference."""
    size = logits.shape[1]
    numbers = (highest, temperature, log_min_p, top_k, top_p)
    values, ids = np.full(len(logits), -np.inf, np.float32), np.full(len(logits), size - 1)
    for i, (best, t, least, k, p) in enumerate(zip(*(x.tolist() for x in numbers), strict=True)):
        if (least > -math.inf or k < size or p < 1) and math.isfinite(best):
            row = _rows(logits[i : i + 1])[0]
            ids[i] = _last(row, best, t, least, min(k, size), p)
            values[i] = row[ids[i]] + 0.0
    return LastKept(torch.from_numpy(values), torch.from_numpy(ids))


def _last(row: Floats, best: float, temperature: float, log_min_p: float, top_k: int, top_p: float) -> int:
    """The last token that the filters keep, sorting no more of the row than that takes."""
    ids = None  # all of them
    if log_min_p > -math.inf:
        # Float32 leaves a few too many, of which float64 decides.
        near = np.float32(max(best + temperature * (log_min_p - 1e-3), _LEAST)) - np.float32(abs(best) * 1e-6)
        ids = np.flatnonzero(row >= near)
        ids = ids[_relative(row[ids], best, temperature) >= log_min_p]
    kept = row if ids is None else row[ids]
    if top_k < len(kept):
        head = _top(kept, top_k)
        ids, kept = head if ids is None else ids[head], kept[head]
        if top_p == 1:
            return int(ids[-1])
    elif top_p == 1:
        assert ids is not None, "something narrows"
        return int(ids[kept == kept.min()][-1])
    starts = range(0, len(kept), _BLOCK)
    total = sum(int(_mass(kept[start : start + _BLOCK], best, temperature).sum()) for start in starts)
    limit = min(math.ceil(top_p * float(total)), total)
    count = FIRST_HEAD
    while True:
        head = _top(kept, min(count, len(kept)))
        reached = _mass(kept[head], best, temperature).cumsum()
        if reached[-1] >= limit:
            last = head[np.searchsorted(reached, limit)]
            return int(last if ids is None else ids[last])
        count *= HEAD_GROWTH


def _relative(row: Floats, best: float, temperature: float) -> npt.NDArray[np.float64]:
    relative = row.astype(np.float64)
    relative /= temperature
    relative -= best / temperature
    return relative


def _mass(row: Floats, best: float, temperature: float) -> npt.NDArray[np.int64]:
    """`masses` of tokens."""
    relative = _relative(row, best, temperature)
    return masses(relative) if relative.max() > reference.LOWEST_EXPONENT else np.zeros(len(row), np.int64)


def masses(relative: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The reference's `masses`, operation by operation, in place."""
    x = np.maximum(relative, reference.LOWEST_EXPONENT)
    whole = x * reference.LOG2_E
    whole += 0.5
    np.floor(whole, out=whole)
    value = whole * reference.LN2_HIGH
    x -= value
    np.multiply(whole, reference.LN2_LOW, out=value)
    x -= value
    value.fill(reference.EXP_TERMS[0])
    for term in reference.EXP_TERMS[1:]:
        value *= x
        value += term
    scale = whole.astype(np.int64)
    scale += reference.MASS_BITS + 1023
    scale <<= 52
    value *= scale.view(np.float64)
    value += 0.5
    np.floor(value, out=value)
    return value.astype(np.int64)


@reference.edit_logits.impl("cpu", refuse=_not_on_cpu)
def edit_logits(
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
    """See the reference; computes penalties where a token was there before."""
    edited = logits.to(torch.float32, copy=True)
    for i, table_row in enumerate(rows.tolist()):
        if not table_row:
            continue
        edited[i] += bias[table_row]
        there = np.flatnonzero(in_prompt[table_row].numpy() | (output_counts[table_row].numpy() != 0))
        if len(there):
            ids = torch.from_numpy(there)
            edited[i, ids] = reference.penalised(
                edited[i, ids],
                in_prompt[table_row, ids],
                output_counts[table_row, ids],
                repetition[i],
                frequency[i],
                presence[i],
            )
    return edited


@reference.mask_logits.impl("cpu", refuse=_not_on_cpu)
def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """See the reference; unpacks the rows that have a mask."""
    masked = logits.clone(memory_format=torch.contiguous_format)
    bits_of = {2: torch.int16, 4: torch.int32, 8: torch.int64}[masked.element_size()]  # NumPy knows no bfloat16
    minus_infinity = torch.tensor(-torch.inf, dtype=masked.dtype).view(bits_of).item()
    numbers, words = masked.view(bits_of).numpy(), np.ascontiguousarray(bitmask.numpy())
    for i, row in enumerate(rows.tolist()):
        if row >= 0:
            allowed = np.unpackbits(words[row].view(np.uint8), bitorder="little", count=logits.shape[1])
            np.copyto(numbers[i], minus_infinity, where=allowed == 0)
    return masked
