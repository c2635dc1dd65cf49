"""Steps with prompts are started before the last one is read: prompts come at any moment, and no answer changes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from rorqual import LLM, SamplingParams
from rorqual.engine.scheduler import Scheduler
from rorqual.outputs import RequestOutput
from tests.engine.engines import scripted_llm, tiny_llm
from tests.engine.test_async_scheduling import said
from tests.tiny import VOCAB

TIGHT = 17
"""Blocks: the longest request needs all but one."""
Request = tuple[list[int], SamplingParams]


def random_requests(seed: int, count: int = 28) -> list[Request]:
    """Prompts with common beginnings, some longer than a step; many short answers, ends by tokens, several answers."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(2, VOCAB) for _ in range(24)] for _ in range(3)]
    found = []
    for i in range(count):
        prompt = draw.choice(beginnings)[: draw.choice((0, 4, 9, 24))]
        prompt = prompt + [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 20))]
        options = draw.choice(
            (
                {"temperature": 0.0},
                {"temperature": 1.2},
                {"temperature": 1.2, "stop_token_ids": list(range(2, VOCAB, 6))},
                {"temperature": 0.8, "repetition_penalty": 1.3, "top_k": 20},
                {"temperature": 0.0, "logprobs": 1},
                {"temperature": 0.0, "prompt_logprobs": 1},
                {"temperature": 1.0, "n": 2},
            )
        )
        found.append((prompt, SamplingParams(seed=i, max_tokens=draw.choice((1, 2, 7, 17, 17)), **options)))
    return found


def serve(
    llm: LLM, requests: list[Request], *, ahead: bool, seed: int, abort: float = 0.0
) -> tuple[list[RequestOutput], Counter[str]]:
    """Requests that arrive at random moments; returns what came of them, and how often what happened."""
    engine, draw, done, seen = llm.engine, random.Random(seed), {}, Counter[str]()
    engine._looks_ahead = ahead
    coming, ids = requests[::-1], []
    while coming or engine.has_work:
        if coming and (draw.random() < 0.5 or not engine.has_work):
            ids.append(engine.add_request(*coming.pop(), on_finish=lambda out: done.update({out.request_id: out})))
        if draw.random() < abort and engine._requests:
            engine.abort(draw.choice(list(engine._requests)))
            seen["aborts in flight"] += engine._flight is not None
        before = engine._flight
        engine.step()
        engine.scheduler.check()
        after = engine._flight
        if before is not None and after is not None:
            seen[f"{'prompts' if before.prompts else 'decodes'} -> {'prompts' if after.prompts else 'decodes'}"] += 1
        seen["landed alone"] += before is not None and after is None and engine.has_work
    assert engine.cache.usage() == 0
    seen["preemptions"] = engine.scheduler.num_preemptions
    seen["cached"] = engine.stats.num_cached_tokens
    return [done[request_id] for request_id in ids], seen


