"""`/metrics` as Prometheus reads it: names, labels, counts after scripted requests, and two servers in one process."""

import asyncio
import logging

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families as parse_text

from rorqual.sampling_params import SamplingParams
from rorqual.server.engine_client import EngineDead, RequestRefused
from rorqual.server.messages import Completion, Delta, EngineInfo, EngineStats, Finished
from rorqual.server.metrics import ServerMetrics
from rorqual.server.stats_line import log_stats, stats_line

INFO = EngineInfo(
    model_path="m",
    vocab_size=9,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_logprobs=5,
    eos_token_ids=[1],
    block_size=16,
    num_blocks=12,
    dtype="float32",
    device="cpu",
    generation_config={},
    banner="",
)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class ScriptedEngine:
    """An engine whose requests give a list of items; a number moves the clock, an exception is raised."""

    def __init__(self, clock=None):
        self.state, self.failure, self.stats, self.clock = "ready", None, EngineStats(), clock or Clock()
        self.script, self.aborted, self.closed = [], 0, 0

    @property
    def info(self):
        if self.state != "ready":
            raise EngineDead("loading")
        return INFO

    def submit(self, prompt_token_ids, params, *, request_id, cache_salt="", streamed=False):
        return ScriptedHandle(self, request_id)


class ScriptedHandle:
    def __init__(self, engine, request_id):
        self.engine, self.request_id = engine, request_id

    async def __aiter__(self):
        try:
            for item in self.engine.script:
                if isinstance(item, float):
                    self.engine.clock.now += item
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
            await asyncio.Event().wait()
        finally:
            self.engine.closed += 1

    def abort(self):
        self.engine.aborted += 1


def delta(count, index=0):
    return Delta("r", index, "t" * count, [5] * count, None, None, None, None)


def finished(*lengths, reason="stop", **times):
    completions = [Completion(i, "", [5] * n, None, reason, None, None) for i, n in enumerate(lengths)]
    return Finished("r", completions, num_prompt_tokens=30, num_cached_tokens=16, **times)


def made(model_name="tiny", script=()):
    clock = Clock()
    engine = ScriptedEngine(clock)
    engine.script = list(script)
    return engine, ServerMetrics(engine, model_name=model_name, clock=clock)


