"""Which cache slots `load_kv` reads into which rows: pure arithmetic on the host, checked before the device sees it.

A plan is a list of segments whose rows follow one another; each function starts at row `first_row` and the next one
goes on at `end_of` the segments so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

ZEROS = -1
"""Block id of a segment that reads nothing and writes zeros."""


class LoadSegment(NamedTuple):
    """Slots [begin, end) of one block go to the rows from `row` on."""

    block: int
    begin: int
    end: int
    row: int


def zero_fill(num_rows: int, *, block_size: int, first_row: int = 0) -> list[LoadSegment]:
    """Rows of zeros, in segments of at most one block's length."""
    _check(0, num_rows, block_size, first_row)
    return [
        LoadSegment(ZEROS, 0, min(block_size, num_rows - done), first_row + done)
        for done in range(0, num_rows, block_size)
    ]


def paged_range(
    block_table: Sequence[int], start: int, stop: int, *, block_size: int, first_row: int = 0
) -> list[LoadSegment]:
    """Tokens [start, stop) of a sequence whose token t is slot t % block_size of block_table[t // block_size].

    Raises ValueError for a range that the table does not cover.
    """
    _check(start, stop, block_size, first_row)
    if stop > len(block_table) * block_size:
        raise ValueError(
            f"stop must be at most {len(block_table) * block_size}, what a table of {len(block_table)} blocks of "
            f"{block_size} holds, got {stop}: pass the whole block table"
        )
    return [
        _segment(block_table[at // block_size], at % block_size, length, first_row + at - start)
        for at, length in _pieces(start, stop, block_size)
    ]


def ring_range(block: int, start: int, stop: int, *, ring_size: int, first_row: int = 0) -> list[LoadSegment]:
    """Positions [start, stop) of a ring kept in one block: position p is slot p % ring_size.

    Raises ValueError for more positions than the ring holds: the older ones are overwritten.
    """
    _check(start, stop, ring_size, first_row)
    if stop - start > ring_size:
        raise ValueError(f"a ring of {ring_size} slots cannot hold {stop - start} positions: load the last {ring_size}")
    return [
        _segment(block, at % ring_size, length, first_row + at - start)
        for at, length in _pieces(start, stop, ring_size)
    ]


def end_of(segments: Sequence[LoadSegment], first_row: int = 0) -> int:
    """The row behind the last one that the segments write; `first_row` if there are none."""
    return max((s.row + s.end - s.begin for s in segments), default=first_row)


def segment_tensor(segments: Sequence[LoadSegment], *, device: torch.device | None = None) -> torch.Tensor:
    """int32 [n, 4] as `load_kv` takes them."""
    return torch.tensor(segments, dtype=torch.int32, device=device).reshape(-1, 4)


def _pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """(start, length) of each piece of [start, stop), cut at the multiples of size."""
    cuts = [start, *range(start - start % size + size, stop, size), stop] if stop > start else []
    return [(low, high - low) for low, high in itertools.pairwise(cuts)]


def _segment(block: int, begin: int, length: int, row: int) -> LoadSegment:
    if block < 0:
        raise ValueError(f"block ids must be 0 or more, got {block}: rows without a block come from zero_fill")
    return LoadSegment(block, begin, begin + length, row)


def _check(start: int, stop: int, size: int, first_row: int) -> None:
    if size < 1:
        raise ValueError(f"a block or ring must have at least 1 slot, got {size}")
    if not 0 <= start <= stop or first_row < 0:
        raise ValueError(f"need 0 <= start <= stop and a first row of 0 or more, got [{start}, {stop}) at {first_row}")
