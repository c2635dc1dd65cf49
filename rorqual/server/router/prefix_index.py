"""The beginnings of prompts that a replica was sent, as hashes of blocks, the newest ones. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence

BLOCK_CHARACTERS = 128
BLOCK_TOKENS = 32
MOST_BLOCKS = 4096
"""What lies behind so many blocks of a prompt makes no difference."""


def blocks_of(prompt: str | Sequence[int], seed: Hashable) -> list[int]:
    """A hash per whole block of the prompt, each over all that stands before the block's end too.

    Two prompts have the same first n hashes where they have the same first n blocks and the same seed; hash collisions
    apart, which would cost no more than a cache miss.
    """
    size = BLOCK_CHARACTERS if isinstance(prompt, str) else BLOCK_TOKENS
    chain, found = hash(seed), []
    for start in range(0, min(len(prompt) - size + 1, MOST_BLOCKS * size), size):
        block = prompt[start : start + size]
        chain = hash((chain, block if isinstance(block, str) else tuple(block)))
        found.append(chain)
    return found


class SentPrefixes:
    """A bounded set of such hashes, the least recently used of which give way.

    A block is used whenever one behind it is, and counts as used later than that one: what is there of a prompt is
    always a beginning of it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()
        """The least recently used first."""

    def __len__(self) -> int:
        return len(self._hashes)

    def match(self, blocks: Sequence[int]) -> int:
        """How many blocks of a prompt are there, from its beginning on."""
        return bisect_left(range(len(blocks)), True, key=lambda i: blocks[i] not in self._hashes)

    def add(self, blocks: Sequence[int]) -> None:
        """A prompt is sent."""
        for block in reversed(blocks):
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def clear(self) -> None:
        """The cache is gone."""
        self._hashes.clear()
