"""Where a cache group's tokens lie, and which of them are still read. No torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Retention(NamedTuple):
    """How far back the next query reads: at position n, from n // period * period - back on."""

    back: int
    period: int = 1

    def first_kept(self, num_computed: int) -> int:
        """The first position that a query at num_computed, or anything computed after it, reads."""
        return max(0, num_computed // self.period * self.period - self.back)

    @property
    def span(self) -> int:
        """The most positions from the first that a query reads up to its own."""
        return self.back + self.period


class Paging(NamedTuple):
    """How a group's tokens lie in blocks."""

    block_tokens: int
    """Tokens of one block."""
    tokens_per_row: int = 1
    """Tokens that one row of a block stands for; it is written by the last of them."""

    @property
    def rows(self) -> int:
        """Rows of one block."""
        return self.block_tokens // self.tokens_per_row

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that cover this many tokens."""
        return -(-num_tokens // self.block_tokens)

    def most_blocks(self, num_tokens: int, retention: Retention | None, *, max_chunk: int) -> int:
        """Blocks that a sequence of this length holds at most, in chunks of max_chunk. The last token needs no slot."""
        all_blocks = self.blocks_for(max(1, num_tokens - 1))
        return all_blocks if retention is None else min(all_blocks, self.blocks_for(retention.span + max_chunk) + 1)

    def slots(self, blocks: NDArray[np.int32], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] int64: the slots that tokens at these positions write in the blocks that cover them, both [n]; -1 for a
        token that completes no row."""
        row, rest = np.divmod(positions % self.block_tokens, self.tokens_per_row)
        slots: NDArray[np.int64] = blocks * np.int64(self.rows) + row
        if self.tokens_per_row > 1:
            slots[rest != self.tokens_per_row - 1] = -1
        return slots
