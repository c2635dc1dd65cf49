"""Attention over the paged cache: store this step's keys and values, then read all that each query may see."""

from __future__ import annotations

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.cache.spec import KVSpec
from rorqual.cache.storage import KVStorage
from rorqual.ops.attention import paged_attention
from rorqual.ops.store_kvcache import store_kvcache


class Attention(nn.Module):
    """Causal attention of one layer, with grouped query heads and an optional sliding window."""

    def __init__(self, layer: int, spec: KVSpec, *, scale: float) -> None:
        super().__init__()
        self.layer, self.spec, self.scale = layer, spec, scale

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, kv: KVStorage
    ) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim] -> like query."""
        cache = kv[self.layer]
        view = batch.caches[cache.group]
        store_kvcache(key, value, cache.key, cache.value, view.slot_mapping, scratch=batch.scratch)
        return paged_attention(
            query,
            cache.key,
            cache.value,
            batch,
            view.block_tables,
            scale=self.scale,
            sliding_window=self.spec.sliding_window,
        )
