"""The layer ops on a GPU: bytes moved, time, and the fraction of what a plain copy (or the matrix units) reaches.

    python benchmarks/layer_ops.py [--out benchmarks/results]

Every figure is the median over replays of a CUDA graph that calls the op on several sets of inputs in turn, together
larger than the L2 cache, so that neither launch gaps nor cache hits count. "of copy" compares with a copy of gigabytes;
"of plain" with one elementwise torch kernel on as many bytes, which pays for its launch and the memory's latency too.
"launches" are the kernels that one call starts. For decode sizes the yardstick is an empty kernel in the same kind of
graph: "over empty" is what the op takes beyond it and beyond its bytes at copy speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_timing import L2_BYTES, copy_bytes_per_us, graph_us  # noqa: E402
from rorqual.cli.collect_env import environment  # noqa: E402
from rorqual.ops.kv_transform import NormStage, RopeStage, transform_and_store_kv  # noqa: E402
from rorqual.ops.linear import linear, prepare_weight  # noqa: E402
from rorqual.ops.quantize import quantize  # noqa: E402
from rorqual.ops.registry import load_backends  # noqa: E402
from rorqual.ops.rms_norm import rms_norm  # noqa: E402
from rorqual.ops.rope import rotary_embedding  # noqa: E402
from rorqual.ops.silu_and_mul import silu_and_mul  # noqa: E402
from rorqual.ops.store_kvcache import store_kvcache  # noqa: E402
from rorqual.quantization import FP8_BLOCK, FP8_ROW, FP8_ROW_UE8M0, MXFP4, MXFP8, QTensor, ScaleLayout  # noqa: E402
from rorqual.quantization.kv_record import V41  # noqa: E402

BF16 = torch.bfloat16


class Work(NamedTuple):
    """One line of the table."""

    name: str
    make: Callable[[int], Callable[[], Any]]
    """seed -> a call on inputs of its own."""
    num_bytes: int
    """Read once and written once."""
    flops: int = 0
    target: str = ""
    compare: Callable[[int], Callable[[], Any]] | None = None
    """Another way to the same result, timed beside it."""
    compare_name: str = ""


def randn(*shape: int, seed: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


# ---- timing ----------------------------------------------------------------------------------------------------------


def host_us(call: Callable[[], Any]) -> float:
    """Median microseconds that the host needs to issue one call."""
    import time

    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            call()
        times.append((time.perf_counter() - start) / 20 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def launches(call: Callable[[], Any]) -> int:
    """Kernels and copies that one call starts on the device."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in trace.events())


def empty_kernel_us() -> float:
    """A kernel that does nothing, in a graph of such kernels."""
    import triton

    @triton.jit
    def nothing() -> None:
        pass

    launch = nothing[(1,)]
    return graph_us([launch] * 4)


