"""Blocks: counts, free list and cached prefixes, by plain examples and by a state machine that models all three."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import CacheManager, GroupPool
from rorqual.cache.paging import Paging
from rorqual.cache.prefix import PrefixIndex, PrefixNode
from rorqual.sequence import Sequence

BLOCK = 4


def make_cache(num_blocks: int = 8) -> tuple[CacheManager, BlockPool]:
    pool = BlockPool(num_blocks)
    return CacheManager([GroupPool(pool, Paging(BLOCK))], block_size=BLOCK), pool


def admitted(cache: CacheManager, token_ids: list[int]) -> Sequence:
    """A sequence that holds blocks for its tokens, all of them computed and published."""
    seq = Sequence(0, list(token_ids), len(token_ids), len(token_ids) + 8)
    assert cache.admit(seq, cache.find_prefix(seq), stop=len(token_ids), headroom=0)
    seq.num_computed_tokens = len(token_ids)
    cache.publish(seq)
    return seq


@pytest.mark.parametrize(("length", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_pc8_sequence_holds_the_blocks_that_cover_it(length, num_blocks):
    cache, pool = make_cache()
    seq = admitted(cache, list(range(length)))
    assert len(seq.block_tables[0]) == num_blocks
    assert pool.num_free == 8 - num_blocks
    cache.check([seq])
    assert len(seq.prefix) == length // BLOCK, "only full blocks have names"
    for i, node in enumerate(seq.prefix):
        assert len(node.tokens) == BLOCK * 8, "all of a full block's tokens are in its name, the last block's too"
        assert pool.find(node) == seq.block_tables[0][i]
    cache.release(seq)
    cache.check([])
    assert pool.num_free == 8
    assert seq.block_tables == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_pc8_shared_prefix_is_released_in_either_order(order):
    cache, pool = make_cache()
    seqs = [admitted(cache, [1, 2, 3, 4, 5, 6, 7, 8, 9]), admitted(cache, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11])]
    assert seqs[0].block_tables[0][:2] == seqs[1].block_tables[0][:2]
    assert pool.num_free == 8 - 4
    cache.check(seqs)
    cache.release(seqs[order[0]])
    cache.check([seqs[order[1]]])
    assert pool.num_free == 8 - 3, "the shared blocks are still held"
    cache.release(seqs[order[1]])
    cache.check([])
    assert pool.num_free == 8
    assert len(set(admitted(cache, list(range(100, 132))).block_tables[0])) == 8, "no block is free twice"


def test_pc8_block_given_back_twice_is_noticed_and_counts_stay():
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="given back more often than taken"):
        pool.give_back(blocks)
    pool.check([])


def test_fresh_blocks_are_held_once():
    pool = BlockPool(4)
    first = pool.take(2)
    pool.check([first])
    both = pool.take(1, shared=first)
    assert both[:2] == first
    pool.check([first, both])
    pool.give_back(first)
    pool.check([both])


def test_all_or_nothing():
    pool = BlockPool(3)
    held = pool.take(2)
    assert pool.take(2) is None
    assert pool.take(2, shared=held) is None
    pool.check([held])
    assert pool.take(0) == []
    assert pool.take(1, shared=held) is not None


def test_cached_blocks_that_are_free_count_as_taken_when_revived():
    """Two free blocks, one of them cached: sharing that one leaves room for one more, not for two."""
    pool, node = BlockPool(2), PrefixIndex().root("")
    (block,) = pool.take(1)
    pool.publish(block, node)
    pool.give_back([block])
    assert pool.num_free == 2
    assert not pool.can_take(2, [block])
    assert pool.take(2, [block]) is None
    assert pool.can_take(1, [block])
    taken = pool.take(1, [block])
    assert taken[0] == block != taken[1]
    pool.check([taken])


def test_prefix_outlives_its_continuations():
    """Blocks are handed out again least recently freed first, and a sequence frees its last block first."""
    pool, index = BlockPool(3), PrefixIndex()
    blocks = pool.take(3)
    nodes = [index.root(""), *(index.root(str(i)) for i in (1, 2))]
    for block, node in zip(blocks, nodes, strict=True):
        pool.publish(block, node)
    pool.give_back(blocks)
    assert pool.take(1) == [blocks[2]]
    assert [pool.find(node) for node in nodes] == [blocks[0], blocks[1], None]
    assert pool.take(1) == [blocks[1]]
    assert [pool.find(node) for node in nodes] == [blocks[0], None, None]


def test_blocks_without_a_name_are_reused_before_new_ones_and_cached_ones_last():
    pool, index = BlockPool(5), PrefixIndex()
    blocks = pool.take(3)
    pool.publish(blocks[0], index.root("kept"))
    pool.give_back(blocks)
    assert pool.take(2) == [blocks[1], blocks[2]], "the last freed first"
    assert pool.take(2) == [3, 4], "never used"
    assert pool.find(index.root("kept")) == blocks[0]
    assert pool.take(1) == [blocks[0]]


def test_a_stream_of_requests_without_a_prefix_cache_touches_few_blocks():
    pool, touched = BlockPool(100), set()
    for _ in range(50):
        blocks = pool.take(4)
        touched.update(blocks)
        pool.give_back(blocks)
    assert len(touched) == 4


def test_reused_block_is_no_longer_found_under_its_old_name():
    pool, index = BlockPool(1), PrefixIndex()
    old, new = index.root("old"), index.root("new")
    (block,) = pool.take(1)
    pool.publish(block, old)
    pool.give_back([block])
    (again,) = pool.take(1)
    assert again == block
    assert pool.find(old) is None
    pool.publish(again, new)
    assert pool.find(new) == block
    assert pool.find(old) is None
    pool.check([[again]])


def test_first_block_under_a_name_wins():
    pool, node = BlockPool(2), PrefixIndex().root("")
    first, second = pool.take(2)
    pool.publish(first, node)
    pool.publish(second, node)
    assert pool.find(node) == first
    pool.give_back([second])
    assert pool.find(node) == first
    pool.check([[first]])


def test_forgetting_keeps_what_is_held():
    pool, node = BlockPool(2), PrefixIndex().root("")
    blocks = pool.take(1)
    pool.publish(blocks[0], node)
    pool.forget()
    assert pool.find(node) is None
    pool.check([blocks])


@pytest.mark.parametrize("break_it", ["count", "free_twice", "maps"])
def test_check_notices(break_it):
    pool, node = BlockPool(3), PrefixIndex().root("")
    blocks = pool.take(1)
    pool.publish(blocks[0], node)
    if break_it == "count":
        pool._refs[blocks[0]] = 2
    elif break_it == "free_twice":
        pool._blank.append(blocks[0])
    else:
        del pool._node_of[blocks[0]]
    with pytest.raises(AssertionError, match="disagree"):
        pool.check([blocks])


class BlockPoolMachine(RuleBasedStateMachine):
    """Eight blocks, any order of calls; modelled by a list of tables, the free blocks in the order in which they were
    freed, the blocks that never were used, and blocks by name."""

    SIZE = 8

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.SIZE)
        self.tables: list[list[int]] = []
        self.free: list[int] = []
        self.unused = list(range(self.SIZE))
        self.where: dict[PrefixNode, int] = {}
        index = PrefixIndex()
        self.nodes = [index.root(str(i)) for i in range(10)]

    def _taken(self, num_new: int, shared: list[int]) -> list[int] | None:
        """What `take` must return; changes the model as it does."""
        revived = [block for block in shared if block in self.free]
        if num_new + len(revived) > len(self.free) + len(self.unused):
            return None
        self.free = [block for block in self.free if block not in revived]
        named = set(self.where.values())
        blank = [block for block in self.free if block not in named]
        fresh = [*blank[::-1], *self.unused, *(block for block in self.free if block in named)][:num_new]
        self.free, self.unused = ([block for block in each if block not in fresh] for each in (self.free, self.unused))
        self.where = {node: block for node, block in self.where.items() if block not in fresh}
        return shared + fresh

    @rule(num_new=st.integers(0, 4), hits=st.lists(st.integers(0, 9), unique=True, max_size=3))
    def take(self, num_new, hits):
        found = [self.pool.find(self.nodes[i]) for i in hits]
        shared = [block for block in found if block is not None]
        can = self.pool.can_take(num_new, shared)
        want = self._taken(num_new, shared)
        assert self.pool.take(num_new, shared) == want
        assert can == (want is not None)
        if want:
            self.tables.append(want)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 7), num_new=st.integers(1, 2))
    def append(self, which, num_new):
        want = self._taken(num_new, [])
        assert self.pool.take(num_new) == want
        self.tables[which % len(self.tables)] += want or []

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 7), keep=st.integers(0, 2))
    def share(self, which, keep):
        """Another sequence with the same leading blocks."""
        shared = self.tables[which % len(self.tables)][: keep + 1]
        want = self._taken(0, shared)
        assert self.pool.take(0, shared) == want == shared
        self.tables.append(list(shared))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 7), first=st.integers(0, 3))
    def give_back(self, which, first):
        """All of a table's blocks, or the first few as a window passes."""
        table = self.tables.pop(which % len(self.tables))
        given, kept = (table[:first], table[first:]) if first else (table, [])
        if kept:
            self.tables.append(kept)
        self.pool.give_back(given)
        for block in reversed(given):
            if not any(block in other for other in self.tables):
                self.free.append(block)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 7), at=st.integers(0, 3), name=st.integers(0, 9))
    def publish(self, which, at, name):
        table = self.tables[which % len(self.tables)]
        block, node = table[at % len(table)], self.nodes[name]
        self.pool.publish(block, node)
        if node not in self.where and block not in self.where.values():
            self.where[node] = block

    @rule()
    def forget(self):
        """What was cached is blank now, the last freed on top."""
        self.pool.forget()
        named = [block for block in self.free if block in self.where.values()]
        self.free = [block for block in self.free if block not in named] + named
        self.where.clear()

    @invariant()
    def every_block_is_free_or_held(self):
        self.pool.check(self.tables)
        held = set(itertools.chain.from_iterable(self.tables))
        assert self.pool.num_free + len(held) == self.SIZE
        assert sorted(self.free + self.unused) == sorted(set(range(self.SIZE)) - held)
        assert min(self.pool._refs) >= 0

    @invariant()
    def names_lead_to_the_blocks_that_were_published(self):
        assert {node: self.pool.find(node) for node in self.nodes} == {n: self.where.get(n) for n in self.nodes}


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestPC12BlockPoolStateMachine = BlockPoolMachine.TestCase
