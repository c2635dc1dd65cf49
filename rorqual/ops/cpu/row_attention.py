"""Attention over rows on CPU: each sequence's rows are gathered once for all its tokens, and multiplied as matrices.

Tokens of answers, one of each sequence, are the reference's: there nothing is gathered twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.row_attention import RowRange, RowSource, attend, row_attention
from rorqual.ops.row_cache import read_rows

_SCORES_AT_ONCE = 1 << 22
"""float32 scores of one block of queries: 16 MiB."""
_GATHERED_AT_ONCE = 1 << 24
"""float32 numbers of the rows of some answers' tokens: 64 MiB."""


class SeenRows(NamedTuple):
    """Rows of one cache, and which of them some tokens see."""

    slots: torch.Tensor
    """[n] int64."""
    hidden: torch.Tensor | None
    """[num_tokens, n] bool: those that a token does not see; None where all see all."""


def _refuse(query: torch.Tensor, *_args: object, **_options: object) -> str | None:
    return None if query.is_cpu else f"needs CPU tensors, got {query.device.type}"


@row_attention.impl("cpu", refuse=_refuse)
def row_attention_cpu(
    query: torch.Tensor,
    sources: Sequence[RowSource],
    batch: Batch,
    *,
    scale: float,
    value_dim: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """See the reference."""
    out = query.new_empty(*query.shape[:2], value_dim)
    for some in answers(batch, sources, query.shape[2]):
        out[some] = attend(query[some], sources, batch, some, scale=scale, value_dim=value_dim, sinks=sinks)
    for seq, part in prompts(batch):
        seen = [seen_by(source, seq, part, batch) for source in sources]
        rows = torch.cat([read_rows(source.cache, of.slots) for source, of in zip(sources, seen, strict=True)])
        hidden = hidden_of(seen, part.stop - part.start)
        for some in blocks(part, query.shape[1] * len(rows)):
            scores = torch.matmul(query[some].float().flatten(0, 1), rows.T).mul_(scale)
            scores = scores.view(some.stop - some.start, -1, len(rows))
            if hidden is not None:
                scores.masked_fill_(hidden[some.start - part.start : some.stop - part.start, None], float("-inf"))
            weights = softmax(scores, sinks)
            found = torch.matmul(weights.flatten(0, 1), rows[:, :value_dim])
            out[some] = found.view(some.stop - some.start, -1, value_dim).to(query.dtype)
    return out


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """scores float32 [..., num_heads, n]; where a row is -inf alone and there is no sink, zeros."""
    if sinks is None:
        return scores.softmax(-1).nan_to_num_(0.0)
    column = sinks[:, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]


def answers(batch: Batch, sources: Sequence[RowSource], width: int) -> list[slice]:
    """The tokens in front of the prompts, some after others, so that what is gathered for them stays small."""
    ranges = [which for _, which in sources if isinstance(which, RowRange)]
    listed = sum(which.slots.shape[1] for _, which in sources if not isinstance(which, RowRange))

    def make() -> tuple[list[RowRange], list[slice]]:
        count, most = batch.num_single_token_seqs, listed
        for which in ranges if count else ():
            stop = which.stop[:count]
            most += int((stop if which.first is None else stop - which.first[:count]).max())
        step = max(1, _GATHERED_AT_ONCE // max(1, most * width))
        return ranges, [slice(start, min(start + step, count)) for start in range(0, count, step)]

    # With the ranges beside it, so that the numbers of their tensors stay theirs.
    return batch.once(("answers", *map(_name, ranges), listed, width), make)[1]


def _name(which: RowRange) -> tuple[int, int, int]:
    return id(which.block_tables), id(which.first), id(which.stop)


def prompts(batch: Batch) -> Iterator[tuple[int, slice]]:
    """The sequences behind the answers' tokens, and where their tokens are."""
    start = first = batch.num_single_token_seqs
    for seq in range(first, len(batch.query_lens)):
        stop = start + batch.query_lens[seq]
        yield seq, slice(start, stop)
        start = stop


def blocks(part: slice, scores_per_token: int) -> Iterator[slice]:
    """Some tokens after others, so that their scores stay small."""
    step = max(1, _SCORES_AT_ONCE // max(1, scores_per_token))
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def seen_by(source: RowSource, seq: int, part: slice, batch: Batch) -> SeenRows:
    """What the tokens of one sequence see of a source: each row once, whatever number of them sees it."""
    cache, which = source
    if isinstance(which, RowRange):
        size = cache.rows_per_block
        name = ("seen_by", *_name(which), size, seq)
        return batch.once(name, lambda: (which, _seen_in_range(which, seq, part, size)))[1]
    listed = which.slots[part]
    slots, place = torch.unique(listed, return_inverse=True)
    hidden = torch.ones(len(listed), len(slots), dtype=torch.bool).scatter_(1, place, False)
    none = int((slots < 0).sum())
    return SeenRows(slots[none:].long(), hidden[:, none:])


def _seen_in_range(which: RowRange, seq: int, part: slice, rows_per_block: int) -> SeenRows:
    stop = which.stop[part]
    first = torch.zeros_like(stop) if which.first is None else which.first[part]
    seen = stop > first
    low, high = (int(first[seen].min()), int(stop.max())) if bool(seen.any()) else (0, 0)
    at = torch.arange(low, high)
    slots = which.block_tables[seq, at // rows_per_block].long() * rows_per_block + at % rows_per_block
    hidden = (at >= stop[:, None]) | (at < first[:, None])
    return SeenRows(slots, hidden if bool(hidden.any()) else None)


def hidden_of(seen: Sequence[SeenRows], num_tokens: int) -> torch.Tensor | None:
    """Of all sources side by side."""
    if all(each.hidden is None for each in seen):
        return None
    shapes = [torch.zeros(num_tokens, len(each.slots), dtype=torch.bool) for each in seen]
    return torch.cat([none if each.hidden is None else each.hidden for each, none in zip(seen, shapes, strict=True)], 1)
