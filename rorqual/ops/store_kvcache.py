"""The tensors of the paged cache, and the write of new keys and values into their slots."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from rorqual.ops.registry import op


class KVCache(NamedTuple):
    """One layer's cache, each [num_blocks, block_size, num_kv_heads, head_dim] with strides of the kernels' choice."""

    key: torch.Tensor
    value: torch.Tensor


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
    strides, written in place; slot_mapping [num_tokens] int64. `scratch` is the batch's, for what layers can share.
    """
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().squeeze(1)
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block_size = key_cache.shape[1]
    where = (slot_mapping // block_size, slot_mapping % block_size)
    key_cache.index_put_(where, key.to(key_cache.dtype))
    value_cache.index_put_(where, value.to(value_cache.dtype))
