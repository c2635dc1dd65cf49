"""A mixture-of-experts layer on this CPU: one call beside its ops one by one, and the bytes that it must read.

    python benchmarks/cpu_moe.py [--kinds bfloat16 q4_1] [--tokens 1 16 256] [--threads 2] [--out benchmarks/results]

The second half of a layer of Qwen3-30B-A3B (hidden size 2048, 128 experts of 768, 8 for each token): norm with the
residual, router, experts. Its experts hold the same made-up numbers, each in memory of its own; several batches of
random tokens take turns. The two ways alternate, and are equal to the bit; medians. "GB/s" counts the weights of the
experts that were chosen, once each.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from rorqual.cli.collect_env import environment  # noqa: E402
from rorqual.ops.decoder_blocks import Norm, Product, add_norm  # noqa: E402
from rorqual.ops.linear import Weight, prepare_weight  # noqa: E402
from rorqual.ops.moe import (  # noqa: E402
    ExpertWeights,
    Routing,
    SparseMoEBlock,
    fused_experts,
    route_softmax,
    sparse_moe_block,
)
from rorqual.ops.registry import load_backends  # noqa: E402
from rorqual.platform import usable_cores  # noqa: E402
from rorqual.quantization.integer import Q4_1, Q8_0, IntegerWeight  # noqa: E402

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 2048, 768, 128, 8
KINDS = {"bfloat16": None, "q4_1": Q4_1, "q8_0": Q8_0}
BATCHES = 6
SECONDS = 4.0
Stream = tuple[torch.Tensor, torch.Tensor]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def experts(kind: str, rows: int, columns: int) -> tuple[Weight, ...]:
    weight: Weight = randn(rows, columns) * columns**-0.5
    if (format := KINDS[kind]) is not None:
        weight = IntegerWeight.quantize(weight, format)
    first = prepare_weight(weight)
    return (first, *(copy.deepcopy(first) for _ in range(NUM_EXPERTS - 1)))


def make_block(kind: str) -> SparseMoEBlock:
    router = Product(prepare_weight(randn(NUM_EXPERTS, HIDDEN) * HIDDEN**-0.5))
    weights = ExpertWeights(experts(kind, 2 * INNER, HIDDEN), experts(kind, HIDDEN, INNER))
    return SparseMoEBlock(Norm(1 + randn(HIDDEN) / 10, 1e-6), router, TOP_K, True, weights)


def one_by_one(hidden: torch.Tensor, residual: torch.Tensor, block: SparseMoEBlock) -> Stream:
    """The ops that the layer consists of, each with its own kernel."""
    normed, total = add_norm(hidden, residual, block.norm)
    routing = route_softmax(block.router(normed), top_k=block.top_k, renormalize=block.renormalize)
    return fused_experts.reference(normed, block.experts, routing), total


def chosen(hidden: torch.Tensor, residual: torch.Tensor, block: SparseMoEBlock) -> int:
    """How many experts some token uses."""
    normed, _ = add_norm(hidden, residual, block.norm)
    routing: Routing = route_softmax(block.router(normed), top_k=block.top_k, renormalize=block.renormalize)
    return len(routing.expert_ids.unique())


def measure(block: SparseMoEBlock, num_tokens: int) -> dict[str, float]:
    """Median milliseconds of both ways, and what the one call reads."""
    batches = [(randn(num_tokens, HIDDEN), randn(num_tokens, HIDDEN)) for _ in range(BATCHES)]
    ways: dict[str, Callable[..., Stream]] = {"one_call": sparse_moe_block, "one_by_one": one_by_one}
    for x in batches:
        assert all(torch.equal(a, b) for a, b in zip(*(way(*x, block) for way in ways.values()), strict=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + SECONDS
    for x in itertools.cycle(batches):
        for name, way in ways.items():
            start = time.perf_counter()
            way(*x, block)
            times[name].append((time.perf_counter() - start) * 1e3)
        if time.perf_counter() > end:
            break
    ms = {name: statistics.median(found) for name, found in times.items()}
    expert_bytes = block.experts.gate_up[0].nbytes + block.experts.down[0].nbytes
    read = statistics.mean(chosen(*x, block) for x in batches) * expert_bytes
    ratio = ms["one_by_one"] / ms["one_call"]
    return ms | {"ratio": ratio, "megabytes": read / 1e6, "gb_s": read / ms["one_call"] / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["bfloat16", "q4_1"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 256])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    load_backends("native", "cpu")
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for kind in args.kinds:
            block = make_block(kind)
            for num_tokens in args.tokens:
                rows.append({"kind": kind, "tokens": num_tokens, **measure(block, num_tokens)})
                print(rows[-1], file=sys.stderr, flush=True)
    env = environment()
    lines = [
        "# CPU: a mixture-of-experts layer",
        "",
        f"- {env['machine']['cpu']}, {args.threads} threads",
        f"- date {env['date']}, commit {env['commit']}",
        "- command: `python benchmarks/cpu_moe.py`; what it measures stands at the top of that file",
        "",
        "| weights | tokens | one call, ms | op by op, ms | ratio | must read, MB | GB/s |",
        "|---" * 7 + "|",
    ]
    lines += [
        f"| {r['kind']} | {r['tokens']} | {r['one_call']:.2f} | {r['one_by_one']:.2f} | {r['ratio']:.1f} | "
        f"{r['megabytes']:.0f} | {r['gb_s']:.1f} |"
        for r in rows
    ]
    (args.out / "cpu_moe.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (args.out / "cpu_moe.json").write_text(
        json.dumps({"environment": env, "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
