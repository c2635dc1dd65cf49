"""Multi-head latent attention: many heads over one cached latent per token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.grouped_linear import grouped_linear
from rorqual.ops.registry import op
from rorqual.ops.row_attention import RowSource, row_attention


class LatentUp(NamedTuple):
    """What makes a head's keys and values of latents of `rank` numbers; both contiguous, of the activations' dtype."""

    key: torch.Tensor
    """[num_heads, rank, nope_dim]: with a query it makes one for latents, transposed it makes keys."""
    value: torch.Tensor
    """[num_heads, value_dim, rank]."""


@op
def latent_attention(
    query: torch.Tensor, source: RowSource, up: LatentUp, batch: Batch, *, scale: float
) -> torch.Tensor:
    """softmax(scale * q k^T) v, where head h's key of a row is [up.key_h^T c | r] and its value up.value_h c, c being
    the row's first rank numbers and r the others.

    Args:
        query: [num_tokens, num_heads, nope_dim + rope_dim].
        source: rows of rank + rope_dim numbers, which hold this batch's already, and which of them each token sees: a
            list, or as a range its sequence up to itself.
        up: of the query's heads and dtype.
        batch: whose tokens these are.

    Returns: [num_tokens, num_heads, value_dim] of the query's dtype. A token that sees nothing gets zeros.

    There are two ways to the same numbers. Absorbed, as here: the query goes through up.key_h once and meets latents as
    they are, which costs 2 (2 rank + rope_dim) operations per head and pair of a query and a row, and reads every row
    once. Expanded: keys and values are made first, which costs 2 rank (nope_dim + value_dim) per head and row, and
    2 (nope_dim + rope_dim + value_dim) per pair: for DeepSeek-V3 640 in place of 2176, worthwhile once a row is seen by
    170 queries. Answers' tokens are always absorbed, and which way a prompt's tokens go must not follow from how the
    prompt was cut, whose tokens would else be rounded in one way or in another: an implementation that expands does so
    for all of them.

    Source: DeepSeek-V2, arXiv:2405.04434.
    """
    nope = up.key.shape[2]
    absorbed = torch.cat((grouped_linear(query[..., :nope], up.key), query[..., nope:]), dim=-1)
    seen = row_attention(absorbed, [source], batch, scale=scale, value_dim=up.key.shape[1])
    return grouped_linear(seen, up.value)
