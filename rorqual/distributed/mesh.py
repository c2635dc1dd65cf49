"""Mesh: which rank this is along each parallel axis. Every sharded layer takes one; the default is a single rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rorqual.distributed.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank's place among dp_size x tp_size ranks.

    The `tp` ranks of a replica split every layer and compute the same tokens. Each of the `dp` replicas computes tokens
    of its own. With `expert_parallel` all ranks together hold the routed experts, each some whole ones; without, every
    replica holds all of them, split like the other layers. Pipelines and context parallelism would be further axes.

    Ranks are numbered replica by replica, so that those who exchange most are neighbours.
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    expert_parallel: bool = False
    tp: RankGroup | None = None
    """The ranks of this replica, in order; None where there is one, or nothing is exchanged (as in tests of shapes)."""
    ep: RankGroup | None = None
    """All ranks, where several replicas share the routed experts."""
    num_redundant_experts: int | None = None
    """Places for experts beyond one each, where experts are moved to balance ranks; None: they stay where they are."""

    @classmethod
    def single(cls) -> Mesh:
        """One rank: sharding and reducing cost nothing."""
        return cls()

    @classmethod
    def of_rank(
        cls,
        rank: int,
        *,
        tp_size: int = 1,
        dp_size: int = 1,
        expert_parallel: bool = False,
        num_redundant_experts: int | None = None,
    ) -> Mesh:
        """The place of a rank of all, before it is connected. Raises ValueError for a rank that is not there."""
        if not 0 <= rank < tp_size * dp_size:
            raise ValueError(f"ranks go from 0 to {tp_size * dp_size - 1}, got {rank}")
        return cls(
            rank % tp_size,
            tp_size,
            rank // tp_size,
            dp_size,
            expert_parallel,
            num_redundant_experts=num_redundant_experts,
        )

    def connected(self, *, tp: RankGroup | None, ep: RankGroup | None = None) -> Mesh:
        """The same place with the groups that it exchanges in."""
        return replace(self, tp=tp, ep=ep)

    @property
    def rank(self) -> int:
        """Among all."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.dp_size * self.tp_size

    @property
    def tp_ranks(self) -> tuple[int, ...]:
        """All ranks of this replica."""
        return tuple(range(self.dp_rank * self.tp_size, (self.dp_rank + 1) * self.tp_size))

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """All ranks that hold what this one holds of the layers that are not experts."""
        return tuple(range(self.tp_rank, self.world_size, self.tp_size))

    @property
    def ep_ranks(self) -> tuple[int, ...]:
        """All ranks that exchange tokens for their experts: those of all replicas, or this one alone."""
        return tuple(range(self.world_size)) if self.expert_parallel and self.dp_size > 1 else (self.rank,)

    @property
    def ep_size(self) -> int:
        """How many ranks share the routed experts whole."""
        return self.world_size if self.expert_parallel else 1

    @property
    def ep_rank(self) -> int:
        """This rank among them."""
        return self.rank if self.expert_parallel else 0

    def shard(self, size: int, *, what: str) -> slice:
        """This rank's slice of a dimension. Raises ValueError when the ranks cannot share it evenly."""
        if size % self.tp_size:
            raise ValueError(
                f"{what} ({size}) cannot be split over {self.tp_size} ranks: use a tensor_parallel_size that divides it"
            )
        width = size // self.tp_size
        return slice(self.tp_rank * width, (self.tp_rank + 1) * width)

    def shard_experts(self, num_experts: int) -> slice:
        """The routed experts that this rank holds. Raises ValueError when the ranks cannot share them evenly."""
        if num_experts % self.ep_size:
            raise ValueError(
                f"{num_experts} experts cannot be shared by {self.ep_size} ranks: use a number of ranks that divides "
                "them, or turn expert parallelism off"
            )
        count = num_experts // self.ep_size
        return slice(self.ep_rank * count, (self.ep_rank + 1) * count)

    def tp_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the tp ranks; x may be overwritten."""
        if self.tp_size == 1:
            return x
        return self._tp_group().all_reduce(x)

    def tp_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] of each tp rank -> [..., tp_size * n], in the order of ranks."""
        if self.tp_size == 1:
            return x
        return self._tp_group().all_gather(x)

    def _tp_group(self) -> RankGroup:
        assert self.tp is not None, "several ranks need a group"
        return self.tp
