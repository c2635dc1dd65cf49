"""Sampling on CPU: row by row in NumPy, whose unsigned shifts, argmax and partition are vectorised; torch's are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rorqual.ops import sample as reference
from rorqual.ops.sample import FMIX32, LOWBIAS32, Candidates, RowMax

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

SHORT_ROW = 4096
"""Below this the reference, which takes all rows at once, is quicker."""
_LOWEST_SCORE = -26.5
"""Noise lies in [-3.14, 22.88]: a token whose scaled logit is further than that below the best one's cannot win."""
_SLACK = 1 - 1e-4
"""More than float32 loses on the way to a score's upper bound."""


def _not_on_cpu(logits: torch.Tensor, *_args: Any, **_options: Any) -> str | None:
    return None if logits.device.type == "cpu" else f"takes CPU tensors, got one on {logits.device}"


def _not_long_rows(
    logits: torch.Tensor, *args: Any, token_ids: torch.Tensor | None = None, **_options: Any
) -> str | None:
    if logits.shape[1] < SHORT_ROW:
        return f"takes rows of {SHORT_ROW} logits or more, got {logits.shape[1]}"
    if token_ids is not None:
        return "takes whole rows, got token_ids"
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


def _draw(logits: Floats, temperature: float, key: tuple[int, int], all_ids: Words) -> int:
    """The reference's draw from one row. Float32 finds the few tokens that can win, float64 decides between them.

    With w = exp((logit - max) / T), the score is log(w / E), where E = -log1p(-v) >= v: so w / v is an upper bound that
    costs no logarithm, and whoever stays below the true w / E of one token has lost.
    """
    inverse = np.float32(max(1 / temperature, 1e-44))  # keeps -inf * inverse from being NaN
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) * inverse
    near = scaled >= _LOWEST_SCORE
    if np.count_nonzero(near) * 8 < len(scaled):  # a confident model: most of the vocabulary needs no noise
        ids = np.flatnonzero(near).astype(np.uint32)
        scaled = scaled[ids]
    else:
        ids = all_ids
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
    scores = _exact_scores(logits[ids[finalists]], temperature, bits[finalists])
    return int(ids[finalists[scores.argmax()]])  # finalists ascend, argmax takes the first: ties go to the lowest id


@reference.gumbel_argmax.impl("cpu", refuse=_not_long_rows)
def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """See the reference; takes whole rows only."""
    assert token_ids is None
    all_ids = np.arange(logits.shape[1], dtype=np.uint32)
    rows = zip(_rows(logits), temperature.tolist(), keys.tolist(), strict=True)
    return torch.tensor([_draw(row, t, (key[0], key[1]), all_ids) for row, t, key in rows], dtype=torch.int64)


@reference.row_max.impl("cpu", refuse=_not_on_cpu)
def row_max(logits: torch.Tensor) -> RowMax:
    """See the reference."""
    rows = _rows(logits)
    ids = rows.argmax(1)
    return RowMax(torch.from_numpy(rows[np.arange(len(rows)), ids]), torch.from_numpy(ids))


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


@reference.total_mass.impl("cpu", refuse=_not_on_cpu)
def total_mass(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """See the reference; one row at a time, in place, stays in the core's cache."""
    masses = torch.empty_like(temperature)
    for row, t, mass in zip(logits, temperature, masses, strict=True):
        x = row.to(torch.float64, copy=True)
        x -= x.amax()
        x /= t
        mass.copy_(x.exp_().sum())
    return masses


@reference.apply_penalties.impl("cpu", refuse=_not_on_cpu)
def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """See the reference; computes where a token was there before, copies elsewhere."""
    penalised = logits.clone()
    for row in range(len(logits)):
        there = np.flatnonzero(in_prompt[row].numpy() | (output_counts[row].numpy() != 0))
        ids, one = torch.from_numpy(there)[None], slice(row, row + 1)
        penalised[one].scatter_(
            1,
            ids,
            reference.apply_penalties.reference(
                logits[one].gather(1, ids),
                in_prompt[one].gather(1, ids),
                output_counts[one].gather(1, ids),
                repetition=repetition[one],
                frequency=frequency[one],
                presence=presence[one],
            ),
        )
    return penalised
