"""The lightning indexer: which rows of a cache a token should look at."""

from __future__ import annotations

import torch

from rorqual.batch import Batch
from rorqual.ops.registry import op
from rorqual.ops.row_attention import RowRange, range_slots, seq_of_token
from rorqual.ops.row_cache import RowCache, read_rows

_TOKENS_AT_ONCE = 64


@op
def select_rows(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: RowCache,
    rows: RowRange,
    batch: Batch,
    *,
    top_k: int,
) -> torch.Tensor:
    """The slots of the top_k rows by sum over heads of weight_h * relu(q_h . k), for each token.

    Args:
        query: [num_tokens, num_heads, index_dim].
        weights: float32 [num_tokens, num_heads], of any sign.
        keys: index keys, which hold this batch's already.
        rows: those that each token may choose from, which begin at row 0.
        top_k: how many; all rows where there are no more.

    Returns: int32 [num_tokens, top_k], in ascending order of the rows, -1 behind the last. Of equal scores the lower
    row wins. Scores in float32, of the numbers that query and cache hold.

    Source: DeepSeek-V3.2.
    """
    made = torch.full((batch.num_tokens, top_k), -1, dtype=torch.int32, device=query.device)
    choose(query, weights, keys, rows, batch, slice(0, batch.num_tokens), made)
    return made


def choose(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: RowCache,
    rows: RowRange,
    batch: Batch,
    tokens: slice,
    made: torch.Tensor,
) -> None:
    """`select_rows` of some of the tokens, written to their rows of `made`, which hold -1."""
    owners, top_k = seq_of_token(batch), made.shape[1]
    for start in range(tokens.start, tokens.stop, _TOKENS_AT_ONCE):
        part = slice(start, min(start + _TOKENS_AT_ONCE, tokens.stop))
        slots = range_slots(rows, owners, keys.rows_per_block, part)
        visible = slots >= 0
        found = read_rows(keys, slots).masked_fill(~visible[:, :, None], 0.0)
        scores = torch.relu(torch.einsum("thd,tnd->thn", query[part].float(), found))
        scores = torch.einsum("thn,th->tn", scores, weights[part].float()).masked_fill(~visible, float("-inf"))
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].sort(dim=-1).values
        # What is not visible stands behind all that is, in either order.
        made[part, : order.shape[1]] = slots.gather(1, order)
