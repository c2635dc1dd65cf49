"""One sequence's blocks across cache groups: find a cached prefix, reserve, release, publish. No torch tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.paging import Paging, Retention
from rorqual.cache.prefix import PrefixIndex, PrefixNode
from rorqual.sequence import Sequence

PASSED = -1
"""Entry of a block table whose block holds nothing that is still read, and was released."""


class GroupPool(NamedTuple):
    """The blocks of one cache group."""

    pool: BlockPool
    paging: Paging
    retention: Retention | None = None

    def first_block(self, num_computed: int) -> int:
        """The first block of which a query at position num_computed, or anything computed after it, reads something."""
        if self.retention is None:
            return 0
        return self.retention.first_kept(num_computed) // self.paging.block_tokens


class Prefix(NamedTuple):
    """What the cache holds of a sequence's first tokens."""

    num_tokens: int
    blocks: list[list[int]]
    """Per group, the full blocks of these tokens; PASSED stands for those that nothing reads any more."""


class CacheManager:
    """Keeps every group's block tables in step: a sequence has slots for its tokens in all groups, or in none.

    Groups without a retention hold every block of a sequence. A group with one holds the blocks of which the next
    query, or one after it, still reads something and those being written, and gives the others back as they are passed.

    Prefixes are named per block_size tokens, the grain at which hits end. A block of a group that holds more tokens has
    the name of the last of them.
    """

    def __init__(self, groups: Iterable[GroupPool], *, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._index = PrefixIndex()
        assert all(g.paging.block_tokens % block_size == 0 for g in self.groups), "blocks have the names of prefixes"
        self._choosy = [
            g
            for g in self.groups
            if g.retention is not None or g.paging.block_tokens not in (block_size, g.paging.tokens_per_row)
        ]
        """Groups that may serve a prefix but not all shorter ones."""

    def why_never_fits(self, num_tokens: int, *, max_chunk: int) -> str | None:
        """Why a sequence of this length could not run even alone, or None. The last token needs no slot."""
        for pool, paging, retention in self.groups:
            needed = paging.most_blocks(num_tokens, retention, max_chunk=max_chunk)
            if needed > pool.num_blocks:
                return (
                    f"{num_tokens} tokens need {needed} KV blocks of {paging.block_tokens} tokens, and the cache has "
                    f"{pool.num_blocks}: ask for fewer tokens or raise --kv-cache-memory"
                )
        return None

    def find_prefix(self, seq: Sequence) -> Prefix:
        """The longest cached prefix that every group can serve, a multiple of block_size. Takes nothing.

        At least one token is left to compute, or there would be no logits to sample from.
        """
        num_tokens = 0
        if self.enable_prefix_caching and seq.reads_prefix_cache:
            self.name_blocks(seq, len(seq.token_ids))
            num_tokens = max(0, len(seq.token_ids) - 1) // self.block_size * self.block_size
        for group in self.groups:
            if group.retention is None:
                num_tokens = self._served(group, seq.prefix, num_tokens)
        while num_tokens > 0:
            shorter = min((self._served(g, seq.prefix, num_tokens) for g in self._choosy), default=num_tokens)
            if shorter == num_tokens:
                break
            num_tokens = shorter
        return Prefix(num_tokens, [self._blocks_of(group, seq.prefix, num_tokens) for group in self.groups])

    def admit(self, seq: Sequence, cached: Prefix, *, stop: int, headroom: int) -> bool:
        """Hold `cached` and fresh blocks for the sequence, or hold nothing and return False.

        Groups without a retention reserve all known tokens, so that an admitted prompt never waits half way; groups
        with one reserve up to `stop`. `headroom` more blocks must stay free in each group.
        """
        plans = []
        for (pool, paging, retention), blocks in zip(self.groups, cached.blocks, strict=True):
            shared = [block for block in blocks if block != PASSED]
            num_new = paging.blocks_for(len(seq.token_ids) if retention is None else stop) - len(blocks)
            if not pool.can_take(num_new + headroom, shared):
                return False
            plans.append((pool, num_new, shared, len(blocks) - len(shared)))
        seq.block_tables = []
        for pool, num_new, shared, num_passed in plans:
            taken = pool.take(num_new, shared)
            assert taken is not None
            seq.block_tables.append(array("i", [PASSED] * num_passed + taken))
        seq.num_computed_tokens = seq.num_published_tokens = cached.num_tokens
        return True

    def reserve(self, seq: Sequence, stop: int) -> bool:
        """Make sure that tokens [num_computed, stop) have slots in every group, or change nothing and return False."""
        missing = [
            group.paging.blocks_for(stop) - len(table)
            for group, table in zip(self.groups, seq.block_tables, strict=True)
        ]
        if max(missing) <= 0:  # so it is for most tokens
            return True
        if not all(g.pool.can_take(max(0, n)) for g, n in zip(self.groups, missing, strict=True)):
            return False
        for group, table, num_new in zip(self.groups, seq.block_tables, missing, strict=True):
            if num_new > 0:
                table.extend(group.pool.take(num_new) or ())
        return True

    def publish(self, seq: Sequence) -> None:
        """Make the newly full, computed blocks findable, and give back those of which nothing is read any more."""
        num_full = seq.num_computed_tokens // self.block_size * self.block_size
        if self.enable_prefix_caching and num_full > seq.num_published_tokens:
            self.name_blocks(seq, num_full)
            for group, table in zip(self.groups, seq.block_tables, strict=True):
                size = group.paging.block_tokens
                for i in range(seq.num_published_tokens // size, num_full // size):
                    group.pool.publish(table[i], self._name(group, seq.prefix, i))
            seq.num_published_tokens = num_full
        self._release_passed(seq)

    def has_news_at(self, num_computed: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether `publish` has anything to do at these counts, int64 [n], of sequences that compute token by token."""
        news: NDArray[np.bool_] = (num_computed % self.block_size == 0) & self.enable_prefix_caching
        for _, paging, retention in self.groups:
            if retention is not None:
                first, before = (n // retention.period * retention.period - retention.back
                                 for n in (num_computed, num_computed - 1))  # fmt: skip
                news |= first // paging.block_tokens > before // paging.block_tokens
        return news

    def release(self, seq: Sequence) -> None:
        """Give all blocks back. The sequence starts again from its tokens, less what the prefix cache then holds."""
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            group.pool.give_back([block for block in table if block != PASSED])
        seq.block_tables = []
        seq.num_computed_tokens = seq.num_published_tokens = 0
        seq.draft_token_ids = []

    def name_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Extend seq.prefix to the full blocks of its first `num_tokens` tokens."""
        size, prefix = self.block_size, seq.prefix
        if len(prefix) >= num_tokens // size:
            return
        parent = prefix[-1] if prefix else self._index.root(seq.cache_salt)
        for i in range(len(prefix), num_tokens // size):
            parent = self._index.child(parent, seq.token_ids[i * size : (i + 1) * size])
            prefix.append(parent)

    def forget_prefixes(self) -> None:
        """Empty the prefix cache of every group."""
        for group in self.groups:
            group.pool.forget()

    def usage(self) -> float:
        """Share of blocks that are held, of the fullest group."""
        return max(1 - g.pool.num_free / g.pool.num_blocks for g in self.groups)

    def check(self, live: Iterable[Sequence]) -> None:
        """Assert every invariant of all groups, given the sequences that hold blocks."""
        live = list(live)
        for i, group in enumerate(self.groups):
            group.pool.check([block for block in seq.block_tables[i] if block != PASSED] for seq in live)
            for seq in live:
                first = group.first_block(seq.num_computed_tokens)
                assert all(block == PASSED for block in seq.block_tables[i][:first]), "a passed block is still held"

    def _name(self, group: GroupPool, names: list[PrefixNode], block: int) -> PrefixNode:
        """The name of a group's block, which is that of the prefix it ends."""
        return names[(block + 1) * (group.paging.block_tokens // self.block_size) - 1]

    def _served(self, group: GroupPool, names: list[PrefixNode], num_tokens: int) -> int:
        """num_tokens, if a group has the rows that computing from there on reads; else a shorter prefix that it might
        serve, with none between."""
        _, (block_tokens, tokens_per_row), _ = group
        if num_tokens % block_tokens >= tokens_per_row:  # whole rows in a block that is not full
            return num_tokens - self.block_size
        for i in range(group.first_block(num_tokens), num_tokens // block_tokens):
            if group.pool.find(self._name(group, names, i)) is None:
                return ((i + 1) * block_tokens - 1) // self.block_size * self.block_size
        return num_tokens

    def _blocks_of(self, group: GroupPool, names: list[PrefixNode], num_tokens: int) -> list[int]:
        first = group.first_block(num_tokens)
        blocks = [
            group.pool.find(self._name(group, names, i)) for i in range(first, num_tokens // group.paging.block_tokens)
        ]
        return [PASSED] * first + [block for block in blocks if block is not None]

    def _release_passed(self, seq: Sequence) -> None:
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if group.retention is None:
                continue
            passed = group.first_block(seq.num_computed_tokens)
            # Blocks are given back in order, so only the last few before `passed` can still be held.
            first = passed
            while first > 0 and table[first - 1] != PASSED:
                first -= 1
            group.pool.give_back(table[first:passed].tolist())
            for i in range(first, passed):
                table[i] = PASSED
