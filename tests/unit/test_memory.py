"""What the KV cache gets of a GPU's memory: the account, on readings of a card that is made up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rorqual.cache.spec import CacheGroup, KVSpec
from rorqual.config import EngineConfig
from rorqual.engine.memory import (
    SLACK,
    CacheSizing,
    MemoryPlan,
    Reading,
    check_weights_fit,
    gpu_budget,
    plan_memory,
    told_when_full,
)
from rorqual.engine.model_runner import ModelRunner
from rorqual.loader.checkpoint import open_checkpoint
from tests.tiny import checkpoint_folder

GIB = 1 << 30
TOTAL = 100 * GIB
CONTEXT = GIB // 2
"""What the driver holds of an empty card."""


class Card:
    """A card whose memory a test fills by hand, in bytes; `peak` is what a step takes."""

    def __init__(self, *, others: int = 0, total: int = TOTAL, peak: int = 3 * GIB) -> None:
        self.total, self.others, self.peak = total, others + CONTEXT, peak
        self.reserved = self.driver = 0
        self.steps = 0

    def read(self) -> Reading:
        return Reading(self.total - self.others - self.driver - self.reserved, self.total, self.reserved)

    def peak_of(self, step: Callable[[], object]) -> int:
        step()
        self.steps += 1
        return self.peak


def plan_of(
    *, others: int = 0, weights: int = 20 * GIB, newcomers: int = 0, graphs: int = GIB, utilization: float = 0.9
) -> MemoryPlan:
    """The plan for a card on which loading and the first steps have gone as told."""
    card = Card(others=others)
    start = card.read()
    card.reserved += weights
    loaded = card.read()
    card.reserved += 32 << 20
    card.driver += 100 << 20
    card.others += newcomers
    return plan_memory(start, loaded, card.read(), activations=3 * GIB, graphs=graphs, utilization=utilization)


WORKSPACES = (32 << 20) + (100 << 20)


def test_the_cache_gets_the_rest_of_the_share():
    plan = plan_of()
    assert (plan.total, plan.share, plan.others) == (TOTAL, 90 * GIB, CONTEXT)
    assert (plan.weights, plan.workspaces, plan.newcomers) == (20 * GIB, WORKSPACES, 0)
    assert plan.kv_cache == 90 * GIB - 20 * GIB - WORKSPACES - 3 * GIB - GIB - SLACK
    assert plan.available == TOTAL - CONTEXT - 20 * GIB - WORKSPACES - 3 * GIB - GIB


def test_what_others_hold_counts_only_where_it_leaves_less_than_the_share():
    assert plan_of(others=9 * GIB).kv_cache == plan_of().kv_cache
    crowded = plan_of(others=40 * GIB)
    assert crowded.kv_cache == crowded.available - SLACK == plan_of().available - 40 * GIB - SLACK
    assert plan_of(others=40 * GIB, utilization=0.3).kv_cache == plan_of(utilization=0.3).kv_cache


@pytest.mark.parametrize("utilization", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("others", [0, 30 * GIB, 70 * GIB])
@pytest.mark.parametrize("newcomers", [0, 10 * GIB])
def test_all_that_is_planned_fits_what_is_really_free(utilization, others, newcomers):
    plan = plan_of(others=others, newcomers=newcomers, utilization=utilization)
    ours = plan.weights + plan.workspaces + plan.activations + plan.graphs + plan.kv_cache
    assert ours + SLACK <= plan.share
    assert ours + SLACK <= TOTAL - CONTEXT - others - newcomers


def test_others_that_come_meanwhile_are_noticed(caplog):
    with caplog.at_level(logging.WARNING):
        assert plan_of().newcomers == 0
        assert not caplog.records
        plan = plan_of(newcomers=50 * GIB)
    # The driver's hundred MiB cannot be told from theirs.
    assert plan.newcomers == 50 * GIB + (100 << 20)
    assert f"{plan.newcomers:,} bytes of the GPU's memory were taken by other processes" in caplog.text
    assert plan.kv_cache == plan.available - SLACK < plan_of().kv_cache
    assert f"{plan.newcomers:,} taken by other processes meanwhile" in plan.account()
    assert f", {(plan.others + plan.newcomers) / GIB:.1f} GiB held by others" in plan.summary(0)


def test_memory_that_others_give_back_meanwhile_is_nobodys_loss():
    assert plan_of(others=40 * GIB, newcomers=-40 * GIB).kv_cache == plan_of().kv_cache + (100 << 20)


def test_graphs_that_outgrow_the_plan_are_said(caplog):
    plan = plan_of(graphs=GIB)
    assert plan.with_graphs(GIB + SLACK).graphs == GIB + SLACK
    assert not caplog.records
    assert plan.with_graphs(2 * GIB).graphs == 2 * GIB
    assert f"CUDA graphs hold {2 * GIB:,} bytes and {GIB:,} were planned" in caplog.text


# --- before loading


def test_who_holds_memory_before_is_said_from_a_gib_on(caplog):
    check_weights_fit(Card().read(), GIB, 0.9)
    assert not caplog.records
    check_weights_fit(Card(others=20 * GIB).read(), GIB, 0.9)
    assert f"{20 * GIB + CONTEXT:,} bytes of the GPU's memory are held by others" in caplog.text


@pytest.mark.parametrize(
    ("others", "utilization", "way_out"),
    [(0, 0.2, "raise --gpu-memory-utilization"), (75 * GIB, 0.9, "free memory that other processes hold")],
)
def test_weights_that_cannot_fit_are_refused_before_they_are_read(others, utilization, way_out):
    with pytest.raises(ValueError, match=way_out) as error:
        check_weights_fit(Card(others=others).read(), 30 * GIB, utilization)
    free = TOTAL - CONTEXT - others
    for number in (30 * GIB, TOTAL, int(TOTAL * utilization), free):
        assert f"{number:,}" in str(error.value)


# --- from bytes to blocks

PER_BLOCK = 2 * 8 * 128 * 2 * 16 * 32


def sized(plan: MemoryPlan, **options: Any) -> tuple[tuple[int, ...], int]:
    group = CacheGroup(KVSpec(8, 128, torch.bfloat16), tuple(range(32)))
    config = EngineConfig(**options)
    return CacheSizing(config, (group,), gpu_budget(plan), max_num_seqs=256, max_chunk=8192).size(
        config.max_model_len or 40_000
    )


def test_blocks_fill_what_the_plan_leaves():
    plan = plan_of()
    assert sized(plan) == ((plan.kv_cache // PER_BLOCK,), 40_000)


def test_a_cache_without_room_is_refused_with_bytes_and_flags():
    plan = plan_of(utilization=0.24)
    assert plan.kv_cache < 0
    with pytest.raises(ValueError, match="the KV cache cannot hold one sequence of 2 tokens") as error:
        sized(plan)
    said = str(error.value)
    assert "raise --gpu-memory-utilization or lower --max-model-len, --max-num-batched-tokens or --max-num-seqs" in said
    for number in (TOTAL, plan.share, plan.free, plan.weights, plan.activations, plan.graphs, plan.workspaces):
        assert f"{number:,}" in said
    with pytest.raises(ValueError, match="free memory that other processes hold on the GPU or lower"):
        sized(plan_of(newcomers=76 * GIB))


def test_a_model_length_that_was_asked_for_is_not_cut(caplog):
    small = plan_of(utilization=0.245)
    blocks, longest = sized(small)
    assert longest == blocks[0] * 16 + 1 < 40_000
    assert "for more, raise --gpu-memory-utilization" in caplog.text
    with pytest.raises(ValueError, match="cannot hold one sequence of 39000 tokens"):
        sized(small, max_model_len=39_000)


def test_a_given_size_may_exceed_the_share_but_not_what_is_free():
    plan = plan_of(utilization=0.3)
    wanted = plan.kv_cache + 20 * GIB
    assert sized(plan, kv_cache_memory=wanted) == ((wanted // PER_BLOCK,), 40_000)
    for flag, options in {
        "--kv-cache-memory": {"kv_cache_memory": plan.available + PER_BLOCK},
        "--num-kv-blocks": {"num_kv_blocks": plan.available // PER_BLOCK + 1},
    }.items():
        with pytest.raises(
            ValueError, match=rf"as {flag} wants it, does not fit the {plan.available:,} .*lower {flag}"
        ):
            sized(plan, **options)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA driver error: out of memory")]
)
def test_memory_that_runs_out_is_one_sentence(error):
    card = Card(others=5 * GIB)
    card.reserved = 7 * GIB
    with (
        pytest.raises(ValueError, match=rf"ran out while loading: .* holds {7 * GIB:,} and .* --max-num-seqs"),
        told_when_full("loading", card),
    ):
        raise error
    with pytest.raises(type(error)), told_when_full("loading", None):
        raise error


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes differ"), told_when_full("loading", Card()):
        raise RuntimeError("shapes differ")


# --- the whole way, with a model on the CPU and a card that is made up


class LoadedCard(Card):
    """A card that holds weights from the second reading on."""

    def __init__(self, *, weights: int, **options: int) -> None:
        super().__init__(**options)
        self.weights, self.readings = weights, 0

    def read(self) -> Reading:
        self.reserved = self.weights if self.readings else 0
        self.readings += 1
        return super().read()


def runner(card: Card, **options: Any) -> ModelRunner:
    folder = checkpoint_folder("qwen2_windows")
    options = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "block_size": 4} | options
    config = EngineConfig(model=str(folder), max_num_batched_tokens=30, max_num_seqs=7, **options)
    return ModelRunner(config, open_checkpoint(folder), progress=False, memory=card)


def test_a_runner_sizes_its_cache_by_what_the_largest_step_leaves(monkeypatch):
    ran: list[tuple[int, ...]] = []
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda self, batch: ran.append(batch.query_lens) or run(self, batch))
    card = LoadedCard(weights=300 << 20, total=2 * GIB, peak=500 << 20)
    made = runner(card, gpu_memory_utilization=0.7)
    assert made.resolved.num_blocks == ()
    made.warm_up()
    largest = (4, 4, 4, 4, 4, 5, 5)
    assert ran == [(1,), (1, 2), largest, largest], "measured, and once more with everything in place"
    left = int(2 * GIB * 0.7) - (800 << 20) - SLACK
    assert 0.95 * left < made.resolved.kv_cache_bytes <= left
    assert made.kv[0].key.shape[0] == made.resolved.num_blocks[0]
    assert made.memory_summary() is not None
    assert f"activations {500 / 1024:.2f}" in made.memory_summary()


def test_a_runner_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="the KV cache cannot hold one sequence of 64 tokens"):
        runner(LoadedCard(weights=300 << 20, total=2 * GIB), gpu_memory_utilization=0.8).warm_up()
    with pytest.raises(ValueError, match="the weights need"):
        runner(LoadedCard(weights=0, total=GIB, others=GIB - CONTEXT - 1000))
