"""Routed experts moved between ranks, in place, from one layout to another.

Places that keep their expert are left alone; an expert that a rank has elsewhere is copied there; one that it lacks is
fetched from a rank that has it. All that makes up an expert moves, weights and scales alike, byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from rorqual.distributed.expert_balance import ExpertLayout
from rorqual.distributed.rank_group import RankGroup

PerPlace: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A tensor of each place of a rank, of one shape and dtype: one by one, or [per_rank, ...]."""


class Copy(NamedTuple):
    """An expert that goes from one place of a rank to another of the same rank."""

    source: int
    target: int


class Fetch(NamedTuple):
    """An expert that goes from a place of one rank to a place of another."""

    sender: int
    source: int
    receiver: int
    target: int


class LayerMovement(NamedTuple):
    """How a layer's experts get to where they should be. Places are numbered from 0 on each rank."""

    copies: tuple[tuple[Copy, ...], ...]
    """Of each rank."""
    fetches: tuple[Fetch, ...]
    """By receiver, sender and target: rows between two ranks travel in this order."""


def plan_movement(old: ExpertLayout, new: ExpertLayout) -> list[LayerMovement]:
    """The movement of each layer. Raises ValueError for layouts of different shapes."""
    shapes = [(each.num_layers, each.num_experts, each.num_physical, each.num_ranks) for each in (old, new)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "experts move between layouts of as many (layers, experts, places, ranks) only, "
            f"got {shapes[0]} and {shapes[1]}"
        )
    tables = (each.physical_to_logical.view(-1, old.num_ranks, old.per_rank).tolist() for each in (old, new))
    return [_plan_layer(before, after) for before, after in zip(*tables, strict=True)]


def _plan_layer(before: list[list[int]], after: list[list[int]]) -> LayerMovement:
    """before, after: the experts in each rank's places."""
    place_before = [{expert: place for place, expert in enumerate(experts)} for experts in before]
    copies: list[tuple[Copy, ...]] = []
    wanted: dict[int, list[tuple[int, int]]] = {}  # expert: (receiver, target)
    for rank, experts in enumerate(after):
        here = place_before[rank]
        copies.append(
            tuple(
                Copy(here[expert], target)
                for target, expert in enumerate(experts)
                if expert in here and here[expert] != target
            )
        )
        for target, expert in enumerate(experts):
            if expert not in here:
                wanted.setdefault(expert, []).append((rank, target))
    fetches = []
    for expert, receivers in wanted.items():
        senders = [rank for rank, here in enumerate(place_before) if expert in here]
        for j, (receiver, target) in enumerate(receivers):
            sender = senders[_sender_of(j, len(senders), len(receivers))]
            fetches.append(Fetch(sender, place_before[sender][expert], receiver, target))
    return LayerMovement(tuple(copies), tuple(sorted(fetches, key=lambda it: (it.receiver, it.sender, it.target))))


def _sender_of(receiver: int, senders: int, receivers: int) -> int:
    """Which of the senders serves a receiver: neighbours the same one, and each as many, or one more."""
    each = receivers // senders
    return receiver // each if receiver < each * senders else receiver - each * senders


def move_experts(layers: Sequence[Sequence[PerPlace]], old: ExpertLayout, new: ExpertLayout, group: RankGroup) -> None:
    """Bring this rank's experts from the old layout to the new one, in place. All ranks of the group call it.

    Layer by layer and tensor by tensor, so that beside them there is room needed for one tensor's sent, fetched and
    copied experts only. No step may run meanwhile.

    Args:
        layers: for each layer the tensors that make up its experts, of any dtype and strides.
        group: the ranks of the layouts, in their order.

    Raises: ValueError for tensors, a group or layouts that do not fit; PeerLost where another rank is gone.
    """
    plan = plan_movement(old, new)
    if len(layers) != old.num_layers or group.size != old.num_ranks:
        raise ValueError(
            f"the layouts are of {old.num_layers} layers on {old.num_ranks} ranks, "
            f"got tensors of {len(layers)} layers and {group.size} ranks"
        )
    for i, tensors in enumerate(layers):
        if wrong := [len(x) for x in tensors if len(x) != old.per_rank]:
            raise ValueError(f"layer {i}: tensors must be of {old.per_rank} experts each, got {wrong[0]}")
    for tensors, movement in zip(layers, plan, strict=True):
        for x in tensors:
            _move(x, movement, group)


def _move(x: PerPlace, movement: LayerMovement, group: RankGroup) -> None:
    """A place may be read and written, so all that is read is set aside before anything is written."""
    copies = movement.copies[group.rank]
    moved = [(target, x[source].clone()) for source, target in copies]
    if movement.fetches:  # for anybody: all ranks take part or none
        sent = [fetch for fetch in movement.fetches if fetch.sender == group.rank]
        received = [fetch for fetch in movement.fetches if fetch.receiver == group.rank]
        like = x[0]
        rows = like.new_empty((len(sent), *like.shape))
        for row, fetch in zip(rows, sent, strict=True):
            row.copy_(x[fetch.source])
        size = like.numel() * like.element_size()
        arrived = group.all_to_all(
            rows.flatten().view(torch.uint8),  # bytes, as not every group knows every dtype
            sent=[size * sum(fetch.receiver == rank for fetch in sent) for rank in range(group.size)],
            received=[size * sum(fetch.sender == rank for fetch in received) for rank in range(group.size)],
        )
        fetched = arrived.view(like.dtype).view(len(received), *like.shape)
        moved += [(fetch.target, row) for fetch, row in zip(received, fetched, strict=True)]
    for target, row in moved:
        x[target].copy_(row)
