"""How many blocks each cache group gets out of a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence

from rorqual.cache.spec import CacheGroup


def blocks_for_tokens(groups: Sequence[CacheGroup], num_tokens: int, *, block_size: int, max_chunk: int) -> list[int]:
    """Blocks per group that one sequence of this length holds at most. The last token needs no slot."""
    return [
        group.paging(block_size).most_blocks(num_tokens, group.spec.retention, max_chunk=max_chunk) for group in groups
    ]


def bytes_for_blocks(groups: Sequence[CacheGroup], num_blocks: Sequence[int], *, block_size: int) -> int:
    """Bytes of so many blocks of each group."""
    return sum(g.bytes_per_block(block_size) * n for g, n in zip(groups, num_blocks, strict=True))


def bytes_per_token(groups: Sequence[CacheGroup]) -> float:
    """What one token more takes of the groups that keep all."""
    kept = [group for group in groups if group.spec.retention is None]
    return sum(group.bytes_per_row() / group.spec.tokens_per_row for group in kept)


def bytes_per_sequence(groups: Sequence[CacheGroup], *, block_size: int) -> int:
    """What a long sequence holds in the other groups while it decodes, at most."""
    held = [_blocks_held(group, block_size) for group in groups]
    return bytes_for_blocks(groups, held, block_size=block_size)


def blocks_beside(
    groups: Sequence[CacheGroup], num_blocks: int, *, block_size: int, max_num_seqs: int, max_chunk: int
) -> list[int]:
    """Blocks per group where those that keep all hold num_blocks * block_size tokens.

    Where a block is longer than block_size, each sequence may have one that is hardly used: so many more. A group with
    a retention needs no more than what max_num_seqs sequences and one step's tokens fill, and gets as much again, for
    prefixes that finished sequences leave. Without any group that keeps all there is nothing to go by: then more blocks
    make a larger prefix cache.
    """
    keeps_all = any(group.spec.retention is None for group in groups)
    found = []
    for group in groups:
        paging = group.paging(block_size)
        count = paging.blocks_for(num_blocks * block_size)
        if count and paging.block_tokens > block_size:
            count += max_num_seqs
        if keeps_all and group.spec.retention is not None:
            most = 2 * max_num_seqs * _blocks_held(group, block_size) + paging.blocks_for(max_chunk) + 1
            count = min(count, most)
        found.append(count)
    return found


def plan_blocks(
    groups: Sequence[CacheGroup], budget_bytes: int, *, block_size: int, max_num_seqs: int, max_chunk: int
) -> list[int]:
    """The most blocks per group that fit the budget, as `blocks_beside` weighs them. Zeros if nothing fits."""

    def plan(num_blocks: int) -> list[int]:
        return blocks_beside(groups, num_blocks, block_size=block_size, max_num_seqs=max_num_seqs, max_chunk=max_chunk)

    low, high = 0, 1
    while bytes_for_blocks(groups, plan(high), block_size=block_size) <= budget_bytes:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        if bytes_for_blocks(groups, plan(middle), block_size=block_size) <= budget_bytes:
            low = middle
        else:
            high = middle
    return plan(low)


def _blocks_held(group: CacheGroup, block_size: int) -> int:
    """Blocks that a decoding sequence holds at most in a group with a retention; 0 in others."""
    retention = group.spec.retention
    return 0 if retention is None else group.paging(block_size).blocks_for(retention.span) + 1
