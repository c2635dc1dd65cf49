"""Cases of attention over latents, whose reference is absorbed: an implementation that expands must equal it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rorqual.ops.latent_attention import LatentUp
from rorqual.ops.row_attention import RowRange, RowSource
from tests.ops.paged_cases import make_batch
from tests.ops.row_attention_cases import Rows
from tests.ops.values import Call, normal

BF16 = torch.bfloat16


def latent_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int = 3,
    rank: int = 24,
    nope: int = 10,
    rope: int = 6,
    value_dim: int = 9,
    dtype: torch.dtype = torch.float32,
    listed: int | None = None,
    strided: bool = False,
) -> Call:
    """Every token sees its sequence up to itself, or up to `listed` rows of it."""
    batch = make_batch(query_lens, context_lens)
    rows = Rows(context_lens, rank + rope, dtype=dtype)
    ends = (batch.positions + 1).int()
    which = RowRange(rows.block_tables, None, ends)
    if listed is not None:
        owners = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens, dtype=torch.int64))
        which = rows.lists(owners, ends, listed)
    query = normal(len(ends), heads + 2, nope + rope, dtype=dtype, seed=1)
    query = query[:, 1:-1] if strided else query[:, :heads].contiguous()
    up = LatentUp(
        normal(heads, rank, nope, dtype=dtype, seed=2) / rank**0.5,
        normal(heads, value_dim, rank, dtype=dtype, seed=3) / rank**0.5,
    )
    return (query, RowSource(rows.cache, which), up, batch), {"scale": 0.3}


_MIXED = ([1, 1, 1, 5, 2, 9], [1, 4, 13, 5, 11, 30])

LATENT_CASES: dict[str, Callable[[], Call]] = {
    "none": lambda: latent_case([], []),
    "one_token_of_one": lambda: latent_case([1], [1]),
    "answers": lambda: latent_case([1, 1, 1], [3, 40, 17]),
    "one_prompt": lambda: latent_case([23], [23]),
    "one_chunk": lambda: latent_case([5], [90]),
    "mixed": lambda: latent_case(*_MIXED),
    "mixed_strided": lambda: latent_case(*_MIXED, strided=True),
    "mixed_wide_values": lambda: latent_case(*_MIXED, value_dim=40),
    "mixed_listed": lambda: latent_case(*_MIXED, listed=7),
    "mixed_bfloat16": lambda: latent_case(*_MIXED, dtype=BF16),
    "mixed_listed_bfloat16": lambda: latent_case(*_MIXED, dtype=BF16, listed=7),
    "mixed_strided_bfloat16": lambda: latent_case(*_MIXED, dtype=BF16, strided=True),
    "prompts_bfloat16": lambda: latent_case([23, 2, 70], [23, 90, 200], dtype=BF16),
    "answers_bfloat16": lambda: latent_case([1, 1, 1], [3, 40, 17], dtype=BF16),
    "of_the_published_size_bfloat16": lambda: latent_case(
        [1, 3], [70, 9], heads=2, rank=512, nope=128, rope=64, value_dim=128, dtype=BF16
    ),
}
LATENTS_EXPANDED_BY_VENDOR = {
    *("mixed_bfloat16", "mixed_strided_bfloat16", "prompts_bfloat16"),
    "of_the_published_size_bfloat16",
}
"""On a GPU: prompts among them, all rows seen, 16-bit numbers."""
