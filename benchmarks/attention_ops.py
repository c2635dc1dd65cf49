"""Paged attention on a GPU: TB/s of keys and values where sequences decode, TFLOP/s where they read prompts.

    python benchmarks/attention_ops.py [--out benchmarks/results]

bfloat16, blocks of 16 in any order. What decodes is timed as in layer_ops.py: the median over replays of a CUDA graph
that attends over several caches in turn, together larger than the L2 cache; its bytes are those of keys and values.
Prompts are timed in graphs of three calls with pauses between, as the card lowers its clock within seconds of such
work; their operations are those of the pairs of a query and a key that it sees. The peer is FlashAttention 3, as vLLM
ships it, on another H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_timing import L2_BYTES, copy_bytes_per_us, graph_us  # noqa: E402
from rorqual.batch import Batch  # noqa: E402
from rorqual.cli.collect_env import environment  # noqa: E402
from rorqual.ops.attention import paged_attention  # noqa: E402
from rorqual.ops.registry import load_backends  # noqa: E402
from rorqual.ops.store_kvcache import allocate_kvcache  # noqa: E402

DIMS, BLOCK_SIZE = 128, 16


class Work(NamedTuple):
    """One line of the table."""

    batch: int
    length: int
    """Tokens of each sequence; a decoding one attends from the last."""
    heads: int
    kv_heads: int
    prompt: bool
    target: str
    peer: str

    @property
    def name(self) -> str:
        """As the table has it."""
        kind = "prompts" if self.prompt else "decoding"
        return f"{kind}, {self.batch} x {self.length:,}, {self.heads} / {self.kv_heads} heads"

    @property
    def cache_bytes(self) -> int:
        """Of the keys and values that are read."""
        return 2 * 2 * self.batch * self.length * self.kv_heads * DIMS

    @property
    def flops(self) -> int:
        """Of two products for each query and key that it sees."""
        return 4 * DIMS * self.heads * self.batch * (self.length * (self.length + 1) // 2)


WORK = [
    Work(256, 1024, 16, 8, False, ">= 3.8 TB/s", "3.79 TB/s"),
    Work(64, 4096, 32, 8, False, ">= 4.0 TB/s", "4.03 TB/s"),
    Work(1, 8192, 32, 8, False, "<= 20 us", "34 us"),
    Work(8, 2048, 32, 8, True, ">= 500 TFLOP/s", "507 TFLOP/s"),
    Work(2, 8192, 16, 16, True, ">= 590 TFLOP/s", "596 TFLOP/s"),
    Work(16, 1024, 16, 8, True, "", ""),
    Work(32, 512, 16, 8, True, "", ""),
]


def batch_of(work: Work) -> Batch:
    """Sequences of equal length, whole or with their last token alone."""
    count = work.length if work.prompt else 1
    ends = torch.arange(work.batch + 1, dtype=torch.int32, device="cuda") * count
    positions = torch.arange(work.length - count, work.length, device="cuda").repeat(work.batch)
    lengths = torch.full((work.batch,), work.length, dtype=torch.int32, device="cuda")
    return Batch(
        input_ids=torch.zeros(count * work.batch, dtype=torch.int64, device="cuda"),
        positions=positions,
        cu_seqlens_q=ends,
        context_lens=lengths,
        caches=(),
        logits_indices=ends[1:].long() - 1,
        query_lens=(count,) * work.batch,
        context_lens_host=(work.length,) * work.batch,
        num_answer_tokens=0 if work.prompt else work.batch,
    )


def make(work: Work, seed: int) -> Callable[[], Any]:
    """A call on inputs of its own."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    blocks = -(-work.length // BLOCK_SIZE)
    shape = (work.batch * blocks, BLOCK_SIZE, work.kv_heads, DIMS)
    caches = allocate_kvcache(*shape, dtype=torch.bfloat16, device=torch.device("cuda"))
    for cache in caches:
        cache.normal_(generator=generator)
    order = torch.randperm(shape[0], generator=generator, device="cuda").int().view(work.batch, blocks)
    batch = batch_of(work)
    query = torch.empty((len(batch.positions), work.heads, DIMS), dtype=torch.bfloat16, device="cuda")
    query.normal_(generator=generator)
    out = torch.empty_like(query)
    return lambda: paged_attention(query, *caches, batch, order, scale=DIMS**-0.5, out=out)


def paused_us(call: Callable[[], Any], *, calls: int = 3, rounds: int = 15, pause: float = 0.3) -> float:
    """Median microseconds of a call among some, each time after a pause."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds):
        time.sleep(pause)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def measure(work: Work) -> dict[str, Any]:
    """One line's figures."""
    if work.prompt:
        us = paused_us(make(work, 0))
        rate = {"tflops": work.flops / us / 1e6}
    else:
        sets = max(1, min(8, -(-2 * L2_BYTES // work.cache_bytes)))
        us = graph_us([make(work, seed) for seed in range(sets)])
        rate = {"tb_s": work.cache_bytes / us / 1e6}
    return {"name": work.name, "us": us, **rate, "target": work.target, "peer": work.peer}


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| | us | rate | target | FlashAttention 3 |", "|---" * 5 + "|"]
    for r in results:
        rate = f"{r['tflops']:.0f} TFLOP/s" if "tflops" in r else f"{r['tb_s']:.2f} TB/s"
        lines.append(f"| {r['name']} | {r['us']:.1f} | {rate} | {r['target']} | {r['peer']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("attention_ops measures CUDA kernels and finds no CUDA device here")
    load_backends("vendor", "triton")
    copy_rate = copy_bytes_per_us()
    results = []
    for work in WORK:
        results.append(measure(work))
        print(table(results[-1:]).splitlines()[-1], flush=True)
        torch.cuda.empty_cache()
    facts = environment()
    asked.out.mkdir(parents=True, exist_ok=True)
    record = {"copy_tb_s": copy_rate / 1e6, "results": results, "environment": facts}
    (asked.out / "attention_ops.json").write_text(json.dumps(record, indent=2) + "\n")
    about = [
        f"- {', '.join(facts['machine']['gpus'])}; torch {facts['versions']['torch']}; {facts['date']}",
        f"- commit {facts['commit']}",
        f"- a plain copy moves {copy_rate / 1e6:.2f} TB/s, read and written",
        "- command: `python benchmarks/attention_ops.py`; how it is timed stands at the top of that file",
    ]
    text = "\n".join(["# Paged attention on a GPU", "", *about, "", table(results), ""])
    (asked.out / "attention_ops.md").write_text(text)


if __name__ == "__main__":
    main()
