"""Random requests in crowds: nothing leaks, every answer ends as it was asked to, and says what it says alone.

On a GPU decode steps are CUDA graphs and start before the last is read; the CPU's form of the test looks ahead too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.engine import Engine
from rorqual.outputs import CompletionOutput, RequestOutput, StreamDelta
from rorqual.sequence import Sequence as EngineSequence
from tests.engine.engines import byte_tokenizer, tiny_llm
from tests.tiny import VOCAB

MAX_LEN = 96
TIGHT = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "block_size": 2, "num_kv_blocks": 112}
"""A third of the blocks that so many sequences would like, and small ones: about one request in seven is preempted."""
WIDE = {"max_num_seqs": 80, "max_num_batched_tokens": 320, "block_size": 2, "num_kv_blocks": 1000}
"""Batches of all sizes, and steps ahead of many sequences."""
ABORTS = ("waiting", "in its prompt", "between steps", "in flight")
"""Where a request is when it is aborted; the last two are decoding."""
NUM_ALONE = 60
STRETCH = {"deepseek_v32": 2, "deepseek_v4": 3, "deepseek_v4_window": 3}
"""How many times as long texts are, of models that keep something of every 128 tokens, or choose among many."""
EOS = 1  # of every tiny config


@dataclass
class Asked:
    """A request, when to abort it, and what came of it."""

    prompt: list[int]
    params: SamplingParams
    salt: str
    streamed: bool
    abort_when: str | None
    abort_after: int
    """Tokens, for aborts while decoding."""
    output: RequestOutput | None = None
    deltas: list[StreamDelta] = field(default_factory=list)


def random_params(draw: random.Random, seed: int, *, bad_words: bool) -> SamplingParams:
    """Any mixture of options. Only a tenth of them each, so that pairs meet often and crowds of one kind sometimes."""

    def sometimes(chance: float = 0.1) -> bool:
        return draw.random() < chance

    options: dict[str, Any] = {"max_tokens": min(1 + int(draw.expovariate(1 / 15)), 70), "ignore_eos": sometimes(0.6)}
    options |= {"temperature": 0.0} if sometimes(0.35) else {"temperature": draw.uniform(0.3, 1.6), "seed": seed}
    if sometimes():
        options["top_k"] = draw.randint(1, 40)
    if sometimes():
        options["top_p"] = draw.uniform(0.3, 0.99)
    if sometimes():
        options["min_p"] = draw.uniform(0.01, 0.4)
    for penalty in ("presence_penalty", "frequency_penalty"):
        if sometimes():
            options[penalty] = draw.uniform(-1.0, 1.5)
    if sometimes():
        options["repetition_penalty"] = draw.uniform(0.8, 1.6)
    if sometimes():
        options["logprobs"] = draw.randint(0, 4)
    if sometimes(0.03):
        options["prompt_logprobs"] = draw.randint(0, 2)
    if sometimes():
        options["logit_bias"] = {draw.randrange(VOCAB): draw.uniform(-20, 5) for _ in range(draw.randint(1, 6))}
    if sometimes(0.05):
        options["allowed_token_ids"] = sorted(draw.sample(range(VOCAB), 60))
    if sometimes(0.15):
        options["stop_token_ids"] = sorted(draw.sample(range(VOCAB), draw.randint(1, 12)))
    if sometimes():
        options["min_tokens"] = draw.randint(1, options["max_tokens"])
    if sometimes(0.05):
        options["stop"] = [chr(draw.randrange(33, 127)) for _ in range(draw.randint(1, 4))]
    if bad_words and sometimes(0.3):
        options["bad_words"] = [chr(draw.randrange(33, 127)) for _ in range(draw.randint(1, 30))]
    if sometimes(0.06):
        options["n"] = draw.randint(2, 4)
    if sometimes(0.01):
        del options["max_tokens"]  # until the context is full
    return SamplingParams(**options)


def random_requests(seed: int, count: int, stretch: int = 1) -> list[Asked]:
    """Prompts that begin as one of a few texts, for a random length, and go on with something of their own.

    All of them are `stretch` times as long as without.
    """
    draw = random.Random(seed)

    def text(length: int) -> list[int]:
        return [draw.randrange(2, VOCAB) for _ in range(length * stretch)]

    beginnings = [text(60) for _ in range(12)]
    asked = []
    for i in range(count):
        shared = draw.choice(beginnings)[: stretch * draw.choice((0, draw.randint(1, 30), draw.randint(1, 60)))]
        prompt = shared + text(draw.choice((1, draw.randint(1, 6), draw.randint(1, 30))))
        # Steps are not started ahead while a bad word is looked for: those requests come in stretches of their own.
        params = random_params(draw, i, bad_words=i % 400 < 60)
        # Few prompts are ever half done, and few steps of a full cache in flight.
        abort = draw.choices(ABORTS, (3, 4, 3, 4))[0] if draw.random() < 0.3 else None
        salt = draw.choice(("", "", "", "a", "b"))
        asked.append(Asked(prompt, params, salt, draw.random() < 0.2, abort, draw.randint(1, 6)))
    return asked


def place(engine: Engine, seq: EngineSequence) -> str | None:
    """Where a running answer is, in the words of ABORTS."""
    if seq in engine.scheduler.waiting:
        return "waiting" if not seq.num_output_tokens else None
    if seq.num_output_tokens == 0:
        return "in its prompt" if seq.num_computed_tokens > 0 else None
    return "between steps" if engine._flight is None else "in flight" if seq in engine._flight.drawing else None


def drive(llm: LLM, requests: Sequence[Asked], seed: int) -> Counter[str]:
    """Serve them, arriving in waves with lulls between; returns how often what happened."""
    engine, draw, seen = llm.engine, random.Random(seed), Counter[str]()
    coming, by_id, to_abort = list(requests)[::-1], dict[str, Asked](), dict[str, Asked]()
    seats = engine.resolved.max_num_seqs
    lull, turn = False, seats  # requests come until so many live, then none until few are left

    def finish(output: RequestOutput) -> None:
        asked = by_id[output.request_id]
        assert asked.output is None, "finished twice"
        asked.output = output

    while coming or engine.has_work:
        num_live = len(engine._answer_of)
        if (num_live <= turn) if lull else (num_live > turn):
            lull = not lull
            turn = draw.choice((draw.randint(1, seats // 2), seats)) if lull else int(seats * draw.uniform(0.5, 4.0))
        for _ in range(0 if lull else min(len(coming), draw.choice((0, 1, 1, 2, seats // 3)))):
            asked = coming.pop()
            request_id = engine.add_request(
                asked.prompt, asked.params, cache_salt=asked.salt, streamed=asked.streamed, on_finish=finish
            )
            by_id[request_id] = asked
            if asked.abort_when is not None:
                to_abort[request_id] = asked
        for request_id, asked in list(to_abort.items()):
            if asked.output is not None or is_due(engine, request_id, asked):
                del to_abort[request_id]
                if asked.output is None:
                    engine.abort(request_id)
                    seen[f"aborted {asked.abort_when}"] += 1
        for delta in engine.step():
            by_id[delta.request_id].deltas.append(delta)
        seen["steps"] += 1
        seen["flights"] += engine._flight is not None
        if seen["steps"] % 50 == 0:
            engine.scheduler.check()
            unfinished = len(engine.scheduler.running) + len(engine.scheduler.waiting)
            assert unfinished == len(engine._answer_of)
            assert unfinished == len(engine._sampler._parameters) - len(engine._sampler._free)
    return seen


def is_due(engine: Engine, request_id: str, asked: Asked) -> bool:
    """Whether an answer of the request is where it is to be aborted."""
    for answer in engine._requests[request_id].answers:
        late_enough = asked.abort_when in ABORTS[:2] or answer.seq.num_output_tokens >= asked.abort_after
        if not answer.finished and late_enough and place(engine, answer.seq) == asked.abort_when:
            return True
    return False


def check_nothing_is_left(engine: Engine) -> None:
    assert not engine.has_work
    assert not engine._requests
    assert not engine._answer_of
    engine.scheduler.check()
    for group in engine.cache.groups:
        assert group.pool.num_free == group.pool.num_blocks
    sampler = engine._sampler
    assert sorted(sampler._free) == list(range(len(sampler._parameters)))
    assert not any(sampler._sequences)
    assert sorted(sampler._tables._free) == list(range(1, sampler._tables.num_rows))


def check_answer(llm: LLM, asked: Asked, answer: CompletionOutput) -> None:
    """What an answer's parameters and its end say about its tokens."""
    params, tokens, reason = asked.params, answer.token_ids, answer.finish_reason
    room = llm.engine.resolved.max_model_len - len(asked.prompt)
    longest = min(params.max_tokens or room, room)
    ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    assert reason in ("stop", "length", "abort"), answer.error
    assert (reason == "abort") <= (asked.abort_when is not None)
    assert len(tokens) <= longest
    assert not ends & set(tokens[:-1]), "it went on after its end"
    assert not ends & set(tokens[: params.min_tokens]), "an end before min_tokens"
    if reason == "length":
        assert len(tokens) == longest
        assert tokens[-1] not in ends
    elif reason == "stop" and isinstance(answer.stop_reason, str):
        assert answer.stop_reason in params.stop
        assert len(tokens) > params.min_tokens
    elif reason == "stop":
        assert tokens[-1] in ends
        assert answer.stop_reason == (tokens[-1] if tokens[-1] in (params.stop_token_ids or ()) else None)
    if params.allowed_token_ids is not None:
        assert set(tokens) <= set(params.allowed_token_ids)
    for word in llm.engine._bad_words(params):
        assert word not in [tokens[i : i + len(word)] for i in range(len(tokens))]
    assert (answer.logprobs is None) == (params.logprobs is None)
    if answer.logprobs is not None:
        assert [next(iter(entry)) for entry in answer.logprobs] == tokens
    if asked.streamed:
        deltas = [delta for delta in asked.deltas if delta.index == answer.index]
        assert [token for delta in deltas for token in delta.token_ids] == tokens
        if reason != "abort":
            assert "".join(delta.text for delta in deltas) == answer.text
            assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, which bad words and stop strings need."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("device", "model", "count", "crowd"),
    [
        ("cpu", "qwen3", 150, TIGHT),
        ("cpu", "qwen2_windows", 150, TIGHT),
        ("cpu", "deepseek_v32", 90, TIGHT),
        pytest.param("cpu", "deepseek_v4", 90, TIGHT, marks=pytest.mark.slow),
        pytest.param("cuda", "qwen3", 2500, TIGHT, marks=pytest.mark.gpu),
        pytest.param("cuda", "qwen2_windows", 1250, TIGHT, marks=pytest.mark.gpu),
        pytest.param("cuda", "qwen3_moe", 1250, TIGHT, marks=pytest.mark.gpu),
        pytest.param("cuda", "deepseek_v32", 400, TIGHT, marks=pytest.mark.gpu),
        pytest.param("cuda", "deepseek_v4", 400, TIGHT, marks=pytest.mark.gpu),
        pytest.param("cuda", "llama", 5000, WIDE, marks=pytest.mark.gpu),
    ],
    ids=lambda value: ("tight" if value is TIGHT else "wide") if isinstance(value, dict) else None,
)
def test_nothing_leaks_and_company_changes_no_answer(
    device: str, model: str, count: int, crowd: dict[str, int], tokenizer: Path
) -> None:
    on_gpu, stretch = device == "cuda", STRETCH.get(model, 1)
    if stretch > 1:  # prompts are longer, answers are not: little more than one sequence fills the cache
        crowd = crowd | {"max_num_batched_tokens": 48 * stretch, "num_kv_blocks": 60 * stretch}
    options = {
        "device": device,
        "dtype": "bfloat16" if on_gpu else "float32",
        "skip_tokenizer_init": False,
        "tokenizer": str(tokenizer),
        "max_model_len": MAX_LEN * stretch,
    }
    requests = random_requests(11, count, stretch)
    with tiny_llm(model, **options, **crowd) as llm:
        engine = llm.engine
        assert engine._looks_ahead == on_gpu
        assert (engine._runner._graphs is not None) == on_gpu
        engine._looks_ahead = True
        seen = drive(llm, requests[: count // 4], seed=1)
        check_nothing_is_left(engine)
        held = torch.cuda.memory_allocated() if on_gpu else 0
        seen += drive(llm, requests[count // 4 :], seed=2)
        check_nothing_is_left(engine)
        if on_gpu:  # the sampler's tables may have grown meanwhile, and a step's last tensors are still there
            assert torch.cuda.memory_allocated() - held < 4 << 20
        seen["preemptions"] += engine.scheduler.num_preemptions
        seen["cached tokens"] += engine.stats.num_cached_tokens
        for asked in requests:
            assert asked.output is not None
            assert asked.output.finished
            assert asked.output.prompt_token_ids == asked.prompt
            assert len(asked.output.outputs) == asked.params.n
            assert asked.output.num_cached_tokens < len(asked.prompt)
            if asked.params.prompt_logprobs is not None and asked.output.token_ids:
                assert asked.output.prompt_logprobs is not None
                assert all(asked.output.prompt_logprobs[1:])
            for answer in asked.output.outputs:
                check_answer(llm, asked, answer)
    print(dict(seen))
    for what in ("flights", "preemptions", "cached tokens", *(f"aborted {when}" for when in ABORTS)):
        assert seen[what] > 0 or (what == "preemptions" and crowd["max_num_seqs"] > 16), (
            f"{what}: it did not happen in {dict(seen)}"
        )
    compare_with_alone(model, requests, options | {"enforce_eager": True, "async_scheduling": False})


def compare_with_alone(model: str, requests: Sequence[Asked], options: dict[str, Any]) -> None:
    """Ask some again, one at a time, in an engine that looks up nothing and starts nothing ahead."""
    begun = [asked for asked in requests if asked.output is not None and asked.output.token_ids]
    kinds: dict[str, list[Asked]] = {"finished": [], "aborted": []}
    for asked in begun:
        kinds["aborted" if asked.output.finish_reason == "abort" else "finished"].append(asked)
    longest = options["max_model_len"]
    most = NUM_ALONE // 2 * MAX_LEN // longest
    sample = [asked for kind in kinds.values() for asked in kind[:: -(-len(kind) // most)]]
    alone = {"max_num_seqs": 1, "max_num_batched_tokens": longest, "enable_prefix_caching": False}
    alone |= {"num_kv_blocks": max(64, longest // 4 + 8)}
    with tiny_llm(model, **options, **alone) as llm:
        for asked in sample:
            again = llm.generate({"prompt_token_ids": asked.prompt}, asked.params, use_tqdm=False)[0]
            for got, want in zip(asked.output.outputs, again.outputs, strict=True):
                if got.finish_reason == "abort":
                    assert got.token_ids == want.token_ids[: len(got.token_ids)], asked
                else:
                    assert said(got) == said(want), asked


def said(answer: CompletionOutput) -> tuple[object, ...]:
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason
