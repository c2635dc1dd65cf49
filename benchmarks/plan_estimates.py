"""`rorqual plan` beside what was measured, and on paper for more GPUs than there were.

    python benchmarks/plan_estimates.py [--out benchmarks/results]

Nothing is run on a GPU. The first tables hold decode steps and memory of cuda_engine.json and cuda_deepseek.json, on
one H200, against the plan of the same model, batch and context; the others are the plan alone, of models of published
sizes on 64 and 320 H200s, and of DeepSeek-V3 on the 144 H800s that its makers have published figures of.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.gpu_deepseek import CONFIGS, V3, V4_FLASH  # noqa: E402
from benchmarks.gpu_engine import MODELS  # noqa: E402
from rorqual.config import EngineConfig  # noqa: E402
from rorqual.engine.gpu_facts import gpu_facts  # noqa: E402
from rorqual.engine.topology import DecodeStep, Hosts, Topology, TopologyPlan  # noqa: E402
from rorqual.engine.topology_plan import Planner, resolve_for_gpu  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NAME = "plan_estimates"
V4_PRO = V4_FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
AS_RELEASED = {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp4"}
PAPER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3": (V3, {}),
    "DeepSeek-V4-Flash": (V4_FLASH, AS_RELEASED),
    "DeepSeek-V4-Pro": (V4_PRO, AS_RELEASED),
}
"""config.json with the published numbers, and options."""
NUM_GPUS = (64, 320)
CONTEXTS = (4096, 65536)
PER_GPU = (32, 128)
"""Sequences for each GPU."""
EXCHANGES: tuple[Literal["buffers", "rows"], ...] = ("buffers", "rows")
STEP = ("ms a step", "tok/s a GPU", "roofline", "all-to-all, MB a GPU", "ms", "bound by")
PUBLISHED_V3 = {"gpus": 144, "redundant": 32, "context": 4989, "tokens_per_s_per_gpu": 14_800 // 8}
"""DeepSeek's overview of its inference system: decoding on 18 hosts of 8 H800, average context and rate of a host."""


class Measured(NamedTuple):
    """A decode step of one GPU."""

    model: str
    batch: int
    context: int
    seconds: float
    num_bytes: float | None = None
    """Where it is known which experts were read."""


def planner(
    config: dict[str, Any],
    num_gpus: int = 1,
    *,
    gpu: str = "h200",
    redundant: int = 0,
    exchange: Literal["buffers", "rows"] = "buffers",
    max_num_seqs: int | None = None,
    **options: Any,
) -> Planner:
    """As `rorqual plan` makes it; options are the engine's."""
    resolved, hosts = resolve_for_gpu(EngineConfig(**options), config), Hosts(num_gpus, 8)
    return Planner(
        config,
        resolved,
        gpu_facts(gpu),
        hosts,
        max_num_seqs=max_num_seqs,
        num_redundant_experts=redundant,
        exchange=exchange,
    )


def measured_steps() -> list[Measured]:
    """What the results hold. A request alone has some 1,024 + 128 tokens on average."""
    found = []
    for model, parts in json.loads((RESULTS / "cuda_engine.json").read_text())["models"].items():
        rows = parts.get("batch", {}).get("rows", [])
        found += [Measured(model, row["batch"], row["context"], row["step_s"]) for row in rows]
        if not rows:
            found.append(Measured(model, 1, 1152, parts["latency"]["between_tokens_ms"] / 1e3))
    for model, part in json.loads((RESULTS / "cuda_deepseek.json").read_text())["engine"].items():
        found += [
            Measured(model, row["batch"], row["context"], row["step_s"], row["num_bytes"]) for row in part["rows"]
        ]
    return found


def planned_steps(found: list[Measured]) -> list[DecodeStep]:
    """The plan of each, with the bytes that were read where they are known."""
    configs: dict[str, dict[str, Any]] = MODELS | CONFIGS["engine"]
    planners = {model: planner(configs[model]) for model in {each.model for each in found}}
    steps = []
    for each in found:
        planning = planners[each.model]
        (step,) = planning.plan(Topology(1, 1), [each.batch], each.context).steps
        if each.num_bytes is not None:
            step = step._replace(memory_bytes=each.num_bytes, memory_s=each.num_bytes / planning.gpu.bytes_per_s)
        steps.append(step)
    return steps


def measured_memory() -> dict[str, dict[str, float]]:
    """GiB of each part that an engine has said it holds, by model."""
    found = {}
    for model, parts in json.loads((RESULTS / "cuda_engine.json").read_text())["models"].items():
        line = next(line for line in parts["latency"]["banner"].splitlines() if line.startswith("memory"))
        named = [part.rsplit(" ", 1) for part in line[line.index("(") + 1 : line.index(")")].split(", ")]
        found[model] = {name: float(gib) for name, gib in named}
    return found


def planned_memory(model: str) -> dict[str, float]:
    """The same parts by the plan, with the sequences that those engines ran."""
    memory = planner(MODELS[model]).plan(Topology(1, 1), [256], 1024).memory
    parts = {
        "weights": memory.dense + memory.tables + memory.experts,
        "activations": memory.activations,
        "workspaces": memory.workspaces,
        "KV cache": memory.kv_cache,
    }
    return {name: num_bytes / 2**30 for name, num_bytes in parts.items()}


