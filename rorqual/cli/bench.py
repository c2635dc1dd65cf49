"""`rorqual bench throughput`: nano-vLLM's offline workload, and where each step's time goes."""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from rorqual.cli.command import Command, open_llm
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel
from rorqual.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rorqual.llm import LLM
    from rorqual.outputs import RequestOutput


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
    warmup: bool = True
    """Run two short requests first, so that one-time work is not measured."""
    json_out: str | None = None
    """Write the result there as JSON, with machine, versions, commit and options."""
    quiet: bool = False
    """No banner or progress on standard error."""


class Workload(NamedTuple):
    """Prompts as token ids, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]


def draw_workload(
    *, num_seqs: int, input_len: tuple[int, int], output_len: tuple[int, int], vocab_size: int, seed: int
) -> Workload:
    """The same for the same arguments, in nano-vLLM's order: length and ids of each prompt, then output lengths."""
    draw = random.Random(seed)
    prompts = [[draw.randint(0, vocab_size - 1) for _ in range(draw.randint(*input_len))] for _ in range(num_seqs)]
    return Workload(prompts, [draw.randint(*output_len) for _ in range(num_seqs)])


def parse_range(text: str, *, origin: str) -> tuple[int, int]:
    """Read "100:1024" or "128".

    Raises:
        ValueError: anything else, an end below 1, or ends in the wrong order.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high:
        raise ValueError(f"{origin} must be a number or LOW:HIGH with 1 <= LOW <= HIGH, got {text!r}")
    return low, high


def run(settings: Settings) -> int:
    """Run the workload once and print what came out."""
    options = settings.build(ThroughputOptions)
    config = settings.build(EngineConfig)
    input_len = parse_range(options.input_len, origin=settings.origin(ThroughputOptions, "input_len"))
    output_len = parse_range(options.output_len, origin=settings.origin(ThroughputOptions, "output_len"))
    seed = config.seed or 0
    with open_llm(settings, quiet=options.quiet) as llm:
        _check_fits(llm, input_len, output_len)
        load = draw_workload(
            num_seqs=options.num_seqs,
            input_len=input_len,
            output_len=output_len,
            vocab_size=llm.engine.vocab_size,
            seed=seed,
        )
        result = measure(llm, load, options, seed=seed)
        print(table(result))
        if options.json_out:
            _write(options.json_out, result | {"options": _used(options, config, llm, seed)})
    return 0


def measure(llm: LLM, load: Workload, options: ThroughputOptions, *, seed: int) -> dict[str, Any]:
    """Run the workload; counts, seconds and tokens per second, and the seconds of each stage of the steps."""
    if options.warmup:
        llm.generate([[1] * 16, [2] * 32], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    params = [
        SamplingParams(temperature=options.temperature, ignore_eos=True, max_tokens=length, seed=seed + number)
        for number, length in enumerate(load.output_lens)
    ]
    before = _Counts.of(llm)
    started = time.perf_counter()
    outputs = llm.generate(load.prompts, params, use_tqdm=not options.quiet)
    elapsed = time.perf_counter() - started
    _check_complete(outputs, load)
    after = _Counts.of(llm)
    seconds = {stage: total - before.stage_s.get(stage, 0.0) for stage, total in after.stage_s.items()}
    seconds["other"] = max(0.0, elapsed - sum(seconds.values()))
    steps = after.steps - before.steps
    prompt_tokens, output_tokens = sum(map(len, load.prompts)), sum(load.output_lens)
    return {
        "total_s": elapsed,
        "num_requests": len(load.prompts),
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "prompt_tokens_per_s": prompt_tokens / elapsed,
        "output_tokens_per_s": output_tokens / elapsed,
        "num_steps": steps,
        "mean_tokens_per_step": (after.tokens - before.tokens - len(load.prompts)) / max(1, steps),
        "stage_s": seconds,
    }


def table(result: Mapping[str, Any]) -> str:
    """The result for people: rates, then where the time of the steps went."""
    total, steps = result["total_s"], max(1, result["num_steps"])
    lines = [
        f"requests      {result['num_requests']}",
        f"total time    {total:.2f} s",
        f"prompt        {result['prompt_tokens']} tokens, {result['prompt_tokens_per_s']:.1f} tok/s",
        f"output        {result['output_tokens']} tokens, {result['output_tokens_per_s']:.1f} tok/s",
        f"steps         {result['num_steps']}, {result['mean_tokens_per_step']:.1f} tokens each on average",
        "",
        f"{'stage':<12} {'seconds':>9} {'ms/step':>9} {'share':>7}",
    ]
    for stage, seconds in result["stage_s"].items():
        lines.append(f"{stage:<12} {seconds:>9.3f} {1000 * seconds / steps:>9.3f} {100 * seconds / total:>6.1f}%")
    return "\n".join(lines)


class _Counts(NamedTuple):
    """The engine's running totals."""

    stage_s: dict[str, float]
    steps: int
    tokens: int
    """Prompt and output, with each request's first output token, which its prompt's last step gave for free."""

    @classmethod
    def of(cls, llm: LLM) -> _Counts:
        stats = llm.engine.stats
        return cls(dict(stats.seconds), stats.num_steps, stats.num_prompt_tokens + stats.num_output_tokens)


def _check_fits(llm: LLM, input_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    longest, limit = input_len[1] + output_len[1], llm.engine.resolved.max_model_len
    if longest > limit:
        raise ValueError(
            f"--input-len up to {input_len[1]} and --output-len up to {output_len[1]} make {longest} tokens, "
            f"but max_model_len is {limit}: lower the first two or raise the third"
        )


def _check_complete(outputs: list[RequestOutput], load: Workload) -> None:
    """Tokens per second of a run that lost some would be a wrong number."""
    for output, wanted in zip(outputs, load.output_lens, strict=True):
        if len(output.token_ids) != wanted:
            fault = output.outputs[0].error or f"finish reason {output.finish_reason}"
            raise RuntimeError(f"a request gave {len(output.token_ids)} of {wanted} tokens: {fault}")


def _used(options: ThroughputOptions, config: EngineConfig, llm: LLM, seed: int) -> dict[str, Any]:
    """Every option as it was in force, defaults and answers to "auto" included."""
    return {
        "command": sys.argv,
        "bench": options.model_dump(),
        "engine": config.model_dump() | {"seed": seed},
        "banner": llm.engine.banner(),
    }


def _write(path: str, result: dict[str, Any]) -> None:
    from rorqual.cli.collect_env import environment

    target = Path(path).expanduser()
    text = json.dumps({"benchmark": "throughput", **result, "environment": environment()}, indent=2)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + "\n")
    except OSError as error:
        raise ValueError(f"cannot write --json-out {path}: {error}") from None


THROUGHPUT = Command(
    words=("bench", "throughput"),
    summary="offline tokens per second, and where each step's time goes",
    details="Run many random prompts at once, as nano-vLLM's benchmark does, and show where each step's time goes. "
    "The workload depends only on --seed (default 0), the counts and the lengths.",
    models=(ThroughputOptions, EngineConfig),
    run=run,
)