def all_said(out: RequestOutput, *, exact: bool) -> object:
    entries = [
        {t: (e.rank, e.logprob if exact else pytest.approx(e.logprob, abs=1e-4)) for t, e in (at or {}).items()}
        for at in out.prompt_logprobs or ()
    ]
    return entries, [said(answer, exact=exact) for answer in out.outputs]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {}),
        ("llama", {"num_kv_blocks": TIGHT}),
        ("llama", {"max_num_seqs": 2}),
        ("llama", {"enable_prefix_caching": False, "max_num_batched_tokens": 8}),
        ("mistral_window", {"num_kv_blocks": 18}),
        ("qwen2_windows", {"num_kv_blocks": TIGHT}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same(model: str, options: dict, seed: int) -> None:
    requests = random_requests(seed)
    with tiny_llm(model, **options) as llm:
        want, _ = serve(llm, requests, ahead=False, seed=seed)
    with tiny_llm(model, **options) as llm:
        got, seen = serve(llm, requests, ahead=True, seed=seed)
    assert [all_said(out, exact=False) for out in want] == [all_said(out, exact=True) for out in got]
    changes = ("prompts -> prompts", "prompts -> decodes", "decodes -> prompts", "decodes -> decodes")
    for change in changes[:1] if "max_num_batched_tokens" in options else changes:  # small steps all have prompts
        assert seen[change] > 0, f"{change}: it did not happen in {dict(seen)}"
    assert seen["landed alone"] == 0, "a step waited though there was work"
    assert (seen["cached"] > 0) == options.get("enable_prefix_caching", True)
    assert (seen["preemptions"] > 0) == (options.get("num_kv_blocks") == TIGHT), dict(seen)


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": TIGHT}])
@pytest.mark.parametrize("seed", range(4))
def test_aborts_leave_the_others_alone(options: dict, seed: int) -> None:
    requests = random_requests(seed)
    with tiny_llm("llama") as llm:
        want, _ = serve(llm, requests, ahead=False, seed=seed)
    with tiny_llm("llama", **options) as llm:
        got, seen = serve(llm, requests, ahead=True, seed=seed, abort=0.1)
    assert seen["aborts in flight"] > 0
    reasons = Counter()
    for whole, out in zip(want, got, strict=True):
        for full, answer in zip(whole.outputs, out.outputs, strict=True):
            reasons[answer.finish_reason == "abort"] += 1
            if answer.finish_reason == "abort":
                assert answer.token_ids == full.token_ids[: len(answer.token_ids)]
            else:
                assert (answer.token_ids, answer.finish_reason) == (full.token_ids, full.finish_reason)
    assert min(reasons[True], reasons[False]) > 0


def test_a_sequence_is_preempted_while_its_token_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(
        Scheduler, "_preempt", lambda self, seq: (unknown.append(seq.num_unknown_tokens), preempt(self, seq))
    )
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True, presence_penalty=0.5)
    requests = [([5 + i, 6, 7], params) for i in range(8)]
    with tiny_llm("llama", num_kv_blocks=18) as llm:
        got, _ = serve(llm, requests, ahead=True, seed=0)
    assert 1 in unknown
    with tiny_llm("llama") as llm:
        want, _ = serve(llm, requests, ahead=False, seed=0)
    assert [out.token_ids for out in got] == [out.token_ids for out in want]


def test_a_prompt_joins_without_a_pause() -> None:
    """Between any two steps one is in flight, and the newcomer is in the first that is started after it came."""
    with tiny_llm("llama") as llm:
        engine, done = llm.engine, []
        engine._looks_ahead = True
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        engine.add_request([5, 6, 7], params, on_finish=done.append)
        for _ in range(4):
            engine.step()
        assert engine._flight is not None
        assert not engine._flight.prompts
        engine.add_request(list(range(2, 22)), params, on_finish=done.append)
        num_rows = []
        for _ in range(4):
            engine.step()
            assert engine._flight is not None
            num_rows.append((engine._flight.num_decodes, engine._flight.num_prompt_tokens))
        assert num_rows == [(1, 15), (1, 5), (2, 0), (2, 0)]
        while engine.has_work:
            engine.step()
        engine._looks_ahead = False
        for out in done:
            assert out.token_ids == llm.generate(out.prompt_token_ids, params, use_tqdm=False)[0].token_ids


def test_the_seat_of_an_answer_whose_last_token_is_drawn_is_taken_at_once() -> None:
    with tiny_llm("llama", max_num_seqs=1) as llm:
        engine, done = llm.engine, []
        engine._looks_ahead = True
        for first, max_tokens in ((5, 1), (6, 3), (7, 1), (8, 1)):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            engine.add_request([first, 3, 4], params, on_finish=done.append)
        num_steps = 0
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
            num_steps += 1
        assert num_steps == 1 + 6, "a step per token, and the call that starts the first"
        assert [len(out.token_ids) for out in done] == [1, 3, 1, 1]