def plain_kernel_us(num_bytes: int) -> float:
    """One elementwise kernel that reads and writes so many bytes together."""

    def make(seed: int) -> Callable[[], Any]:
        source = randn(max(1, num_bytes // 4), seed=seed)
        target = torch.empty_like(source)
        return lambda: torch.add(source, 1, out=target)

    return graph_us([make(i) for i in range(sets_for(num_bytes))])


def sets_for(num_bytes: int) -> int:
    """Input sets whose turns leave the cache behind."""
    return max(1, min(24, -(-2 * L2_BYTES // max(num_bytes, 1))))


# ---- the work --------------------------------------------------------------------------------------------------------


def norm_work(rows: int, size: int, *, format: Any = None, target: str = "") -> Work:
    def inputs(seed: int) -> tuple[torch.Tensor, ...]:
        return randn(rows, size, seed=seed), randn(rows, size, seed=seed + 1), randn(size, seed=seed + 2)

    def make(seed: int) -> Callable[[], Any]:
        x, residual, weight = inputs(seed)
        options: dict[str, Any] = {}
        if format is not None:
            options = {"format": format, "layout": ScaleLayout.COLUMN_PACKED, "copy": True}
        return lambda: rms_norm(x, weight, eps=1e-6, residual=residual, **options)

    def unfused(seed: int) -> Callable[[], Any]:
        x, residual, weight = inputs(seed)

        def run() -> Any:
            total = x + residual
            normed = torch.nn.functional.rms_norm(total, (size,), weight, 1e-6)
            groups = normed.float().unflatten(1, (-1, format.block[1]))
            amax = groups.abs().amax(-1).clamp_min(1e-4)
            exponent = (amax / 448).log2().ceil()
            values = (groups * torch.exp2(-exponent)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(1)
            codes = (exponent + 127).to(torch.uint8).view(rows, -1, 4).view(torch.int32).squeeze(-1)
            return values, codes.t().contiguous().t(), normed, total

        return run

    element_bytes = 2 * 4 if format is None else 2 * 4 + 1
    num_bytes = rows * size * element_bytes + size * 2
    if format is not None:
        num_bytes += rows * size // format.block[1]
        return Work(f"RMSNorm + residual + {format.name}, packed column scales, bf16 copy {rows} x {size}",
                    make, num_bytes, target=target, compare=unfused, compare_name="unfused torch")  # fmt: skip
    return Work(f"RMSNorm + residual {rows} x {size}", make, num_bytes, target=target)


def rope_work(tokens: int, *, interleaved: bool = False, target: str = "") -> Work:
    def make(seed: int) -> Callable[[], Any]:
        query, key = randn(tokens, 32, 128, seed=seed), randn(tokens, 8, 128, seed=seed + 1)
        positions = torch.arange(tokens, device="cuda") % 8192
        cos_sin = randn(8192, 128, seed=seed + 2, dtype=torch.float32)
        return lambda: rotary_embedding(query, positions, cos_sin, key=key, interleaved=interleaved)

    kind = "interleaved" if interleaved else "half-split"
    num_bytes = tokens * (40 * 128 * 2 * 2 + 128 * 4 + 8)
    return Work(f"RoPE {kind}, 32 + 8 heads x 128, {tokens} tokens", make, num_bytes, target=target)


def kv_work(tokens: int, *, target: str = "") -> Work:
    block_size = 64

    def make(seed: int) -> Callable[[], Any]:
        x, weight = randn(tokens, 512, seed=seed), randn(512, seed=seed + 1)
        cache = V41.allocate(-(-tokens // block_size) + 1, block_size, device=torch.device("cuda"))
        slots = torch.randperm(cache.shape[0] * block_size, device="cuda")[:tokens].to(torch.int64)
        positions = torch.arange(tokens, device="cuda") % 8192
        rope = RopeStage(positions, randn(8192, 64, seed=seed + 2, dtype=torch.float32), interleaved=True)
        norm = NormStage(weight, 1e-6)
        return lambda: transform_and_store_kv(x, cache, slots, record=V41, norm=norm, rope=rope)

    num_bytes = tokens * (512 * 2 + 528 + 64 * 4 + 16)
    return Work(f"norm + rope + cast + store, 1 head x 512, {tokens} tokens", make, num_bytes, target=target)


def store_work(tokens: int) -> Work:
    def make(seed: int) -> Callable[[], Any]:
        key, value = (randn(tokens, 8, 128, seed=seed + i) for i in (0, 1))
        caches = [torch.zeros(-(-tokens // 16) + 1, 16, 8, 128, dtype=BF16, device="cuda") for _ in "kv"]
        slots = torch.randperm(caches[0].shape[0] * 16, device="cuda")[:tokens]
        return lambda: store_kvcache(key, value, *caches, slots)

    return Work(f"plain KV store, 8 heads x 128, {tokens} tokens", make, tokens * (8 * 128 * 2 * 2 * 2 + 8))


def quantize_work(rows: int, size: int, format: Any) -> Work:
    def make(seed: int) -> Callable[[], Any]:
        x = randn(rows, size, seed=seed)
        return lambda: quantize(x, format=format, layout=ScaleLayout.ROW)

    scale_bytes = 4 if format.scale == "float32" else 1
    num_bytes = rows * size * (5 if format.element == "e2m1" else 6) // 2 + rows * size // format.block[1] * scale_bytes
    return Work(f"quantise to {format.name} {rows} x {size}", make, num_bytes)


def silu_work(rows: int, size: int) -> Work:
    def make(seed: int) -> Callable[[], Any]:
        gate_up = randn(rows, 2 * size, seed=seed)
        return lambda: silu_and_mul(gate_up)

    return Work(f"SiLU and multiply {rows} x {size}", make, rows * size * 6)


def linear_work(
    rows: int, in_features: int, out_features: int, *, format: Any, activation: Any, name: str, target: str = ""
) -> Work:
    def weight(seed: int) -> Any:
        plain = randn(out_features, in_features, seed=seed) * in_features**-0.5
        return prepare_weight(plain if format is None else QTensor.quantize(plain, format))

    def make(seed: int) -> Callable[[], Any]:
        made, x = weight(seed), randn(rows, in_features, seed=seed + 1)
        # The activation is quantised by the op before (RMSNorm does it on the way), so it is not timed here.
        given = quantize(x, format=activation) if activation is not None else x
        return lambda: linear(given, made, out_dtype=BF16)

    def plain(seed: int) -> Callable[[], Any]:
        matrix, x = randn(out_features, in_features, seed=seed), randn(rows, in_features, seed=seed + 1)
        return lambda: torch.nn.functional.linear(x, matrix)

    weight_bytes = 2 * out_features * in_features
    if format is not None:
        bits = 8 if format.element == "e4m3" else 4
        scales = -(-out_features // format.block[0]) * -(-in_features // format.block[1])
        weight_bytes = out_features * in_features * bits // 8 + scales * (4 if format.scale == "float32" else 1)
    num_bytes = weight_bytes + rows * (in_features * (1 if activation else 2) + out_features * 2)
    flops = 2 * rows * in_features * out_features
    return Work(f"{name} linear, M={rows} K={in_features} N={out_features}", make, num_bytes, flops,
                target, None if format is None else plain, "bf16")  # fmt: skip


def all_work() -> list[Work]:
    large = [
        *(norm_work(8192, n, target=">= 85 % of copy") for n in (4096, 7168)),
        *(norm_work(8192, n, format=f, target=">= 80 % of copy, >= 3x unfused") for n in (4096, 7168)
          for f in (MXFP8, FP8_ROW_UE8M0)),
        rope_work(8192, target=">= 80 % of copy"),
        rope_work(8192, interleaved=True),
        kv_work(8192, target=">= 75 % of copy"),
        store_work(8192),
        quantize_work(8192, 4096, FP8_ROW),
        quantize_work(8192, 4096, MXFP8),
        silu_work(8192, 12288),
        linear_work(4096, 4096, 12288, format=FP8_BLOCK, activation=FP8_ROW, name="FP8 1x128 / 128x128",
                    target=">= 1,000 TFLOP/s"),
        linear_work(4096, 4096, 12288, format=MXFP8, activation=MXFP8, name="MXFP8"),
        linear_work(4096, 4096, 12288, format=MXFP4, activation=None, name="MXFP4 weight"),
        *(linear_work(m, 4096, 12288, format=MXFP4, activation=None, name="MXFP4 weight",
                      target=">= 70 % of copy, faster than bf16") for m in (1, 4, 16)),
        *(linear_work(m, 4096, 12288, format=FP8_BLOCK, activation=None, name="FP8 weight") for m in (1, 16)),
        *(linear_work(m, 4096, 12288, format=None, activation=None, name="bf16") for m in (1, 16)),
    ]  # fmt: skip
    small = [
        work
        for tokens in (1, 8, 64)
        for work in (
            norm_work(tokens, 4096, target="within 2 us"),
            norm_work(tokens, 4096, format=MXFP8, target="within 2 us"),
            rope_work(tokens, target="within 2 us"),
            kv_work(tokens, target="within 2 us"),
            store_work(tokens),
            quantize_work(tokens, 4096, FP8_ROW),
        )
    ]
    return large + small


def measure(work: Work, copy_rate: float, empty_us: float) -> dict[str, Any]:
    calls = [work.make(1000 * i) for i in range(sets_for(work.num_bytes))]
    us = graph_us(calls)
    result: dict[str, Any] = {
        "op": work.name, "bytes": work.num_bytes, "us": us, "of_copy": work.num_bytes / us / copy_rate,
        "over_empty_us": us - empty_us - work.num_bytes / copy_rate, "launches": launches(calls[0]),
        "host_us": host_us(calls[0]), "target": work.target, "plain_us": plain_kernel_us(work.num_bytes),
    }  # fmt: skip
    if work.flops:
        result["tflops"] = work.flops / us / 1e6
    if work.compare is not None:
        other = [work.compare(1000 * i) for i in range(min(len(calls), 6))]
        result["compare"], result["compare_us"] = work.compare_name, graph_us(other)
    return result


def table(results: list[dict[str, Any]]) -> str:
    head = "| op | MB | us | of copy | of plain | TFLOP/s | over empty, us | launches | host, us | beside | target |"
    lines = [head, "|---" * 11 + "|"]
    for r in results:
        if "error" in r:
            lines.append(f"| {r['op']} | failed: {r['error']} |" + " |" * 9)
            continue
        beside = ""
        if "compare" in r:
            beside = f"{r['compare']}: {r['compare_us']:.1f} us ({r['compare_us'] / r['us']:.2f}x)"
        tflops = f"{r['tflops']:.0f}" if "tflops" in r else ""
        lines.append(
            f"| {r['op']} | {r['bytes'] / 1e6:.2f} | {r['us']:.2f} | {r['of_copy']:.0%} | "
            f"{r['plain_us'] / r['us']:.0%} | {tflops} | {r['over_empty_us']:.2f} | "
            f"{r['launches']} | {r['host_us']:.0f} | {beside} | {r['target']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default="", help="measure the ops whose name holds this text")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("layer_ops measures CUDA kernels and finds no CUDA device here")
    load_backends("vendor", "triton")
    copy_rate, empty_us = copy_bytes_per_us(), empty_kernel_us()
    print(f"copy {copy_rate / 1e6:.2f} TB/s, empty kernel {empty_us:.2f} us", flush=True)
    results = []
    for work in all_work():
        if asked.only not in work.name:
            continue
        try:
            results.append(measure(work, copy_rate, empty_us))
        except Exception as error:  # one kernel that fails must not hide the others
            results.append({"op": work.name, "error": f"{type(error).__name__}: {str(error)[:200]}"})
        print(table(results[-1:]).splitlines()[-1], flush=True)
        torch.cuda.empty_cache()
    facts = environment()
    asked.out.mkdir(parents=True, exist_ok=True)
    record = {"copy_tb_s": copy_rate / 1e6, "empty_us": empty_us, "results": results, "environment": facts}
    (asked.out / "layer_ops.json").write_text(json.dumps(record, indent=2) + "\n")
    about = [
        f"- {', '.join(facts['machine']['gpus'])}; torch {facts['versions']['torch']}; {facts['date']}",
        f"- commit {facts['commit']}",
        f"- a plain copy moves {copy_rate / 1e6:.2f} TB/s, read and written; an empty kernel takes {empty_us:.2f} us",
        "- command: `python benchmarks/layer_ops.py`; how it is timed stands at the top of that file",
    ]
    text = "\n".join(["# Layer ops on a GPU", "", *about, "", table(results), ""])
    (asked.out / "layer_ops.md").write_text(text)


if __name__ == "__main__":
    main()