def samples(metrics):
    """Every sample by name and labels without the model's name, which each has to have."""
    found = {}
    for family in parse_text(metrics.text().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            key = (sample.name, *sorted(labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


async def consume(metrics, engine, params=None, *, stop_after=None):
    handle = metrics.watch(engine).submit([1], params or SamplingParams(), request_id="r", streamed=True)
    got = []
    items = aiter(handle)
    async for item in items:
        got.append(item)
        if isinstance(item, Finished) or len(got) == stop_after:
            break
    return handle, items, got


NAMES = {
    "gauge": ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "gpu_cache_usage_perc"],
    "counter": [
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
    ],
    "histogram": [
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "time_per_output_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "iteration_tokens_total",
    ],
}


@pytest.mark.parametrize("state", ["loading", "ready", "dead"])
def test_names_and_kinds_are_there_before_any_request_and_whatever_the_engine_does(state):
    engine, metrics = made()
    engine.state = state
    kinds = {family.name: family.type for family in parse_text(metrics.text().decode())}
    wanted = {f"vllm:{name}": kind for kind, names in NAMES.items() for name in names}
    wanted |= {"vllm:cache_config_info": "gauge"} if state == "ready" else {}
    assert kinds == wanted
    assert all(value == 0 for key, value in samples(metrics).items() if key[0] != "vllm:cache_config_info")


def test_what_the_engine_counts_is_what_is_published():
    engine, metrics = made()
    engine.stats = EngineStats(
        num_running=3,
        num_waiting=2,
        kv_cache_usage=0.25,
        num_prompt_tokens=100,
        num_output_tokens=40,
        num_cached_tokens=60,
        num_queried_tokens=150,
        num_preemptions=1,
    )
    metrics.on_steps([1, 8, 9, 20000])
    got = samples(metrics)
    plain = {key[0].removeprefix("vllm:"): value for key, value in got.items() if len(key) == 1}
    assert (plain["num_requests_running"], plain["num_requests_waiting"]) == (3, 2)
    assert plain["kv_cache_usage_perc"] == plain["gpu_cache_usage_perc"] == 0.25
    assert (plain["prompt_tokens_total"], plain["generation_tokens_total"]) == (160, 40)
    assert (plain["prefix_cache_queries_total"], plain["prefix_cache_hits_total"]) == (150, 60)
    assert plain["num_preemptions_total"] == 1
    steps = {key[1][1]: value for key, value in got.items() if key[0] == "vllm:iteration_tokens_total_bucket"}
    assert (steps["1.0"], steps["8.0"], steps["16.0"], steps["16384.0"], steps["+Inf"]) == (1, 2, 3, 3, 4)
    assert (plain["iteration_tokens_total_sum"], plain["iteration_tokens_total_count"]) == (20018, 4)
    cache = next(dict(key[1:]) for key in got if key[0] == "vllm:cache_config_info")
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "12")


def totals(metrics):
    """Sum and count of each histogram that has any."""
    got = samples(metrics)
    names = [key[0].removesuffix("_count") for key in got if key[0].endswith("_count")]
    found = {name: (got[(f"{name}_sum",)], got[(f"{name}_count",)]) for name in names}
    return {name.removeprefix("vllm:"): total for name, total in found.items() if total[1]}


def reasons(metrics):
    return {key[1][1]: n for key, n in samples(metrics).items() if key[0] == "vllm:request_success_total" and n}


@pytest.mark.asyncio
async def test_a_streamed_request():
    script = [0.5, delta(1), 0.25, delta(1), 1.0, delta(4), 0.5, finished(6, queue_s=0.1, prefill_s=0.4, decode_s=1.25)]
    engine, metrics = made(script=script)
    _, _, got = await consume(metrics, engine, SamplingParams(max_tokens=7))
    assert got == [item for item in script if not isinstance(item, float)]
    assert totals(metrics) == {
        "time_to_first_token_seconds": (0.5, 1),
        "inter_token_latency_seconds": (pytest.approx(0.25 + 4 * 0.25), 5),
        "time_per_output_token_seconds": (pytest.approx(0.25 + 4 * 0.25), 5),
        "request_time_per_output_token_seconds": (0.25, 1),
        "e2e_request_latency_seconds": (2.25, 1),
        "request_queue_time_seconds": (0.1, 1),
        "request_prefill_time_seconds": (0.4, 1),
        "request_decode_time_seconds": (1.25, 1),
        "request_inference_time_seconds": (1.65, 1),
        "request_prompt_tokens": (30, 1),
        "request_generation_tokens": (6, 1),
        "request_max_num_generation_tokens": (6, 1),
        "request_params_n": (1, 1),
        "request_params_max_tokens": (7, 1),
    }
    assert reasons(metrics) == {"stop": 1}


@pytest.mark.asyncio
async def test_answers_of_one_streamed_request_have_gaps_of_their_own():
    script = [1.0, delta(1, 0), 0.5, delta(1, 1), 0.5, delta(1, 0), delta(1, 1), finished(2, 2, reason="length")]
    engine, metrics = made(script=script)
    await consume(metrics, engine, SamplingParams(n=2, temperature=1.0))
    got = totals(metrics)
    assert got["time_to_first_token_seconds"] == (1.0, 1)
    assert got["inter_token_latency_seconds"] == (1.5, 2)
    assert got["request_generation_tokens"] == (4, 2)
    assert reasons(metrics) == {"length": 2}


@pytest.mark.asyncio
async def test_a_request_that_is_not_streamed_is_known_by_the_engines_times():
    engine, metrics = made(script=[9.0, finished(5, 3, queue_s=1.0, prefill_s=2.0, decode_s=6.0)])
    await consume(metrics, engine, SamplingParams(n=2, temperature=1.0))
    got = totals(metrics)
    assert got["time_to_first_token_seconds"] == (3.0, 1)
    assert got["inter_token_latency_seconds"] == (pytest.approx(6 * 1.5), 6)
    assert got["request_max_num_generation_tokens"] == (5, 1)


@pytest.mark.asyncio
async def test_an_abort_is_counted_once_and_passed_on():
    engine, metrics = made(script=[delta(1), finished(1, reason="abort")])
    handle, items, _ = await consume(metrics, engine, stop_after=1)
    handle.abort()
    handle.abort()
    assert engine.aborted == 2
    assert isinstance(await anext(items), Finished)
    assert reasons(metrics) == {"abort": 1}


@pytest.mark.asyncio
async def test_an_abort_after_the_end_is_none():
    engine, metrics = made(script=[finished(1)])
    handle, _, _ = await consume(metrics, engine)
    handle.abort()
    assert reasons(metrics) == {"stop": 1}


@pytest.mark.asyncio
async def test_closing_and_cancelling_reach_the_engines_own_iterator():
    engine, metrics = made(script=[delta(1)])
    _, items, _ = await consume(metrics, engine, stop_after=1)
    await items.aclose()
    assert engine.closed == 1
    task = asyncio.create_task(consume(metrics, engine))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.closed == 2
    assert reasons(metrics) == {"abort": 2}


@pytest.mark.asyncio
@pytest.mark.parametrize(("error", "counted"), [(EngineDead("gone"), {"error": 1}), (RequestRefused("no"), {})])
async def test_errors_pass_and_a_refused_request_was_none(error, counted):
    engine, metrics = made(script=[error])
    with pytest.raises(type(error), match=str(error)):
        await consume(metrics, engine)
    assert reasons(metrics) == counted
    if not counted:
        assert totals(metrics) == {}


def test_two_servers_in_one_process_share_nothing():
    _, metrics = made("tiny")
    other_engine, other = made("other")
    metrics.on_steps([5])
    other_engine.stats = EngineStats(num_running=7)
    for each, name in ((metrics, "tiny"), (other, "other")):
        app = FastAPI()
        app.include_router(each.router())
        wants_more = {"accept": "application/openmetrics-text;version=1.0.0;escaping=underscores,text/plain"}
        answer = TestClient(app).get("/metrics", headers=wants_more)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        assert f'vllm:num_requests_running{{model_name="{name}"}} {7.0 if name == "other" else 0.0}' in lines
        assert f'vllm:iteration_tokens_total_count{{model_name="{name}"}} {1.0 if name == "tiny" else 0.0}' in lines


def test_without_a_name_it_is_the_models_path_once_that_is_known():
    engine = ScriptedEngine()
    metrics = ServerMetrics(engine)
    engine.state = "loading"
    assert metrics.text() == b""
    for state in ("ready", "dead"):
        engine.state = state
        assert {s.labels["model_name"] for f in parse_text(metrics.text().decode()) for s in f.samples} == {"m"}


def test_a_model_name_with_quotes_is_escaped():
    text = ServerMetrics(ScriptedEngine(), model_name='a"b\\c\nd').text()
    assert {s.labels["model_name"] for f in parse_text(text.decode()) for s in f.samples} == {'a"b\\c\nd'}


BUSY = EngineStats(
    num_running=2, kv_cache_usage=0.125, num_prompt_tokens=500, num_output_tokens=50, num_cached_tokens=30
)


def test_the_line_says_what_happened_between_two_looks():
    after = EngineStats(
        num_running=4,
        num_waiting=1,
        kv_cache_usage=0.5,
        num_prompt_tokens=1500,
        num_output_tokens=250,
        num_cached_tokens=130,
        num_queried_tokens=400,
        num_preemptions=2,
    )
    assert stats_line(BUSY, after, 10.0) == (
        "prompt 100.0 tok/s, generation 20.0 tok/s, running 4, waiting 1, KV cache 50.0%, prefix hits 25.0%, "
        "preemptions 2"
    )


def test_there_is_no_line_without_work_and_no_share_of_nothing():
    idle = EngineStats(num_prompt_tokens=500, num_output_tokens=50)
    assert stats_line(idle, idle, 10.0) is None
    assert stats_line(BUSY, BUSY, 10.0) == (
        "prompt 0.0 tok/s, generation 0.0 tok/s, running 2, waiting 0, KV cache 12.5%"
    )


@pytest.mark.asyncio
async def test_lines_come_while_there_is_work_and_end_with_the_engine(caplog):
    engine = ScriptedEngine()
    with caplog.at_level(logging.INFO, "rorqual.server"):
        task = asyncio.create_task(log_stats(engine, 0.02))
        await asyncio.sleep(0.1)
        assert not caplog.records
        engine.stats = BUSY
        await asyncio.sleep(0.1)
        assert len(caplog.records) >= 2
        assert "running 2" in caplog.records[0].getMessage()
        engine.state = "dead"
        await asyncio.wait_for(task, 1.0)
