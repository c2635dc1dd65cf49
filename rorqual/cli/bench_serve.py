"""`rorqual bench serve`: load for any OpenAI-compatible server, and how it bears it. No torch."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rorqual.cli.bench_workload import parse_range
from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import StrictModel

if TYPE_CHECKING:
    from rorqual.cli.load.requests import Record
    from rorqual.server.http_client import HttpClient

Positive = Annotated[float, Field(gt=0)]


class ServeOptions(StrictModel):
    """What `rorqual bench serve` takes."""

    base_url: str = "http://127.0.0.1:8000"
    """The server, with or without /v1."""
    model: str | None = None
    """The model's name there. Default: the first that it lists."""
    api_key: str | None = None
    """Sent as bearer token. Default: the variable OPENAI_API_KEY."""
    endpoint: Literal["chat", "completions"] = "chat"
    """Which of the two to ask."""
    num_prompts: Annotated[int, Field(ge=1)] = 100
    """Requests in all; for each point of a sweep no more than ten per stream, and no fewer than one."""
    max_concurrency: Annotated[int | None, Field(ge=1)] = None
    """Requests at a time: whoever has its answer sends the next. Default: 8, or no limit with --request-rate."""
    request_rate: Positive | None = None
    """Requests per second, sent when they are due however many still run."""
    burstiness: Positive = 1.0
    """Shape of the gamma distribution of the gaps: 1 for Poisson arrivals, less for bursts, more for even ones."""
    sweep_concurrency: tuple[int, ...] = ()
    """Numbers of concurrent requests to measure one after another, as in 1,2,4,8, for a Pareto plot."""
    input_len: str = "128:512"
    """Words or ids per prompt: one number, or LOW:HIGH for a uniform draw, both ends included."""
    output_len: str = "64:256"
    """Tokens to ask for, likewise."""
    prefix_len: Annotated[int, Field(ge=0)] = 0
    """Words or ids in front of those that all prompts share."""
    prompt_kind: Literal["words", "ids"] = "words"
    """Random words, or random token ids (for --endpoint completions), of which the server takes exactly as many."""
    vocab_size: Annotated[int, Field(ge=1)] = 1000
    """Ids are drawn below this."""
    ignore_eos: bool = True
    """Ask for the full length of drawn requests. Off for servers that do not know this parameter."""
    dataset: str | None = None
    """JSONL file with a "prompt" or "messages" per line, and "max_tokens" where wanted, instead of drawn prompts."""
    temperature: Annotated[float | None, Field(ge=0)] = None
    """Sampling temperature. Default: the server's."""
    extra_body: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """JSON object merged into every request."""
    num_warmups: Annotated[int, Field(ge=0)] = 2
    """Requests before the measurement; they show also whether the server answers at all."""
    goodput: tuple[str, ...] = ()
    """Limits in milliseconds, as in ttft:500 tpot:50 e2e:9000; answers within all of them are counted apart. Can be
    repeated."""
    timeout: Positive = 600.0
    """Seconds after which a request counts as failed."""
    seed: int = 0
    """What lengths, prompts and arrivals are drawn from."""
    json_out: str | None = None
    """Write the result there as JSON, with every request, machine, versions, commit and options."""
    plot_out: str = "rorqual-pareto.png"
    """Where a sweep's plot goes."""
    quiet: bool = False
    """No progress on standard error."""


def run(settings: Settings) -> int:
    """Send the load and print what came out: 0 if any request was answered, else 1."""
    from rorqual.cli.load.report import parse_goodput

    options = settings.build(ServeOptions)
    if options.goodput:
        limits = parse_goodput([*options.goodput, *settings.positionals])
    elif settings.positionals:
        raise ValueError(f"unexpected argument {settings.positionals[0]!r}: see rorqual bench serve --help")
    else:
        limits = {}
    if options.sweep_concurrency and (options.request_rate or options.max_concurrency):
        raise ValueError(
            "--sweep-concurrency sets how many requests run: leave out --request-rate and --max-concurrency"
        )
    if any(streams < 1 for streams in options.sweep_concurrency):
        raise ValueError(f"--sweep-concurrency must be numbers from 1 on, got {list(options.sweep_concurrency)}")
    bodies = _bodies(options, settings)
    return asyncio.run(_Bench(options, limits, bodies).run())


def _bodies(options: ServeOptions, settings: Settings) -> list[dict[str, Any]]:
    from rorqual.cli.load.workload import from_file, synthetic

    # No point of a sweep repeats another's prompts: it would find them in the prefix cache.
    count = options.num_warmups + sum(_point_sizes(options) or [options.num_prompts])
    if options.dataset is not None:
        return from_file(options.endpoint, options.dataset, count)
    return synthetic(
        options.endpoint,
        count,
        input_len=parse_range(options.input_len, origin=settings.origin(ServeOptions, "input_len")),
        output_len=parse_range(options.output_len, origin=settings.origin(ServeOptions, "output_len")),
        prefix_len=options.prefix_len,
        kind=options.prompt_kind,
        vocab_size=options.vocab_size,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )


def _point_sizes(options: ServeOptions) -> list[int]:
    """Requests of each point of a sweep."""
    return [max(streams, min(options.num_prompts, 10 * streams)) for streams in options.sweep_concurrency]


