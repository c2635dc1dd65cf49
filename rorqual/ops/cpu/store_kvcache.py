"""The paged cache on CPU, head by head, and the write into it: a row copy per tensor, indices shared by all layers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from rorqual.batch import once
from rorqual.ops.store_kvcache import KVCache, allocate_kvcache, as_cached, by_bytes, store_kvcache


class _Rows(NamedTuple):
    """Which input rows go to which rows of a cache seen as [num_blocks * num_kv_heads * block_size, head_dim]."""

    source: torch.Tensor | None
    """Tokens that have a slot; None if all have."""
    target: torch.Tensor


def _refuse_allocate(*_shape: int, dtype: torch.dtype, device: torch.device) -> str | None:
    return None if device.type == "cpu" else f"is for the CPU, got {device.type}"


@allocate_kvcache.impl("cpu", refuse=_refuse_allocate)
def allocate_kvcache_cpu(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """The heads of a block lie one after the other, so that a head's keys can be gathered as long rows."""
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return KVCache(*(torch.empty(shape, dtype=dtype).transpose(1, 2) for _ in "kv"))


def _refuse(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, *_args: object, **_kwargs: object
) -> str | None:
    if key.device.type != "cpu":
        return f"needs CPU tensors, got {key.device.type}"
    if not key_cache.transpose(1, 2).is_contiguous():
        return "needs a cache whose heads lie one after the other in each block"
    return None


@store_kvcache.impl("cpu", refuse=_refuse)
def store_kvcache_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scratch: dict[Hashable, Any] | None = None,
) -> None:
    """See the reference."""
    _, block_size, num_heads, head_dim = key_cache.shape
    name = ("store_kvcache", id(slot_mapping), block_size, num_heads)
    rows = once(scratch, name, lambda: _rows(slot_mapping, block_size, num_heads))
    for new, cache in ((key, key_cache), (value, value_cache)):
        kept = new if rows.source is None else new[rows.source]
        written = by_bytes(as_cached(kept.reshape(-1, head_dim), cache.dtype))
        by_bytes(cache).transpose(1, 2).view(-1, head_dim).index_copy_(0, rows.target, written)


def _rows(slot_mapping: torch.Tensor, block_size: int, num_heads: int) -> _Rows:
    source = None
    if bool((slot_mapping < 0).any()):
        source = (slot_mapping >= 0).nonzero().squeeze(1)
        slot_mapping = slot_mapping[source]
    block = slot_mapping // block_size
    heads = block[:, None] * num_heads + torch.arange(num_heads)
    return _Rows(source, (heads * block_size + (slot_mapping - block * block_size)[:, None]).flatten())
