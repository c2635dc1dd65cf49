"""Every sampling option draws the same in steps that are started before the last one is read, also when preempted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from rorqual import LLM, SamplingParams
from rorqual.outputs import CompletionOutput
from tests.engine.engines import tiny_llm
from tests.tiny import VOCAB

OPTIONS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.2},
    "top_k": {"top_k": 7},
    "top_p": {"temperature": 1.5, "top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all_filters": {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.7},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.8, "frequency_penalty": 1.1},
    "all_penalties": {"repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.9, "top_p": 0.9},
    "bias": {"temperature": 0.0, "logit_bias": {9: 5.0, 11: -100.0}},
    "allowed": {"allowed_token_ids": [3, 5, 8, 13, 21], "frequency_penalty": 0.5},
    "min_tokens": {"temperature": 1.3, "stop_token_ids": list(range(2, VOCAB, 3)), "min_tokens": 5},
    "logprobs": {"temperature": 0.9, "logprobs": 3},
    "logprobs_of_penalised": {"temperature": 0.0, "logprobs": 0, "presence_penalty": 1.0},
}


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]], *, ahead: bool) -> tuple[list[object], int, int]:
    """What the answers hold, how many steps were started ahead, and how often sequences were preempted."""
    engine, done, flights = llm.engine, {}, 0
    engine._looks_ahead = ahead
    ids = [engine.add_request(*each, on_finish=lambda out: done.update({out.request_id: out})) for each in requests]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
        flights += engine._flight is not None
    return [said(done[i].outputs[0], exact=ahead) for i in ids], flights, engine.scheduler.num_preemptions


def said(answer: CompletionOutput, *, exact: bool) -> tuple[object, ...]:
    """What an answer holds, but for its logprobs' last bits, which company moves."""
    entries = [
        {t: (e.rank, e.logprob if exact else pytest.approx(e.logprob, abs=1e-4)) for t, e in at.items()}
        for at in answer.logprobs or ()
    ]
    return answer.token_ids, answer.finish_reason, entries


def requests_with(names: list[str]) -> list[tuple[list[int], SamplingParams]]:
    return [
        ([2 + i, 7, 2 + i, 9][: 2 + i % 3], SamplingParams(seed=i, max_tokens=18 + i % 4, **OPTIONS[name]))
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_draws_the_same_ahead(name: str) -> None:
    answers = []
    for ahead in (False, True):
        with tiny_llm("llama") as llm:
            found, flights, _ = run(llm, requests_with([name] * 3), ahead=ahead)
            answers.append(found)
            assert (flights > 5) == ahead, "its steps do not wait"
    assert answers[0] == answers[1]


@pytest.mark.parametrize("num_kv_blocks", [64, 17])
def test_all_options_together_draw_the_same_ahead(num_kv_blocks: int) -> None:
    answers = []
    for ahead, blocks in ((False, 64), (False, num_kv_blocks), (True, num_kv_blocks)):
        with tiny_llm("llama", num_kv_blocks=blocks) as llm:
            found, flights, preemptions = run(llm, requests_with(list(OPTIONS)), ahead=ahead)
            answers.append(found)
            assert (flights > 0) == ahead
            assert (preemptions > 0) == (blocks < 64)
    assert answers[0] == answers[1]
    assert answers[1] == answers[2]


def test_bad_words_of_several_tokens_make_steps_wait_and_are_never_completed() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    with tiny_llm("llama") as llm:
        engine = llm.engine
        (free,) = run(llm, [([5, 6, 7], params)], ahead=True)[0]
        word = list(free[0][3:5])
        engine._bad_words = lambda _params: [word]
        answers = []
        for ahead in (False, True):
            (answer,), flights, _ = run(llm, [([5, 6, 7], params)], ahead=ahead)
            answers.append(answer)
            assert flights == 0
        assert answers[0] == answers[1]
        ids = answers[0][0]
        assert ids[:4] == free[0][:4]
        assert word not in [list(pair) for pair in pairwise(ids)]
