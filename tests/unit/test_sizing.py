"""From a budget of bytes to blocks per cache group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import CacheManager, GroupPool
from rorqual.cache.paging import Paging, Retention
from rorqual.cache.sizing import (
    blocks_beside,
    blocks_for_tokens,
    bytes_for_blocks,
    bytes_per_sequence,
    bytes_per_token,
    plan_blocks,
)
from rorqual.cache.spec import CacheGroup, KVSpec, RowPart, RowSpec, group_caches

BLOCK = 4


def group(num_layers: int = 1, window: int | None = None, num_kv_heads: int = 2, dtype=torch.float32) -> CacheGroup:
    return CacheGroup(KVSpec(num_kv_heads, 8, dtype, window), tuple(range(num_layers)))


def rows(tokens_per_row: int, retention: Retention | None = None, *, num_layers: int = 1, width: int = 8) -> CacheGroup:
    spec = RowSpec((RowPart(width, torch.float32), RowPart(4, torch.bfloat16)), tokens_per_row, retention)
    return CacheGroup(spec, tuple(range(num_layers)))


def plan(groups: list[CacheGroup], budget: int, **options) -> list[int]:
    return plan_blocks(groups, budget, **({"block_size": BLOCK, "max_num_seqs": 3, "max_chunk": 16} | options))


def size_of(groups: list[CacheGroup], num_blocks: list[int]) -> int:
    return bytes_for_blocks(groups, num_blocks, block_size=BLOCK)


CAP = 2 * 3 * (2 + 1) + 4 + 1
"""Blocks that twice three windows of eight tokens and a step of sixteen fill."""


def test_bytes_of_a_block_are_those_of_its_keys_and_values():
    assert KVSpec(2, 8, torch.float32).bytes_per_row() == 2 * 2 * 8 * 4
    assert KVSpec(2, 8, torch.bfloat16).bytes_per_row() == 2 * 2 * 8 * 2
    assert group(3, dtype=torch.bfloat16).bytes_per_block(16) == 3 * 64 * 16
    assert size_of([group(1), group(2)], [5, 7]) == 128 * BLOCK * (5 + 2 * 7)


def test_layers_are_grouped_by_what_they_keep():
    full, window = KVSpec(2, 8, torch.float32), KVSpec(2, 8, torch.float32, 4)
    assert group_caches([window, full, window, full, full]) == (
        CacheGroup(window, (0, 2)),
        CacheGroup(full, (1, 3, 4)),
    )


@pytest.mark.parametrize(
    ("tokens_per_row", "paging"),
    [(1, Paging(4)), (2, Paging(4, 2)), (4, Paging(4, 4)), (8, Paging(8, 8)), (6, Paging(12, 6))],
)
def test_blocks_hold_whole_rows(tokens_per_row, paging):
    made = rows(tokens_per_row, num_layers=3)
    assert made.paging(BLOCK) == paging
    assert made.bytes_per_block(BLOCK) == 3 * paging.rows * (8 * 4 + 4 * 2)


def test_memory_per_token_and_per_sequence():
    """A row of 40 bytes per token and layer, one for 4 and one for 8 tokens, a window of 6, a state of 8."""
    groups = [rows(1), rows(4, num_layers=2), rows(8), rows(1, Retention(5)), rows(1, Retention(4, 4), num_layers=3)]
    assert bytes_per_token(groups) == 40 * (1 + 2 / 4 + 1 / 8)
    assert bytes_per_sequence(groups, block_size=BLOCK) == 40 * BLOCK * (3 + 3 * 3)


def test_groups_that_keep_all_hold_equal_numbers_of_tokens():
    groups = [rows(1), rows(4), rows(8), rows(6), rows(1, Retention(5)), rows(8, Retention(16))]
    # Blocks of 8 and 12 tokens: one more for each of three sequences. Windows of 6 and 17 tokens, each twice.
    options = {"block_size": BLOCK, "max_num_seqs": 3, "max_chunk": 16}
    assert blocks_beside(groups, 120, **options) == [120, 120, 60 + 3, 40 + 3, 2 * 3 * 3 + 5, 2 * 3 * 4 + 3]
    assert blocks_beside(groups, 1, **options) == [1, 1, 1 + 3, 1 + 3, 1, 1 + 3]
    assert blocks_beside(groups, 0, **options) == [0] * 6


def test_one_group_fills_the_budget():
    per_block = group(3).bytes_per_block(BLOCK)
    assert plan([group(3)], 10 * per_block) == [10]
    assert plan([group(3)], 10 * per_block - 1) == [9]


@pytest.mark.parametrize("budget", [0, 1, 511])
def test_budget_below_one_block_gives_none(budget):
    assert plan([group()], budget) == [0]
    assert plan([group(), group(window=8)], budget) == [0, 0]


def test_groups_without_a_window_get_equal_numbers():
    groups = [group(1), group(3), group(1, num_kv_heads=5)]
    found = plan(groups, 100_000)
    assert len(set(found)) == 1
    assert size_of(groups, found) <= 100_000 < size_of(groups, [n + 1 for n in found])


def test_window_beside_a_full_group_is_capped_and_the_rest_goes_to_the_other():
    groups = [group(1), group(2, window=8)]
    found = plan(groups, size_of(groups, [200, CAP]))
    assert found == [200, CAP]


def test_window_below_its_cap_gets_what_the_full_group_gets():
    groups = [group(1), group(2, window=8)]
    assert plan(groups, size_of(groups, [CAP - 1, CAP - 1])) == [CAP - 1, CAP - 1]


def test_windows_alone_are_not_capped():
    groups = [group(1, window=8), group(1, window=64)]
    assert plan(groups, size_of(groups, [500, 500])) == [500, 500]


groups_of_a_model = st.lists(
    st.one_of(
        st.builds(group, st.integers(1, 5), st.sampled_from([None, None, 3, 8, 100]), st.integers(1, 8)),
        st.builds(
            rows,
            st.sampled_from([1, 2, 4, 8, 6]),
            st.sampled_from([None, None, Retention(7), Retention(0, 8), Retention(4, 4), Retention(6, 6)]),
            num_layers=st.integers(1, 3),
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(groups=groups_of_a_model, budget=st.integers(0, 2_000_000), max_num_seqs=st.integers(1, 20))
def test_plan_fits_and_one_block_more_would_not(groups, budget, max_num_seqs):
    found = plan(groups, budget, max_num_seqs=max_num_seqs)
    assert size_of(groups, found) <= budget
    options = {"block_size": BLOCK, "max_num_seqs": max_num_seqs, "max_chunk": 16}
    kept = [g.spec.retention is None or all(g.spec.retention for g in groups) for g in groups]
    tokens = {
        (n - max_num_seqs * (n > 0 and g.paging(BLOCK).block_tokens > BLOCK)) * g.paging(BLOCK).block_tokens // 24
        for g, n, keeps in zip(groups, found, kept, strict=True)
        if keeps
    }
    assert max(tokens) - min(tokens) <= 1, "equal numbers of tokens, but for what ends within a block"
    num_blocks = next(n for n in range(100_000) if blocks_beside(groups, n, **options) == found)
    while blocks_beside(groups, num_blocks, **options) == found:
        num_blocks += 1
    assert size_of(groups, blocks_beside(groups, num_blocks, **options)) > budget


@settings(max_examples=200, deadline=None)
@given(groups=groups_of_a_model, num_tokens=st.integers(1, 500), max_chunk=st.integers(1, 40))
def test_blocks_for_tokens_is_exactly_what_the_manager_asks_for(groups, num_tokens, max_chunk):
    needed = blocks_for_tokens(groups, num_tokens, block_size=BLOCK, max_chunk=max_chunk)
    num_tokens = max(num_tokens, 2)

    def why(num_blocks: list[int]) -> str | None:
        pools = [
            GroupPool(BlockPool(n), g.paging(BLOCK), g.spec.retention) for n, g in zip(num_blocks, groups, strict=True)
        ]
        return CacheManager(pools, block_size=BLOCK).why_never_fits(num_tokens, max_chunk=max_chunk)

    assert why(needed) is None
    for i in range(len(groups)):
        assert why([n - (i == j) for j, n in enumerate(needed)]) is not None
