"""Attention of a flat batch over the paged KV cache."""

from __future__ import annotations

import torch

from rorqual.batch import Batch
from rorqual.ops.registry import op
from rorqual.ops.store_kvcache import by_bytes


@op
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: Batch,
    block_tables: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale * q k^T) v for every token, over the keys of its own sequence up to and including itself.

    query [num_tokens, num_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim] that already hold
    this batch's keys; block_tables [num_seqs, max_blocks] int32. Query head h reads KV head h // (num_heads /
    num_kv_heads). With a sliding window a query sees the last `sliding_window` keys, itself included. A soft cap (> 0)
    makes soft_cap * tanh(score / soft_cap) of each score. Sinks, float32 [num_heads], are one more score for each query
    of a head, neither scaled, capped nor hidden, that takes its share of the softmax and adds no value. Scores and
    softmax in float32, of the numbers that the caches hold in their own dtype. Returns query's shape and dtype, in the
    contiguous `out` if one is given.
    """
    num_heads, num_kv_heads, block_size = query.shape[1], key_cache.shape[2], key_cache.shape[1]
    outputs = []
    chunks: tuple[torch.Tensor, ...] = query.split(batch.query_lens)  # type: ignore[no-untyped-call]
    for i, (chunk, context) in enumerate(zip(chunks, batch.context_lens_host, strict=True)):
        first = 0 if sliding_window is None else max(0, context - len(chunk) - sliding_window + 1) // block_size
        blocks = block_tables[i, first : -(-context // block_size)].long()
        start = first * block_size
        keys, values = (  # [num_keys, num_kv_heads, head_dim]
            by_bytes(cache)[blocks].view(cache.dtype).flatten(0, 1)[: context - start].float()
            for cache in (key_cache, value_cache)
        )
        keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
        values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
        scores = torch.einsum("qhd,khd->hqk", chunk.float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at = torch.arange(start, context, device=query.device)
        position = torch.arange(context - len(chunk), context, device=query.device)[:, None]
        hidden = at > position
        if sliding_window is not None:
            hidden |= at <= position - sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(chunk), 1)), dim=-1)
        weights = scores.softmax(-1)[..., : context - start]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    found = torch.cat(outputs).to(query.dtype)
    return found if out is None else out.copy_(found)
