"""Mesh: which rank this is along each parallel axis. Every sharded layer takes one; the default is a single rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place. `tp` ranks split every layer."""

    tp_rank: int = 0
    tp_size: int = 1

    @classmethod
    def single(cls) -> Mesh:
        """One rank: sharding and reducing cost nothing."""
        return cls()

    def shard(self, size: int, *, what: str) -> slice:
        """This rank's slice of a dimension. Raises ValueError when the ranks cannot share it evenly."""
        if size % self.tp_size:
            raise ValueError(
                f"{what} ({size}) cannot be split over {self.tp_size} ranks: use a tensor_parallel_size that divides it"
            )
        width = size // self.tp_size
        return slice(self.tp_rank * width, (self.tp_rank + 1) * width)

    def tp_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the tp ranks."""
        assert self.tp_size == 1, "several ranks need a process group"
        return x
