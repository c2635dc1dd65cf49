"""`rorqual generate`: complete prompts, streaming one to the terminal or running several as a batch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rorqual.cli.command import Command, open_llm, sampling_params
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig, StrictModel
from rorqual.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rorqual.llm import LLM
    from rorqual.outputs import FinishReason, RequestOutput


class GenerateOptions(StrictModel):
    """What `rorqual generate` itself takes."""

    prompt_file: tuple[str, ...] = ()
    """A file that is one prompt, without its last line break; "-" is standard input. Can be repeated."""
    chat: bool = False
    """Put each prompt into the model's chat template, as a user's message. Default: complete the text as it stands."""
    json_: bool = False
    """Print one JSON object per prompt, in order, and nothing else on standard output."""
    quiet: bool = False
    """No banner, progress or summary on standard error."""


class Timing(NamedTuple):
    """One answer's counts and seconds; None where it has too few tokens to say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    ttft_s: float | None
    """From the request's arrival to its first token."""
    decode_tokens_per_s: float | None
    """Tokens after the first one, over the time that they took."""


def run(settings: Settings) -> int:
    """Complete the prompts; the exit code is 1 if the engine failed on one of them."""
    options = settings.build(GenerateOptions)
    settings.build(SamplingParams)  # before any model is opened
    prompts = [*settings.positionals, *map(_read_prompt, options.prompt_file)]
    if not prompts:
        raise ValueError("no prompt: give one as an argument, or --prompt-file FILE (- reads standard input)")
    for prompt in prompts:
        _check_utf8(prompt)
    with open_llm(settings, quiet=options.quiet) as llm:
        params = sampling_params(settings, llm)
        if len(prompts) == 1 and not options.json_:
            return _stream_one(llm, prompts[0], params, options)
        return _run_batch(llm, prompts, params, options)


def _read_prompt(name: str) -> str:
    try:
        text = sys.stdin.read() if name == "-" else Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the prompt file {name}: {error}") from None
    return text.removesuffix("\n")


def _check_utf8(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a prompt must be valid UTF-8, got {prompt!r}") from None


def _prompt_ids(llm: LLM, prompt: str, options: GenerateOptions) -> list[int]:
    tokenizer = llm.get_tokenizer()
    return tokenizer.encode_chat([{"role": "user", "content": prompt}]) if options.chat else tokenizer.encode(prompt)


def _stream_one(llm: LLM, prompt: str, params: SamplingParams, options: GenerateOptions) -> int:
    """Print the text as it comes, then one summary line on stderr."""
    ids = _prompt_ids(llm, prompt, options)
    started = time.perf_counter()
    first = last = None
    count, text, reason, fault = 0, "", None, None
    for delta in llm.stream(ids, params):
        if delta.token_ids:
            last = time.perf_counter()
            first = first or last
        count += len(delta.token_ids)
        text = delta.text or text
        reason, fault = delta.finish_reason or reason, delta.error or fault
        sys.stdout.write(delta.text)
        sys.stdout.flush()
    if not text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    if not options.quiet:
        timing = _timing(len(ids), count, None, arrival=started, first=first, last=last)
        print(_summary(timing, reason), file=sys.stderr)
    return _report_fault(fault)


def _run_batch(llm: LLM, prompts: list[str], params: SamplingParams, options: GenerateOptions) -> int:
    """Run all prompts together and print the answers in the prompts' order."""
    started = time.perf_counter()
    if options.chat:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(conversations, params, use_tqdm=not options.quiet)
    else:
        outputs = llm.generate(prompts, params, use_tqdm=not options.quiet)
    elapsed = time.perf_counter() - started
    code = 0
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
        if options.json_:
            print(json.dumps(_as_json(output), allow_nan=False), flush=True)
        else:
            print(f"{_header(number, len(prompts), prompt)}\n{output.text}", flush=True)
        code = max(code, _report_fault(output.outputs[0].error))
    if not options.quiet:
        prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        new = sum(len(output.token_ids) for output in outputs)
        print(
            f"[{len(outputs)} prompts: {prompt_tokens} prompt + {new} new tokens in {elapsed:.2f} s, "
            f"{new / elapsed:.1f} new tok/s together]",
            file=sys.stderr,
        )
    return code


def _header(number: int, of: int, prompt: str) -> str:
    line = " ".join(prompt.split())
    return f"=== {number}/{of}: {line if len(line) <= 60 else line[:59] + '…'}"


def _report_fault(fault: str | None) -> int:
    if fault:
        print(f"rorqual: error: {fault}", file=sys.stderr)
    return 1 if fault else 0


def _timing(
    prompt_tokens: int, new: int, cached: int | None, *, arrival: float, first: float | None, last: float | None
) -> Timing:
    decode_s = (last or 0.0) - (first or 0.0)
    return Timing(
        prompt_tokens=prompt_tokens,
        completion_tokens=new,
        cached_tokens=cached,
        ttft_s=None if first is None else first - arrival,
        decode_tokens_per_s=(new - 1) / decode_s if new > 1 and decode_s > 0 else None,
    )


def _as_json(output: RequestOutput) -> dict[str, Any]:
    times = output.times
    timing = _timing(
        len(output.prompt_token_ids),
        len(output.token_ids),
        output.num_cached_tokens,
        arrival=times.arrival_s,
        first=times.first_token_s,
        last=times.finished_s,
    )
    answer = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
    return answer | timing._asdict() | {"error": output.outputs[0].error}


def _summary(timing: Timing, reason: FinishReason | None) -> str:
    parts = [f"{timing.prompt_tokens} prompt + {timing.completion_tokens} new tokens"]
    if timing.ttft_s is not None:
        parts.append(f"first after {timing.ttft_s:.3f} s")
    if timing.decode_tokens_per_s is not None:
        parts.append(f"then {timing.decode_tokens_per_s:.1f} tok/s")
    return f"[{', '.join([*parts, f'finish: {reason}'])}]"


COMMAND = Command(
    words=("generate",),
    summary="complete prompts, streaming to the terminal",
    details="Complete one or more prompts. One prompt streams as it is generated; several run together as a batch.",
    models=(GenerateOptions, SamplingParams, EngineConfig),
    run=run,
    usage="[OPTIONS] PROMPT...",
    max_positionals=None,
)
