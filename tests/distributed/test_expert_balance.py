"""Layouts of experts on ranks, the choice among replicas, counted loads and the policy that follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.distributed.expert_balance import (
    ExpertLayout,
    ExpertLoads,
    RearrangementSchedule,
    broadcast_layout,
    choose_replicas,
    imbalance,
    num_physical_experts,
    place_replicas,
    rebalance,
    replicate_experts,
)
from tests.distributed.ranks import connect, on_ranks


def layout_of(*layers: list[int], experts: int, ranks: int) -> ExpertLayout:
    return ExpertLayout.of(torch.tensor(layers), num_experts=experts, num_ranks=ranks)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Experts, redundant experts and ranks that go together; often as crowded as can be."""
    experts, ranks = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    return experts, draw(st.integers(0, experts * (ranks - 1))), ranks


@st.composite
def loads(draw: st.DrawFn) -> tuple[ExpertLayout, torch.Tensor]:
    """A layout, and tokens of a few steps: even, skewed, or none for many experts."""
    experts, redundant, ranks = draw(shapes())
    steps, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    layout = ExpertLayout.initial(layers, experts, num_redundant=redundant, num_ranks=ranks)
    count = st.integers(0, 4) | st.integers(0, 1000) | st.just(0)
    size = steps * layers * experts
    tokens = draw(st.lists(count, min_size=size, max_size=size))
    return layout, torch.tensor(tokens).view(steps, layers, experts)


def check(layout: ExpertLayout) -> None:
    """What every layout must be, said in another way than `of` does."""
    for layer in range(layout.num_layers):
        placed = layout.physical_to_logical[layer].tolist()
        for rank in range(layout.num_ranks):
            mine = placed[rank * layout.per_rank : (rank + 1) * layout.per_rank]
            assert len(set(mine)) == len(mine)
            assert layout.on_rank(rank)[layer].tolist() == mine
        for expert in range(layout.num_experts):
            where = [place for place, held in enumerate(placed) if held == expert]
            assert where
            assert layout.replica_counts[layer, expert] == len(where)
            row = layout.logical_to_physical[layer, expert].tolist()
            assert row == where + [-1] * (len(row) - len(where))


def test_redundant_experts_are_rounded_up_to_as_many_places_on_each_rank():
    assert num_physical_experts(256, 0, 32) == 256
    assert num_physical_experts(256, 1, 32) == 288
    assert num_physical_experts(256, 32, 32) == 288
    assert num_physical_experts(3, 0, 2) == 4
    assert num_physical_experts(4, 4, 2) == 8
    with pytest.raises(ValueError, match=r"2 ranks can hold 0 to 4 redundant experts of 4.* got 5"):
        num_physical_experts(4, 5, 2)
    with pytest.raises(ValueError, match="1 ranks can hold 0 to 0 redundant"):
        num_physical_experts(4, 1, 1)
    with pytest.raises(ValueError, match="got -1"):
        num_physical_experts(4, -1, 2)


def test_tables_of_the_initial_layout():
    layout = ExpertLayout.initial(2, 4, num_redundant=1, num_ranks=2)
    assert layout.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    assert layout.logical_to_physical.tolist() == [[[0, 4], [1, 5], [2, -1], [3, -1]]] * 2
    assert layout.replica_counts.tolist() == [[2, 2, 1, 1]] * 2
    assert layout.on_rank(1).tolist() == [[3, 0, 1]] * 2
    assert (layout.num_layers, layout.num_physical, layout.per_rank) == (2, 6, 3)


@given(shapes())
def test_initial_layouts_are_valid_however_crowded(shape):
    experts, redundant, ranks = shape
    layout = ExpertLayout.initial(2, experts, num_redundant=redundant, num_ranks=ranks)
    assert layout.num_physical - experts - redundant < ranks
    check(layout)


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ([0, 1, 2, 3, 0], "5 physical experts cannot be shared evenly by 2 ranks"),
        ([0, 1, 2, 4, 0, 1], "experts go from 0 to 3, got 0 to 4"),
        ([0, 1, -1, 3, 0, 1], "experts go from 0 to 3, got -1 to 3"),
        ([0, 1, 2, 2, 0, 1], "expert 3 of layer 0 is nowhere"),
        ([0, 1, 2, 3, 0, 3], "rank 1 holds expert 3 of layer 0 twice"),
    ],
)
def test_what_is_no_layout_is_refused(placed, message):
    with pytest.raises(ValueError, match=message):
        layout_of(placed, experts=4, ranks=2)


