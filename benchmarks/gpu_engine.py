"""The engine on a GPU, beside its floor, its targets and its peers: models of published shapes with made-up weights.

    python benchmarks/gpu_engine.py [--models qwen3-0.6b ...] [--parts throughput ...] [--out benchmarks/results]

Every part runs in a process of its own, and its result is merged into cuda_engine.json in the folder (one that is not
there starts from benchmarks/results), so that parts may run one by one; the tables and, with matplotlib, the plot are
made of what the file then holds.

    throughput   256 requests, 100 to 1,024 tokens in and out, temperature 0.6: `rorqual bench throughput`
    latency      one request, 1,024 in and 256 out: `rorqual bench latency`
    prefill      64 requests of 2,048 tokens in and one out: `rorqual bench prefill`
    batch        steps in which every sequence decodes one token after some 1,024, for batches of 1 to 256
    report       nothing is run: tables and plot alone

Figures are medians of three rounds. Options behind "--" go to the engine of every part. What a floor counts stands at
the top of rorqual/engine/roofline.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
NAME = "cuda_engine"

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": _QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""config.json of each model, with the published numbers."""

MEASURES = ("throughput", "latency", "prefill", "start")
UNITS = {
    "throughput": "256 requests, output tok/s",
    "latency": "one request, ms per output token",
    "prefill": "prompts, tok/s",
    "start": "start, s",
}
TARGETS: dict[str, dict[str, float]] = {
    "qwen3-0.6b": {"throughput": 27_000, "latency": 1.10, "prefill": 500_000, "start": 15},
    "qwen3-8b": {"throughput": 10_800, "latency": 4.3, "prefill": 43_000, "start": 15},
    "qwen3-30b-a3b": {"throughput": 7_000, "latency": 3.2, "prefill": 90_000, "start": 15},
}
PEERS: dict[str, dict[str, tuple[float, float, float, float]]] = {
    "qwen3-0.6b": {
        "SGLang 0.5.16": (21_134, 1.91, 235_000, 141),
        "vLLM 0.26.0": (18_002, 3.07, 289_000, 110),
        "mini-sglang 20fcd7f": (19_074, 1.87, 402_000, 45),
        "nano-vLLM bb823b3": (18_070, 2.50, 264_000, 57),
    },
    "qwen3-8b": {
        "SGLang 0.5.16": (9_236, 5.32, 41_800, 68),
        "vLLM 0.26.0": (9_038, 5.29, 42_100, 80),
        "mini-sglang 20fcd7f": (9_036, 5.41, 41_900, 22),
        "nano-vLLM bb823b3": (8_085, 6.53, 41_000, 35),
    },
    "qwen3-30b-a3b": {
        "SGLang 0.5.16": (6_351, 4.27, 65_300, 117),
        "vLLM 0.26.0": (5_337, 4.34, 67_000, 135),
    },
}
"""The same workloads on one H200 with torch 2.11, bfloat16, made-up weights, no detokenising; in the order of MEASURES.
Best of their runs; vLLM on the 30B model has one."""

PARTS = ("throughput", "latency", "prefill", "batch")
ENGINE = ("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--max-model-len", "4096")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024
STEPS = 20
ROUNDS = 3


# ---- running ---------------------------------------------------------------------------------------------------------


