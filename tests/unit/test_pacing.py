"""Steps beside a stream carry so many prompt tokens that they take less than twice as long as without."""

from __future__ import annotations

import random

import pytest

from rorqual.engine.pacing import FEWEST_TOKENS, STRETCH, Pacing
from tests.unit.test_scheduler import Run


def simulated(pacing: Pacing, *, fixed: float, per_token: float, noise: float = 0.0, steps: int = 60) -> list[float]:
    """Seconds of the mixed steps, once costs are known, of a machine where a step takes fixed + per_token * tokens."""
    rng = random.Random(1)
    seen = []
    for step in range(steps):
        limit = pacing.prompt_limit(1)
        tokens = 0 if step % 3 == 0 else 256 if limit is None else limit
        seconds = (fixed + per_token * tokens) * (1 + noise * rng.random())
        if tokens and limit is not None:
            seen.append(seconds)
        pacing.start(tokens)
        pacing.record(num_decodes=4, num_prompt_tokens=tokens, seconds=seconds)
    return seen


@pytest.mark.parametrize(("fixed", "per_token"), [(0.02, 2e-4), (0.005, 1e-4), (0.05, 5e-5), (0.3, 1e-3)])
def test_a_mixed_step_takes_less_than_twice_as_long(fixed, per_token):
    seen = simulated(Pacing(), fixed=fixed, per_token=per_token)
    assert len(seen) > 30
    assert max(seen) <= STRETCH * fixed + 1e-9
    assert max(seen) >= 1.3 * fixed, "prompts get what streams leave"


def test_noise_does_not_move_it_far():
    seen = simulated(Pacing(), fixed=0.02, per_token=2e-4, noise=0.3)
    assert sum(s <= 2 * 0.02 * 1.3 for s in seen) == len(seen)


@pytest.mark.parametrize("per_token", [5e-4, 1e-3, 0.01])
def test_where_the_fewest_tokens_cost_too_much_several_steps_go_without(per_token):
    pacing, fixed, seen = Pacing(), 0.005, []
    pacing.record(num_decodes=1, num_prompt_tokens=0, seconds=fixed)
    pacing.record(num_decodes=1, num_prompt_tokens=64, seconds=fixed + 64 * per_token)
    for _ in range(600):
        tokens = pacing.prompt_limit(1)
        assert tokens in (0, FEWEST_TOKENS)
        seen.append(fixed + per_token * tokens)
        pacing.start(tokens)
        pacing.record(num_decodes=1, num_prompt_tokens=tokens, seconds=seen[-1])
    assert sorted(seen)[len(seen) // 2 if per_token > 5e-4 else 0] == fixed
    assert 0.9 * STRETCH * fixed <= sum(seen) / len(seen) <= STRETCH * fixed * 1.001


def test_no_limit_before_both_costs_are_known():
    pacing = Pacing()
    assert pacing.prompt_limit(1) is None
    pacing.record(num_decodes=1, num_prompt_tokens=0, seconds=0.01)
    assert pacing.prompt_limit(1) is None
    pacing.record(num_decodes=0, num_prompt_tokens=100, seconds=0.02)
    assert pacing.prompt_limit(0) == pacing.prompt_limit(1) == int((STRETCH - 1) * 0.01 / 2e-4) // 16 * 16


def test_each_prompt_adds_its_share():
    pacing = Pacing()
    pacing.record(num_decodes=1, num_prompt_tokens=0, seconds=0.01)
    pacing.record(num_decodes=0, num_prompt_tokens=100, seconds=0.02)
    assert [pacing.prompt_limit(n) for n in (1, 4, 100)] == [16, 112, 2992]


def test_few_tokens_say_nothing_about_their_cost():
    pacing = Pacing()
    pacing.record(num_decodes=1, num_prompt_tokens=0, seconds=0.01)
    pacing.record(num_decodes=1, num_prompt_tokens=2, seconds=0.05)
    assert pacing.prompt_limit(1) is None


def test_prompts_are_those_who_wait_and_those_who_are_not_through():
    run = Run(max_num_batched_tokens=64, num_blocks=256, max_num_seqs=2)
    answering = run.add(4, 40)
    run.until(lambda: answering.num_output_tokens == 2)
    assert run.scheduler.num_prompts == 0
    run.add(200, 1)
    run.add(4, 1)
    assert run.scheduler.num_prompts == 2
    run.step()
    assert (len(run.scheduler.waiting), run.scheduler.num_prompts) == (1, 2)


@pytest.mark.parametrize("streamed", [False, True])
def test_only_steps_that_move_a_stream_are_limited(streamed):
    run = Run(max_num_batched_tokens=64, num_blocks=256)
    first = run.add(4, 40, is_streamed=streamed)
    run.until(lambda: first.num_output_tokens == 2)
    run.add(200, 1)
    chunks = run.scheduler.schedule(16)
    assert {c.seq.seq_id: c.num_tokens for c in chunks} == {0: 1, 1: 16 if streamed else 63}


def test_a_prompt_alone_is_not_limited():
    run = Run(max_num_batched_tokens=64, num_blocks=256)
    run.add(200, 1, is_streamed=True)
    (chunk,) = run.scheduler.schedule(16)
    assert chunk.num_tokens == 64
