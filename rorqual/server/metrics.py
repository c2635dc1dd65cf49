"""`/metrics`: vLLM's names, so that its dashboards and routers read them as they are. No torch.

What the engine counts is read when somebody asks. What a request does is watched on its way: `ServerMetrics.watch`
wraps the engine, and no endpoint has to report anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from rorqual.sampling_params import SamplingParams
from rorqual.server.engine_client import EngineClient, EngineDead, EngineState, RequestHandle, RequestRefused
from rorqual.server.histograms import (
    ANSWERS,
    BETWEEN_TOKENS_S,
    FIRST_TOKEN_S,
    REQUEST_S,
    TOKENS,
    TOKENS_PER_STEP,
    Histogram,
)
from rorqual.server.messages import Delta, EngineInfo, EngineStats, Finished

REASONS = ("stop", "length", "abort", "error")
LABEL = "model_name"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The one format in which prometheus_client leaves the colon in names, whatever the client says that it accepts."""


class ServerMetrics:
    """Everything one server publishes; two in one process know nothing of each other.

    Args:
        engine: whose counts are published.
        model_name: the label of everything. None: the model's path, and nothing is published before it is known.
        clock: seconds.
    """

    def __init__(
        self, engine: EngineClient, *, model_name: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._engine, self._given_name, self.clock = engine, model_name, clock
        self.first_token = Histogram("vllm:time_to_first_token_seconds", "Time to first token.", FIRST_TOKEN_S)
        self.between_tokens = Histogram(
            "vllm:inter_token_latency_seconds", "Time from each token of an answer to the next.", BETWEEN_TOKENS_S
        )
        self.per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Per request, the mean time from token to token.",
            BETWEEN_TOKENS_S,
        )
        self.e2e = Histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the end.", REQUEST_S)
        self.queue = Histogram("vllm:request_queue_time_seconds", "Time before the first step.", REQUEST_S)
        self.inference = Histogram("vllm:request_inference_time_seconds", "Time from there to the end.", REQUEST_S)
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds", "Time from the first step to the first token.", REQUEST_S
        )
        self.decode = Histogram("vllm:request_decode_time_seconds", "Time from there to the end.", REQUEST_S)
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self.generation_tokens = Histogram("vllm:request_generation_tokens", "Generated tokens per answer.", TOKENS)
        self.longest_answer = Histogram(
            "vllm:request_max_num_generation_tokens", "Generated tokens of a request's longest answer.", TOKENS
        )
        self.params_n = Histogram("vllm:request_params_n", "Answers asked for per request.", ANSWERS)
        self.params_max_tokens = Histogram("vllm:request_params_max_tokens", "max_tokens where it is given.", TOKENS)
        self.per_step = Histogram("vllm:iteration_tokens_total", "Tokens computed per step.", TOKENS_PER_STEP)
        self.answers = dict.fromkeys(REASONS, 0)
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def watch(self, engine: EngineClient) -> EngineClient:
        """The same engine, whose requests are counted here."""
        return _WatchedEngine(engine, self)

    def on_request(self, params: SamplingParams) -> RequestMetrics:
        """A request was sent to the engine; what becomes of it is told to what is returned."""
        return RequestMetrics(self, params)

    def on_steps(self, tokens_per_step: Iterable[int]) -> None:
        """`Stats.tokens_per_step` has come."""
        for count in tokens_per_step:
            self.per_step.observe(count)

    def text(self) -> bytes:
        """What is published, as Prometheus reads it."""
        return generate_latest(self.registry)

    def router(self) -> APIRouter:
        """GET /metrics."""
        router = APIRouter()

        @router.get(
            "/metrics",
            tags=["operations"],
            response_class=Response,
            responses={200: {"description": "Prometheus metrics.", "content": {"text/plain": {}}}},
        )
        async def metrics() -> Response:
            """Counters, gauges and histograms for Prometheus."""
            return Response(self.text(), headers={"content-type": CONTENT_TYPE})

        return router

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not look at the engine before somebody asks."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """What the registry publishes."""
        info = self._engine.info if self._engine.state == "ready" else None
        if info is not None and self._given_name is None:
            self._given_name = info.model_path
        if (name := self._given_name) is None:
            return
        yield from _engine_gauges(self._engine.stats, name)
        yield from _engine_counters(self._engine.stats, name)
        answers = CounterMetricFamily("vllm:request_success", "Finished answers.", labels=[LABEL, "finished_reason"])
        for reason, count in self.answers.items():
            answers.add_metric([name, reason], count)
        yield answers
        for histogram in vars(self).values():
            if isinstance(histogram, Histogram):
                yield histogram.family(LABEL, name)
        # Its name in older dashboards.
        yield self.between_tokens.family(LABEL, name, "vllm:time_per_output_token_seconds")
        if info is not None:
            yield _cache_config(info, name)


def _engine_gauges(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    usage = "Part of the KV cache's blocks that is in use, 0 to 1."
    for name, documentation, value in (
        ("num_requests_running", "Requests in the running batch.", stats.num_running),
        ("num_requests_waiting", "Requests in the queue.", stats.num_waiting),
        ("kv_cache_usage_perc", usage, stats.kv_cache_usage),
        ("gpu_cache_usage_perc", f"{usage} Its name in older dashboards.", stats.kv_cache_usage),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", documentation, labels=[LABEL])
        gauge.add_metric([model_name], value)
        yield gauge


def _engine_counters(stats: EngineStats, model_name: str) -> Iterator[Metric]:
    prompt = stats.num_prompt_tokens + stats.num_cached_tokens
    for name, documentation, value in (
        ("prompt_tokens", "Prompt tokens, computed or found in the prefix cache.", prompt),
        ("generation_tokens", "Generated tokens.", stats.num_output_tokens),
        ("prefix_cache_queries", "Prompt tokens looked for in the prefix cache.", stats.num_queried_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.num_cached_tokens),
        ("num_preemptions", "Preemptions.", stats.num_preemptions),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", documentation, labels=[LABEL])
        counter.add_metric([model_name], value)
        yield counter


def _cache_config(info: EngineInfo, model_name: str) -> Metric:
    labels = {
        LABEL: model_name,
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "cache_dtype": info.dtype,
    }
    gauge = GaugeMetricFamily("vllm:cache_config_info", "How the KV cache is laid out.", labels=list(labels))
    gauge.add_metric(list(labels.values()), 1)
    return gauge


class RequestMetrics:
    """One request, from its arrival on."""

    __slots__ = ("_arrival", "_ended", "_last", "_metrics", "_params")

    def __init__(self, metrics: ServerMetrics, params: SamplingParams) -> None:
        self._metrics, self._params, self._ended = metrics, params, False
        self._arrival = metrics.clock()
        self._last: dict[int, float] = {}
        """When the newest token of each answer came."""

    def on_delta(self, delta: Delta) -> None:
        """Tokens of a streamed answer have come."""
        if count := len(delta.token_ids):
            now, last = self._metrics.clock(), self._last.get(delta.index)
            if last is not None:
                self._metrics.between_tokens.observe((now - last) / count, count)
            else:
                if not self._last:
                    self._metrics.first_token.observe(now - self._arrival)
                if count > 1:
                    self._metrics.between_tokens.observe(0.0, count - 1)
            self._last[delta.index] = now

    def on_finished(self, finished: Finished) -> None:
        """It has ended."""
        if self._ended:
            return
        self._ended = True
        metrics, now = self._metrics, self._metrics.clock()
        lengths = [len(completion.token_ids) for completion in finished.completions]
        longest = max(lengths, default=0)
        for completion, length in zip(finished.completions, lengths, strict=True):
            metrics.answers[completion.finish_reason] += 1
            metrics.generation_tokens.observe(length)
        metrics.prompt_tokens.observe(finished.num_prompt_tokens)
        metrics.longest_answer.observe(longest)
        metrics.params_n.observe(self._params.n)
        if self._params.max_tokens is not None:
            metrics.params_max_tokens.observe(self._params.max_tokens)
        metrics.e2e.observe(now - self._arrival)
        metrics.queue.observe(finished.queue_s)
        metrics.prefill.observe(finished.prefill_s)
        metrics.decode.observe(finished.decode_s)
        metrics.inference.observe(finished.prefill_s + finished.decode_s)
        if longest > 1:
            metrics.per_output_token.observe(finished.decode_s / (longest - 1))
        if longest and not self._last:  # it was not streamed: all that is known are the engine's own times
            metrics.first_token.observe(finished.queue_s + finished.prefill_s)
            if gaps := sum(length - 1 for length in lengths if length > 1):
                metrics.between_tokens.observe(finished.decode_s / (longest - 1), gaps)

    def on_abort(self) -> None:
        """Nobody waits for it any more."""
        self._end_with("abort")

    def on_error(self) -> None:
        """The engine is gone."""
        self._end_with("error")

    def on_refused(self) -> None:
        """It was never a request."""
        self._ended = True

    def _end_with(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._metrics.answers[reason] += self._params.n
            self._metrics.e2e.observe(self._metrics.clock() - self._arrival)


class _WatchedEngine:
    """An `EngineClient` that tells what becomes of its requests."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine, self._metrics = engine, metrics

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def failure(self) -> str | None:
        return self._engine.failure

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        streamed: bool = False,
    ) -> RequestHandle:
        handle = self._engine.submit(
            prompt_token_ids, params, request_id=request_id, cache_salt=cache_salt, streamed=streamed
        )
        return _WatchedHandle(handle, self._metrics.on_request(params))

    async def is_responsive(self, timeout_s: float) -> bool:
        return await self._engine.is_responsive(timeout_s)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def close(self) -> None:
        await self._engine.close()


