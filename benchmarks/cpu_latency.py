"""What a reader of a stream notices when somebody else's long prompt arrives: gaps between tokens, idle and meanwhile.

    python benchmarks/cpu_latency.py [MODEL] [--quantization auto] [--prompt 4000] [--rounds 3]

In every round one request streams (32 prompt tokens, greedy). After some tokens a prompt of random ids is submitted and
wants one token. Gaps between the stream's tokens count as "meanwhile" until that token is there, and as "idle" before
and after, as many each, since the stream's own context grows and costs too; a gap is what passes between two tokens in
the reader's hands. A round is discarded first, in which the engine learns its costs. Beside it: how long such a prompt
takes with nobody streaming.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rorqual import LLM, SamplingParams  # noqa: E402
from rorqual.cli.collect_env import environment  # noqa: E402

STREAM_PROMPT = 32
IDLE_TOKENS = 100


def gaps(llm: LLM, prompt_tokens: int, draw: random.Random) -> dict[str, Any]:
    """Milliseconds between the stream's tokens around the prompt and while it was computed, and its own time."""
    done: list[float] = []
    params = SamplingParams(temperature=0, ignore_eos=True)
    stream = llm.stream(ids(llm, STREAM_PROMPT, draw), params.clone(max_tokens=2 * IDLE_TOKENS + prompt_tokens))
    times: list[float] = []
    submitted, end = 0.0, 0
    for _ in stream:
        times.append(time.perf_counter())
        if len(times) == IDLE_TOKENS:
            submitted = time.perf_counter()
            llm.engine.add_request(
                ids(llm, prompt_tokens, draw),
                params.clone(max_tokens=1),
                on_finish=lambda _output: done.append(time.perf_counter()),
            )
        if done and not end:
            end = len(times)
        if end and len(times) == end + IDLE_TOKENS:
            break
    stream.close()
    found = [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
    # The first gaps belong to a cache and branches that are still cold.
    idle = found[10 : IDLE_TOKENS - 1] + found[end + 9 :]
    return {"idle": idle, "meanwhile": found[IDLE_TOKENS - 1 : end], "prompt_s": done[0] - submitted}


def alone_s(llm: LLM, prompt_tokens: int, draw: random.Random) -> float:
    """Seconds of such a prompt with nobody streaming."""
    start = time.perf_counter()
    llm.generate(
        [ids(llm, prompt_tokens, draw)], SamplingParams(temperature=0, ignore_eos=True, max_tokens=1), use_tqdm=False
    )
    return time.perf_counter() - start


def ids(llm: LLM, count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(llm.engine.vocab_size) for _ in range(count)]


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def table(rounds: list[dict[str, Any]]) -> str:
    """A row for each round, and one for all gaps together."""
    lines = [
        "| round | idle mean, ms | idle median | idle p95 | meanwhile mean | median | p95 | longest | "
        "mean over idle's | median | p95 | prompt, s | alone, s |",
        "|---" * 13 + "|",
    ]
    everything = {key: [gap for r in rounds for gap in r[key]] for key in ("idle", "meanwhile")}
    whole = everything | {key: statistics.median(r[key] for r in rounds) for key in ("prompt_s", "alone_s")}
    for name, r in [*((str(i + 1), r) for i, r in enumerate(rounds)), ("all", whole)]:
        each = {key: (statistics.mean(r[key]), statistics.median(r[key]), p95(r[key])) for key in ("idle", "meanwhile")}
        ratios = [busy / idle for busy, idle in zip(each["meanwhile"], each["idle"], strict=True)]
        cells = [f"{x:.1f}" for x in (*each["idle"], *each["meanwhile"], max(r["meanwhile"]))]
        cells += [f"{x:.2f}x" for x in ratios]
        lines.append(f"| {name} | {' | '.join(cells)} | {r['prompt_s']:.1f} | {r['alone_s']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    # Room for the longest stream: a token for every prompt token.
    length = STREAM_PROMPT + 2 * IDLE_TOKENS + asked.prompt + 16
    with LLM(
        asked.model,
        quantization=asked.quantization,
        threads=asked.threads,
        max_model_len=length,
        num_kv_blocks=2 * (-(-length // 16) + 1),
        progress=False,
    ) as llm:
        rounds = []
        for number in range(-1, asked.rounds):
            draw = random.Random(number)
            found = {"alone_s": alone_s(llm, asked.prompt, draw)} | gaps(llm, asked.prompt, draw)
            if number >= 0:
                rounds.append(found)
                print(table([found]).splitlines()[-1], file=sys.stderr, flush=True)
    write({
        "benchmark": "cpu_latency", "model": Path(asked.model).name, "quantization": asked.quantization,
        "threads": asked.threads, "prompt_tokens": asked.prompt, "environment": environment(), "rounds": rounds,
        "command": " ".join(["python", "benchmarks/cpu_latency.py", *sys.argv[1:]]),
    }, asked.out)  # fmt: skip
    print(table(rounds))


def write(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rounded = result | {
        "rounds": [
            {k: [round(x, 3) for x in v] if isinstance(v, list) else v for k, v in r.items()} for r in result["rounds"]
        ]
    }
    (out / "cpu_latency.json").write_text(json.dumps(rounded) + "\n")
    facts = result["environment"]
    machine = facts["machine"]
    head = [
        "# CPU: gaps between a stream's tokens while a long prompt lands",
        "",
        f"- machine: {machine['cpu']}, {machine['cores_usable']} cores usable, {', '.join(machine['isa'])}",
        f"- model {result['model']}, --quantization {result['quantization']}, {result['threads']} threads, a prompt of "
        f"{result['prompt_tokens']} tokens",
        f"- date {facts['date']}, commit {facts['commit']}",
        f"- command: `{result['command']}`; what it measures stands at the top of that file",
        "",
        "",
    ]
    (out / "cpu_latency.md").write_text("\n".join(head) + table(result["rounds"]) + "\n")


if __name__ == "__main__":
    main()
