"""Paged attention on CPU, straight from the blocks: no gather, and one kernel for prompts, chunks and decodes."""

from __future__ import annotations

import torch

from rorqual.batch import Batch
from rorqual.ops.attention import paged_attention
from rorqual.ops.native.library import kernels
from rorqual.ops.native.store_kvcache import refuse_layout


def _refuse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *_args: object,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    **_kwargs: object,
) -> str | None:
    if query.device.type != "cpu":
        return f"needs CPU tensors, got {query.device.type}"
    if query.dtype != torch.bfloat16:
        return f"needs bfloat16, got {query.dtype}"
    if soft_cap is not None or sinks is not None:
        return "computes neither a soft cap nor sinks"
    return refuse_layout(key_cache, value_cache)


@paged_attention.impl("native", refuse=_refuse)
def paged_attention_native(
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
    """Weights are rounded to bfloat16 before they meet the values where AMX multiplies them; all sums in float32."""
    found = kernels()
    assert found is not None
    if query.stride(2) != 1:
        query = query.contiguous()
    block_tables = block_tables.contiguous()
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    failed = found.attention(
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        batch.cu_seqlens_q.data_ptr(),
        batch.context_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.shape[1],
        block_tables.shape[0],
        query.shape[1],
        key_cache.shape[2],
        query.shape[2],
        key_cache.shape[1],
        scale,
        sliding_window or 0,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError("no memory for the list of attention tasks")
    return out
