"""Paged attention on NVIDIA GPUs: chunks in tiles, single tokens with their context in spans."""

# mypy: ignore-errors

from __future__ import annotations

import functools
import math

import torch
import triton.language as tl

from rorqual.batch import Batch, once
from rorqual.ops.attention import paged_attention
from rorqual.ops.store_kvcache import KVCache, allocate_kvcache
from rorqual.ops.triton._attention_kernel import chunk_kernel, single_token_kernel
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._hopper_attention import HOPPER_TILE, attend_chunks, takes_chunks
from rorqual.ops.triton._linear_launch import arrivals
from rorqual.ops.triton.launch import DEVICE, refuses

SPAN = 256
"""Keys of a single token's context that are one softmax. Sums depend on it, and on nothing else but the context."""
_PROGRAMS = 264
"""How many programs single tokens should have at least: two for each multiprocessor, which is how many fit in one."""
_LARGEST_HEAD, _LARGEST_GROUP = 256, 64
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _refuse_allocate(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> str | None:
    return None if device.type == DEVICE else f"needs {DEVICE}, got {device.type}"


@allocate_kvcache.impl("triton", refuse=_refuse_allocate)
def allocate_kvcache_triton(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """A head's rows of a block lie together: one program reads them."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return KVCache(*(torch.empty(shape, dtype=dtype, device=device).transpose(1, 2) for _ in "kv"))


def _refuse(
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
) -> str | None:
    if refusal := refuses(query, key_cache, value_cache, block_tables, sinks):
        return refusal
    num_heads, num_kv_heads, dims = query.shape[1], key_cache.shape[2], query.shape[2]
    if dims > _LARGEST_HEAD or num_heads // num_kv_heads > _LARGEST_GROUP:
        return f"needs heads of up to {_LARGEST_HEAD} and {_LARGEST_GROUP} per KV head, got {list(query.shape)}"
    if query.dtype not in _DTYPES or key_cache.dtype not in (*_DTYPES, torch.float8_e4m3fn):
        return f"does not know queries of {query.dtype} beside a cache of {key_cache.dtype}"
    if any(t.stride(-1) != 1 for t in (query, key_cache, value_cache, block_tables, query if sinks is None else sinks)):
        return "needs channels, block tables and sinks without gaps"
    if sinks is not None and sinks.dtype != torch.float32:
        return f"needs sinks of float32, got {sinks.dtype}"
    return None


@paged_attention.impl("triton", refuse=_refuse)
def paged_attention_triton(
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
    """One launch for all sequences with a single token, one for all others."""
    num_heads, dims = query.shape[1:]
    block_size, num_kv_heads = key_cache.shape[1:3]
    group, block_d = num_heads // num_kv_heads, max(16, 1 << (dims - 1).bit_length())
    e4m3 = key_cache.dtype == torch.float8_e4m3fn
    compute = query.dtype if e4m3 or key_cache.dtype == query.dtype else torch.float32
    if e4m3:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    steps = (
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        num_heads * dims,
    )
    # Scores are in powers of two; tanh of a score to be capped is made of a power of twice it.
    cap = 0.0 if soft_cap is None else soft_cap * math.log2(math.e)
    unit = scale * math.log2(math.e) if soft_cap is None else 2 * scale / soft_cap * math.log2(math.e)
    numbers = (unit, cap, sliding_window or 0)
    constants = {
        "GROUP": group,
        "D": dims,
        "BLOCK_D": block_d,
        "BLOCK_SIZE": block_size,
        "WINDOW": sliding_window is not None,
        "CAPPED": soft_cap is not None,
        "SINKS": sinks is not None,
        "E4M3": e4m3,
        "COMPUTE": _DTYPES[compute],
        "PRECISION": "ieee" if compute == torch.float32 else "tf32",
        "launch_pdl": DEPENDENT_LAUNCH,
    }
    caches = (key_cache, value_cache, block_tables, batch.context_lens)
    sinks = query if sinks is None else sinks  # an address that nobody reads
    singles = batch.num_single_token_seqs
    if singles < len(batch.query_lens):
        on_hopper = takes_chunks(query, key_cache, value_cache, scale=scale, sliding_window=sliding_window)
        tile = HOPPER_TILE if on_hopper else _chunk_tile(block_d, compute.itemsize, group)
        queries = tile["BM"] // group
        tiles = once(batch.scratch, ("paged_attention", "tiles", queries), lambda: _tiles(batch, queries, query.device))
        if on_hopper:
            attend_chunks(query, *caches, sinks, batch.cu_seqlens_q, tiles, out, *numbers[:2], constants)
        else:
            chunk_kernel[(len(tiles), num_kv_heads)](
                query, *caches, sinks, batch.cu_seqlens_q, tiles, out, *steps, *numbers, **tile, **constants
            )
    if singles:
        most_spans = -(-max(batch.context_lens_host[:singles]) // SPAN)
        splits = max(1, min(most_spans, -(-_PROGRAMS // (singles * num_kv_heads))))
        partial = counters = query
        if splits > 1:
            shape = (singles, num_kv_heads, most_spans, group, block_d + 2)
            partial = once(
                batch.scratch,
                ("paged_attention", shape),
                lambda: torch.empty(shape, dtype=torch.float32, device=query.device),
            )
            counters = arrivals(query.device)
        single_token_kernel[(num_kv_heads, singles, splits)](
            query,
            *caches,
            sinks,
            out,
            partial,
            counters,
            *steps,
            *numbers,
            most_spans,
            BM=max(16, 1 << (group - 1).bit_length()),
            SPAN=SPAN,
            SPLIT=splits > 1,
            **_single_tile(block_d, compute.itemsize),
            **constants,
        )
    return out


@functools.cache
def _single_tile(block_d: int, itemsize: int) -> dict[str, int]:
    return {"BN": 32 if block_d * itemsize > 256 else 128, "STAGES": 3, "num_warps": 4}


@functools.cache
def _chunk_tile(block_d: int, itemsize: int, group: int) -> dict[str, int]:
    """BN does not depend on the group, so that a query's sums do not either."""
    if block_d * itemsize > 256:
        return {"BM": max(64, 1 << (group - 1).bit_length()), "BN": 32, "STAGES": 2, "num_warps": 4}
    return {"BM": 128, "BN": 128, "STAGES": 3, "num_warps": 8}


def _tiles(batch: Batch, queries: int, device: torch.device) -> torch.Tensor:
    """int32 [num_tiles, 2]: (sequence, first query) of every chunk's tiles, the longest contexts first."""
    found = []
    for seq in range(batch.num_single_token_seqs, len(batch.query_lens)):
        length, context = batch.query_lens[seq], batch.context_lens_host[seq]
        found += [(context - length + first, seq, first) for first in range(0, length, queries)]
    found.sort(reverse=True)
    return torch.tensor([entry[1:] for entry in found], dtype=torch.int32).to(device, non_blocking=True)
