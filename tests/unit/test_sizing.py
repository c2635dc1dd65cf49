"""From a budget of bytes to blocks per cache group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import CacheManager, GroupPool
from rorqual.cache.sizing import blocks_for_tokens, bytes_for_blocks, plan_blocks
from rorqual.cache.spec import CacheGroup, KVSpec, group_caches

BLOCK = 4


def group(num_layers: int = 1, window: int | None = None, num_kv_heads: int = 2, dtype=torch.float32) -> CacheGroup:
    return CacheGroup(KVSpec(num_kv_heads, 8, dtype, window), tuple(range(num_layers)))


def plan(groups: list[CacheGroup], budget: int, **options) -> list[int]:
    return plan_blocks(groups, budget, **({"block_size": BLOCK, "max_num_seqs": 3, "max_chunk": 16} | options))


def size_of(groups: list[CacheGroup], num_blocks: list[int]) -> int:
    return bytes_for_blocks(groups, num_blocks, block_size=BLOCK)


CAP = 3 * (2 + 1) + 4 + 1
"""Blocks that three windows of eight tokens and a step of sixteen fill."""


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
    st.builds(group, st.integers(1, 5), st.sampled_from([None, None, 3, 8, 100]), st.integers(1, 8)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(groups=groups_of_a_model, budget=st.integers(0, 2_000_000), max_num_seqs=st.integers(1, 20))
def test_plan_fits_and_one_block_more_would_not(groups, budget, max_num_seqs):
    found = plan(groups, budget, max_num_seqs=max_num_seqs)
    assert size_of(groups, found) <= budget
    windows = [g.spec.sliding_window for g in groups]
    growing = [window is None or None not in windows for window in windows]
    most = max(found)
    more = [n + 1 if grows or n == most else n for n, grows in zip(found, growing, strict=True)]
    uncapped = [n for n, grows in zip(found, growing, strict=True) if grows]
    assert len(set(uncapped)) == 1
    assert size_of(groups, more) > budget


@settings(max_examples=200, deadline=None)
@given(groups=groups_of_a_model, num_tokens=st.integers(1, 500), max_chunk=st.integers(1, 40))
def test_blocks_for_tokens_is_exactly_what_the_manager_asks_for(groups, num_tokens, max_chunk):
    needed = blocks_for_tokens(groups, num_tokens, block_size=BLOCK, max_chunk=max_chunk)
    num_tokens = max(num_tokens, 2)

    def why(num_blocks: list[int]) -> str | None:
        pools = [GroupPool(BlockPool(n), g.spec.sliding_window) for n, g in zip(num_blocks, groups, strict=True)]
        return CacheManager(pools, block_size=BLOCK).why_never_fits(num_tokens, max_chunk=max_chunk)

    assert why(needed) is None
    for i in range(len(groups)):
        assert why([n - (i == j) for j, n in enumerate(needed)]) is not None
