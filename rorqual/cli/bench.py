"""`rorqual bench throughput`, `latency` and `prefill`: tokens per second, beside what the machine could reach."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from rorqual.cli.bench_report import floor_of, table, used_options, write_json
from rorqual.cli.bench_workload import Workload, check_fits, draw_workload, measure, parse_range, warm_up
from rorqual.cli.command import Command, open_llm
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel

if TYPE_CHECKING:
    from rorqual.llm import LLM


class ThroughputOptions(StrictModel):
    """What `rorqual bench throughput` itself takes."""

    num_seqs: Annotated[int, Field(ge=1)] = 256
    """Requests, all submitted at once."""
    input_len: str = "100:1024"
    """Prompt tokens per request: one number, or LOW:HIGH for a uniform draw, both ends included."""
    output_len: str = "100:1024"
    """Generated tokens per request, likewise; EOS is ignored."""
    temperature: Annotated[float, Field(ge=0)] = 0.6
    """Sampling temperature."""
    rounds: Annotated[int, Field(ge=1)] = 1
    """Times to run the workload; the round with the median time is shown. None finds another's prefixes cached."""
    warmup: bool = True
    """Run the start of a few requests first, so that one-time work is not measured."""
    profile: bool = False
    """Then run some steady steps of the workload under torch's profiler, and show where their time goes."""
    profile_out: str = "rorqual-trace.json.gz"
    """Where --profile writes its trace, for chrome://tracing or Perfetto."""
    json_out: str | None = None
    """Write the result there as JSON, with machine, versions, commit and options."""
    quiet: bool = False
    """No banner or progress on standard error."""


class LatencyOptions(ThroughputOptions):
    """What `rorqual bench latency` itself takes."""

    num_seqs: Annotated[int, Field(ge=1)] = 1
    """Requests, all submitted at once."""
    input_len: str = "1024"
    """Prompt tokens per request: one number, or LOW:HIGH for a uniform draw, both ends included."""
    output_len: str = "256"
    """Generated tokens per request, likewise; EOS is ignored."""
    rounds: Annotated[int, Field(ge=1)] = 3
    """Times to run the workload; the round with the median time is shown. None finds another's prefixes cached."""


class PrefillOptions(ThroughputOptions):
    """What `rorqual bench prefill` itself takes."""

    num_seqs: Annotated[int, Field(ge=1)] = 64
    """Requests, all submitted at once."""
    input_len: str = "2048"
    """Prompt tokens per request: one number, or LOW:HIGH for a uniform draw, both ends included."""
    output_len: str = "1"
    """Generated tokens per request, likewise; EOS is ignored."""
    rounds: Annotated[int, Field(ge=1)] = 3
    """Times to run the workload; the round with the median time is shown. None finds another's prefixes cached."""


def run(model: type[ThroughputOptions], name: str, settings: Settings) -> int:
    """Run a workload as often as asked and print what came out."""
    options = settings.build(model)
    config = settings.build(EngineConfig)
    input_len = parse_range(options.input_len, origin=settings.origin(model, "input_len"))
    output_len = parse_range(options.output_len, origin=settings.origin(model, "output_len"))
    seed = config.seed or 0
    started = time.perf_counter()
    with open_llm(settings, quiet=options.quiet) as llm:
        start_s = time.perf_counter() - started
        check_fits(llm, input_len, output_len)
        load = draw_workload(
            num_seqs=options.num_seqs,
            input_len=input_len,
            output_len=output_len,
            vocab_size=llm.engine.vocab_size,
            seed=seed,
        )
        result = {"start_s": start_s, **_median_round(llm, load, options, seed=seed)}
        result["floor"] = floor_of(llm, config, load)
        result["options"] = used_options(options.model_dump(), config, llm, seed)
        print(table(result))
        if options.json_out:
            write_json(options.json_out, name, result)
        if options.profile:
            from rorqual.cli.bench_profile import profile_steps

            timeline = profile_steps(llm, load, options.profile_out, temperature=options.temperature)
            print(f"\n{timeline.table()}\n\ntrace written to {options.profile_out}")
            if options.json_out:
                write_json(options.json_out, name, result | {"profile": timeline.as_json()})
    return 0


def _median_round(llm: LLM, load: Workload, options: ThroughputOptions, *, seed: int) -> dict[str, Any]:
    """What the round with the median time measured (of an even number, the faster of the middle two)."""
    if options.warmup:
        warm_up(llm, load, temperature=options.temperature)
    rounds = [
        measure(llm, load, temperature=options.temperature, seed=seed, salt=f"round {i}", quiet=options.quiet)
        for i in range(options.rounds)
    ]
    times = [each["total_s"] for each in rounds]
    return sorted(rounds, key=lambda each: each["total_s"])[(len(rounds) - 1) // 2] | {"rounds_s": times}


def _command(model: type[ThroughputOptions], word: str, summary: str, details: str) -> Command:
    return Command(
        words=("bench", word),
        summary=summary,
        details=f"{details} Tokens go in and out as ids; the workload depends only on --seed (default 0), the counts "
        "and the lengths. The floor is what reading weights, keys and values and multiplying takes at least on this "
        "device, by a copy and a product measured here.",
        models=(model, EngineConfig),
        run=functools.partial(run, model, word),
    )


THROUGHPUT = _command(
    ThroughputOptions,
    "throughput",
    "offline tokens per second, and where each step's time goes",
    "Run many random prompts at once, as nano-vLLM's benchmark does, and show where each step's time goes.",
)
LATENCY = _command(
    LatencyOptions,
    "latency",
    "milliseconds to the first token and per token, one request at a time",
    "Run one random prompt, and show the time to its first token and per token.",
)
PREFILL = _command(
    PrefillOptions,
    "prefill",
    "prompt tokens per second",
    "Run long random prompts that want one token each.",
)