@pytest.mark.parametrize("prompt_len", [1, 3, 20])
def test_what_was_computed_behind_an_end_is_dropped(prompt_len: int) -> None:
    """The end is the first token, drawn by the prompt's step, and the step ahead of it decodes what nobody wants."""
    scripts = {5: [11, 12, 13], 6: [21, 22, 23, 24, 25]}
    llm, _ = scripted_llm(scripts, prompt_lens={5: prompt_len, 6: 1})
    with llm:
        engine, done = llm.engine, {}
        engine._looks_ahead = True
        params = SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[11])
        engine.add_request([6], params, on_finish=lambda out: done.update({6: out}))
        engine.step()
        engine.add_request([5] * prompt_len, params, on_finish=lambda out: done.update({5: out}), streamed=True)
        seq = list(engine._answer_of)[-1]
        deltas, dropped = [], False
        while engine.has_work:
            deltas += engine.step()
            engine.scheduler.check()
            dropped |= 5 in done and engine._flight is not None and seq in engine._flight.drawing
        assert dropped, "a step had it in"
        assert done[5].token_ids == [11]
        assert [delta.token_ids for delta in deltas] == [[11]]
        assert done[6].token_ids == [21, 22, 23, 24, 25]
        assert engine.stats.num_output_tokens == 6


def test_a_request_with_bad_words_makes_only_its_steps_wait() -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, seed=i, logprobs=0) for i in range(3)]
    requests = [([5 + i, 6, 7], params[i]) for i in range(3)]
    with tiny_llm("llama") as llm:
        free, _ = serve(llm, requests, ahead=True, seed=0)
        word = free[1].token_ids[3:5]
        engine = llm.engine
        engine._bad_words = lambda params: [word] if params.seed == 1 else []
        answers = []
        for ahead in (False, True):
            got, seen = serve(llm, requests, ahead=ahead, seed=0)
            answers.append([out.token_ids for out in got])
            assert (seen["landed alone"] > 0) == ahead
        assert answers[0] == answers[1]
        assert tuple(word) not in pairwise(answers[0][1])
        assert answers[0][0] == free[0].token_ids


@pytest.mark.parametrize("prompt_first", [False, True])
def test_a_step_that_cannot_be_started_loses_nothing(prompt_first: bool) -> None:
    """The step before it is still in flight, and is read by the next call."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=9, presence_penalty=0.5)
    with tiny_llm("llama") as llm:
        engine, done = llm.engine, []
        engine._looks_ahead = True
        engine.add_request([5, 6, 7], params, on_finish=done.append)
        for _ in range(1 if prompt_first else 4):
            engine.step()
        engine.add_request([8, 9], params, on_finish=done.append)
        hidden_states = engine._runner.hidden_states
        engine._runner.hidden_states = lambda batch: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.step()
        engine._runner.hidden_states = hidden_states
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
        engine._looks_ahead = False
        for out in done:
            assert out.token_ids == llm.generate(out.prompt_token_ids, params, use_tqdm=False)[0].token_ids


def test_what_is_counted_does_not_depend_on_when_steps_are_read() -> None:
    requests = random_requests(5, 12)
    counts = []
    for ahead in (False, True):
        with tiny_llm("llama", num_kv_blocks=200) as llm:
            outputs, _ = serve(llm, [(ids, params) for ids, params in requests], ahead=ahead, seed=1)
            stats = llm.engine.stats
            assert stats.num_output_tokens == sum(len(a.token_ids) for out in outputs for a in out.outputs)
            assert stats.num_prompt_tokens + stats.num_cached_tokens == sum(
                len(out.prompt_token_ids) * len(out.outputs) for out in outputs
            )
            for out in outputs:
                times = out.times
                assert times.arrival_s <= times.first_scheduled_s <= times.first_token_s <= times.finished_s
            counts.append((stats.num_output_tokens, stats.num_queried_tokens))
    assert counts[0] == counts[1]
