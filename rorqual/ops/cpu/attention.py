"""Paged attention on CPU with batched matrix products.

Sequences with one token are computed together, a few products per layer however many there are, in buckets of similar
context so that padding stays small. Longer chunks go one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rorqual.batch import Batch, once
from rorqual.ops.attention import paged_attention
from rorqual.platform import cpu_flags

_QUERIES_PER_BLOCK = 256
"""Scores of one block of queries stay in cache: without AMX 2.8 times faster than torch's fused attention at 1,024."""
_BUCKET_RATIO = 3
"""Longest over shortest context in a bucket of single-token sequences: padding costs less than another dozen calls."""
_FUSED_BELOW = 1 << 16
"""Gathered keys of fewer elements go through torch's fused attention, which begins sooner and grows faster."""
_KEYS_ROUNDED_TO = 64
"""oneDNN compiles a product for each new shape, in milliseconds: rounded lengths change every 64 steps only."""
_BUCKET_SLACK = 64
"""Contexts that differ by no more than this share a bucket in any case: a call costs more than so many keys."""


def _refuse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    *_args: object,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    **_kwargs: object,
) -> str | None:
    if query.device.type != "cpu":
        return f"needs CPU tensors, got {query.device.type}"
    if not key_cache.transpose(1, 2).is_contiguous():
        return "needs a cache whose heads lie one after the other in each block"
    if key_cache.dtype not in (query.dtype, torch.float8_e4m3fn):
        return f"needs a cache of the query's dtype or of float8_e4m3fn, got {query.dtype} and {key_cache.dtype}"
    if soft_cap is not None or sinks is not None:
        return "computes neither a soft cap nor sinks"
    return None


