"""How a step's time on this CPU follows its size, and what part of the machine's speed it reaches.

    python benchmarks/cpu_scaling.py MODEL [--quantization auto] [--threads 1 2] [--out benchmarks/results]

One model step (embedding to logits) for every batch, on random tokens and made-up block tables, without scheduler and
sampler; medians. Roofline: a step must read every weight once (the head too) and each sequence's keys and values, and
multiply every token with every weight of the layers; beside it stand the bytes and operations per second that this
machine reaches in a plain read of 256 MiB and in torch's bfloat16 product of 2048 x 2048 matrices. The plot needs
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from rorqual import LLM  # noqa: E402
from rorqual.batch import Batch, CacheView  # noqa: E402
from rorqual.cli.collect_env import environment  # noqa: E402

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 8192)
CHUNKS = (64, 256, 512, 1024)
REPEATS = 15


class Model:
    """A loaded model and its steps."""

    def __init__(self, name: str, *, quantization: str, threads: int, kv_bytes: int) -> None:
        self.llm = LLM(
            name,
            quantization=quantization,
            threads=threads,
            kv_cache_memory=kv_bytes,
            max_num_seqs=max(BATCHES),
            progress=False,
            device="cpu",
        )
        self.runner = self.llm.engine._runner
        self.resolved = self.llm.engine.resolved

    def batch(self, num_seqs: int, context: int, length: int = 1) -> Batch:
        """Sequences that compute the last `length` of `context` tokens each."""
        size = self.resolved.block_size
        blocks = -(-context // size)
        if num_seqs * blocks > min(self.resolved.num_blocks):
            raise MemoryError(f"{num_seqs} sequences of {context} tokens do not fit the cache")
        tables = torch.arange(num_seqs * blocks, dtype=torch.int32).view(num_seqs, blocks)
        positions = torch.arange(context - length, context).repeat(num_seqs)
        owner = torch.arange(num_seqs).repeat_interleave(length)
        slots = tables[owner, positions // size].long() * size + positions % size
        ends = torch.arange(1, num_seqs + 1) * length
        return Batch(
            input_ids=torch.randint(0, self.llm.engine.vocab_size, (num_seqs * length,)),
            positions=positions,
            cu_seqlens_q=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(),
            context_lens=torch.full((num_seqs,), context, dtype=torch.int32),
            caches=tuple(CacheView(slots, tables) for _ in self.resolved.groups),
            logits_indices=ends - 1,
            query_lens=(length,) * num_seqs,
            context_lens_host=(context,) * num_seqs,
        )

    def step_ms(self, num_seqs: int, context: int, length: int = 1) -> float:
        """Median milliseconds of a step."""
        times = []
        for i in range(REPEATS + 2):
            batch = self.batch(num_seqs, context, length)
            start = time.perf_counter()
            self.runner.run(batch)
            times.append((time.perf_counter() - start) * 1e3)
            if i > 4 and sum(times) > 4000:
                break
        return statistics.median(times[2:])

    def floor(self, num_seqs: int, context: int, length: int = 1) -> tuple[int, int]:
        """(bytes that a step must read, operations that it must do)."""
        kv = sum(
            len(group.caches) * 2 * group.spec.num_kv_heads * group.spec.head_dim * group.spec.dtype.itemsize
            for group in self.resolved.groups
        )
        head, layers = _weights(self.runner.model)
        tokens = num_seqs * length
        operations = 2 * (tokens * layers[1] + num_seqs * head[1])
        return layers[0] + head[0] + num_seqs * context * kv, operations


def _weights(model: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """((bytes, values) of the head, (bytes, values) of all layers' products)."""
    found = {"head": (0, 0), "layers": (0, 0)}
    for name, module in model.named_modules():
        operand = getattr(module, "operand", None)
        if operand is None or "embed_tokens" in name:  # of a table one row a token is read, or the head's is tied to it
            continue
        key = "head" if "lm_head" in name else "layers"
        rows, columns = _shape(operand)
        total_bytes, total_values = found[key]
        found[key] = (total_bytes + operand.nbytes, total_values + rows * columns)
    return found["head"], found["layers"]


def _shape(operand: Any) -> tuple[int, int]:
    if isinstance(operand, torch.Tensor) and operand.dim() == 4:  # laid out in pairs, see ops/native/linear.py
        return operand.shape[0] * 16, operand.shape[1] * 2
    return tuple(operand.shape)


def read_gb_s(threads: int) -> float:
    """What a sum over 256 MiB reads."""
    torch.set_num_threads(threads)
    data = torch.zeros(1 << 26, dtype=torch.int32).random_()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        data.max()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times) / 1e9


