"""KVSpec: what a layer keeps per token. Layers with equal specs share a cache group: its pool and block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of one attention layer, on one rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sliding_window: int | None = None
    """A query sees this many keys, itself included; None sees all."""

    def bytes_per_token(self) -> int:
        """Bytes of one layer's key and value for one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class GroupLayers(NamedTuple):
    """One cache group: a spec and the model layers that share it."""

    spec: KVSpec
    layers: tuple[int, ...]

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all layers of the group."""
        return self.spec.bytes_per_token() * len(self.layers) * block_size


def group_layers(specs: Sequence[KVSpec]) -> tuple[GroupLayers, ...]:
    """Group layer numbers by equal spec, in order of first appearance."""
    found: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        found.setdefault(spec, []).append(layer)
    return tuple(GroupLayers(spec, tuple(layers)) for spec, layers in found.items())
