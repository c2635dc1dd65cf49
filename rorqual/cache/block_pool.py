"""Blocks: which physical KV blocks are free, held, or reusable as a cached prefix. Pure Python, no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from rorqual.cache.prefix import PrefixNode


class BlockPool:
    """Reference-counted blocks; a freed block keeps its content findable until it is handed out again.

    Free blocks without findable content go first, the last freed before all: its memory was touched already, and that
    of a block that was never used costs nothing until it is. Then cached ones go, least recently freed first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._node_of: dict[int, PrefixNode] = {}
        self._block_of: dict[PrefixNode, int] = {}
        self._blank = list(range(num_blocks))[::-1]
        """Free blocks that nobody could find, the next to be handed out at the end."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with a name, the next to be handed out at the beginning."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; cached ones among them."""
        return len(self._blank) + len(self._cached)

    def find(self, node: PrefixNode) -> int | None:
        """The block that holds this prefix's KV, or None. Takes nothing."""
        return self._block_of.get(node)

    def can_take(self, num_new: int, shared: Iterable[int] = ()) -> bool:
        """Whether `take` with the same arguments would succeed."""
        revived = sum(self._refs[block] == 0 for block in shared)
        return num_new + revived <= self.num_free

    def take(self, num_new: int, shared: Sequence[int] = ()) -> list[int] | None:
        """Hold `shared` and `num_new` fresh blocks, in this order; or hold nothing and return None."""
        if not self.can_take(num_new, shared):
            return None
        for block in shared:
            self._cached.pop(block, None)
            self._refs[block] += 1
        fresh = [self._blank.pop() if self._blank else self._cached.popitem(last=False)[0] for _ in range(num_new)]
        for block in fresh:
            self._refs[block] = 1
            if (node := self._node_of.pop(block, None)) is not None:
                del self._block_of[node]
        return [*shared, *fresh]

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release blocks, last first, so that a prefix outlives its continuations."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} is given back more often than taken"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._node_of:
                    self._cached[block] = None
                else:
                    self._blank.append(block)

    def publish(self, block: int, node: PrefixNode) -> None:
        """Make a full, computed block findable. The first block under a name wins; block tables never change."""
        if node not in self._block_of and block not in self._node_of:
            self._block_of[node] = block
            self._node_of[block] = node

    def forget(self) -> None:
        """Drop every cached prefix. Held blocks stay held."""
        self._node_of.clear()
        self._block_of.clear()
        self._blank.extend(self._cached)
        self._cached.clear()

    def check(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert every invariant, given the blocks of each live sequence. For tests and idle time."""
        refs = [0] * self.num_blocks
        for table in tables:
            blocks = list(table)
            assert len(set(blocks)) == len(blocks), "a sequence holds a block twice"
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts disagree with block tables"
        free = sorted([*self._blank, *self._cached])
        assert free == [b for b, r in enumerate(refs) if r == 0], "free lists disagree with counts"
        assert all(b in self._node_of for b in self._cached), "the free lists disagree with the content maps"
        assert {b: n for n, b in self._block_of.items()} == self._node_of, "the two content maps disagree"
