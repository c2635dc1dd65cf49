"""KVStorage: the tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rorqual.cache.spec import CacheGroup, KVSpec
from rorqual.ops.row_cache import RowCache, allocate_rows
from rorqual.ops.store_kvcache import LayerKV, allocate_kvcache


class KVStorage:
    """What every cache of a model keeps, by its number in the model's list of specs."""

    def __init__(
        self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], *, block_size: int, device: torch.device
    ) -> None:
        self._pairs: dict[int, LayerKV] = {}
        self._several: dict[tuple[int, ...], tuple[LayerKV, ...]] = {}
        self._rows: dict[int, tuple[RowCache, ...]] = {}
        for index, (group, blocks) in enumerate(zip(groups, num_blocks, strict=True)):
            spec, paging = group.spec, group.paging(block_size)
            for number in group.caches:
                if isinstance(spec, KVSpec):
                    cache = allocate_kvcache(
                        blocks, paging.rows, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device=device
                    )
                    self._pairs[number] = LayerKV(index, *cache)
                else:
                    self._rows[number] = tuple(
                        allocate_rows(
                            blocks,
                            paging.rows,
                            part.width,
                            group=index,
                            dtype=part.dtype,
                            record=part.record,
                            device=device,
                        )
                        for part in spec.parts
                    )

    def __getitem__(self, number: int) -> LayerKV:
        """Keys and values of the cache of this number, whose spec is a KVSpec."""
        return self._pairs[number]

    def several(self, numbers: tuple[int, ...]) -> tuple[LayerKV, ...]:
        """Keys and values of these caches, the same object each time."""
        if numbers not in self._several:
            self._several[numbers] = tuple(self._pairs[number] for number in numbers)
        return self._several[numbers]

    def rows(self, number: int) -> tuple[RowCache, ...]:
        """The parts of the cache of this number, whose spec is a RowSpec."""
        return self._rows[number]

    def tensors(self) -> list[torch.Tensor]:
        """All memory, block by block along the first dimension."""
        pairs = [tensor for kv in self._pairs.values() for tensor in (kv.key, kv.value)]
        return pairs + [part.data for parts in self._rows.values() for part in parts]
