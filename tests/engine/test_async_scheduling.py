"""Steps that are started before the tokens of the last one are read change nothing that anybody sees."""

from __future__ import annotations

import random

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.outputs import CompletionOutput, RequestOutput
from tests.engine.engines import ScriptedRunner, tiny_llm
from tests.tiny import VOCAB


def run(llm: LLM, *, ahead: bool, seed: int) -> list[RequestOutput]:
    """A random workload: ends of every kind, late arrivals, parameters that need the host, aborts."""
    llm.engine._looks_ahead = ahead
    draw, done = random.Random(seed), {}
    waiting = []
    for i in range(24):
        ids = [draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 20))]
        options = draw.choice(
            (
                {"temperature": 0.0},
                {"temperature": 1.0},
                {"temperature": 1.3, "stop_token_ids": [draw.randrange(2, VOCAB) for _ in range(8)]},
                {"temperature": 1.3, "stop_token_ids": list(range(2, VOCAB, 5)), "min_tokens": 6},
                {"temperature": 0.9, "top_p": 0.8},
                {"temperature": 0.0, "logprobs": 2},
                {"temperature": 0.7, "presence_penalty": 0.5},
                {"temperature": 1.0, "n": 3},
            )
        )
        waiting.append(
            (ids, SamplingParams(seed=i, max_tokens=max(draw.randint(1, 30), options.get("min_tokens", 0)), **options))
        )
    ids = []
    while waiting or llm.engine.has_work:
        if waiting and draw.random() < 0.3:
            prompt, params = waiting.pop()
            ids.append(llm.engine.add_request(prompt, params, on_finish=lambda out: done.update({out.request_id: out})))
        llm.engine.step()
        llm.engine.scheduler.check()
    return [done[request_id] for request_id in ids]


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_blocks": 20}, {"max_num_seqs": 3}, {"enable_prefix_caching": False}, {"name": "qwen2_windows"}],
)
@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_same(options: dict, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether each step is scheduled, goes on from one that was read, or from one that was not."""
    answers, shorter = [], 0
    for kind in ("scheduled", "on", "ahead"):
        with tiny_llm(**options) as llm:

            def go_on(flight, token_ids, kind=kind, real=llm.engine._go_on):
                nonlocal shorter
                after = None if kind == "scheduled" else real(flight, token_ids)
                shorter += kind == "on" and after is not None
                return after

            monkeypatch.setattr(llm.engine, "_go_on", go_on)
            outputs = run(llm, ahead=kind == "ahead", seed=seed)
            answers.append([[said(a, exact=bool(answers)) for a in out.outputs] for out in outputs])
            assert llm.engine.cache.usage() == 0
            assert llm.engine._landed is None, "an idle engine holds no step"
            if kind == "ahead" and not options:
                assert "wait" in llm.engine.stats.seconds
    assert answers[1:] == [answers[0]] * 2
    assert shorter


def said(answer: CompletionOutput, *, exact: bool) -> tuple[object, ...]:
    """What an answer holds, but for its logprobs' last bits, which company moves."""
    values = [
        {t: e.logprob if exact else pytest.approx(e.logprob, abs=1e-4) for t, e in entries.items()}
        for entries in answer.logprobs or ()
    ]
    ranks = [[entry.rank for entry in entries.values()] for entries in answer.logprobs or ()]
    return answer.token_ids, answer.finish_reason, answer.stop_reason, ranks, values


def test_a_step_flies_while_the_last_is_read() -> None:
    with tiny_llm("llama") as llm:
        engine = llm.engine
        engine._looks_ahead = True
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        request_id = engine.add_request([5, 6, 7], params, streamed=True)
        assert engine.step() == [], "the prompt's step is only started"
        for _ in range(4):
            assert engine._flight is not None
            assert len(engine.step()) == 1
        assert engine._flight is not None
        assert len(engine.step()) == 1
        assert not engine.has_work
        assert engine._flight is None, "no step is started behind the last token that fits"
        assert request_id not in engine._requests


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_return_the_tokens_of_streamed_requests_only(ahead: bool) -> None:
    with tiny_llm("llama") as llm:
        engine, done = llm.engine, []
        engine._looks_ahead = ahead
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        ids = [
            engine.add_request([5, 6, i], params, streamed=streamed, on_finish=done.append)
            for i, streamed in enumerate((True, False, True))
        ]
        read: dict[str, list[int]] = {ids[0]: [], ids[2]: []}
        while engine.has_work:
            for delta in engine.step():
                read[delta.request_id] += delta.token_ids
        assert len(done) == 3
        assert read == {out.request_id: out.token_ids for out in done if out.request_id != ids[1]}


def test_an_abort_drops_what_is_in_flight() -> None:
    with tiny_llm("llama") as llm:
        engine = llm.engine
        engine._looks_ahead = True
        finished = []
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        first = engine.add_request([5, 6, 7], params, on_finish=finished.append)
        engine.add_request([8, 9], params, on_finish=finished.append)
        while len(engine._answer_of) < 2 or engine._flight is None:
            engine.step()
        engine.abort(first)
        while engine.has_work:
            engine.step()
            engine.scheduler.check()
        engine._looks_ahead = False
        assert [len(out.token_ids) for out in finished][1] == 30
        assert finished[0].finish_reason == "abort"
        assert finished[1].token_ids == llm.generate([8, 9], params, use_tqdm=False)[0].token_ids


def test_unusable_logits_end_their_own_answer_only() -> None:
    with tiny_llm("llama") as llm:
        engine = llm.engine
        engine._looks_ahead = True
        scripted = ScriptedRunner(llm, {5: [11, 12, 13, 14, 15, 16, 17, 18], 6: [21, 22, 23, 24, 25, 26]}, {5: 2, 6: 2})
        engine._runner = scripted
        done = {}
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for first in (5, 6):
            engine.add_request([first, 3], params, on_finish=lambda out: done.update({out.prompt_token_ids[0]: out}))
        while len(engine.stats.seconds) == 0 or not done:
            engine.step()
            if engine._flight is not None:
                scripted.spoil.add(5)
        while engine.has_work:
            engine.step()
        assert done[5].finish_reason == "error"
        assert done[6].token_ids == [21, 22, 23, 24, 25, 26]
        assert torch.isfinite(torch.tensor(done[6].token_ids)).all()
