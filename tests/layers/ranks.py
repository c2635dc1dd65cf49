"""Ranks of a mesh, one by one in this process: a test puts their results side by side, or adds them up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rorqual.distributed.mesh import Mesh


@dataclass(frozen=True, slots=True)
class LoneRank(Mesh):
    """One rank of several whose sums, and what they gather, are left to the test."""

    def tp_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        return x

    def tp_all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        return x


def ranks(size: int) -> list[Mesh]:
    return [LoneRank(rank, size) for rank in range(size)]


def in_model(layer: torch.nn.Module) -> torch.nn.Sequential:
    """At a place, so that names have a prefix."""
    return torch.nn.Sequential(layer)