class _Bench:
    """One run of the command."""

    def __init__(self, options: ServeOptions, limits: dict[str, float], bodies: list[dict[str, Any]]) -> None:
        from rorqual.server.http_client import HttpClient

        key = options.api_key or os.environ.get("OPENAI_API_KEY")
        base_url = options.base_url.rstrip("/").removesuffix("/v1")
        self._client: HttpClient = HttpClient(base_url, headers={"Authorization": f"Bearer {key}"} if key else {})
        self._options, self._limits, self._drawn = options, limits, bodies

    async def run(self) -> int:
        """See `run` above."""
        try:
            model = self._options.model or await self._first_model()
            bodies = [self._encoded(body, model) for body in self._drawn]
            warmups, rest = bodies[: self._options.num_warmups], bodies[self._options.num_warmups :]
            if warmups:
                await self._warm_up(warmups)
            if self._options.sweep_concurrency:
                return await self._sweep(rest, model)
            return await self._single(rest, model)
        finally:
            self._client.close()

    async def _first_model(self) -> str:
        from rorqual.cli.load.requests import error_text
        from rorqual.server.http_client import HttpError

        try:
            async with asyncio.timeout(self._options.timeout), self._client.request("GET", "/v1/models") as response:
                body = await response.body()
        except (HttpError, TimeoutError) as error:
            raise ValueError(f"no answer from {self._options.base_url}: {error}") from None
        if response.status != 200:
            raise ValueError(f"{self._options.base_url}/v1/models: HTTP {response.status}: {error_text(body)}")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ValueError(f"{self._options.base_url}/v1/models lists no model: name one by --model") from None

    def _encoded(self, body: dict[str, Any], model: str) -> bytes:
        options = self._options
        sampling = {} if options.temperature is None else {"temperature": options.temperature}
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps({"model": model, **body, **sampling, **streaming, **options.extra_body}).encode()

    async def _warm_up(self, bodies: Sequence[bytes]) -> None:
        from rorqual.cli.load.requests import send

        options = self._options
        for body in bodies:
            record = await send(self._client, options.endpoint, body, due_s=0.0, timeout_s=options.timeout)
            if record.error:
                raise ValueError(f"the first request to {options.base_url} failed: {record.error}: {record.error_text}")

    async def _measure(self, bodies: Sequence[bytes], streams: int | None, what: str) -> list[Record]:
        from tqdm import tqdm

        from rorqual.cli.load.generator import closed_loop, open_loop
        from rorqual.cli.load.workload import arrivals

        options = self._options
        with tqdm(total=len(bodies), desc=what, unit="req", disable=options.quiet, file=sys.stderr) as bar:
            faults, tokens = 0, 0

            def on_done(record: Record) -> None:
                nonlocal faults, tokens
                faults, tokens = faults + (record.error is not None), tokens + record.output_tokens
                bar.set_postfix({"tokens": tokens, "errors": faults}, refresh=False)
                bar.update()

            if options.request_rate is None:
                return await closed_loop(
                    self._client,
                    options.endpoint,
                    bodies,
                    streams=streams or 8,
                    timeout_s=options.timeout,
                    on_done=on_done,
                )
            times = islice(arrivals(options.request_rate, options.burstiness, options.seed), len(bodies))
            return await open_loop(
                self._client,
                options.endpoint,
                bodies,
                times,
                most=streams,
                timeout_s=options.timeout,
                on_done=on_done,
            )

    async def _single(self, bodies: Sequence[bytes], model: str) -> int:
        from rorqual.cli.load.report import requests_as_json, summary, table

        records = await self._measure(bodies, self._options.max_concurrency, model)
        result = summary(records, self._limits)
        print(table(result))
        self._write_json(model, result | {"requests": requests_as_json(records)})
        return 0 if result["num_completed"] else 1

    async def _sweep(self, bodies: Sequence[bytes], model: str) -> int:
        from rorqual.cli.load.report import best, plot, requests_as_json, summary, sweep_table

        options, points, left = self._options, [], iter(bodies)
        for streams, count in zip(options.sweep_concurrency, _point_sizes(options), strict=True):
            records = await self._measure(list(islice(left, count)), streams, f"{streams} streams")
            point = {"concurrency": streams, **summary(records, self._limits), "requests": requests_as_json(records)}
            points.append(point)
        print(sweep_table(points))
        front = [point["concurrency"] for point in best(points)]
        self._write_json(model, {"points": points, "pareto_concurrency": front})
        try:
            plot(points, options.plot_out, f"{model} at {urlsplit(options.base_url).netloc.rpartition('@')[2]}")
            print(f"\nplot written to {options.plot_out}")
        except ImportError:
            print("\nno plot: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
        return 0 if any(point["num_completed"] for point in points) else 1

    def _write_json(self, model: str, result: dict[str, Any]) -> None:
        from rorqual.cli.bench_report import write_json

        if self._options.json_out:
            options = self._options.model_dump(exclude={"api_key"}) | {"model": model}
            write_json(self._options.json_out, "serve", result | {"options": options})


COMMAND = Command(
    words=("bench", "serve"),
    summary="latencies and throughput of a server under load",
    details="Send requests to any OpenAI-compatible server, as many at a time (--max-concurrency), at such a rate "
    "(--request-rate) or at several concurrencies one after another (--sweep-concurrency), and show what users would "
    "see: the time to the first token (TTFT), between the pieces of an answer (ITL), per token after the first (TPOT) "
    "and of whole answers (E2E). A piece is timed when its bytes arrive; an empty opening counts for nothing.",
    models=(ServeOptions,),
    run=run,
    usage="[OPTIONS]",
    max_positionals=None,
)