class _WatchedHandle:
    """A `RequestHandle` that tells its `RequestMetrics` what passes."""

    def __init__(self, handle: RequestHandle, request: RequestMetrics) -> None:
        self._handle, self._request = handle, request
        self.request_id = handle.request_id

    def __aiter__(self) -> AsyncIterator[Delta | Finished]:
        return _WatchedItems(aiter(self._handle), self._request)

    def abort(self) -> None:
        self._request.on_abort()
        self._handle.abort()


class _WatchedItems:
    """What a handle gives. No generator: closing it, or letting it go, must mean the same to the one inside."""

    def __init__(self, items: AsyncIterator[Delta | Finished], request: RequestMetrics) -> None:
        self._items, self._request = items, request

    def __aiter__(self) -> AsyncIterator[Delta | Finished]:
        return self

    async def __anext__(self) -> Delta | Finished:
        try:
            item = await anext(self._items)
        except asyncio.CancelledError:
            self._request.on_abort()
            raise
        except EngineDead:
            self._request.on_error()
            raise
        except RequestRefused:
            self._request.on_refused()
            raise
        if isinstance(item, Delta):
            self._request.on_delta(item)
        else:
            self._request.on_finished(item)
        return item

    async def aclose(self) -> None:
        """Nothing more is wanted."""
        self._request.on_abort()
        if (close := getattr(self._items, "aclose", None)) is not None:
            await close()
