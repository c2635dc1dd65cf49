"""Experts between ranks: who sends what to whom, and that every place holds the bytes of its expert in the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.distributed.expert_balance import ExpertLayout, rebalance
from rorqual.distributed.expert_movement import Copy, Fetch, move_experts, plan_movement
from tests.distributed.ranks import connect, on_ranks


def layout_of(*layers: list[int], experts: int, ranks: int) -> ExpertLayout:
    return ExpertLayout.of(torch.tensor(layers), num_experts=experts, num_ranks=ranks)


def test_what_is_on_a_rank_is_kept_or_copied_and_the_rest_fetched():
    old = layout_of([0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], experts=4, ranks=2)
    new = layout_of([1, 0, 3, 2, 0, 3], [0, 1, 2, 3, 0, 1], experts=4, ranks=2)
    first, second = plan_movement(old, new)
    # Rank 0 changes 0 and 1 over and fetches 3; rank 1 keeps 0, moves 3 away from where 2 comes, and fetches 2.
    assert first.copies == ((Copy(1, 0), Copy(0, 1)), (Copy(0, 2),))
    assert first.fetches == (Fetch(1, 0, 0, 2), Fetch(0, 2, 1, 0))
    assert second.copies == ((), ())
    assert second.fetches == ()


def test_senders_share_the_receivers():
    # Expert 0: from ranks 0 and 1 to 2..6; 5 // 2 = 2 each in turn, and the fifth goes back to the first sender.
    old = layout_of([0, 1, 0, 2, 3, 1, 4, 1, 5, 1, 6, 1, 7, 1], experts=8, ranks=7)
    new = layout_of([0, 1, 0, 2, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0], experts=8, ranks=7)
    (movement,) = plan_movement(old, new)
    assert movement.fetches == tuple(Fetch(sender, 0, 2 + j, 1) for j, sender in enumerate([0, 0, 1, 1, 0]))
    # Expert 0: from ranks 0, 1 and 2 to 3 and 4: 2 // 3 = 0 each, so the rest, one after the other.
    old = layout_of([0, 1, 0, 1, 0, 1, 1, 2, 1, 3], experts=4, ranks=5)
    new = layout_of([0, 1, 0, 1, 0, 1, 0, 2, 0, 3], experts=4, ranks=5)
    (movement,) = plan_movement(old, new)
    assert movement.fetches == (Fetch(0, 0, 3, 0), Fetch(1, 0, 4, 0))


def test_layouts_of_different_shapes_are_refused():
    layouts = [ExpertLayout.initial(1, 4, num_redundant=redundant, num_ranks=2) for redundant in (0, 2)]
    with pytest.raises(ValueError, match=r"got \(1, 4, 4, 2\) and \(1, 4, 6, 2\)"):
        plan_movement(*layouts)


def experts_of(layer: int, experts: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of one layer for the experts: any bytes, also such as are no numbers, drawn for each of them."""
    rows = []
    for expert in experts.tolist():
        draw = torch.Generator().manual_seed(1000 * layer + expert)
        rows.append(torch.randint(256, (256,), generator=draw, dtype=torch.uint8))
    of_all = torch.stack(rows)
    return [
        of_all[:, :48].clone().view(-1, 4, 12),
        of_all[:, 48:96].clone().view(torch.float8_e4m3fn).view(-1, 8, 6).transpose(1, 2),  # by columns
        of_all[:, 96:128].clone().view(torch.float32).view(-1, 2, 4),
        of_all[:, 128:192].clone().view(torch.bfloat16),
        of_all[:, 192:196].clone().view(torch.float32).view(-1),  # a scale for each expert
        of_all[:, 196:].clone().view(torch.bfloat16)[:, :15],  # rows with gaps between them
    ]


def as_bytes(x: torch.Tensor) -> list[int]:
    return x.contiguous().flatten().view(torch.uint8).tolist()


def random_layout(draw: torch.Generator, like: ExpertLayout) -> ExpertLayout:
    """Any valid layout, not only such as a policy would choose: places mixed up, ranks changed over."""
    while True:
        layers = []
        for _ in range(like.num_layers):
            more = torch.randint(like.num_experts, (like.num_physical - like.num_experts,), generator=draw)
            all_of_them = torch.cat((torch.arange(like.num_experts), more))
            layers.append(all_of_them[torch.randperm(like.num_physical, generator=draw)])
        try:
            return ExpertLayout.of(torch.stack(layers), num_experts=like.num_experts, num_ranks=like.num_ranks)
        except ValueError:
            continue


def _moved(rank: int, store: Any, ranks: int, experts: int, redundant: int) -> int:
    """How many places differ, which is to be none, after each of several rearrangements."""
    group = connect(rank, store, tp=ranks).tp
    assert group is not None
    draw = torch.Generator().manual_seed(ranks)
    layout = ExpertLayout.initial(2, experts, num_redundant=redundant, num_ranks=ranks)
    layers = [experts_of(layer, held) for layer, held in enumerate(layout.on_rank(rank))]
    addresses = [[x.data_ptr() for x in tensors] for tensors in layers]
    for turn in range(8):
        if turn % 2:
            new = rebalance(layout, torch.randint(100, (3, 2, experts), generator=draw) ** 2)
        else:
            new = random_layout(draw, layout)
        move_experts(layers, layout, new, group)
        layout = new
        for layer, held in enumerate(layout.on_rank(rank)):
            for found, expected in zip(layers[layer], experts_of(layer, held), strict=True):
                assert as_bytes(found) == as_bytes(expected), f"turn {turn}, layer {layer}"
    assert addresses == [[x.data_ptr() for x in tensors] for tensors in layers]

    with pytest.raises(ValueError, match=r"of 2 layers on .* got tensors of 1 layers"):
        move_experts(layers[:1], layout, layout, group)
    with pytest.raises(ValueError, match=f"layer 1: tensors must be of {layout.per_rank} experts each"):
        move_experts([layers[0], [layers[1][0][1:]]], layout, layout, group)
    return sum(len(tensors) for tensors in layers)


@pytest.mark.parametrize(("ranks", "experts", "redundant"), [(2, 5, 3), pytest.param(4, 6, 6, marks=pytest.mark.slow)])
def test_every_place_holds_the_bytes_of_its_expert(ranks, experts, redundant):
    assert on_ranks(ranks, _moved, ranks, experts, redundant) == [12] * ranks
