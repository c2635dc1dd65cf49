"""Latent attention of prompts by cuBLAS and torch's flash attention: keys and values are made of the latents first.

All tokens of prompts come by here and none of answers, whatever the chunk. Neither product splits its sum by the number
of rows: cuBLAS adds up in order (see linear.py), and flash attention of ragged sequences walks a row's keys in blocks
that begin at the sequence's first, where the one of equal sequences would split them by how many queries there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.latent_attention import LatentUp, latent_attention
from rorqual.ops.row_attention import RowRange, RowSource

_WORKSPACE = 1 << 30
"""Bytes of keys, values and outputs at most, unless one head alone has more: heads beyond come after them."""
_DTYPES = (torch.bfloat16, torch.float16)
_DIMS, _MOST_DIMS = 8, 256
"""Of a head: a multiple of the first, up to the second."""


class _Prompt(NamedTuple):
    """A sequence behind the answers' tokens."""

    tokens: slice
    """Its tokens in the batch, the last ones of its context."""
    context: int
    blocks: torch.Tensor
    """[n] int32: blocks of its context."""
    ends: tuple[torch.Tensor, torch.Tensor]
    """[0, tokens] and [0, context], int32 on the device."""


def _refuse(query: torch.Tensor, source: RowSource, up: LatentUp, batch: Batch, *, scale: float) -> str | None:
    if batch.num_single_token_seqs == len(batch.query_lens):
        return "is for prompts, of which there is none"
    if not isinstance(source.rows, RowRange) or source.rows.first is not None:
        return "expands whole contexts, not rows that were chosen"
    tensors = (query, source.cache.data, *up)
    if any(tensor.device.type != "cuda" for tensor in tensors):
        return f"needs tensors on cuda, got {', '.join(tensor.device.type for tensor in tensors)}"
    if source.cache.record is not None or query.dtype not in _DTYPES or {t.dtype for t in tensors} != {query.dtype}:
        return f"needs bfloat16 or float16 throughout, got {', '.join(str(tensor.dtype) for tensor in tensors)}"
    width, value_dim = query.shape[2], up.value.shape[1]
    if width % _DIMS or width > _MOST_DIMS or value_dim > width:
        most = f"needs keys of a multiple of {_DIMS} dims up to {_MOST_DIMS}, and values of no more"
        return f"{most}, got {width} and {value_dim}"
    if query.stride(2) != 1 or any(step % _DIMS for step in (*query.stride()[:2], query.storage_offset())):
        return f"needs queries without gaps, whose heads begin at multiples of {_DIMS} numbers"
    if any(tensor.requires_grad for tensor in tensors):
        return "writes into an output, of which torch keeps no gradient"
    if torch.cuda.get_device_capability(query.device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or later"
    return None


@latent_attention.impl("vendor", refuse=_refuse)
def latent_attention_vendor(
    query: torch.Tensor, source: RowSource, up: LatentUp, batch: Batch, *, scale: float
) -> torch.Tensor:
    """Answers' tokens as the reference has them, prompts one after another, some heads at once."""
    out = query.new_empty(*query.shape[:2], up.value.shape[1])
    if count := batch.num_single_token_seqs:
        alone, rows = batch.once(("answers_of", source.cache.group), lambda: _answers(source, batch))
        out[:count] = latent_attention.reference(query[:count], RowSource(source.cache, rows), up, alone, scale=scale)
    # Given back at once: what follows is cut from it, and memory that is measured with short prompts has it as well.
    torch.empty(_WORKSPACE if query.is_cuda else 0, dtype=torch.uint8, device=query.device)
    for prompt in batch.once(("prompts_of", source.cache.group), lambda: list(_prompts(source, batch))):
        latents = source.cache.data.index_select(0, prompt.blocks).flatten(0, 1)[: prompt.context]
        for heads in _some_heads(query, prompt):
            mine = LatentUp(up.key[heads], up.value[heads])
            keys, values = expand(latents, mine)
            seen = flash(query[prompt.tokens, heads], keys, values, prompt.ends, scale=scale)
            out[prompt.tokens, heads] = seen[..., : out.shape[2]]
    return out


def expand(latents: torch.Tensor, up: LatentUp) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, num_heads, nope_dim + rope_dim] of latents [n, rank + rope_dim].

    Flash attention wants values as wide as keys: behind value_dim they are anything, as are the columns made of that.
    """
    num_heads, rank, nope = up.key.shape
    value_dim = up.value.shape[1]
    keys = latents.new_empty(len(latents), num_heads, nope + latents.shape[1] - rank)
    values = torch.empty_like(keys)
    of_all = latents[:, :rank].expand(num_heads, -1, -1)
    torch.bmm(of_all, up.key, out=keys[..., :nope].transpose(0, 1))
    keys[..., nope:] = latents[:, None, rank:]
    torch.bmm(of_all, up.value.transpose(1, 2), out=values[..., :value_dim].transpose(0, 1))
    return keys, values


def flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
) -> torch.Tensor:
    """softmax(scale * q k^T) v of one sequence, whose last query sees every key, the one before it one less.

    query [num_tokens, num_heads, width], keys and values [n, num_heads, width], ends as `_Prompt` has them. Returns
    query's shape.
    """
    sizes = len(query), len(keys)
    seen: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, *ends, *sizes, 0.0, True, False, scale=scale
    )[0]
    return seen


def _some_heads(query: torch.Tensor, prompt: _Prompt) -> Iterator[slice]:
    """Heads that fit into the workspace, in groups of almost one size."""
    num_tokens = prompt.tokens.stop - prompt.tokens.start
    bytes_per_head = (2 * prompt.context + num_tokens) * query.shape[2] * query.element_size()
    groups = -(-query.shape[1] // max(1, _WORKSPACE // bytes_per_head))
    step = -(-query.shape[1] // groups)
    for start in range(0, query.shape[1], step):
        yield slice(start, min(start + step, query.shape[1]))


def _prompts(source: RowSource, batch: Batch) -> Iterator[_Prompt]:
    tables, size = source.rows[0], source.cache.rows_per_block
    start = first = batch.num_single_token_seqs
    for seq in range(first, len(batch.query_lens)):
        length, context = batch.query_lens[seq], batch.context_lens_host[seq]
        ends = [torch.arange(0, n + 1, n, dtype=torch.int32, device=tables.device) for n in (length, context)]
        yield _Prompt(slice(start, start + length), context, tables[seq, : -(-context // size)], (ends[0], ends[1]))
        start += length


def _answers(source: RowSource, batch: Batch) -> tuple[Batch, RowRange]:
    """The batch without its prompts, and the rows that its tokens see."""
    count, rows = batch.num_single_token_seqs, source.rows
    assert isinstance(rows, RowRange)
    alone = replace(
        batch,
        input_ids=batch.input_ids[:count],
        positions=batch.positions[:count],
        cu_seqlens_q=batch.cu_seqlens_q[: count + 1],
        context_lens=batch.context_lens[:count],
        caches=(),
        logits_indices=batch.logits_indices[:0],
        query_lens=batch.query_lens[:count],
        context_lens_host=batch.context_lens_host[:count],
        num_answer_tokens=count,
        scratch={},
    )
    return alone, rows._replace(block_tables=rows.block_tables[:count], stop=rows.stop[:count])