def test_tokens_take_turns_among_replicas():
    layout = layout_of([0, 1, 0, 2, 0, 3], experts=4, ranks=3)
    replicas, counts = layout.logical_to_physical[0], layout.replica_counts[0]
    ids = torch.tensor([[0, 1], [0, 2], [3, 0], [0, 0], [-1, 0]], dtype=torch.int32)
    # 23333 % 3 = 2: tokens 0..4 choose replicas 0, 2, 1, 0, 2 of three on rank 0, and one further on each next rank
    assert choose_replicas(ids, replicas, counts, 0).tolist() == [[0, 1], [4, 3], [5, 2], [0, 0], [-1, 4]]
    assert choose_replicas(ids, replicas, counts, 1).tolist() == [[2, 1], [0, 3], [5, 4], [2, 2], [-1, 0]]
    assert choose_replicas(ids, replicas, counts, 2)[:, 0].tolist() == [4, 2, 5, 4, -1]
    assert choose_replicas(ids[:0], replicas, counts, 0).shape == (0, 2)
    assert choose_replicas(torch.arange(4)[None], replicas, counts, 1).tolist() == [[2, 1, 3, 5]]


@given(loads(), st.integers(0, 63), st.integers(0, 2**32))
def test_a_choice_is_a_replica_of_the_expert_by_the_formula(case, ep_rank, seed):
    layout = rebalance(*case)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(layout.num_experts, (11, 3), generator=draw)
    chosen = choose_replicas(ids, layout.logical_to_physical[0], layout.replica_counts[0], ep_rank)
    assert torch.equal(layout.physical_to_logical[0][chosen], ids)
    for token, row in enumerate(ids.tolist()):
        for column, expert in enumerate(row):
            count = int(layout.replica_counts[0, expert])
            which = (ep_rank + token * 23333) % count
            assert chosen[token, column] == layout.logical_to_physical[0, expert, which]


def test_loads_are_those_of_the_last_steps_without_rows_that_fill_up():
    seen = ExpertLoads(2, 3, window=2)
    assert seen.tokens().shape == (0, 2, 3)
    for step in range(3):
        seen.record(0, torch.tensor([[0, 1], [0, step], [-1, -1]], dtype=torch.int32))
        seen.record(0, torch.tensor([[2, 2]]))
        seen.record(1, torch.tensor([], dtype=torch.int64))
        seen.end_step()
        if not step:
            assert seen.tokens().tolist() == [[[3, 1, 2], [0, 0, 0]]]
    assert seen.tokens().tolist() == [[[2, 2, 2], [0, 0, 0]], [[2, 1, 3], [0, 0, 0]]]
    seen = ExpertLoads(1, 1, window=3)
    for step in range(5):
        seen.record(0, torch.zeros(step, dtype=torch.int64))
        seen.end_step()
    assert seen.tokens().flatten().tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="at least one step long, got 0"):
        ExpertLoads(1, 1, window=0)


def test_what_is_discarded_is_no_part_of_its_step():
    seen = ExpertLoads(1, 2, window=2)
    seen.record(0, torch.tensor([0]))
    seen.end_step()
    seen.record(0, torch.tensor([1, 1]))
    seen.discard()
    seen.record(0, torch.tensor([1]))
    seen.end_step()
    assert seen.tokens().tolist() == [[[1, 0]], [[0, 1]]]


def _counted(rank: int, store: Any) -> tuple[torch.Tensor, torch.Tensor, ExpertLayout]:
    group = connect(rank, store, tp=3).tp
    assert group is not None
    seen = ExpertLoads(1, 4, window=3)
    nothing = seen.tokens(group)
    for step in range(4):
        seen.record(0, torch.tensor([rank]))
        for _ in range(4096 if not rank and step == 2 else 0):
            seen.record(0, torch.zeros(4096, dtype=torch.int32))
        seen.end_step()
    found = layout_of(*torch.arange(3).roll(rank)[None].tolist(), experts=3, ranks=3)
    return nothing, seen.tokens(group), broadcast_layout(found, group)


