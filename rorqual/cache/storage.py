"""KVStorage: the tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rorqual.cache.spec import GroupLayers
from rorqual.ops.store_kvcache import LayerKV, allocate_kvcache


class KVStorage:
    """Keys and values of every layer, indexed by layer number."""

    def __init__(
        self, groups: Sequence[GroupLayers], num_blocks: Sequence[int], *, block_size: int, device: torch.device
    ) -> None:
        found: dict[int, LayerKV] = {}
        for index, ((spec, layers), blocks) in enumerate(zip(groups, num_blocks, strict=True)):
            for layer in layers:
                cache = allocate_kvcache(
                    blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device
                )
                found[layer] = LayerKV(index, *cache)
        self._layers = [found[layer] for layer in sorted(found)]

    def __getitem__(self, layer: int) -> LayerKV:
        return self._layers[layer]