def run_part(model: str, part: str, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One part in a process of its own."""
    path, found = folder / model, folder / f"{model}-{part}.json"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODELS[model]))
    engine = ["--model", str(path), *ENGINE, *extra]
    if part == "batch":
        command = [sys.executable, __file__, "--steps-of", json.dumps(engine), "--json", str(found)]
    else:
        command = [sys.executable, "-m", "rorqual", "bench", part, *engine, "--quiet", "--rounds", str(ROUNDS)]
        command += ["--json", str(found)]
    print(f"{model} {part}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(found.read_text())
    print(f"{model} {part} took {time.perf_counter() - started:.0f} s\n", file=sys.stderr, flush=True)
    return result


def measure_steps(engine: list[str]) -> dict[str, Any]:
    """Decode steps of every batch size, in this process; `engine` as options of the command line."""
    from rorqual.cli import bench
    from rorqual.cli.bench_report import counted_cost, measured_limits
    from rorqual.cli.bench_steady import long_enough, running, seconds_per_step, step_until_decoding
    from rorqual.cli.bench_workload import draw_workload
    from rorqual.cli.collect_env import environment
    from rorqual.cli.command import open_llm
    from rorqual.cli.options import Parser
    from rorqual.cli.settings import resolve
    from rorqual.config import EngineConfig

    options = bench.THROUGHPUT.options()
    parser = Parser(add_help=False)
    parser.add_options(options)
    settings = resolve(options, parser.parse_args(engine), positionals=[], environ={}, config_file=None)
    with open_llm(settings, quiet=True) as llm:
        inside, rows = llm.engine, []
        cost = counted_cost(llm, settings.build(EngineConfig))
        limits = measured_limits(inside.resolved)
        for size in BATCHES:
            load = draw_workload(
                num_seqs=size,
                input_len=(CONTEXT, CONTEXT),
                output_len=(1, 1),
                vocab_size=inside.vocab_size,
                seed=size,
            )
            before = inside.stats.num_output_tokens
            with running(inside, long_enough(inside, load, (ROUNDS + 1) * STEPS), temperature=0.6, salt=str(size)):
                step_until_decoding(inside)
                seconds_per_step(inside, STEPS)
                times = [seconds_per_step(inside, STEPS) for _ in range(ROUNDS)]
                given = inside.stats.num_output_tokens - before
            # Of the timed steps, the one in the middle.
            context = CONTEXT + round(given / size - ROUNDS * STEPS / 2)
            step_s, floor_s = statistics.median(times), limits.seconds(cost.decode_step([context] * size))
            rows.append({"batch": size, "context": context, "step_s": step_s, "rounds_s": times, "floor_s": floor_s})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": rows, "limits": limits._asdict(), "environment": environment()}


def kept(part: str, result: dict[str, Any]) -> dict[str, Any]:
    """What of a part's result the file keeps."""
    facts = result["environment"]
    about = {
        "date": facts["date"],
        "commit": facts["commit"],
        "gpus": facts["machine"]["gpus"],
        "cpu": facts["machine"]["cpu"],
        "cores": facts["machine"]["cores_usable"],
        "versions": {name: facts["versions"][name] for name in ("python", "torch", "triton")},
    }
    if part == "batch":
        return {"rows": result["rows"], "limits": result["limits"], "about": about}
    names = ("total_s", "rounds_s", "output_tokens", "prompt_tokens", "output_tokens_per_s", "prompt_tokens_per_s",
             "first_token_ms", "between_tokens_ms", "num_steps", "stage_s", "start_s", "floor")  # fmt: skip
    options = result["options"]
    return {name: result[name] for name in names} | {
        "about": about, "command": options["command"], "bench": options["bench"], "banner": options["banner"]
    }  # fmt: skip


# ---- reporting -------------------------------------------------------------------------------------------------------


def figure(parts: dict[str, Any], measure: str) -> tuple[float, float | None] | None:
    """(what was measured, its floor) of a model's results, in the unit of UNITS; None if it was not run."""
    if measure == "start":
        times = [parts[name]["start_s"] for name in PARTS if "start_s" in parts.get(name, {})]
        return (statistics.median(times), None) if times else None
    if measure not in parts:
        return None
    part = parts[measure]
    count = part["prompt_tokens"] if measure == "prefill" else part["output_tokens"]
    seconds = (part["total_s"], part["floor"]["total_s"])
    reached, least = (1e3 * s / count if measure == "latency" else count / s for s in seconds)
    return reached, least


def shown(measure: str, value: float) -> str:
    return {"latency": f"{value:.2f}", "start": f"{value:.1f}"}.get(measure, f"{value:,.0f}")


def report(found: dict[str, Any]) -> str:
    """The tables, as Markdown."""
    lines = ["# The engine on a GPU", ""]
    abouts = [part["about"] for parts in found["models"].values() for part in parts.values()]
    for about in {json.dumps({k: v for k, v in a.items() if k != "date"}, sort_keys=True): a for a in abouts}.values():
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        lines.append(
            f"- {', '.join(about['gpus']) or 'no GPU'}, {about['cores']} cores ({about['cpu']}); {versions}; "
            f"{about['date'][:10]}, commit {about['commit'] or 'not recorded'}"
        )
    lines += [
        "- bfloat16, made-up weights, token ids in and out; medians of three rounds, but where the table says one",
        "- command: `python benchmarks/gpu_engine.py`; what it runs stands at the top of that file. The floor is what "
        "reading weights, keys and values and multiplying takes at least, by a copy and a product measured in the same "
        "run",
        "- peers: the same workloads on another H200 with torch 2.11, the best of their runs",
        "",
    ]
    for model, parts in found["models"].items():
        peers = PEERS.get(model, {})
        lines += [
            f"## {model}",
            "",
            "| | this engine | target | floor | of the floor | " + " | ".join(peers) + " |",
            "|---" * (5 + len(peers)) + "|",
        ]
        for at, measure in enumerate(MEASURES):
            if (pair := figure(parts, measure)) is None:
                continue
            value, least = pair
            of_floor = ""
            if least is not None:
                of_floor = f"{min(value / least, least / value):.0%}"
            once = len(parts.get(measure, {}).get("rounds_s", [])) == 1
            row = [
                UNITS[measure] + (" (one round)" if once else ""),
                shown(measure, value),
                shown(measure, TARGETS[model][measure]),
            ]
            row += [shown(measure, least) if least is not None else "", of_floor]
            lines.append("| " + " | ".join([*row, *(shown(measure, each[at]) for each in peers.values())]) + " |")
        lines += ["", *step_table(parts), *stage_lines(parts)]
    if any("batch" in parts for parts in found["models"].values()):
        lines += [f"![Decoding by batch size]({NAME}.png)", ""]
    return "\n".join(lines)


def step_table(parts: dict[str, Any]) -> list[str]:
    if "batch" not in parts:
        return []
    lines = [
        f"Decode steps after about {CONTEXT:,} tokens:",
        "",
        "| sequences | ms | tok/s | tok/s each | of the floor |",
        "|---" * 5 + "|",
    ]
    for row in parts["batch"]["rows"]:
        step, size = row["step_s"], row["batch"]
        lines.append(
            f"| {size} | {1e3 * step:.3f} | {size / step:,.0f} | {1 / step:,.0f} | {row['floor_s'] / step:.0%} |"
        )
    return [*lines, ""]


def stage_lines(parts: dict[str, Any]) -> list[str]:
    """Where the host's time goes in the large workload, and the latencies of one request."""
    lines = []
    if "throughput" in parts:
        part = parts["throughput"]
        stages = ", ".join(f"{name} {1e3 * s / part['num_steps']:.2f}" for name, s in part["stage_s"].items())
        lines.append(
            f"The 256 requests take {part['num_steps']} steps of {1e3 * part['total_s'] / part['num_steps']:.2f} ms; "
            f"by stage of the host: {stages}."
        )
    if "latency" in parts:
        part = parts["latency"]
        lines.append(
            f"One request waits {part['first_token_ms']:.1f} ms for its first token, and then "
            f"{part['between_tokens_ms']:.2f} ms for each."
        )
    return [*lines, ""] if lines else []


def plot(found: dict[str, Any], path: Path) -> None:
    """Tokens per second of all and of each sequence by batch size, with the floor."""
    if not any("batch" in parts for parts in found["models"].values()):
        return
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed here (--parts report makes it elsewhere)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for number, (model, parts) in enumerate(found["models"].items()):
        if "batch" not in parts:
            continue
        rows = parts["batch"]["rows"]
        sizes, color = [row["batch"] for row in rows], f"C{number}"
        for axis, each in zip(axes, (False, True), strict=True):
            for key, style, label in (("step_s", "o-", model), ("floor_s", "--", f"{model}, floor")):
                speeds = [(1 if each else row["batch"]) / row[key] for row in rows]
                axis.plot(sizes, speeds, style, color=color, label=label, alpha=1 if style == "o-" else 0.6)
    for axis, label in zip(axes, ("decoded tokens/s, all sequences", "tokens/s of each sequence"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(BATCHES, [str(size) for size in BATCHES])
        axis.set_xlabel(f"sequences at once, each after about {CONTEXT:,} tokens")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=[*PARTS, "report"], default=list(PARTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps-of", type=json.loads, help=argparse.SUPPRESS)  # this script's own child
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    dashes = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    asked, extra = parser.parse_args(sys.argv[1:dashes]), sys.argv[dashes + 1 :]
    if asked.steps_of:
        asked.json.write_text(json.dumps(measure_steps(asked.steps_of)))
        return
    file = asked.out / f"{NAME}.json"
    before = next((path for path in (file, RESULTS / file.name) if path.exists()), None)
    found = json.loads(before.read_text()) if before else {"models": {}}
    asked.out.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.models:
            for part in (part for part in asked.parts if part != "report"):
                try:
                    result = run_part(model, part, Path(folder), extra)
                except subprocess.CalledProcessError as error:
                    failed.append(f"{model} {part} (exit code {error.returncode})")
                    continue
                found["models"].setdefault(model, {})[part] = kept(part, result)
                file.write_text(json.dumps(found, indent=1) + "\n")  # now, in case a later part fails
    found["models"] = {model: found["models"][model] for model in MODELS if model in found["models"]}
    file.write_text(json.dumps(found, indent=1) + "\n")
    text = report(found)
    (asked.out / f"{NAME}.md").write_text(text)
    plot(found, asked.out / f"{NAME}.png")
    print(text)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