@pytest.mark.slow
def test_loads_of_all_ranks_are_added_up_exactly_and_one_layout_is_for_all():
    for nothing, tokens, layout in on_ranks(3, _counted):
        assert nothing.shape == (0, 1, 4)
        assert tokens.tolist() == [[[1, 1, 1, 0]], [[2**24 + 1, 1, 1, 0]], [[1, 1, 1, 0]]]
        assert layout.physical_to_logical.tolist() == [[0, 1, 2]]


def test_imbalance():
    layout = layout_of([0, 1, 2, 0], experts=3, ranks=2)
    rank_loads = layout.rank_loads(torch.tensor([[[8, 1, 3]], [[0, 6, 2]]]))
    assert rank_loads.tolist() == [[[5.0, 7.0]], [[6.0, 2.0]]]
    assert imbalance(rank_loads) == 13 / 10
    assert imbalance(torch.tensor([[9, 0, 0]])) == 3
    assert imbalance(torch.zeros(2, 3)) == 1


def test_rearrangements_come_first_after_a_quarter_of_the_interval():
    schedule = RearrangementSchedule(interval=8, window=8)
    assert [step for step in range(30) if schedule.due(step)] == [2, 10, 18, 26]
    assert [step for step in range(5) if RearrangementSchedule(1, 1).due(step)] == [1, 2, 3, 4]
    for interval, window in [(8, 9), (8, 0), (0, 1)]:
        with pytest.raises(ValueError, match=f"must be 1 to {interval} steps.* got {window}"):
            RearrangementSchedule(interval, window)


TWO_STEPS = np.array([[[90, 10, 10, 10]], [[80, 20, 10, 10]]], dtype=np.float64)


def test_replicas_go_where_they_lower_the_peak_most():
    assert replicate_experts(TWO_STEPS, 2, 6).tolist() == [[3, 1, 1, 1]]
    # Expert 0 may have two. Without it: expert 3 is ahead by a tie in step 1, expert 1 by far in step 2.
    assert replicate_experts(TWO_STEPS, 2, 2).tolist() == [[2, 2, 1, 1]]
    # Step 1: 0 is the peak, 50 to 30; step 2: 1 is it, 60 to 50. Gains: 20 for expert 0, then 60 - 50 = 10 for 1.
    skewed = np.array([[[50, 30, 10]], [[50, 60, 10]]], dtype=np.float64)
    assert replicate_experts(skewed, 1, 3).tolist() == [[2, 1, 1]]
    assert replicate_experts(skewed, 2, 3).tolist() == [[2, 2, 1]]
    # Of equal experts the last one is the busiest.
    assert replicate_experts(np.full((1, 2, 3), 5.0), 1, 2).tolist() == [[1, 1, 2]] * 2


def test_replicas_are_placed_from_the_busiest_to_the_least_busy():
    # Per replica and step: expert 0 45 and 40, 1 5 and 10, 2 and 3 10 and 10; in order 0, 0, 2, 3, 1, 1.
    assert place_replicas(TWO_STEPS, np.array([[2, 2, 1, 1]]), 2).tolist() == [[0, 2, 1, 0, 3, 1]]
    # 0 -> rank 0; 1 -> rank 1 (9, not 18); 2 -> either (12 in sum of peaks 9 + 3): the first; 3 -> rank 1.
    steps = np.array([[[9, 0, 0, 1]], [[0, 9, 3, 1]]], dtype=np.float64)
    assert place_replicas(steps, np.ones((1, 4), np.int64), 2).tolist() == [[0, 1, 2, 3]]
    # One step: 8 -> 0, 7 -> 1, 6 -> 1 would be 13, and 14 on rank 0, so 1; full, so 1 -> 0.
    step = np.array([[[8, 7, 6, 1]]], dtype=np.float64)
    assert place_replicas(step, np.ones((1, 4), np.int64), 2).tolist() == [[0, 3, 1, 2]]


def test_room_is_made_where_all_ranks_with_room_hold_the_expert():
    # 0 -> rank 0; 1, 2, 3 -> rank 1, which is full; 4 -> rank 0, and then again. So 1 makes room for it.
    load = np.array([[[20, 3, 3, 3, 2]]], dtype=np.float64)
    assert place_replicas(load, np.array([[1, 1, 1, 1, 2]]), 2).tolist() == [[0, 4, 1, 3, 2, 4]]
    # The move after which the busier of the two ranks has least to do: 3, of 2 tokens, rather than 1 or 2.
    load = np.array([[[20, 4, 3, 2, 2]]], dtype=np.float64)
    assert place_replicas(load, np.array([[1, 1, 1, 1, 2]]), 2).tolist() == [[0, 4, 3, 1, 2, 4]]

    stuck = 0
    for seed in range(300):
        draw = np.random.default_rng(seed)
        counts = draw.multinomial(3, np.ones(6) / 6)[None] + 1
        tokens = draw.lognormal(3, 2, (1, 1, 6)).repeat(2, axis=0)
        placed = place_replicas(tokens, counts, 3) if counts.max() <= 3 else None
        if placed is not None and _gets_stuck(tokens, counts, 3):
            stuck += 1
            check(found := layout_of(placed[0].tolist(), experts=6, ranks=3))
            assert found.replica_counts.tolist() == counts.tolist()
    assert stuck > 5