def matmul_gop_s(threads: int) -> float:
    """torch's bfloat16 product of two 2048 x 2048 matrices."""
    torch.set_num_threads(threads)
    a, b = (torch.randn(2048, 2048).bfloat16() for _ in "ab")
    times = []
    for _ in range(9):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * 2048**3 / min(times) / 1e9


def measure(name: str, quantization: str, threads: int, kv_bytes: int) -> dict[str, Any]:
    bandwidth, rate = read_gb_s(threads), matmul_gop_s(threads)
    model = Model(name, quantization=quantization, threads=threads, kv_bytes=kv_bytes)
    rows: list[dict[str, Any]] = []
    longest = model.resolved.max_model_len
    plan = [("batch", b, 128, 1) for b in BATCHES]
    plan += [("context", 1, min(c, longest), 1) for c in CONTEXTS]
    plan += [("chunk", 1, min(n, longest), min(n, longest)) for n in CHUNKS]
    for kind, seqs, context, length in plan:
        try:
            ms = model.step_ms(seqs, context, length)
        except MemoryError as error:
            print(error, file=sys.stderr)
            continue
        must_read, must_do = model.floor(seqs, context, length)
        floor_ms = max(must_read / bandwidth / 1e6, must_do / rate / 1e6)
        row = {
            "kind": kind, "seqs": seqs, "context": context, "tokens": seqs * length, "ms": ms,
            "tok_s": seqs * length / ms * 1e3, "bytes": must_read, "ops": must_do,
            "gb_s": must_read / ms / 1e6, "gop_s": must_do / ms / 1e6, "of_floor": floor_ms / ms,
        }  # fmt: skip
        rows.append(row)
        print(threads, row, file=sys.stderr, flush=True)
    model.llm.close()
    return {"threads": threads, "read_gb_s": bandwidth, "matmul_gop_s": rate, "rows": rows}


def table(results: list[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        lines += [
            f"## {result['threads']} thread{'s' * (result['threads'] > 1)}",
            "",
            f"A plain read reaches {result['read_gb_s']:.1f} GB/s, torch's bfloat16 product "
            f"{result['matmul_gop_s']:.0f} GFLOP/s.",
            "",
            "| tokens | seqs | context | ms | tok/s | must read, MB | GB/s | must do, G | GOP/s | of the roofline |",
            "|---" * 10 + "|",
        ]
        lines += [
            f"| {r['tokens']} | {r['seqs']} | {r['context']} | {r['ms']:.2f} | {r['tok_s']:.0f} | "
            f"{r['bytes'] / 1e6:.0f} | {r['gb_s']:.1f} | {r['ops'] / 1e9:.2f} | {r['gop_s']:.0f} | "
            f"{r['of_floor']:.0%} |"
            for r in result["rows"]
        ]
        lines.append("")
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for axis, (kind, x, label, y, what) in zip(
        axes,
        (
            ("batch", "seqs", "sequences at once", "tok_s", "tokens/s"),
            ("context", "context", "context, tokens", "ms", "ms per token"),
            ("chunk", "tokens", "prompt tokens in a step", "tok_s", "tokens/s"),
        ),
        strict=True,
    ):
        for result in results:
            rows = [r for r in result["rows"] if r["kind"] == kind]
            axis.plot([r[x] for r in rows], [r[y] for r in rows], "o-", label=f"{result['threads']} threads")
        axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        axis.set_ylabel(what)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--kv-bytes", type=int, default=3 << 29)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    asked = parser.parse_args()
    results = [measure(asked.model, asked.quantization, n, asked.kv_bytes) for n in asked.threads]
    write({"model": Path(asked.model).name, "quantization": asked.quantization, "environment": environment(),
           "results": results}, asked.out)  # fmt: skip


def write(found: dict[str, Any], out: Path) -> None:
    (out / "cpu_scaling.json").write_text(json.dumps(found, indent=1) + "\n")
    facts = found["environment"]
    head = [
        "# CPU: a step's time by its size",
        "",
        f"- model {found['model']}, --quantization {found['quantization']}; {facts['machine']['cpu']}",
        f"- date {facts['date']}, commit {facts['commit']}",
        f"- command: `python benchmarks/cpu_scaling.py {found['model']} --quantization {found['quantization']}`; what "
        "it measures stands at the top of that file",
        "- the plot: [cpu_scaling.svg](cpu_scaling.svg)",
        "",
    ]
    (out / "cpu_scaling.md").write_text("\n".join(head) + table(found["results"]))
    plot(found["results"], out / "cpu_scaling.svg")


if __name__ == "__main__":
    main()
