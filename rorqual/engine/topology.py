"""How ranks share a model, and what a plan says of it: memory, room for keys and values, decode steps. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Resource = Literal["memory", "compute", "link", "network", "overhead"]


class Topology(NamedTuple):
    """How ranks share a model."""

    tp_size: int
    dp_size: int
    expert_parallel: bool = False

    @property
    def num_gpus(self) -> int:
        """One a rank."""
        return self.tp_size * self.dp_size

    @property
    def ep_size(self) -> int:
        """Ranks that share the routed experts whole."""
        return self.num_gpus if self.expert_parallel else 1

    def __str__(self) -> str:
        parts = [f"{name}{size}" for name, size in (("TP", self.tp_size), ("DP", self.dp_size)) if size > 1]
        parts += [f"EP{self.ep_size}"] if self.expert_parallel else []
        return " ".join(parts) or "one GPU"


def sensible_topologies(
    num_gpus: int, gpus_per_host: int, *, has_experts: bool, expert_parallel: bool | None = None
) -> list[Topology]:
    """Every split of GPUs into replicas of which none spans hosts; with experts in both ways of sharing them, unless
    one is asked for."""
    sizes = [size for size in range(1, num_gpus + 1) if num_gpus % size == 0]
    splits = [(size, num_gpus // size) for size in sizes if min(num_gpus, gpus_per_host) % size == 0]
    ways = (expert_parallel,) if expert_parallel is not None else (False, True)[: 1 + (has_experts and num_gpus > 1)]
    return [Topology(tp_size, dp_size, experts) for experts in ways for tp_size, dp_size in splits]


class Hosts(NamedTuple):
    """How many GPUs of how many stand together."""

    num_gpus: int
    gpus_per_host: int

    def check(self) -> None:
        """Raises ValueError for GPUs that do not fill their hosts."""
        if self.num_gpus > self.gpus_per_host and self.num_gpus % self.gpus_per_host:
            raise ValueError(
                f"{self.num_gpus} GPUs do not fill hosts of {self.gpus_per_host}: use a number of --gpus that does, or "
                "say with --gpus-per-host how many a host has"
            )

    def peers(self, size: int) -> tuple[int, int]:
        """Of the other ranks in a group of so many neighbours, those of the same host and those of others."""
        near = min(size, self.gpus_per_host)
        return near - 1, size - near


class RankMemory(NamedTuple):
    """Where a GPU's memory goes, in bytes."""

    total: int
    dense: int
    """Weights that are neither tables nor routed experts."""
    tables: int
    """Embedding and head."""
    experts: int
    activations: int
    """What the largest step holds, an estimate."""
    workspaces: int
    """Of kernels, graphs and exchanges, an estimate."""
    unused: int
    """What gpu_memory_utilization leaves alone, and some slack."""
    kv_cache: int
    """What is left; below 0 where the rest does not fit."""


class CacheRoom(NamedTuple):
    """What the KV cache of each rank holds."""

    bytes_per_token: float
    """On each rank of a replica."""
    bytes_per_sequence: int
    """Besides, for what a sequence keeps whatever its length."""
    tokens: int
    """Of a replica; each of its ranks holds its part of all of them."""
    sequences: int
    """Of the planned context."""


class Exchange(NamedTuple):
    """What a rank exchanges with others in one step."""

    calls: int = 0
    """One after the other."""
    num_bytes: float = 0.0
    """One way: what it receives, or sends."""
    seconds: float = 0.0
    """Of the bytes."""
    start_s: float = 0.0
    """Of starting so many calls."""
    over: Resource = "link"
    """What takes the time."""


class DecodeStep(NamedTuple):
    """One token for each running sequence, on the busiest rank."""

    batch: int
    """Sequences that were asked for, in all."""
    running: int
    """Those that run at once, in all."""
    context: int
    memory_bytes: float
    memory_s: float
    flops: float
    compute_s: float
    starting_s: float
    """Of the products, beside their bytes."""
    all_reduce: Exchange
    """Sums over the ranks of a replica, and the logits of their parts of the vocabulary."""
    all_to_all: Exchange
    """Tokens to the ranks that hold the chosen experts, and back."""

    @property
    def overhead_s(self) -> float:
        """Starting products and exchanges."""
        return self.starting_s + self.all_reduce.start_s + self.all_to_all.start_s

    @property
    def roofline_s(self) -> float:
        """If all overlapped and nothing took time to start."""
        return max(self.memory_s, self.compute_s, self.all_reduce.seconds, self.all_to_all.seconds)

    @property
    def expected_s(self) -> float:
        """One after the other, but for reading and computing."""
        exchanged = self.all_reduce.seconds + self.all_to_all.seconds
        return max(self.memory_s, self.compute_s) + exchanged + self.overhead_s

    @property
    def tokens_per_s(self) -> float:
        """Expected, of all sequences."""
        return self.running / self.expected_s

    @property
    def bound(self) -> Resource:
        """What takes the largest part of the expected time."""
        times: dict[Resource, float] = dict.fromkeys(("memory", "compute", "link", "network", "overhead"), 0.0)
        times["memory" if self.memory_s >= self.compute_s else "compute"] = max(self.memory_s, self.compute_s)
        for exchange in (self.all_reduce, self.all_to_all):
            times[exchange.over] += exchange.seconds
        times["overhead"] = self.overhead_s
        return max(times, key=lambda name: times[name])


@dataclass(frozen=True, slots=True)
class TopologyPlan:
    """A topology, and all that was counted for it."""

    topology: Topology
    memory: RankMemory
    cache: CacheRoom
    steps: tuple[DecodeStep, ...]
    """One for each batch."""


def ranked(plans: Sequence[TopologyPlan]) -> list[TopologyPlan]:
    """The most expected tokens/s of the largest batch first."""
    return sorted(plans, key=lambda plan: -max(plan.steps, key=lambda step: step.batch).tokens_per_s)
