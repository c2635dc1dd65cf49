"""Expert parallel load balancing (EPLB): which rank holds which routed experts, so that ranks have as much to do.

Ranks have places for more experts than the model has. The experts of the model are the logical ones; the places, and
what is in them, are the physical ones. A logical expert that many tokens want has several physical ones, its replicas,
each on a rank of its own, and tokens are spread over them.

Counts of all ranks, a layout that follows from them, then the movement to it (see expert_movement).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rorqual.distributed.rank_group import RankGroup

Floats: TypeAlias = NDArray[np.float64]
Indices: TypeAlias = NDArray[np.int64]

_STRIDE = 23333
"""Between the replicas that neighbouring tokens choose: coprime to any likely number of replicas, as it is a prime."""
_TIE_BREAK = 1e-4
"""Tokens by which an expert counts as busier than the one before it, so that no two are equally busy."""


def num_physical_experts(num_experts: int, num_redundant: int, num_ranks: int) -> int:
    """Places on all ranks together: redundant experts are rounded up until the ranks have as many places each.

    Raises ValueError for more than can be used: a rank that holds an expert has no use for another replica of it.
    """
    most = num_experts * (num_ranks - 1)
    if not 0 <= num_redundant <= most:
        raise ValueError(
            f"{num_ranks} ranks can hold 0 to {most} redundant experts of {num_experts}, since no rank holds an expert "
            f"twice; got {num_redundant}: ask for fewer, or use more ranks"
        )
    return -(-(num_experts + num_redundant) // num_ranks) * num_ranks


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayout:
    """Where the experts of several layers of one shape are. Physical experts are numbered rank by rank.

    Tables are int64 on the CPU. Their shapes are the same for all layouts of as many experts, places and ranks, so that
    copies on a device can be overwritten in place.
    """

    num_experts: int
    num_ranks: int
    physical_to_logical: torch.Tensor
    """[num_layers, num_physical]."""
    logical_to_physical: torch.Tensor
    """[num_layers, num_experts, most replicas]: replicas in ascending order, then -1."""
    replica_counts: torch.Tensor
    """[num_layers, num_experts], at least 1."""

    @classmethod
    def of(cls, physical_to_logical: torch.Tensor, *, num_experts: int, num_ranks: int) -> ExpertLayout:
        """The layout with these experts in the places: [num_layers, num_physical].

        Raises ValueError unless every rank has as many places, every expert is somewhere, and none is twice on a rank.
        """
        placed = physical_to_logical.to("cpu", torch.int64).numpy().copy()
        num_layers, num_physical = placed.shape
        if num_physical % num_ranks:
            raise ValueError(f"{num_physical} physical experts cannot be shared evenly by {num_ranks} ranks")
        if placed.size and not (placed.min() >= 0 and placed.max() < num_experts):
            raise ValueError(f"experts go from 0 to {num_experts - 1}, got {placed.min()} to {placed.max()}")
        layers = np.arange(num_layers)[:, None]
        counts = np.zeros((num_layers, num_experts), np.int64)
        np.add.at(counts, (layers, placed), 1)
        if not counts.all():
            layer, expert = np.argwhere(counts == 0)[0]
            raise ValueError(f"every expert must be somewhere, but expert {expert} of layer {layer} is nowhere")
        on_rank = np.sort(placed.reshape(num_layers, num_ranks, -1), axis=-1)
        if (twice := np.argwhere(on_rank[..., 1:] == on_rank[..., :-1])).size:
            layer, rank, i = twice[0]
            raise ValueError(f"rank {rank} holds expert {on_rank[layer, rank, i]} of layer {layer} twice: once will do")
        by_expert = np.argsort(placed, axis=1, kind="stable")
        expert = np.take_along_axis(placed, by_expert, axis=1)
        which = np.arange(num_physical) - np.take_along_axis(counts.cumsum(1) - counts, expert, axis=1)
        replicas = np.full((num_layers, num_experts, min(num_physical - num_experts + 1, num_ranks)), -1, np.int64)
        replicas[layers, expert, which] = by_expert
        tables = (torch.from_numpy(table) for table in (placed, replicas, counts))
        return cls(num_experts, num_ranks, *tables)

    @classmethod
    def initial(cls, num_layers: int, num_experts: int, *, num_redundant: int, num_ranks: int) -> ExpertLayout:
        """Experts in order, then the first ones again. Raises ValueError for more redundant ones than can be used."""
        num_physical = num_physical_experts(num_experts, num_redundant, num_ranks)
        # A rank's places follow each other and are at most num_experts, so they hold no expert twice.
        placed = torch.arange(num_physical) % num_experts
        return cls.of(placed.expand(num_layers, -1), num_experts=num_experts, num_ranks=num_ranks)

    @property
    def num_layers(self) -> int:
        """Layers that this is about."""
        return self.physical_to_logical.shape[0]

    @property
    def num_physical(self) -> int:
        """Places on all ranks together."""
        return self.physical_to_logical.shape[1]

    @property
    def per_rank(self) -> int:
        """Places of a rank."""
        return self.num_physical // self.num_ranks

    def on_rank(self, rank: int) -> torch.Tensor:
        """The logical experts in a rank's places: [num_layers, per_rank]."""
        return self.physical_to_logical[:, rank * self.per_rank : (rank + 1) * self.per_rank]

    def rank_loads(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens for experts, [steps, num_layers, num_experts] -> for ranks, [steps, num_layers, num_ranks] float64.

        An expert's tokens count as evenly spread over its replicas.
        """
        per_replica = tokens.to("cpu", torch.float64) / self.replica_counts
        placed = per_replica.gather(2, self.physical_to_logical.expand(len(tokens), -1, -1))
        return placed.view(-1, self.num_layers, self.num_ranks, self.per_rank).sum(-1)


def choose_replicas(
    expert_ids: torch.Tensor, logical_to_physical: torch.Tensor, replica_counts: torch.Tensor, ep_rank: int
) -> torch.Tensor:
    """The physical experts that tokens go to. Nobody waits for the device.

    Args:
        expert_ids: [num_tokens, top_k] int, logical; negative ones (rows that only fill up) become -1.
        logical_to_physical, replica_counts: a layer's tables, on the same device.
        ep_rank: of the tokens. Ranks begin with different replicas.

    Returns: [num_tokens, top_k] int64. One row that lists all experts gives each the replica of token 0: a table for
        those who want all tokens of a rank to go the same way.
    """
    ids = expert_ids.long()
    experts = ids.clamp(min=0)
    tokens = torch.arange(ids.shape[0], device=ids.device)[:, None]
    which = (ep_rank + tokens * _STRIDE) % replica_counts[experts]
    return logical_to_physical[experts, which].masked_fill(ids < 0, -1)


class ExpertLoads:
    """How many tokens chose each logical expert in each of the last steps. Nothing waits for the device."""

    def __init__(self, num_layers: int, num_experts: int, *, window: int, device: torch.device | None = None) -> None:
        """Raises ValueError for a window of less than one step."""
        if window < 1:
            raise ValueError(f"a window must be at least one step long, got {window}")
        self._steps = torch.zeros((window, num_layers, num_experts), dtype=torch.int64, device=device)
        self._now = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        self._count = 0

    def record(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Count a layer's choices, int of any shape, as a part of this step; negative ones do not count.

        The counters stay where they are, so this may be a part of a CUDA graph.
        """
        ids = expert_ids.flatten().long()
        self._now[layer].scatter_add_(0, ids.clamp(min=0), (ids >= 0).long())

    def discard(self) -> None:
        """Forget what was counted since the last step's end."""
        self._now.zero_()

    def end_step(self) -> None:
        """What was counted since the last call is a step; the oldest one falls out of a full window."""
        self._steps[self._count % len(self._steps)].copy_(self._now)
        self._now.zero_()
        self._count += 1

    def tokens(self, group: RankGroup | None = None) -> torch.Tensor:
        """[steps, num_layers, num_experts] int64, the oldest step first; of all ranks together where there is a group.

        Ranks must have ended as many steps. Where several ranks count the same tokens, all counts are multiples, which
        no layout depends on.
        """
        window = len(self._steps)
        steps = self._steps[: self._count] if self._count <= window else self._steps.roll(-(self._count % window), 0)
        if group is None:
            return steps.clone()
        # Step by step, so that gathered counts stay small; a sum in float32 would round large ones.
        return torch.stack([group.gather(step).sum(0) for step in steps]) if len(steps) else steps.clone()


def imbalance(rank_loads: torch.Tensor) -> float:
    """How much longer the busiest ranks take than evenly loaded ones would; 1 is balanced, num_ranks the worst.

    rank_loads: [..., num_ranks] tokens; summed over all others, since each step and layer waits for its busiest rank.
    """
    loads = rank_loads.double()
    mean = loads.mean(-1).sum().item()
    return loads.amax(-1).sum().item() / mean if mean else 1.0


@dataclass(frozen=True, slots=True)
class RearrangementSchedule:
    """When experts are rearranged: for the first time soon, as the initial layout knows nothing of the load."""

    interval: int
    """Steps from one rearrangement to the next; the first comes after a quarter of them."""
    window: int
    """Steps whose load counts."""

    def __post_init__(self) -> None:
        if not 1 <= self.window <= self.interval:
            raise ValueError(
                f"the window of expert loads must be 1 to {self.interval} steps, the interval between rearrangements, "
                f"got {self.window}: choose a shorter window or a longer interval"
            )

    def due(self, num_steps: int) -> bool:
        """Whether to rearrange now that so many steps were made."""
        since_first = num_steps - max(1, self.interval // 4)
        return since_first >= 0 and since_first % self.interval == 0


def rebalance(layout: ExpertLayout, tokens: torch.Tensor) -> ExpertLayout:
    """A layout for the load of the last steps: [steps, num_layers, num_experts] tokens.

    Layers whose busiest ranks would have no less to do stay as they are. Experts that stay on a rank keep their place.
    """
    if not len(tokens):
        return layout
    old = layout.physical_to_logical.numpy()
    loads: Floats = tokens.to("cpu", torch.float64).numpy()
    counts = replicate_experts(loads, layout.num_physical - layout.num_experts, layout.num_ranks)
    new = _keep_places(old, place_replicas(loads, counts, layout.num_ranks), layout.per_rank)
    found = _layout_like(layout, new)
    peak_before, peak_after = (each.rank_loads(tokens).amax(-1).sum(0).numpy() for each in (layout, found))
    return _layout_like(layout, np.where((peak_after < peak_before)[:, None], new, old))


def broadcast_layout(layout: ExpertLayout, group: RankGroup, *, device: torch.device | None = None) -> ExpertLayout:
    """The layout that rank 0 found, on all ranks of the group. Sums round as a CPU pleases, and hosts may differ.

    device: where the group's tensors are; by default on the CPU.
    """
    placed = group.broadcast(layout.physical_to_logical.to(device, copy=True))
    return ExpertLayout.of(placed, num_experts=layout.num_experts, num_ranks=layout.num_ranks)


def replicate_experts(tokens: Floats, num_redundant: int, most_replicas: int) -> Indices:
    """How many replicas each expert should have, greedily: [num_layers, num_experts], of [steps, layers, experts].

    Each redundant one goes where it lowers the load of the busiest replica most, summed over steps; the first expert
    wins ties. Experts that have most_replicas cannot be helped, so they do not count as the busiest.
    """
    tokens = tokens + _TIE_BREAK * np.arange(tokens.shape[2])
    num_steps, num_layers, num_experts = tokens.shape
    steps, layers = np.arange(num_steps)[:, None], np.arange(num_layers)
    counts = np.ones((num_layers, num_experts), np.int64)
    loads = tokens.copy()
    loads[:, counts >= most_replicas] = -np.inf
    for _ in range(num_redundant):
        busiest = loads.argmax(2)
        peak = loads[steps, layers, busiest]
        loads[steps, layers, busiest] = -np.inf
        of_others = loads.max(2)
        loads[steps, layers, busiest] = peak
        helped = tokens[steps, layers, busiest] / (counts[layers, busiest] + 1)
        gain = np.zeros((num_layers, num_experts))
        np.add.at(gain, (layers, busiest), peak - np.maximum(of_others, helped))
        gain[counts >= most_replicas] = -np.inf
        chosen = gain.argmax(1)
        counts[layers, chosen] += 1
        full = counts[layers, chosen] >= most_replicas
        loads[:, layers, chosen] = np.where(full, -np.inf, tokens[:, layers, chosen] / counts[layers, chosen])
    return counts


def place_replicas(tokens: Floats, counts: Indices, num_ranks: int) -> Indices:
    """Which experts are in the places of the ranks, greedily: [num_layers, num_physical], of [steps, layers, experts].

    From the busiest replica to the least busy one (the first expert wins ties), each goes to the rank where the peaks
    of load, summed over steps, stay lowest; the first rank wins ties. Ranks that are full, or hold the expert, are out.
    """
    num_steps, num_layers, num_experts = tokens.shape
    layers = np.arange(num_layers)
    loads = np.ascontiguousarray((tokens / counts).transpose(1, 2, 0))
    replicas = np.stack([np.arange(num_experts).repeat(of_layer) for of_layer in counts])
    busiest_first = np.argsort(-np.take_along_axis(loads.sum(-1), replicas, axis=1), axis=1, kind="stable")
    replicas = np.take_along_axis(replicas, busiest_first, axis=1)
    ranks = _Ranks.empty(num_layers, num_experts, num_ranks, replicas.shape[1] // num_ranks, num_steps)
    peaks = np.zeros((num_layers, num_steps))
    for expert in replicas.T:
        load = loads[layers, expert]
        cost = np.maximum(peaks[:, None], ranks.loads + load[:, None]).sum(-1)
        closed = (ranks.filled == ranks.places.shape[2]) | ranks.holds[layers, :, expert]
        cost[closed] = np.inf
        chosen = cost.argmin(1)
        for layer in np.flatnonzero(closed.all(1)):
            chosen[layer] = ranks.make_room(int(layer), expert[layer], loads[layer])
            peaks[layer] = ranks.loads[layer].max(0)
        ranks.add(layers, chosen, expert, load)
        peaks = np.maximum(peaks, ranks.loads[layers, chosen])
    return ranks.places.reshape(num_layers, -1)


@dataclass(slots=True)
class _Ranks:
    """What ranks have been given so far."""

    places: Indices  # [num_layers, num_ranks, per_rank]
    filled: Indices  # [num_layers, num_ranks]: the first places, that are in use
    holds: NDArray[np.bool_]  # [num_layers, num_ranks, num_experts]
    loads: Floats  # [num_layers, num_ranks, steps]

    @classmethod
    def empty(cls, num_layers: int, num_experts: int, num_ranks: int, per_rank: int, num_steps: int) -> _Ranks:
        return cls(
            np.zeros((num_layers, num_ranks, per_rank), np.int64),
            np.zeros((num_layers, num_ranks), np.int64),
            np.zeros((num_layers, num_ranks, num_experts), np.bool_),
            np.zeros((num_layers, num_ranks, num_steps)),
        )

    def add(self, layer: Any, rank: Any, expert: Any, load: Floats) -> None:
        """An expert to a rank of a layer, or one to one of each layer."""
        self.places[layer, rank, self.filled[layer, rank]] = expert
        self.filled[layer, rank] += 1
        self.holds[layer, rank, expert] = True
        self.loads[layer, rank] += load

    def make_room(self, layer: int, expert: int, loads: Floats) -> int:
        """A rank for an expert that all ranks with room hold already: a full one, from which another expert moves.

        The least busy rank with room takes one over. There is always one that it lacks: the full rank holds more
        experts than it does, and not this one, which it has. Of all such moves it is the one after which the busier of
        the two ranks has least to do.
        """
        holds, ranks = self.holds[layer], self.loads[layer]
        per_rank = self.places.shape[2]
        to = min(np.flatnonzero(self.filled[layer] < per_rank), key=lambda rank: ranks[rank].sum())

        def peak(move: tuple[int, int]) -> float:
            rank, place = move
            moved = loads[self.places[layer, rank, place]]
            return float(np.maximum(ranks[to] + moved, ranks[rank] - moved + loads[expert]).sum())

        moves = [(rank, place) for rank in np.flatnonzero(~holds[:, expert]).tolist() for place in range(per_rank)]
        rank, place = min((move for move in moves if not holds[to, self.places[layer][move]]), key=peak)
        moved = self.places[layer, rank, place]
        self.filled[layer, rank] -= 1
        self.places[layer, rank, place] = self.places[layer, rank, self.filled[layer, rank]]
        holds[rank, moved] = False
        ranks[rank] -= loads[moved]
        self.add(layer, to, moved, loads[moved])
        return rank


def _keep_places(old: Indices, new: Indices, per_rank: int) -> Indices:
    """The new experts of each rank, with those that it has already where they are."""
    kept = np.empty_like(new)
    rows = (table.reshape(-1, per_rank).tolist() for table in (old, new))
    for row, (before, after) in zip(kept.reshape(-1, per_rank), zip(*rows, strict=True), strict=True):
        coming = iter([expert for expert in after if expert not in before])
        row[:] = [expert if expert in after else next(coming) for expert in before]
    return kept


def _layout_like(layout: ExpertLayout, physical_to_logical: Indices) -> ExpertLayout:
    placed = torch.from_numpy(physical_to_logical)
    return ExpertLayout.of(placed, num_experts=layout.num_experts, num_ranks=layout.num_ranks)