def on_paper(name: str, num_gpus: int, exchange: Literal["buffers", "rows"]) -> list[TopologyPlan]:
    """A replica on each GPU, and the experts shared by all; for each context."""
    config, options = PAPER[name]
    redundant = -config["n_routed_experts"] % num_gpus
    plans = planner(config, num_gpus, redundant=redundant, exchange=exchange, max_num_seqs=max(PER_GPU), **options)
    batches = [each * num_gpus for each in PER_GPU]
    return [plans.plan(Topology(1, num_gpus, True), batches, context) for context in CONTEXTS]


# ---- reporting -------------------------------------------------------------------------------------------------------


def measured_tables() -> list[str]:
    columns = ("model", "sequences", "tokens before", "measured, ms", "planned, ms", "planned / measured")
    lines = ["## Decode steps on one H200", "", *_head(*columns, "roofline, ms", "reached")]
    found = measured_steps()
    for each, step in zip(found, planned_steps(found), strict=True):
        times = f"{each.seconds * 1e3:.2f} | {step.expected_s * 1e3:.2f} | {step.expected_s / each.seconds:.2f}"
        ideal = f"{step.roofline_s * 1e3:.2f} | {step.roofline_s / each.seconds:.0%}"
        lines.append(f"| {each.model} | {each.batch} | {each.context:,} | {times} | {ideal} |")
    lines += ["", "Memory of one H200, measured / planned, GiB; workspaces with CUDA graphs:", ""]
    lines += _head("model", "weights", "activations", "workspaces", "KV cache")
    for model, measured in measured_memory().items():
        measured["workspaces"] += measured["CUDA graphs"]
        planned = planned_memory(model)
        lines.append(f"| {model} | {' | '.join(f'{measured[part]:.2f} / {planned[part]:.2f}' for part in planned)} |")
    return [*lines, ""]


def paper_tables() -> list[str]:
    lines = []
    for name, (config, options) in PAPER.items():
        flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())
        lines += [f"## {name} on paper, H200, a replica on each GPU{f', {flags}' if flags else ''}", ""]
        lines += _head(
            *("GPUs", "experts a rank and layer", "weights, GiB", "KV cache, GiB", "KV tokens a GPU", "context"),
            *("sequences a GPU", "exchange", *STEP),
        )
        for num_gpus in NUM_GPUS:
            experts = -(-config["n_routed_experts"] // num_gpus)
            found = {exchange: on_paper(name, num_gpus, exchange) for exchange in EXCHANGES}
            for pair in zip(*found.values(), strict=True):
                memory, cache = pair[0].memory, pair[0].cache
                weights = (memory.dense + memory.tables + memory.experts) / 2**30
                held = f"{num_gpus} | {experts} | {weights:.1f} | {memory.kv_cache / 2**30:.1f} | {cache.tokens:,}"
                rows = [
                    f"| {held} | {step.context:,} | {step.running / num_gpus:g} | {exchange} | "
                    f"{_step(step, num_gpus)} |"
                    for steps in zip(*(plan.steps for plan in pair), strict=True)
                    for exchange, step in zip(found, steps, strict=True)
                ]
                lines += dict.fromkeys(rows)  # no batch twice where only a smaller one fits
        lines.append("")
    return lines


def published_table() -> list[str]:
    num_gpus, redundant = PUBLISHED_V3["gpus"], PUBLISHED_V3["redundant"]
    plans = planner(V3, num_gpus, gpu="h800", redundant=redundant, exchange="rows")
    batches = [count * num_gpus for count in (32, 64, 96, 128)]
    plan = plans.plan(Topology(1, num_gpus, True), batches, PUBLISHED_V3["context"])
    return [
        f"## DeepSeek-V3 on {num_gpus} H800, {PUBLISHED_V3['context']:,} tokens before, --exchange rows; published: "
        f"{PUBLISHED_V3['tokens_per_s_per_gpu']:,} tok/s a GPU",
        "",
        *_head("sequences a GPU", *STEP),
        *(f"| {step.running / num_gpus:g} | {_step(step, num_gpus)} |" for step in plan.steps),
        "",
    ]


def _head(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def _step(step: DecodeStep, num_gpus: int) -> str:
    ideal = step.running / step.roofline_s / num_gpus
    exchanged = f"{step.all_to_all.num_bytes / 1e6:,.0f} | {step.all_to_all.seconds * 1e3:.1f}"
    return (
        f"{step.expected_s * 1e3:.1f} | {step.tokens_per_s / num_gpus:,.0f} | {ideal:,.0f} | {exchanged} | {step.bound}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    out: Path = parser.parse_args().out
    head = ["# Plans beside measurements, and on paper", "", "- command: `python benchmarks/plan_estimates.py`", ""]
    text = "\n".join([*head, *measured_tables(), *paper_tables(), *published_table()]).rstrip() + "\n"
    (out / f"{NAME}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