@paged_attention.impl("cpu", refuse=_refuse)
def paged_attention_cpu(
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
    """See the reference."""
    caches = _HeadRows.of(key_cache, value_cache, query.dtype)
    name = ("paged_attention", id(block_tables), sliding_window, caches.num_heads, query.dtype)
    buckets = once(batch.scratch, name, lambda: _plan_buckets(batch, block_tables, caches, sliding_window, query.dtype))
    if len(buckets) == 1 and len(batch.query_lens) == batch.num_single_token_seqs:
        found = _single_tokens(query, caches, buckets[0], scale)
        return found if out is None else out.copy_(found)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for bucket in buckets:
        out[bucket.rows] = _single_tokens(query[bucket.rows], caches, bucket, scale)
    start = batch.num_single_token_seqs
    for i in range(start, len(batch.query_lens)):
        stop = start + batch.query_lens[i]
        chunk = _Chunk(batch.query_lens[i], batch.context_lens_host[i], sliding_window, caches.block_size)
        if query.dtype == torch.bfloat16 and "amx_bf16" in cpu_flags():
            _fused_chunk(query[start:stop], caches, block_tables[i], chunk, scale, batch.scratch, out[start:stop])
        else:
            _chunk_by_blocks(query[start:stop], caches, block_tables[i], chunk, scale, out[start:stop])
        start = stop
    return out


class _HeadRows(NamedTuple):
    """Both caches as rows of one head's keys in one block, ready to be gathered."""

    keys: torch.Tensor
    """[num_blocks * num_heads, block_size * head_dim]"""
    values: torch.Tensor
    num_heads: int
    block_size: int
    head_dim: int
    dtype: torch.dtype
    """Of what is gathered."""

    @classmethod
    def of(cls, key_cache: torch.Tensor, value_cache: torch.Tensor, dtype: torch.dtype) -> _HeadRows:
        num_blocks, size, heads, dim = key_cache.shape
        keys, values = (c.transpose(1, 2).view(num_blocks * heads, size * dim) for c in (key_cache, value_cache))
        return cls(keys, values, heads, size, dim, dtype)

    def rows_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """blocks [num_seqs, n] -> row numbers [num_seqs * num_heads * n]."""
        return (blocks[:, None, :] * self.num_heads + torch.arange(self.num_heads)[:, None]).reshape(-1)

    def gather(self, rows: torch.Tensor, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `rows_of`, each [num_seqs * num_heads, n * block_size, head_dim]."""
        shape = (num_seqs * self.num_heads, -1, self.head_dim)
        return self._rows(self.keys, rows).view(shape), self._rows(self.values, rows).view(shape)

    def _rows(self, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if cache.dtype == self.dtype:
            return cache.index_select(0, rows)
        codes = cache.view(torch.uint8).index_select(0, rows)
        # A table of the 256 values is several times faster than torch's own conversion.
        return _e4m3_values(self.dtype).index_select(0, codes.flatten().int())


@functools.cache
def _e4m3_values(dtype: torch.dtype) -> torch.Tensor:
    """The value of every float8_e4m3fn code."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


class _Bucket(NamedTuple):
    """Single-token sequences that are computed together, and what all layers share about them."""

    rows: torch.Tensor
    """[n] rows of the query."""
    cache_rows: torch.Tensor
    """Rows of _HeadRows to gather."""
    visible: slice
    """The gathered keys that any of the sequences sees."""
    bias: torch.Tensor | None
    """[n * num_heads, 1, num_visible]: 0, or -inf where a key is not the sequence's or behind its window; None if all
    see the same keys."""


def _buckets(contexts: tuple[int, ...], sliding_window: int | None) -> list[list[int]]:
    """Rows grouped by similar number of visible keys, each group in row order."""
    visible = [c if sliding_window is None else min(c, sliding_window) for c in contexts]
    buckets: list[list[int]] = []
    shortest = 0
    for row in sorted(range(len(visible)), key=visible.__getitem__):
        if not buckets or visible[row] > max(shortest * _BUCKET_RATIO, shortest + _BUCKET_SLACK):
            buckets.append([])
            shortest = visible[row]
        buckets[-1].append(row)
    return [sorted(bucket) for bucket in buckets]


def _plan_buckets(
    batch: Batch, block_tables: torch.Tensor, caches: _HeadRows, sliding_window: int | None, dtype: torch.dtype
) -> list[_Bucket]:
    contexts = batch.context_lens_host[: batch.num_single_token_seqs]
    groups = _buckets(contexts, sliding_window)
    return [_plan(rows, contexts, block_tables, caches, sliding_window, dtype) for rows in groups]


def _plan(
    rows: list[int],
    all_contexts: tuple[int, ...],
    block_tables: torch.Tensor,
    caches: _HeadRows,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> _Bucket:
    size, index = caches.block_size, torch.tensor(rows)
    tables, ends = block_tables[index], torch.tensor([all_contexts[row] for row in rows])
    firsts = torch.zeros_like(ends) if sliding_window is None else (ends - sliding_window).clamp_(min=0)
    first_blocks = firsts // size
    lows, highs = firsts - first_blocks * size, ends - first_blocks * size
    low, high = int(lows.min()), int(highs.max())
    if len(rows) > 1 or high * caches.num_heads * caches.head_dim >= _FUSED_BELOW:
        low, high = 0, -(-high // _KEYS_ROUNDED_TO) * _KEYS_ROUNDED_TO
    columns = (first_blocks[:, None] + torch.arange(-(-high // size))).clamp_(max=tables.shape[1] - 1)
    at = torch.arange(low, high)
    hidden = (at >= highs[:, None]) | (at < lows[:, None])
    bias = None
    if bool(hidden.any()):
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        bias = bias.repeat_interleave(caches.num_heads, dim=0)[:, None, :]
    return _Bucket(index, caches.rows_of(tables.gather(1, columns).long()), slice(low, high), bias)


def _single_tokens(query: torch.Tensor, caches: _HeadRows, bucket: _Bucket, scale: float) -> torch.Tensor:
    """query [num_seqs, num_heads, head_dim], one token each -> the same shape."""
    keys, values = (t[:, bucket.visible] for t in caches.gather(bucket.cache_rows, query.shape[0]))
    grouped = query.reshape(keys.shape[0], -1, caches.head_dim)  # the query heads of each KV head together
    if bucket.bias is None:
        if keys.numel() < _FUSED_BELOW:
            fused = F.scaled_dot_product_attention(grouped[None], keys[None], values[None], scale=scale)
            return fused.view(query.shape)
        scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(scale)
        return torch.bmm(scores.softmax(-1), values).view(query.shape)
    scores = torch.baddbmm(bucket.bias, grouped, keys.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), values)
    if bool(out.isnan().any()):
        # An unwritten or foreign slot may hold NaN, which neither a bias nor a weight of zero silences.
        hidden = bucket.bias == float("-inf")
        scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(scale).masked_fill_(hidden, float("-inf"))
        out = torch.bmm(scores.softmax(-1), values.masked_fill(hidden.transpose(1, 2), 0))
    return out.view(query.shape)


class _Chunk(NamedTuple):
    """The last num_tokens tokens of a sequence of `context` tokens."""

    num_tokens: int
    context: int
    sliding_window: int | None
    block_size: int

    @property
    def first_query(self) -> int:
        """Position of its first token."""
        return self.context - self.num_tokens

    @property
    def first_key(self) -> int:
        """Position of the first key to gather: the start of the block that holds the first visible one."""
        window = self.sliding_window
        first = 0 if window is None else max(0, self.first_query - window + 1)
        return first // self.block_size * self.block_size

    def hides(self, queries: range, keys: range) -> torch.Tensor:
        """[num_queries, num_keys] bool: keys behind the query's position, or before its window."""
        at, position = torch.arange(keys.start, keys.stop), torch.arange(queries.start, queries.stop)[:, None]
        hidden = at > position
        return hidden if self.sliding_window is None else hidden | (at <= position - self.sliding_window)

    def bias(self, dtype: torch.dtype) -> torch.Tensor:
        """[num_tokens, num_keys]: -inf where a key is hidden, else 0."""
        hidden = self.hides(range(self.first_query, self.context), range(self.first_key, self.context))
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))

    def gather(self, caches: _HeadRows, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values from first_key on, each [num_kv_heads, num_keys, head_dim]."""
        blocks = table[self.first_key // self.block_size : -(-self.context // self.block_size)].long()[None]
        keys, values = caches.gather(caches.rows_of(blocks), 1)
        return keys[:, : self.context - self.first_key], values[:, : self.context - self.first_key]


def _fused_chunk(
    query: torch.Tensor,
    caches: _HeadRows,
    table: torch.Tensor,
    chunk: _Chunk,
    scale: float,
    scratch: dict[Hashable, Any],
    out: torch.Tensor,
) -> None:
    """torch's fused attention, whose bfloat16 products run on AMX tiles. query [num_tokens, num_heads, head_dim]."""
    keys, values = chunk.gather(caches, table)
    causal = chunk.first_query == 0 and chunk.sliding_window is None
    name = ("paged_attention bias", chunk, query.dtype)
    fused = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if causal else once(scratch, name, lambda: chunk.bias(query.dtype)),
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    out.copy_(fused[0].transpose(0, 1))


def _chunk_by_blocks(
    query: torch.Tensor, caches: _HeadRows, table: torch.Tensor, chunk: _Chunk, scale: float, out: torch.Tensor
) -> None:
    """Blocks of queries, each with the keys that it sees. query [num_tokens, num_heads, head_dim]; written to out."""
    num_tokens, heads, dim = chunk.num_tokens, caches.num_heads, caches.head_dim
    first_query, first_key, window = chunk.first_query, chunk.first_key, chunk.sliding_window
    keys, values = chunk.gather(caches, table)
    # [kv_heads, group, tokens, head_dim], so that one product serves all query heads of a KV head
    grouped = (query * scale).view(num_tokens, heads, -1, dim).permute(1, 2, 0, 3)
    group = grouped.shape[1]
    for start in range(0, num_tokens, _QUERIES_PER_BLOCK):
        stop = min(start + _QUERIES_PER_BLOCK, num_tokens)
        low = first_key if window is None else max(first_key, first_query + start - window + 1)
        visible = slice(low - first_key, first_query + stop - first_key)
        part = grouped[:, :, start:stop].reshape(heads, -1, dim)
        scores = torch.bmm(part, keys[:, visible].transpose(1, 2)).view(heads, group, stop - start, -1)
        hidden = chunk.hides(range(first_query + start, first_query + stop), range(low, first_query + stop))
        scores.masked_fill_(hidden, float("-inf"))
        weights = scores.softmax(-1).view(heads, -1, scores.shape[-1])
        result = torch.bmm(weights, values[:, visible]).view(heads, group, stop - start, -1)
        out[start:stop] = result.permute(2, 0, 1, 3).reshape(stop - start, -1, dim)
