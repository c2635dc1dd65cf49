"""What a layer's cache keeps, and how a group of equal caches lies in blocks.

A model names its caches in a list, one or several per layer; those with equal specs share a cache group: its pool and
its block tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rorqual.cache.paging import Paging, Retention
from rorqual.quantization.kv_record import KVRecord


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of one attention layer, on one rank."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    sliding_window: int | None = None
    """A query sees this many keys, itself included; None sees all."""

    @property
    def retention(self) -> Retention | None:
        """What a window needs; None keeps all."""
        return None if self.sliding_window is None else Retention(self.sliding_window - 1)

    @property
    def tokens_per_row(self) -> int:
        """1: a row per token."""
        return 1

    def bytes_per_row(self) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class RowPart(NamedTuple):
    """One vector of a row: plain numbers of a dtype, or a record of bytes."""

    width: int
    """Numbers."""
    dtype: torch.dtype
    """Of plain numbers; of what a record is read as."""
    record: KVRecord | None = None

    @property
    def bytes(self) -> int:
        """Bytes of one."""
        return self.width * self.dtype.itemsize if self.record is None else self.record.bytes


@dataclass(frozen=True, slots=True)
class RowSpec:
    """One row of one or several vectors for every `tokens_per_row` tokens: latents, shared keys and values, compressed
    entries, index keys, the rows that a compressor still needs. Vectors that are addressed alike are parts of one row.
    """

    parts: tuple[RowPart, ...]
    tokens_per_row: int = 1
    retention: Retention | None = None
    """None keeps all."""

    def bytes_per_row(self) -> int:
        """Bytes of one row."""
        return sum(part.bytes for part in self.parts)


CacheSpec = KVSpec | RowSpec


class CacheGroup(NamedTuple):
    """A spec and the numbers of the model's caches that share it."""

    spec: CacheSpec
    caches: tuple[int, ...]

    def paging(self, block_size: int) -> Paging:
        """Blocks hold block_size tokens, or the fewest more that are whole rows."""
        return Paging(math.lcm(block_size, self.spec.tokens_per_row), self.spec.tokens_per_row)

    def bytes_per_row(self) -> int:
        """Bytes of one row over all caches of the group."""
        return self.spec.bytes_per_row() * len(self.caches)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block over all caches of the group."""
        return self.bytes_per_row() * self.paging(block_size).rows


def group_caches(specs: Sequence[CacheSpec]) -> tuple[CacheGroup, ...]:
    """Group cache numbers by equal spec, in order of first appearance."""
    found: dict[CacheSpec, list[int]] = {}
    for number, spec in enumerate(specs):
        found.setdefault(spec, []).append(number)
    return tuple(CacheGroup(spec, tuple(numbers)) for spec, numbers in found.items())
