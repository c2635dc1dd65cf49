"""The lightning indexer on CPU: each sequence's keys are gathered once for all its tokens, and nothing is sorted."""

from __future__ import annotations

import torch

from rorqual.batch import Batch
from rorqual.ops.cpu.row_attention import answers, blocks, prompts, seen_by
from rorqual.ops.row_attention import RowRange, RowSource
from rorqual.ops.row_cache import RowCache, read_rows
from rorqual.ops.select_rows import choose, select_rows


def _refuse(query: torch.Tensor, *_args: object, **_options: object) -> str | None:
    return None if query.is_cpu else f"needs CPU tensors, got {query.device.type}"


@select_rows.impl("cpu", refuse=_refuse)
def select_rows_cpu(
    query: torch.Tensor, weights: torch.Tensor, keys: RowCache, rows: RowRange, batch: Batch, *, top_k: int
) -> torch.Tensor:
    """See the reference."""
    made = torch.full((len(query), top_k), -1, dtype=torch.int32)
    for some in answers(batch, [RowSource(keys, rows)], query.shape[2] + query.shape[1]):
        choose(query, weights, keys, rows, batch, some, made)
    for seq, part in prompts(batch):
        slots, hidden = seen_by(RowSource(keys, rows), seq, part, batch)
        if not len(slots):
            continue
        found = read_rows(keys, slots)
        for some in blocks(part, query.shape[1] * len(slots)):
            scores = torch.matmul(query[some].float().flatten(0, 1), found.T).relu_()
            scores = torch.bmm(weights[some, None].float(), scores.view(-1, query.shape[1], len(slots))).squeeze(1)
            if hidden is not None:
                scores.masked_fill_(hidden[some.start - part.start : some.stop - part.start], float("-inf"))
            made[some] = _best(scores, slots, top_k)
    return made


def _best(scores: torch.Tensor, slots: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32 [n, top_k]: the slots of the top_k scores above -inf, in order; of equal ones the first."""
    count = min(top_k, scores.shape[1])
    least = scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > least, scores == least
    places = equal.cumsum(-1, dtype=torch.int32) + above.sum(-1, keepdim=True)
    taken = (above | (equal & (places <= count))) & (scores > float("-inf"))
    token, row = taken.nonzero(as_tuple=True)
    made = torch.full((len(scores), top_k), -1, dtype=torch.int32)
    made[token, taken.cumsum(-1)[taken] - 1] = slots[row].int()
    return made