def _gets_stuck(tokens: np.ndarray, counts: np.ndarray, num_ranks: int) -> bool:
    """Whether the plain greedy policy of one layer finds no rank for an expert."""
    load = (tokens / counts)[:, 0]
    order = sorted(np.arange(counts.shape[1]).repeat(counts[0]).tolist(), key=lambda expert: -load[:, expert].sum())
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in order:
        open_ranks = [r for r in range(num_ranks) if len(held[r]) < len(order) // num_ranks and expert not in held[r]]
        if not open_ranks:
            return True
        of_ranks = np.array([load[:, experts].sum(1) for experts in held])
        cost = {r: np.maximum(of_ranks.max(0), of_ranks[r] + load[:, expert]).sum() for r in open_ranks}
        held[min(open_ranks, key=lambda r: cost[r])].append(expert)
    return False


@settings(max_examples=400)
@given(loads(), st.randoms(use_true_random=False))
def test_the_policy_always_finds_a_valid_layout(case, random):
    layout, tokens = case
    redundant = layout.num_physical - layout.num_experts
    counts = replicate_experts(tokens.double().numpy(), redundant, layout.num_ranks)
    assert (counts.sum(1) == layout.num_physical).all()
    assert counts.min() >= 1
    assert counts.max() <= layout.num_ranks
    shuffled = counts[:, random.sample(range(layout.num_experts), layout.num_experts)]  # counts nobody would choose
    for each in (counts, shuffled):
        placed = place_replicas(tokens.double().numpy(), each, layout.num_ranks)
        found = layout_of(*placed.tolist(), experts=layout.num_experts, ranks=layout.num_ranks)
        assert found.replica_counts.tolist() == each.tolist()
        check(found)


@settings(max_examples=200)
@given(loads(), st.integers(0, 2**32))
def test_no_layer_gets_worse_and_what_stays_on_a_rank_stays_in_its_place(case, seed):
    layout, tokens = case
    now = rebalance(layout, tokens)
    later_tokens = torch.randint(100, tokens.shape, generator=torch.Generator().manual_seed(seed))
    for before, after, load in [(layout, now, tokens), (now, rebalance(now, later_tokens), later_tokens)]:
        check(after)
        peaks = [each.rank_loads(load).amax(-1).sum(0) for each in (before, after)]
        assert (peaks[1] <= peaks[0]).all()
        for rank in range(layout.num_ranks):
            for old, new in zip(before.on_rank(rank).tolist(), after.on_rank(rank).tolist(), strict=True):
                assert all(old[place] == e or e not in old for place, e in enumerate(new))
        assert torch.equal(rebalance(after, load).physical_to_logical, after.physical_to_logical)  # and then it rests
        assert after.logical_to_physical.shape == layout.logical_to_physical.shape


def test_skewed_loads_are_evened_out():
    draw = np.random.default_rng(0)
    wanted = draw.lognormal(0, 1.5, (1, 4, 64))
    tokens = torch.from_numpy(draw.poisson(200 * wanted / wanted.mean(), (20, 4, 64)))
    layout = ExpertLayout.initial(4, 64, num_redundant=16, num_ranks=8)
    assert imbalance(layout.rank_loads(tokens)) > 1.5
    assert imbalance(rebalance(layout, tokens).rank_loads(tokens)) < 1.06
    assert rebalance(layout, tokens[:0]) is layout


def test_a_single_rank_has_nothing_to_balance():
    layout = ExpertLayout.initial(1, 5, num_redundant=0, num_ranks=1)
    assert rebalance(layout, torch.tensor([[[9, 0, 0, 0, 1]]])).physical_to_logical.tolist() == [[0, 1, 2, 3, 4]]
