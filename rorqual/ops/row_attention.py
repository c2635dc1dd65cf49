"""Attention over rows that are keys and values at once: MLA's latents, DeepSeek-V4's windows and compressed entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.registry import op
from rorqual.ops.row_cache import RowCache, read_rows

_TOKENS_AT_ONCE = 64


class RowRange(NamedTuple):
    """The rows [first, stop) of each token's own sequence."""

    block_tables: torch.Tensor
    """[num_seqs, max_blocks] int32, the cache group's."""
    first: torch.Tensor | None
    """[num_tokens] int32; None begins at row 0."""
    stop: torch.Tensor
    """[num_tokens] int32."""
    most: int | None = None
    """Rows that any token sees at most, known on the host (a window's width); None: what the tables have room for."""


class RowList(NamedTuple):
    """Rows by their slots."""

    slots: torch.Tensor
    """[num_tokens, n] int32; -1 is none."""


class RowSource(NamedTuple):
    """A cache and which of its rows each token sees."""

    cache: RowCache
    rows: RowRange | RowList


@op
def row_attention(
    query: torch.Tensor,
    sources: Sequence[RowSource],
    batch: Batch,
    *,
    scale: float,
    value_dim: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v over the rows of all sources together, for every token and head.

    A row is the key of every head, and its first value_dim numbers are the value.

    Args:
        query: [num_tokens, num_heads, width].
        sources: one or two caches of rows of that width, which hold this batch's rows already.
        batch: whose tokens these are; row ranges are those of the sequence that a token belongs to.
        sinks: float32 [num_heads]: one more score per head, not scaled, that takes its share and adds no value.

    Returns: [num_tokens, num_heads, value_dim] of the query's dtype. Scores and softmax in float32. A token that sees
    nothing, and has no sink, gets zeros.

    Source: DeepSeek-V2, arXiv:2405.04434 (absorbed MLA); DeepSeek-V4 for windows beside compressed entries.
    """
    everyone = slice(0, batch.num_tokens)
    return attend(query, sources, batch, everyone, scale=scale, value_dim=value_dim, sinks=sinks)


def attend(
    query: torch.Tensor,
    sources: Sequence[RowSource],
    batch: Batch,
    tokens: slice,
    *,
    scale: float,
    value_dim: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`row_attention` of some of the tokens, whose queries these are: [n, num_heads, value_dim]."""
    outputs = [query.new_empty(0, query.shape[1], value_dim)]
    owners = seq_of_token(batch)
    for start in range(tokens.start, tokens.stop, _TOKENS_AT_ONCE):
        part = slice(start, min(start + _TOKENS_AT_ONCE, tokens.stop))
        mine = query[part.start - tokens.start : part.stop - tokens.start]
        rows, seen = [], []
        for cache, which in sources:
            slots = (
                range_slots(which, owners, cache.rows_per_block, part)
                if isinstance(which, RowRange)
                else (which.slots[part])
            )
            rows.append(read_rows(cache, slots))
            seen.append(slots >= 0)
        keys, visible = torch.cat(rows, dim=1), torch.cat(seen, dim=1)
        keys = keys.masked_fill(~visible[:, :, None], 0.0)  # what lies behind a slot of -1 may be anything
        scores = torch.einsum("thd,tnd->thn", mine.float(), keys) * scale
        scores = scores.masked_fill(~visible[:, None], float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[None, :, None].expand(len(scores), -1, 1)), dim=-1)
        weights = scores.softmax(-1)[..., : keys.shape[1]].nan_to_num(0.0)
        outputs.append(torch.einsum("thn,tnv->thv", weights, keys[..., :value_dim]).to(query.dtype))
    return torch.cat(outputs)


def seq_of_token(batch: Batch) -> torch.Tensor:
    """[num_tokens] int64: the sequence that each token belongs to."""

    def make() -> torch.Tensor:
        lengths = batch.cu_seqlens_q.diff()
        seqs = torch.arange(len(batch.query_lens), device=lengths.device)
        return seqs.repeat_interleave(lengths, output_size=batch.num_tokens)

    return batch.once("seq_of_token", make)


def range_slots(which: RowRange, owners: torch.Tensor, rows_per_block: int, part: slice) -> torch.Tensor:
    """The slots [n, most rows] of ranges, for some of the tokens; -1 behind each."""
    stop = which.stop[part]
    first = torch.zeros_like(stop) if which.first is None else which.first[part]
    most = int((stop - first).max()) if len(stop) else 0
    at = first[:, None] + torch.arange(most, dtype=first.dtype, device=first.device)
    inside = at < stop[:, None]
    at = torch.where(inside, at, 0).long()
    blocks = which.block_tables[owners[part, None], at // rows_per_block]
    return torch.where(inside, blocks * rows_per_block + (at % rows_per_block).int(), -1).int()
