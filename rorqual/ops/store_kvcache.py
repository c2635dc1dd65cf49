"""The tensors of the paged cache, and the write of new keys and values into their slots."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from rorqual.ops.registry import op
from rorqual.quantization.codes import encode_e4m3

CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
"""What a cache of keys and values may hold. float8_e4m3fn has no scale beside it: a value is its own nearest code."""


class KVCache(NamedTuple):
    """One layer's cache, each [num_blocks, block_size, num_kv_heads, head_dim] with strides of the kernels' choice."""

    key: torch.Tensor
    value: torch.Tensor


class LayerKV(NamedTuple):
    """One layer's cache and the group whose block tables address it."""

    group: int
    key: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]; the memory order is the kernels' business."""
    value: torch.Tensor
    """Like key."""


@op
def allocate_kvcache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Memory for a layer's keys and values, in the order that this device's kernels read best.

    Not zeroed: untouched pages cost no memory, and no kernel lets an unwritten slot reach a result.
    """
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    return KVCache(*(torch.empty(shape, dtype=dtype, device=device) for _ in "kv"))


@op
def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> None:
    """cache[slot // block_size, slot % block_size] = row, for every token whose slot is not -1.

    key, value [num_tokens, num_kv_heads, head_dim]; caches [num_blocks, block_size, num_kv_heads, head_dim] with any
    strides, written in place; slot_mapping [num_tokens] int64. Rows are rounded to the cache's dtype, to the nearest
    with ties to even; float8_e4m3fn saturates at 448. `scratch` is the batch's, for what layers can share.
    """
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block_size = key_cache.shape[1]
    where = (slot_mapping // block_size, slot_mapping % block_size)
    for rows, cache in ((key, key_cache), (value, value_cache)):
        by_bytes(cache).index_put_(where, by_bytes(as_cached(rows, cache.dtype)))


def as_cached(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows rounded to a cache's dtype."""
    return encode_e4m3(rows) if dtype == torch.float8_e4m3fn else rows.to(dtype)


def by_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A view to index: float8 as uint8, since not every device indexes float8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
