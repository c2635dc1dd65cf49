"""Plans of `load_kv`: the published worked example, and every position against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rorqual.ops.load_plan import ZEROS, LoadSegment, end_of, paged_range, ring_range, segment_tensor, zero_fill


def rows_of(segments: list[LoadSegment]) -> dict[int, tuple[int, int]]:
    """row -> (block, slot) of every row that the segments name; none twice."""
    found: dict[int, tuple[int, int]] = {}
    for block, begin, end, row in segments:
        assert begin < end
        for i in range(end - begin):
            assert row + i not in found
            found[row + i] = (block, begin + i)
    return found


def test_published_example_of_pages():
    """Two sequences of 5 and 20 tokens in blocks of 8, tables [3] and [4, 6, 9]; then every second token of them."""
    first = paged_range([3], 0, 5, block_size=8)
    both = first + paged_range([4, 6, 9], 0, 20, block_size=8, first_row=end_of(first))
    assert [list(s) for s in both] == [[3, 0, 5, 0], [4, 0, 8, 5], [6, 0, 8, 13], [9, 0, 4, 21]]
    assert end_of(both) == 25
    first = paged_range([3], 0, 2, block_size=4)
    both = first + paged_range([4, 6, 9], 0, 10, block_size=4, first_row=end_of(first))
    assert [list(s) for s in both] == [[3, 0, 2, 0], [4, 0, 4, 2], [6, 0, 4, 6], [9, 0, 2, 10]]


def test_published_example_of_rings():
    """The last 4 tokens before position 8 in a ring of 7, after a sequence that has no history yet."""
    plan = zero_fill(4, block_size=7)
    plan += ring_range(2, 4, 8, ring_size=7, first_row=end_of(plan))
    assert segment_tensor(plan).tolist() == [[-1, 0, 4, 0], [2, 4, 7, 4], [2, 0, 1, 7]]
    assert end_of(plan) == 8


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 9), st.integers(0, 5))
def test_pages_hold_every_token_in_its_slot(start, length, block_size, first_row):
    table = [11 + 3 * i for i in range(-(-(start + length) // block_size))]
    plan = paged_range(table, start, start + length, block_size=block_size, first_row=first_row)
    want = {first_row + i: (table[t // block_size], t % block_size) for i, t in enumerate(range(start, start + length))}
    assert rows_of(plan) == want
    assert end_of(plan, first_row) == first_row + length
    assert len(plan) <= length // block_size + 2


@given(st.integers(0, 60), st.integers(1, 9), st.data())
def test_rings_hold_every_position_in_its_slot(start, ring_size, data):
    length = data.draw(st.integers(0, ring_size))
    plan = ring_range(5, start, start + length, ring_size=ring_size, first_row=2)
    assert rows_of(plan) == {2 + i: (5, (start + i) % ring_size) for i in range(length)}
    assert len(plan) <= 2


@given(st.integers(0, 40), st.integers(1, 9))
def test_zeros_come_in_segments_of_a_block(num_rows, block_size):
    plan = zero_fill(num_rows, block_size=block_size, first_row=3)
    assert sorted(rows_of(plan)) == list(range(3, 3 + num_rows))
    assert all(s.block == ZEROS and s.end - s.begin <= block_size for s in plan)


def test_no_segments_are_a_tensor_too():
    assert segment_tensor([]).shape == (0, 4)
    assert segment_tensor([]).dtype == torch.int32
    assert end_of([]) == 0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (lambda: ring_range(0, 3, 11, ring_size=7), "a ring of 7 slots cannot hold 8 positions: load the last 7"),
        (lambda: paged_range([1, 2], 0, 17, block_size=8), "stop must be at most 16, .* got 17"),
        (lambda: paged_range([1, -1], 0, 12, block_size=8), "block ids must be 0 or more, got -1"),
        (lambda: ring_range(-1, 0, 1, ring_size=7), "block ids must be 0 or more, got -1"),
        (lambda: paged_range([1], 3, 2, block_size=8), "need 0 <= start <= stop"),
        (lambda: zero_fill(-1, block_size=8), "need 0 <= start <= stop"),
        (lambda: zero_fill(1, block_size=0), "at least 1 slot, got 0"),
        (lambda: zero_fill(1, block_size=8, first_row=-2), "a first row of 0 or more"),
    ],
)
def test_mistakes_are_one_sentence(plan, message):
    with pytest.raises(ValueError, match=message):
        plan()
