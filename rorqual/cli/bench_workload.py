"""The requests of a benchmark, and one run of them: counts, rates and where each step's time goes. No torch."""

from __future__ import annotations

import random
import re
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from rorqual.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rorqual.llm import LLM
    from rorqual.outputs import RequestOutput

_WARMUP_REQUESTS = 8
_WARMUP_TOKENS = 4


class Workload(NamedTuple):
    """Prompts as token ids, and how many tokens to generate for each."""

    prompts: list[list[int]]
    output_lens: list[int]

    def params(self, *, temperature: float, seed: int) -> list[SamplingParams]:
        """How each request is sampled: seeded, to its full length, without text."""
        return [
            SamplingParams(
                temperature=temperature, ignore_eos=True, max_tokens=length, seed=seed + number, detokenize=False
            )
            for number, length in enumerate(self.output_lens)
        ]


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


def check_fits(llm: LLM, input_len: tuple[int, int], output_len: tuple[int, int]) -> None:
    """Raise ValueError if a request could outgrow the context."""
    longest, limit = input_len[1] + output_len[1], llm.engine.resolved.max_model_len
    if longest > limit:
        raise ValueError(
            f"--input-len up to {input_len[1]} and --output-len up to {output_len[1]} make {longest} tokens, "
            f"but max_model_len is {limit}: lower the first two or raise the third"
        )


def warm_up(llm: LLM, load: Workload, *, temperature: float) -> None:
    """A few tokens for the first few requests, so that one-time work is not measured."""
    head = Workload(load.prompts[:_WARMUP_REQUESTS], [min(n, _WARMUP_TOKENS) for n in load.output_lens])
    head = Workload(head.prompts, head.output_lens[: len(head.prompts)])
    llm.generate(salted(head, "warm-up"), head.params(temperature=temperature, seed=0), use_tqdm=False)


def salted(load: Workload, salt: str) -> list[dict[str, Any]]:
    """The prompts, none of which finds what another salt's have left in the prefix cache."""
    return [{"prompt_token_ids": ids, "cache_salt": salt} for ids in load.prompts]


def measure(llm: LLM, load: Workload, *, temperature: float, seed: int, salt: str, quiet: bool) -> dict[str, Any]:
    """Run the workload: counts, seconds, rates, latencies, and the seconds of each stage of the steps.

    Raises:
        RuntimeError: a request ended early, so that tokens per second would be a wrong number.
    """
    params = load.params(temperature=temperature, seed=seed)
    before = _Counts.of(llm)
    started = time.perf_counter()
    outputs = llm.generate(salted(load, salt), params, use_tqdm=not quiet)
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
        "cached_tokens": after.cached - before.cached,
        "prompt_tokens_per_s": prompt_tokens / elapsed,
        "output_tokens_per_s": output_tokens / elapsed,
        "num_steps": steps,
        "mean_tokens_per_step": (after.tokens - before.tokens - len(load.prompts)) / max(1, steps),
        "stage_s": seconds,
        **_latencies(outputs),
    }


def _latencies(outputs: list[RequestOutput]) -> dict[str, float | None]:
    """Medians over the requests, in milliseconds: to the first token, and from each token to the next."""
    first, between = [], []
    for output in outputs:
        times = output.times
        assert times.first_token_s is not None
        assert times.finished_s is not None
        first.append(times.first_token_s - times.arrival_s)
        if (count := len(output.token_ids)) > 1:
            between.append((times.finished_s - times.first_token_s) / (count - 1))
    return {
        "first_token_ms": statistics.median(first) * 1e3,
        "between_tokens_ms": statistics.median(between) * 1e3 if between else None,
    }


class _Counts(NamedTuple):
    """The engine's running totals."""

    stage_s: dict[str, float]
    steps: int
    tokens: int
    """Prompt and output, with each request's first output token, which its prompt's last step gave for free."""
    cached: int

    @classmethod
    def of(cls, llm: LLM) -> _Counts:
        stats = llm.engine.stats
        tokens = stats.num_prompt_tokens + stats.num_output_tokens
        return cls(dict(stats.seconds), stats.num_steps, tokens, stats.num_cached_tokens)


def _check_complete(outputs: list[RequestOutput], load: Workload) -> None:
    for output, wanted in zip(outputs, load.output_lens, strict=True):
        if len(output.token_ids) != wanted:
            fault = output.outputs[0].error or f"finish reason {output.finish_reason}"
            raise RuntimeError(f"a request gave {len(output.token_ids)} of {wanted} tokens: {fault}")
