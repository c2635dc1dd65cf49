"""KVStorage: the tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rorqual.cache.spec import GroupLayers


class LayerKV(NamedTuple):
    """One layer's cache and the group whose block tables address it."""

    group: int
    key: torch.Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]; the memory order is a kernel's business, see KVStorage."""
    value: torch.Tensor
    """Like key."""


class KVStorage:
    """Keys and values of every layer, indexed by layer number.

    On CPU the heads of a block lie one after the other in memory ([block, head, offset, dim] behind a transposed view),
    so that a head's keys can be gathered as long rows; on GPU a token's heads lie together.
    """

    def __init__(
        self, groups: Sequence[GroupLayers], num_blocks: Sequence[int], *, block_size: int, device: torch.device
    ) -> None:
        found: dict[int, LayerKV] = {}
        for index, ((spec, layers), blocks) in enumerate(zip(groups, num_blocks, strict=True)):
            for layer in layers:
                pair = [
                    _allocate(blocks, block_size, spec.num_kv_heads, spec.head_dim, spec.dtype, device) for _ in "kv"
                ]
                found[layer] = LayerKV(index, *pair)
        self._layers = [found[layer] for layer in sorted(found)]

    def __getitem__(self, layer: int) -> LayerKV:
        return self._layers[layer]


def _allocate(
    num_blocks: int, block_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    # Not zeroed: untouched pages cost no memory, and no kernel lets an unwritten slot reach a result.
    if device.type == "cpu":
        return torch.empty(num_blocks, num_heads, block_size, head_dim, dtype=dtype).transpose(1, 2)
    return torch.empty(num_blocks, block_size, num_heads, head_dim, dtype=dtype, device=device)
