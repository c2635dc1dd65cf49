"""Paged batches for attention and store cases: scattered blocks, mixed chunks, NaN wherever nobody wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from rorqual.batch import Batch, CacheView
from rorqual.ops.store_kvcache import allocate_kvcache


class PagedCase(NamedTuple):
    """Arguments of `paged_attention`, and each sequence's keys and values end to end for an independent formula."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    batch: Batch
    block_tables: torch.Tensor
    options: dict[str, Any]
    keys: list[torch.Tensor]
    """Per sequence [context_len, num_kv_heads, head_dim]; NaN where the cache no longer holds them."""
    values: list[torch.Tensor]

    @property
    def args(self) -> tuple[Any, ...]:
        """The op's positional arguments."""
        return self.query, self.key_cache, self.value_cache, self.batch, self.block_tables


def make_caches(
    num_blocks: int, block_size: int, num_heads: int, head_dim: int, *, layout: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Keys and values [num_blocks, block_size, num_heads, head_dim], all NaN.

    layout "heads" is that of ops/cpu, "tokens" the GPU's, "own" whatever the kernels in use ask for.
    """
    if layout == "own":
        shape = (num_blocks, block_size, num_heads, head_dim)
        return [t.fill_(float("nan")) for t in allocate_kvcache(*shape, dtype=dtype, device=torch.device("cpu"))]
    if layout == "heads":
        shape = (num_blocks, num_heads, block_size, head_dim)
        return [torch.full(shape, float("nan"), dtype=dtype).transpose(1, 2) for _ in "kv"]
    return [torch.full((num_blocks, block_size, num_heads, head_dim), float("nan"), dtype=dtype) for _ in "kv"]


def make_batch(query_lens: Sequence[int], context_lens: Sequence[int], caches: tuple[CacheView, ...] = ()) -> Batch:
    """A batch whose sequences have these chunks and contexts; ids and logits rows are of no interest."""
    positions = [
        torch.arange(context - length, context) for length, context in zip(query_lens, context_lens, strict=True)
    ]
    ends = torch.tensor([0, *query_lens]).cumsum(0)
    return Batch(
        input_ids=torch.zeros(sum(query_lens), dtype=torch.int64),
        positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.int64),
        cu_seqlens_q=ends.int(),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        caches=caches,
        logits_indices=ends[1:] - 1,
        query_lens=tuple(query_lens),
        context_lens_host=tuple(context_lens),
    )


def attention_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int = 4,
    kv_heads: int = 4,
    head_dim: int = 16,
    block_size: int = 4,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    layout: str = "heads",
    strided: bool = False,
    scale: float | None = None,
    extra_columns: int = 0,
    soft_cap: float | None = None,
    sinks: bool = False,
) -> PagedCase:
    """Scattered blocks that hold NaN outside of what each sequence keeps: behind its context, and before its window."""
    generator = torch.Generator().manual_seed(len(query_lens) * 1000 + sum(context_lens))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lengths = [-(-context // block_size) for context in context_lens]
    spare = 3
    free = torch.randperm(sum(lengths) + spare, generator=generator).tolist()
    caches = make_caches(len(free), block_size, kv_heads, head_dim, layout=layout, dtype=cache_dtype or dtype)
    tables = torch.zeros(len(lengths), max(lengths, default=0) + extra_columns, dtype=torch.int32)
    whole: list[list[torch.Tensor]] = [[], []]
    for row, (length, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        first = 0 if window is None else max(0, context - length - window + 1) // block_size
        blocks = torch.tensor([free.pop() for _ in range(first, lengths[row])])
        tables[row, first : lengths[row]] = blocks.int()  # a passed block's entry names block 0, whoever owns that
        at = torch.arange(first * block_size, context)
        for cache, rows in zip(caches, whole, strict=True):
            content = normal(context, kv_heads, head_dim)
            content[: first * block_size] = float("nan")
            cache[blocks[at // block_size - first], at % block_size] = content[at].to(cache.dtype)
            rows.append(content)
    num_tokens = sum(query_lens)
    query = normal(num_tokens, heads + 3, head_dim)[:, 1:-2] if strided else normal(num_tokens, heads, head_dim)
    options = {"scale": head_dim**-0.5 if scale is None else scale}
    if window is not None:
        options["sliding_window"] = window
    if soft_cap is not None:
        options["soft_cap"] = soft_cap
    if sinks:
        options["sinks"] = torch.randn(heads, generator=generator) * 3  # now less than the scores, now more
    return PagedCase(query, *caches, make_batch(query_lens, context_lens), tables, options, *whole)


_MIXED = ([1, 1, 1, 5, 2, 9], [1, 4, 13, 5, 11, 30])
_SPREAD = ([1] * 8, [1, 3, 200, 5, 700, 130, 70, 699])


def _native(query_lens: Sequence[int], context_lens: Sequence[int], **options: Any) -> PagedCase:
    shape = {"head_dim": 32, "block_size": 16, "heads": 6, "kv_heads": 2, "dtype": torch.bfloat16, "layout": "own"}
    return attention_case(query_lens, context_lens, **(shape | options))


_CHUNKS = ([1, 40, 150, 7], [300, 40, 290, 130])
_HOPPER = {"head_dim": 128, "block_size": 16, "heads": 8, "kv_heads": 2, "dtype": torch.bfloat16, "strided": True}
_LONG = ([1, 1, 40, 300, 7], [600, 17, 40, 1200, 1030])

CAPPED_OR_SUNK_CASES: dict[str, Any] = {
    "chunks_on_hopper_soft_cap_and_sinks": lambda: attention_case(*_CHUNKS, **_HOPPER, soft_cap=2.0, sinks=True),
    "mixed_soft_cap": lambda: attention_case(*_MIXED, soft_cap=1.5),
    "mixed_soft_cap_far_below_scores": lambda: attention_case(*_MIXED, soft_cap=0.5, scale=100.0),
    "mixed_sinks": lambda: attention_case(*_MIXED, sinks=True),
    "mixed_sinks_three_heads_a_group_bfloat16": lambda: attention_case(
        *_MIXED, heads=9, kv_heads=3, strided=True, dtype=torch.bfloat16, sinks=True
    ),
    "window_soft_cap_and_sinks": lambda: attention_case(
        *_MIXED, heads=16, kv_heads=1, window=4, soft_cap=3.0, sinks=True
    ),
    "fp8_cache_soft_cap_and_sinks": lambda: attention_case(
        *_MIXED, cache_dtype=torch.float8_e4m3fn, soft_cap=3.0, sinks=True
    ),
    "spread_contexts_soft_cap_and_sinks": lambda: attention_case(
        *_SPREAD, block_size=16, heads=6, kv_heads=2, soft_cap=2.0, sinks=True
    ),
    "chunk_beyond_one_block_of_queries_soft_cap_and_sinks": lambda: attention_case(
        [1, 300], [40, 555], block_size=16, heads=6, kv_heads=2, soft_cap=2.0, sinks=True
    ),
}

ATTENTION_CASES: dict[str, Any] = {
    "one_token_of_one": lambda: attention_case([1], [1]),
    "one_token": lambda: attention_case([1], [7]),
    "one_token_at_a_block_edge": lambda: attention_case([1, 1, 1], [8, 9, 7]),
    "contexts_out_of_order": lambda: attention_case([1, 1, 1, 1], [1, 9, 5, 13]),
    "equal_full_blocks": lambda: attention_case([1, 1], [8, 8]),
    "one_prompt": lambda: attention_case([6], [6]),
    "one_chunk_of_a_prompt": lambda: attention_case([3], [10]),
    "mixed": lambda: attention_case(*_MIXED),
    "mixed_wide_tables": lambda: attention_case(*_MIXED, extra_columns=5),
    "mixed_strided": lambda: attention_case(*_MIXED, strided=True),
    "mixed_bfloat16": lambda: attention_case(*_MIXED, dtype=torch.bfloat16),
    "mixed_three_heads_a_group": lambda: attention_case(*_MIXED, heads=9, kv_heads=3),
    "mixed_three_heads_a_group_strided_bfloat16": lambda: attention_case(
        *_MIXED, heads=9, kv_heads=3, strided=True, dtype=torch.bfloat16
    ),
    "mixed_eight_heads_a_group": lambda: attention_case(*_MIXED, heads=8, kv_heads=1),
    "mixed_odd_head_dim": lambda: attention_case(*_MIXED, heads=6, kv_heads=2, head_dim=7),
    "mixed_block_size_one": lambda: attention_case(*_MIXED, block_size=1),
    "mixed_block_size_16": lambda: attention_case(*_MIXED, block_size=16),
    "mixed_other_scale": lambda: attention_case(*_MIXED, scale=0.7),
    "spread_contexts": lambda: attention_case(*_SPREAD, block_size=16, heads=6, kv_heads=2),
    "spread_contexts_bfloat16": lambda: attention_case(
        *_SPREAD, block_size=16, heads=6, kv_heads=2, dtype=torch.bfloat16
    ),
    "spread_contexts_window": lambda: attention_case(*_SPREAD, block_size=16, heads=6, kv_heads=2, window=150),
    "window_of_one": lambda: attention_case(*_MIXED, window=1),
    "window_of_four": lambda: attention_case(*_MIXED, window=4, heads=8, kv_heads=1),
    "window_edge": lambda: attention_case([1, 1, 1, 1, 3, 4], [3, 4, 5, 8, 5, 8], window=4),
    "window_of_seven_strided_bfloat16": lambda: attention_case(*_MIXED, window=7, strided=True, dtype=torch.bfloat16),
    "window_wider_than_all": lambda: attention_case(*_MIXED, window=64),
    "window_wide_tables": lambda: attention_case(*_MIXED, window=5, extra_columns=3),
    "chunk_beyond_one_block_of_queries": lambda: attention_case([1, 300], [40, 555], block_size=16),
    "chunk_beyond_one_block_of_queries_window": lambda: attention_case(
        [1, 520], [40, 600], block_size=16, heads=6, kv_heads=2, window=37
    ),
    "layout_of_the_gpu": lambda: attention_case(*_MIXED, layout="tokens"),
    "cache_of_another_dtype": lambda: attention_case(*_MIXED, cache_dtype=torch.bfloat16),
    "fp8_cache": lambda: attention_case(*_MIXED, cache_dtype=torch.float8_e4m3fn),
    "fp8_cache_one_token": lambda: attention_case([1], [7], cache_dtype=torch.float8_e4m3fn),
    "fp8_cache_three_heads_a_group": lambda: attention_case(
        *_MIXED, heads=9, kv_heads=3, block_size=16, cache_dtype=torch.float8_e4m3fn
    ),
    "fp8_cache_bfloat16_window": lambda: attention_case(
        *_MIXED, window=5, dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn
    ),
    "native_one_token_of_one": lambda: _native([1], [1]),
    "native_mixed": lambda: _native(*_MIXED),
    "native_mixed_one_head_a_group": lambda: _native(*_MIXED, kv_heads=6),
    "native_mixed_twenty_heads_a_group": lambda: _native(*_MIXED, heads=40, extra_columns=3),
    "native_mixed_strided": lambda: _native(*_MIXED, strided=True),
    "native_mixed_other_scale": lambda: _native(*_MIXED, scale=0.7),
    "native_window_of_one": lambda: _native(*_MIXED, window=1),
    "native_window_of_four": lambda: _native(*_MIXED, window=4),
    "native_spread": lambda: _native(*_SPREAD, head_dim=64),
    "native_long": lambda: _native(*_LONG, heads=9, kv_heads=3, head_dim=64),
    "native_long_blocks_of_48": lambda: _native(*_LONG, block_size=48, head_dim=96),
    "native_long_window": lambda: _native(*_LONG, window=100, head_dim=128, block_size=32),
    "native_long_wide_heads": lambda: _native(*_LONG, head_dim=256, heads=2),
    **CAPPED_OR_SUNK_CASES,
}


def store_case(
    slots: Sequence[int],
    *,
    heads: int = 3,
    head_dim: int = 8,
    num_blocks: int = 5,
    block_size: int = 4,
    layout: str = "heads",
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    strided: bool = False,
) -> tuple[Any, ...]:
    """Arguments of `store_kvcache`."""
    generator = torch.Generator().manual_seed(len(slots))
    merged = torch.randn(len(slots), 3 * heads, head_dim, generator=generator).to(dtype)  # as qkv_proj gives them
    _, key, value = merged.split(heads, dim=1)
    if not strided:
        key, value = key.contiguous(), value.contiguous()
    caches = make_caches(num_blocks, block_size, heads, head_dim, layout=layout, dtype=cache_dtype or dtype)
    return key, value, *caches, torch.tensor(slots, dtype=torch.int64)


_SLOTS = [7, 0, 19, 3, 12, 8]


def _native_store(slots: Sequence[int], **options: Any) -> tuple[Any, ...]:
    shape = {"head_dim": 32, "block_size": 16, "dtype": torch.bfloat16, "layout": "own"}
    return store_case(slots, **(shape | options))


STORE_CASES: dict[str, Any] = {
    "none": lambda: (store_case([]), {}),
    "one": lambda: (store_case([5]), {}),
    "scattered": lambda: (store_case(_SLOTS), {}),
    "scattered_strided": lambda: (store_case(_SLOTS, strided=True), {}),
    "scattered_bfloat16": lambda: (store_case(_SLOTS, dtype=torch.bfloat16), {}),
    "layout_of_the_gpu": lambda: (store_case(_SLOTS, layout="tokens"), {}),
    "cache_of_another_dtype": lambda: (store_case(_SLOTS, cache_dtype=torch.bfloat16, strided=True), {}),
    "fp8_cache": lambda: (store_case(_SLOTS, cache_dtype=torch.float8_e4m3fn, strided=True), {}),
    "fp8_cache_bfloat16": lambda: (
        store_case([-1, 7, 0, 12], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn, layout="tokens"),
        {},
    ),
    "float16_cache": lambda: (store_case(_SLOTS, cache_dtype=torch.float16), {}),
    "odd_heads_layout_of_the_gpu": lambda: (store_case(_SLOTS, heads=5, head_dim=7, layout="tokens"), {}),
    "padded": lambda: (store_case([-1, 7, -1, 0, 19, -1]), {}),
    "only_padding": lambda: (store_case([-1, -1]), {}),
    "native_none": lambda: (_native_store([]), {}),
    "native_scattered": lambda: (_native_store([17, 0, 79, 3, 32, 8]), {}),
    "native_strided": lambda: (_native_store([17, 0, 79, 3, 32, 8], strided=True), {}),
    "native_padded": lambda: (_native_store([-1, 17, -1, 0, 79, -1], head_dim=64), {}),
}

ALLOCATE_CASES: dict[str, Any] = {
    name: lambda shape=shape, dtype=dtype: (shape, {"dtype": dtype, "device": torch.device("cpu")})
    for name, shape, dtype in (
        ("small", (3, 4, 2, 8), torch.float32),
        ("small_bfloat16", (3, 4, 2, 8), torch.bfloat16),
        ("small_fp8", (3, 4, 2, 8), torch.float8_e4m3fn),
        ("native_small", (3, 16, 2, 32), torch.bfloat16),
        ("native_wide", (3, 32, 1, 256), torch.bfloat16),
    )
}
