"""One sequence's blocks across cache groups: find a cached prefix, reserve, release, publish. No torch tensors."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.prefix import PrefixIndex, PrefixNode
from rorqual.sequence import Sequence

PASSED = -1
"""Entry of a block table whose block lies wholly behind a sliding window and was released."""


class GroupPool(NamedTuple):
    """The blocks of one cache group."""

    pool: BlockPool
    sliding_window: int | None


class CacheManager:
    """Keeps every group's block tables in step: a sequence has slots for its tokens in all groups, or in none.

    Groups without a window hold every block of a sequence. A group with a window holds the blocks that the next
    query can still see and those being written, and gives the others back as the window passes.
    """

    def __init__(self, groups: Iterable[GroupPool], *, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._index = PrefixIndex()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover this many tokens."""
        return -(-num_tokens // self.block_size)

    def first_visible_block(self, sliding_window: int | None, num_computed: int) -> int:
        """The first block that holds a key which the query at position num_computed may see."""
        return 0 if sliding_window is None else max(0, num_computed - sliding_window + 1) // self.block_size

    def why_never_fits(self, num_tokens: int, *, max_chunk: int) -> str | None:
        """Why a sequence of this length could not run even alone, or None. The last token needs no slot."""
        for group in self.groups:
            needed = self.num_blocks_for(num_tokens - 1)
            if group.sliding_window is not None:
                needed = min(needed, self.num_blocks_for(group.sliding_window + max_chunk) + 1)
            if needed > group.pool.num_blocks:
                return (
                    f"{num_tokens} tokens need {needed} KV blocks of {self.block_size} tokens, and the cache has "
                    f"{group.pool.num_blocks}: ask for fewer tokens or raise --kv-cache-memory"
                )
        return None

    def find_prefix(self, seq: Sequence) -> list[list[int]]:
        """Per group, the cached blocks of the longest prefix that every group can serve. Takes nothing.

        At least one token is left to compute, or there would be no logits to sample from. Equal lengths in all
        groups; PASSED stands for blocks that a window no longer needs.
        """
        if not (self.enable_prefix_caching and seq.reads_prefix_cache):
            return [[] for _ in self.groups]
        self.name_blocks(seq, len(seq.token_ids))
        num_blocks = (len(seq.token_ids) - 1) // self.block_size
        for group in self.groups:
            if group.sliding_window is None:
                num_blocks = self._leading_hits(group.pool, seq.prefix[:num_blocks])
        while num_blocks > 0:
            found = [self._visible_blocks(group, seq.prefix[:num_blocks]) for group in self.groups]
            if all(blocks is not None for blocks in found):
                return [blocks for blocks in found if blocks is not None]
            num_blocks -= 1
        return [[] for _ in self.groups]

    def admit(self, seq: Sequence, cached: list[list[int]], *, stop: int, headroom: int) -> bool:
        """Hold `cached` and fresh blocks for the sequence, or hold nothing and return False.

        Groups without a window reserve all known tokens, so that an admitted prompt never waits half way; groups
        with one reserve up to `stop`. `headroom` more blocks must stay free in each group.
        """
        plans = []
        for group, blocks in zip(self.groups, cached, strict=True):
            upto = len(seq.token_ids) if group.sliding_window is None else stop
            shared = [block for block in blocks if block != PASSED]
            num_new = self.num_blocks_for(upto) - len(blocks)
            if not group.pool.can_take(num_new + headroom, shared):
                return False
            plans.append((group.pool, num_new, shared, len(blocks) - len(shared)))
        seq.block_tables = []
        for pool, num_new, shared, num_passed in plans:
            taken = pool.take(num_new, shared)
            assert taken is not None
            seq.block_tables.append(array("i", [PASSED] * num_passed + taken))
        seq.num_computed_tokens = len(cached[0]) * self.block_size
        seq.num_published_blocks = len(cached[0])
        return True

    def reserve(self, seq: Sequence, stop: int) -> bool:
        """Make sure that tokens [num_computed, stop) have slots in every group, or change nothing and return False."""
        if stop <= min(map(len, seq.block_tables)) * self.block_size:  # so it is for most tokens
            return True
        missing = [self.num_blocks_for(stop) - len(table) for table in seq.block_tables]
        if not all(g.pool.can_take(max(0, n)) for g, n in zip(self.groups, missing, strict=True)):
            return False
        for group, table, num_new in zip(self.groups, seq.block_tables, missing, strict=True):
            if num_new > 0:
                table.extend(group.pool.take(num_new) or ())
        return True

    def publish(self, seq: Sequence) -> None:
        """Make the newly full, computed blocks findable, and give back those that a window has passed."""
        num_full = seq.num_computed_tokens // self.block_size
        if self.enable_prefix_caching and num_full > seq.num_published_blocks:
            self.name_blocks(seq, seq.num_computed_tokens)
            for i in range(seq.num_published_blocks, num_full):
                for group, table in zip(self.groups, seq.block_tables, strict=True):
                    group.pool.publish(table[i], seq.prefix[i])
            seq.num_published_blocks = num_full
        self._release_passed(seq)

    def has_news_at(self, num_computed: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether `publish` has anything to do at these counts, int64 [n], of sequences that compute token by token."""
        news: NDArray[np.bool_] = (num_computed % self.block_size == 0) & self.enable_prefix_caching
        for _, window in self.groups:
            if window is not None:
                news |= (num_computed - window + 1) % self.block_size == 0
        return news

    def release(self, seq: Sequence) -> None:
        """Give all blocks back. The sequence starts again from its tokens, less what the prefix cache then holds."""
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            group.pool.give_back([block for block in table if block != PASSED])
        seq.block_tables = []
        seq.num_computed_tokens = seq.num_published_blocks = 0
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
        tables = [seq.block_tables for seq in live]
        for i, group in enumerate(self.groups):
            group.pool.check([block for block in table[i] if block != PASSED] for table in tables)

    def _leading_hits(self, pool: BlockPool, nodes: list[PrefixNode]) -> int:
        for i, node in enumerate(nodes):
            if pool.find(node) is None:
                return i
        return len(nodes)

    def _visible_blocks(self, group: GroupPool, nodes: list[PrefixNode]) -> list[int] | None:
        first = self.first_visible_block(group.sliding_window, len(nodes) * self.block_size)
        blocks = [group.pool.find(node) for node in nodes[first:]]
        if any(block is None for block in blocks):
            return None
        return [PASSED] * first + [block for block in blocks if block is not None]

    def _release_passed(self, seq: Sequence) -> None:
        for group, table in zip(self.groups, seq.block_tables, strict=True):
            if group.sliding_window is None:
                continue
            passed = self.first_visible_block(group.sliding_window, seq.num_computed_tokens)
            # Blocks are given back in order, so only the last few before `passed` can still be held.
            first = passed
            while first > 0 and table[first - 1] != PASSED:
                first -= 1
            group.pool.give_back(table[first:passed].tolist())
            for i in range(first, passed):
                table[i] = PASSED
