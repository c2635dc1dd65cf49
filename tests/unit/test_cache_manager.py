"""Block tables over cache groups: windows, prefix hits that every group can serve, and all-or-nothing holding."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import PASSED, CacheManager, GroupPool
from rorqual.cache.paging import Paging, Retention
from rorqual.sequence import Sequence

BLOCK = 4


def make(*groups: tuple[int, int | None], **options) -> CacheManager:
    """One group per (number of blocks, window)."""
    pools = [
        GroupPool(BlockPool(num_blocks), Paging(BLOCK), None if window is None else Retention(window - 1))
        for num_blocks, window in groups
    ]
    return CacheManager(pools, **({"block_size": BLOCK} | options))


def sequence(num_tokens: int, **options) -> Sequence:
    """Tokens 0, 1, 2, ...: equal prefixes for all."""
    return Sequence(0, list(range(num_tokens)), num_tokens, num_tokens + 20, **options)


def admit(cache: CacheManager, seq: Sequence, *, stop: int | None = None, headroom: int = 0) -> bool:
    return cache.admit(seq, cache.find_prefix(seq), stop=stop or len(seq.token_ids), headroom=headroom)


def compute(cache: CacheManager, seq: Sequence, stop: int) -> None:
    """As the scheduler does for a chunk that ends at `stop`."""
    assert cache.reserve(seq, stop)
    seq.num_computed_tokens = stop
    cache.publish(seq)
    cache.check([seq])


def free(cache: CacheManager) -> list[int]:
    return [group.pool.num_free for group in cache.groups]


# --- windows


@pytest.mark.parametrize(
    ("window", "num_computed", "first"),
    [
        (None, 100, 0), (4, 0, 0), (4, 3, 0), (4, 6, 0), (4, 7, 1), (4, 10, 1), (4, 11, 2),
        (1, 3, 0), (1, 4, 1), (5, 7, 0), (5, 8, 1),
    ],
)  # fmt: skip
def test_first_visible_block_holds_the_first_key_of_the_next_query(window, num_computed, first):
    cache = make((8, window))
    assert cache.groups[0].first_block(num_computed) == first
    seen = [i for i in range(num_computed + 1) if window is None or num_computed - i < window]
    assert seen[0] // BLOCK == first


def test_blocks_are_given_back_as_the_window_passes():
    cache = make((8, 4))
    seq = sequence(20)
    assert admit(cache, seq, stop=BLOCK)
    (table,) = seq.block_tables
    passed = []
    for stop in range(1, 21):
        compute(cache, seq, stop)
        passed.append(list(table).count(PASSED))
        assert list(table[: passed[-1]]) == [PASSED] * passed[-1], "only leading blocks are passed"
        assert free(cache) == [8 - len(table) + passed[-1]]
    # The query at position p sees p-3 to p: block 0 goes when p = 7 is next, block 1 when p = 11 is.
    assert passed == [0] * 6 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 2
    cache.release(seq)
    assert free(cache) == [8]


def test_window_that_passes_many_blocks_at_once_gives_them_all_back():
    cache = make((8, 4))
    seq = sequence(30)
    assert admit(cache, seq)
    compute(cache, seq, 30)
    assert list(seq.block_tables[0]).count(PASSED) == 6
    assert free(cache) == [8 - 2]
    cache.release(seq)
    cache.check([])


def test_window_group_beside_a_full_one_holds_less():
    cache = make((8, None), (8, 4))
    seq = sequence(24)
    assert admit(cache, seq, stop=8)
    assert [len(table) for table in seq.block_tables] == [6, 2], "all known tokens, and those up to the chunk's end"
    for stop in (8, 16, 24):
        compute(cache, seq, stop)
    assert list(seq.block_tables[0]).count(PASSED) == 0
    assert list(seq.block_tables[1])[:5] == [PASSED] * 5
    assert free(cache) == [2, 7]


# --- prefix hits


def computed(cache: CacheManager, num_tokens: int, **options) -> Sequence:
    seq = sequence(num_tokens, **options)
    assert admit(cache, seq, stop=BLOCK)
    for stop in range(1, num_tokens + 1):
        compute(cache, seq, stop)
    return seq


@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (40, 4)])
def test_pc2_hit_leaves_at_least_one_token_to_compute(length, hit):
    cache = make((32, None))
    cache.release(computed(cache, 16))
    assert [len(blocks) for blocks in cache.find_prefix(sequence(length)).blocks] == [hit]


def test_find_prefix_takes_nothing():
    cache = make((32, None))
    cache.release(computed(cache, 16))
    cache.find_prefix(sequence(40))
    cache.check([])
    assert free(cache) == [32]


def test_hit_is_held_and_counted_as_computed():
    cache = make((8, None))
    first = computed(cache, 9)
    second = sequence(11)
    assert admit(cache, second)
    assert second.num_computed_tokens == 8
    assert second.num_published_tokens == 8
    assert second.block_tables[0][:2] == first.block_tables[0][:2]
    cache.check([first, second])
    assert free(cache) == [8 - 4]


def test_pc7_hits_stay_within_a_salt():
    cache = make((32, None))
    cache.release(computed(cache, 16, cache_salt="a"))
    assert len(cache.find_prefix(sequence(16, cache_salt="a")).blocks[0]) == 3
    assert cache.find_prefix(sequence(16, cache_salt="b")).blocks == [[]]
    assert cache.find_prefix(sequence(16)).blocks == [[]]


def test_sequence_may_decline_to_read_the_cache_and_still_fills_it():
    cache = make((32, None))
    cache.release(computed(cache, 16, reads_prefix_cache=False))
    assert cache.find_prefix(sequence(16, reads_prefix_cache=False)).blocks == [[]]
    assert len(cache.find_prefix(sequence(16)).blocks[0]) == 3


def test_without_prefix_caching_nothing_is_found_or_named():
    cache = make((32, None), enable_prefix_caching=False)
    seq = computed(cache, 16)
    assert seq.prefix == []
    cache.release(seq)
    assert cache.find_prefix(sequence(16)).blocks == [[]]


def test_forgotten_prefixes_are_not_found():
    cache = make((32, None), (32, 4))
    cache.release(computed(cache, 16))
    cache.forget_prefixes()
    assert cache.find_prefix(sequence(16)).blocks == [[], []]


def test_hit_ends_at_the_first_block_that_a_full_group_lacks():
    cache = make((5, None))
    cache.release(computed(cache, 20))
    taken = cache.groups[0].pool.take(2)  # the least recently freed: the sequence's last two
    assert [len(blocks) for blocks in cache.find_prefix(sequence(20)).blocks] == [3]
    cache.groups[0].pool.give_back(taken)


def test_pc6_window_group_serves_a_hit_with_the_blocks_that_are_still_seen():
    cache = make((8, None), (8, 4))
    cache.release(computed(cache, 17))
    full, window = cache.find_prefix(sequence(17)).blocks
    assert len(full) == len(window) == 4
    assert PASSED not in full
    assert window[:3] == [PASSED] * 3, "the query at position 16 sees 13 to 16: block 3, and what it writes"
    assert window[3] != PASSED
    seq = sequence(17)
    assert admit(cache, seq)
    assert list(seq.block_tables[1][:3]) == [PASSED] * 3
    cache.check([seq])
    compute(cache, seq, 17)


def test_pc6_hit_needs_the_visible_blocks_of_every_group():
    """The window group has lost the last block: the hit shrinks until its visible blocks are there too."""
    cache = make((8, None), (8, 4))
    first = computed(cache, 17)
    names = list(first.prefix)
    cache.release(first)
    window_pool = cache.groups[1].pool
    held = window_pool.take(0, [window_pool.find(names[2])])
    while window_pool.find(names[3]) is not None:
        held += window_pool.take(1)
    full, window = cache.find_prefix(sequence(17)).blocks
    assert len(full) == len(window) == 3
    assert window == [PASSED, PASSED, held[0]]
    window_pool.give_back(held)


def test_pc6_no_hit_where_a_window_group_has_nothing_left():
    cache = make((8, None), (8, 4))
    cache.release(computed(cache, 17))
    cache.groups[1].pool.forget()
    assert cache.find_prefix(sequence(17)).blocks == [[], []]


def test_pc6_no_hit_where_the_full_group_has_nothing_left():
    cache = make((8, None), (8, 4))
    cache.release(computed(cache, 17))
    cache.groups[0].pool.forget()
    assert cache.find_prefix(sequence(17)).blocks == [[], []]


# --- all or nothing


def test_admission_holds_blocks_in_all_groups_or_in_none():
    cache = make((8, None), (1, 16))
    seq = sequence(8)
    assert not admit(cache, seq)
    assert free(cache) == [8, 1]
    assert seq.block_tables == []
    cache.check([])


@pytest.mark.parametrize(("headroom", "fits"), [(0, True), (1, True), (2, False)])
def test_headroom_stays_free(headroom, fits):
    cache = make((3, None))
    assert admit(cache, sequence(8), headroom=headroom) is fits
    assert free(cache) == [1 if fits else 3]


def test_cached_blocks_that_nobody_holds_count_against_the_free_ones():
    """Three blocks, two of them a free prefix: with one new block and one for headroom it is one too few."""
    cache = make((3, None))
    cache.release(computed(cache, 9))
    assert not admit(cache, sequence(9), headroom=1)
    assert admit(cache, sequence(9))
    assert free(cache) == [0]


def test_reservation_holds_blocks_in_all_groups_or_changes_nothing():
    cache = make((8, None), (2, 16))
    seq = sequence(8)
    assert admit(cache, seq)
    before = [list(table) for table in seq.block_tables]
    assert not cache.reserve(seq, 9)
    assert [list(table) for table in seq.block_tables] == before
    assert free(cache) == [6, 0]
    cache.check([seq])


def test_reservation_within_held_blocks_takes_none():
    cache = make((8, None))
    seq = sequence(5)
    assert admit(cache, seq)
    assert cache.reserve(seq, 8)
    assert free(cache) == [6]
    assert cache.reserve(seq, 9)
    assert free(cache) == [5]


def test_release_starts_a_sequence_over():
    cache = make((8, None), (8, 4))
    seq = computed(cache, 10)
    seq.draft_token_ids = [1]
    cache.release(seq)
    assert (seq.block_tables, seq.num_computed_tokens, seq.num_published_tokens) == ([], 0, 0)
    assert seq.draft_token_ids == []
    assert len(seq.token_ids) == 10
    assert free(cache) == [8, 8]


def test_usage_is_that_of_the_fullest_group():
    cache = make((8, None), (4, 64))
    assert cache.usage() == 0
    assert admit(cache, sequence(8))
    assert cache.usage() == 0.5


# --- what never fits


@pytest.mark.parametrize(
    ("groups", "num_tokens", "max_chunk", "needed"),
    [
        ([(3, None)], 13, 8, None),  # the last token needs no slot
        ([(3, None)], 14, 8, 4),
        ([(3, None)], 17, 8, 4),
        ([(3, None)], 18, 8, 5),
        ([(4, 4)], 1000, 8, None),  # window and chunk cover twelve tokens: three blocks, and one more where they begin
        ([(3, 4)], 1000, 8, 4),
        ([(3, 4)], 13, 8, None),  # a short sequence needs no more than its length
        ([(3, 5)], 1000, 8, 5),
        ([(250, None), (4, 4)], 1000, 8, None),
        ([(249, None), (4, 4)], 1000, 8, 250),
        ([(250, None), (3, 4)], 1000, 8, 4),
    ],
)
def test_why_never_fits_says_how_many_blocks(groups, num_tokens, max_chunk, needed):
    why = make(*groups).why_never_fits(num_tokens, max_chunk=max_chunk)
    if needed is None:
        assert why is None
    else:
        assert why is not None
        assert f"{num_tokens} tokens need {needed} KV blocks of 4 tokens" in why


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 8])
def test_what_fits_by_the_count_fits_in_fact(window, chunk):
    """A sequence alone, in chunks of any alignment, never needs more blocks than why_never_fits counts."""
    longest = 60
    needed = next(n for n in range(1, 40) if make((n, window)).why_never_fits(longest, max_chunk=chunk) is None)
    for first in range(1, chunk + 1):
        cache = make((needed, window))
        seq = sequence(longest - 1)
        assert admit(cache, seq, stop=first)
        stop = first
        while stop < len(seq.token_ids):
            compute(cache, seq, stop)
            stop = min(stop + chunk, len(seq.token_ids))
        compute(cache, seq, stop)


# --- groups of several kinds


def make_kinds(*groups: tuple[Paging, Retention | None], num_blocks: int = 40) -> CacheManager:
    return CacheManager([GroupPool(BlockPool(num_blocks), *group) for group in groups], block_size=BLOCK)


ENTRIES, STATES = (Paging(8, 8), None), (Paging(BLOCK), Retention(0, 8))
OVERLAPPED = (Paging(BLOCK, 4), None), (Paging(BLOCK), Retention(4, 4))


def held(table) -> list[int]:
    return [i for i, block in enumerate(table) if block != PASSED]


def test_tables_are_as_long_as_each_groups_blocks():
    cache = make_kinds((Paging(BLOCK), None), ENTRIES, (Paging(12, 6), None))
    seq = sequence(13)
    assert admit(cache, seq)
    assert [len(table) for table in seq.block_tables] == [4, 2, 2]
    assert cache.reserve(seq, 16)
    assert free(cache) == [36, 38, 38]
    assert cache.reserve(seq, 17)
    assert [len(table) for table in seq.block_tables] == [5, 3, 2]


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(0, 8), {7: [0, 1], 8: [2], 9: [2], 15: [2, 3], 16: [4]}),
        (Retention(4, 4), {7: [0, 1], 8: [1, 2], 11: [1, 2], 12: [2, 3], 16: [3, 4]}),
        (Retention(6, 6), {11: [0, 1, 2], 12: [1, 2, 3], 17: [1, 2, 3, 4], 18: [3, 4]}),
    ],
)
def test_blocks_are_given_back_by_what_the_next_query_or_a_later_one_reads(retention, kept):
    cache = make_kinds((Paging(BLOCK), retention), (Paging(BLOCK), None))
    seq = sequence(30)
    assert admit(cache, seq, stop=BLOCK)
    for stop in range(1, 20):
        compute(cache, seq, stop)
        assert cache.reserve(seq, stop + 1)
        if stop in kept:
            assert held(seq.block_tables[0]) == kept[stop]


def test_has_news_wherever_publishing_does_something():
    groups = [
        (Paging(BLOCK), None),
        ENTRIES,
        STATES,
        *OVERLAPPED,
        (Paging(BLOCK), Retention(5)),
        (Paging(BLOCK), Retention(6, 6)),
    ]
    for caching in (True, False):
        cache = CacheManager(
            [GroupPool(BlockPool(40), *group) for group in groups], block_size=BLOCK, enable_prefix_caching=caching
        )
        seq = sequence(50)
        assert admit(cache, seq)
        for count in range(1, 50):
            seq.num_computed_tokens = count
            before = seq.num_published_tokens, [list(table) for table in seq.block_tables]
            cache.publish(seq)
            changed = before != (seq.num_published_tokens, [list(table) for table in seq.block_tables])
            assert cache.has_news_at(np.array([count]))[0] or not changed, count


@pytest.mark.parametrize("length", range(2, 34))
def test_hits_end_at_any_block_where_every_group_can_go_on(length):
    """An entry of 8 tokens whose window is not full is made of states, which are found block by block."""
    cache = make_kinds((Paging(BLOCK), None), ENTRIES, STATES, *OVERLAPPED)
    first = computed(cache, 32)
    cache.release(first)
    found = cache.find_prefix(sequence(length))
    full = (length - 1) // BLOCK * BLOCK
    assert found.num_tokens == full
    assert [len(blocks) for blocks in found.blocks] == [full // 4, full // 8, full // 4, full // 4, full // 4]
    assert held(found.blocks[2]) == list(range(full // 8 * 2, full // 4))
    assert held(found.blocks[4]) == list(range(max(0, full // 4 - 1), full // 4))
    seq = sequence(length)
    assert admit(cache, seq)
    cache.check([seq])


@pytest.mark.parametrize(("length", "hit"), [(5, 4), (9, 4), (12, 4), (13, 12), (17, 16), (21, 16), (25, 24)])
def test_no_hit_ends_behind_a_row_in_a_block_that_is_not_full(length, hit):
    """Rows of 6 tokens, two to a block: at 8 tokens the first row is there, in a block that nobody can share."""
    cache = make_kinds((Paging(BLOCK), None), (Paging(12, 6), None))
    cache.release(computed(cache, 30))
    assert cache.find_prefix(sequence(length)).num_tokens == hit


def test_a_long_block_is_found_once_it_is_full():
    cache = make_kinds(ENTRIES)
    seq = computed(cache, 12)
    names = seq.prefix
    assert [cache.groups[0].pool.find(name) is not None for name in names] == [False, True, False]
    compute(cache, seq, 12)
    seq.token_ids += range(12, 17)
    compute(cache, seq, 16)
    assert cache.groups[0].pool.find(seq.prefix[3]) == seq.block_tables[0][1]


def test_states_that_are_lost_shorten_the_hit_to_where_none_are_needed():
    """Without states a prefix ends where a window does: there the next entry begins anew."""
    cache = make_kinds((Paging(BLOCK), None), ENTRIES, STATES)
    cache.release(computed(cache, 32))
    cache.groups[2].pool.forget()
    assert [cache.find_prefix(sequence(n)).num_tokens for n in (31, 32, 33, 29, 9, 8)] == [24, 24, 32, 24, 8, 0]


def test_a_rejected_draft_takes_nothing_back_that_is_still_read():
    """Computed up to 18 with drafts, of which two are wrong: the states of the window that 16 began stay."""
    cache = make_kinds((Paging(BLOCK), None), *OVERLAPPED, STATES)
    seq = computed(cache, 15)
    seq.token_ids.append(15)
    assert cache.reserve(seq, 18)
    seq.num_computed_tokens = 15
    cache.publish(seq)
    assert held(seq.block_tables[2]) == [2, 3, 4]
    assert held(seq.block_tables[3]) == [2, 3, 4]
    cache.check([seq])
