"""How many blocks each cache group gets out of a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.cache.spec import CacheGroup


def blocks_for_tokens(groups: Sequence[CacheGroup], num_tokens: int, *, block_size: int, max_chunk: int) -> list[int]:
    """Blocks per group that one sequence of this length holds at most. The last token needs no slot."""
    all_blocks = -(-max(1, num_tokens - 1) // block_size)
    found = []
    for group in groups:
        window = group.spec.sliding_window
        # As CacheManager.why_never_fits counts.
        found.append(all_blocks if window is None else min(all_blocks, -(-(window + max_chunk) // block_size) + 1))
    return found


def bytes_for_blocks(groups: Sequence[CacheGroup], num_blocks: Sequence[int], *, block_size: int) -> int:
    """Bytes of so many blocks of each group."""
    return sum(g.bytes_per_block(block_size) * n for g, n in zip(groups, num_blocks, strict=True))


def plan_blocks(
    groups: Sequence[CacheGroup], budget_bytes: int, *, block_size: int, max_num_seqs: int, max_chunk: int
) -> list[int]:
    """The most blocks per group that fit the budget.

    Groups without a window get equal numbers. A group with a window beside them needs no more than what max_num_seqs
    windows and one step's tokens fill; what it does not need goes to the others. Returns zeros if nothing fits.
    """
    caps = [
        None
        if g.spec.sliding_window is None
        else max_num_seqs * (-(-g.spec.sliding_window // block_size) + 1) + -(-max_chunk // block_size) + 1
        for g in groups
    ]
    if all(cap is not None for cap in caps):
        caps = [None] * len(groups)  # windows only: more blocks make a larger prefix cache

    def plan(num_blocks: int) -> list[int]:
        return [num_blocks if cap is None else min(num_blocks, cap) for cap in caps]

    low, high = 0, budget_bytes // min(g.bytes_per_block(block_size) for g in groups)
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_for_blocks(groups, plan(middle), block_size=block_size) <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return plan(low)
