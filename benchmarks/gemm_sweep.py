"""Tiles for the Triton products with quantised weights: every candidate checked and timed on this GPU.

    python benchmarks/gemm_sweep.py [--family fp8 ...] [--shape 12288x4096 ...] [--rows 1 16 64 4096] [--out FOLDER]

Processes beside this one compile the candidates and compare them with the reference on a small product; one that fails
is reported and skipped. Times are medians over replays of a CUDA graph that multiplies with several copies of a weight
in turn, together larger than the L2 cache. "of copy" is the bytes of weight, scales, inputs and outputs over that time,
as a fraction of what a plain copy moves. The last lines are for the table in `rorqual/ops/triton/_linear_launch.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_timing import L2_BYTES, copy_bytes_per_us, graph_us  # noqa: E402
from rorqual.cli.collect_env import environment  # noqa: E402
from rorqual.ops.linear import allocate_output, linear, prepare_weight  # noqa: E402
from rorqual.ops.quantize import quantize  # noqa: E402
from rorqual.ops.registry import load_backends  # noqa: E402
from rorqual.ops.triton import _linear_launch as launches  # noqa: E402
from rorqual.ops.triton import linear as products  # noqa: E402
from rorqual.quantization import (  # noqa: E402
    FP8_BLOCK,
    FP8_ROW,
    MXFP4,
    MXFP8,
    QTensor,
    QuantFormat,
    ScaleLayout,
)

BF16 = torch.bfloat16
FORMATS: dict[str, tuple[QuantFormat, QuantFormat | None]] = {
    "fp8": (FP8_BLOCK, FP8_ROW),
    "mxfp8": (MXFP8, MXFP8),
    "fp8_weight": (FP8_BLOCK, None),
    "mxfp8_weight": (MXFP8, None),
    "mxfp4_weight": (MXFP4, None),
}
ROWS = {
    "fp8": (1, 16, 64, 4096),
    "mxfp8": (1, 16, 64),
    "fp8_weight": (16,),
    "mxfp8_weight": (16, 512),
    "mxfp4_weight": (1, 8, 16, 64, 512),
}


class Candidate(NamedTuple):
    """A tile, how many programs share its columns, and the family and rows that it is for."""

    family: str
    rows: int
    tile: launches.Tile
    split: int

    def __str__(self) -> str:
        return f"{tuple(self.tile)} split {self.split}"


def candidates(family: str, rows: int) -> Iterator[Candidate]:
    """What is worth compiling; the present choice first."""
    skinny = rows <= launches.SKINNY
    present = launches.tile_of(family, rows)
    if not skinny:
        yield Candidate(family, rows, present, 1)
        for block_n, block_m, warps, stages in itertools.product((64, 128, 256), (64, 128, 256), (4, 8), (3, 4)):
            if 64 * 64 <= block_n * block_m <= 128 * 256 and block_n * block_m // warps <= 4096:
                yield Candidate(family, rows, launches.Tile(block_n, block_m, warps, stages), 1)
        return
    block_m = max(8 if family == "mxfp4_weight" else 16, 1 << (rows - 1).bit_length())
    for split in (1, 2, 4, 8):
        yield Candidate(family, rows, present, split)
    by_registers = family.endswith("_weight")
    shapes = [(32, 1), (32, 2), (64, 2), (64, 4), (128, 4), (128, 8)] if by_registers else [(64, 4), (128, 4), (128, 8)]
    for (block_n, warps), stages, split in itertools.product(shapes, (3, 5, 8), (1, 2, 4, 8)):
        if stages * (block_n + 2 * block_m) * 128 <= 200 << 10:
            yield Candidate(family, rows, launches.Tile(block_n, block_m, warps, stages), split)


class Problem(NamedTuple):
    """Operands of one product, and copies of the weight that do not fit into the L2 cache together."""

    x: torch.Tensor | QTensor
    weights: list[QTensor]
    out: torch.Tensor

    def run(self, candidate: Candidate, weight: QTensor) -> None:
        """One launch."""
        options: dict[str, Any] = {"accumulate": False, "tile": candidate.tile, "split": candidate.split}
        if isinstance(self.x, QTensor):
            launches.multiply_scaled(self.x, weight, None, self.out, **options)
        else:
            launches.multiply_weight_only(self.x, weight, None, self.out, **options)

    @property
    def num_bytes(self) -> int:
        """Read and written by one product."""
        weight, x = self.weights[0], self.x
        return weight.nbytes + x.nbytes + self.out.numel() * self.out.element_size()


def make_problem(family: str, rows: int, features: int, columns: int, *, copies: bool) -> Problem:
    """Random operands on the GPU."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    format, activation = FORMATS[family]
    x: Any = torch.randn(rows, columns, generator=generator, device="cuda", dtype=BF16)
    weight = torch.randn(features, columns, generator=generator, device="cuda", dtype=BF16) / columns**0.5
    prepared = prepare_weight(QTensor.quantize(weight, format))
    assert isinstance(prepared, QTensor)
    if activation is not None:
        packed = family == "mxfp8"
        x = quantize(x, format=activation, layout=ScaleLayout.COLUMN_PACKED if packed else ScaleLayout.COLUMN)
    count = -(-3 * L2_BYTES // prepared.nbytes) if copies else 1
    weights = [dataclasses.replace(prepared, values=prepared.values.clone()) for _ in range(count)]
    return Problem(x, weights, allocate_output((rows, features), BF16, torch.device("cuda")))


# ---- in other processes ----------------------------------------------------------------------------------------------

_small: dict[tuple[str, int], tuple[Problem, torch.Tensor]] = {}


def compile_and_check(candidate: Candidate) -> str | None:
    """Compile a candidate, which leaves it in Triton's cache, and check it; what is wrong with it, or None."""
    try:
        load_backends("triton")
        key = (candidate.family, candidate.rows)
        if key not in _small:
            problem = make_problem(candidate.family, candidate.rows, 512, 1024, copies=False)
            _small[key] = problem, linear.reference(problem.x, problem.weights[0])
        problem, want = _small[key]
        problem.out.fill_(float("nan"))
        problem.run(candidate, problem.weights[0])
        torch.cuda.synchronize()
        error = (problem.out.float() - want.float()).abs().max().item()
        return None if error <= 0.05 else f"wrong by {error:.3g}"
    except Exception as failure:  # a tile may need too much memory, or meet a fault of the compiler
        return f"{type(failure).__name__}: {str(failure).strip().splitlines()[-1][:100] if str(failure) else ''}"


# ---- timing ----------------------------------------------------------------------------------------------------------


def yardsticks(family: str, rows: int, features: int, columns: int, problem: Problem) -> dict[str, float]:
    """Other ways to the product, in microseconds."""
    x = torch.randn(rows, columns, device="cuda", dtype=BF16)
    dense = [torch.randn(features, columns, device="cuda", dtype=BF16) for _ in range(4)]
    found = {"bfloat16 by cuBLAS": graph_us([lambda w=w: torch.mm(x, w.t()) for w in dense])}
    if family == "fp8" and rows % 4 == 0 and isinstance(problem.x, QTensor):
        from rorqual.ops.vendor import linear as vendor

        weights, scales = problem.weights, problem.x.scales
        calls = [
            lambda w=w: torch.nn.functional.scaled_mm(
                problem.x.values,
                w.values.t(),
                scale_a=scales,
                scale_recipe_a=torch.nn.functional.ScalingType.BlockWise1x128,
                scale_b=vendor._block_scales(w.scales),
                scale_recipe_b=torch.nn.functional.ScalingType.BlockWise128x128,
                output_dtype=BF16,
            )
            for w in weights
        ]
        found["FP8 by cuBLASLt"] = graph_us(calls)
    if family in ("mxfp8_weight", "mxfp4_weight") and rows > launches.SKINNY:
        decoded = [
            lambda w=w: products._multiply_expanded(x, w, None, problem.out, accumulate=False) for w in problem.weights
        ]
        found["decoded first"] = graph_us(decoded)
    return found


# ---- the sweep -------------------------------------------------------------------------------------------------------


def compile_all(wanted: list[Candidate], workers: int, deadline: float) -> dict[Candidate, str | None]:
    """Candidate -> what is wrong with it, for those that were tried before the deadline."""
    verdicts: dict[Candidate, str | None] = {}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context)
    pending = {pool.submit(compile_and_check, candidate): candidate for candidate in wanted}
    try:
        for done in as_completed(pending, timeout=max(1.0, deadline - time.monotonic())):
            verdicts[pending[done]] = str(done.exception()) if done.exception() else done.result()
    except TimeoutError:
        print(f"out of time: {len(wanted) - len(verdicts)} of {len(wanted)} candidates were not compiled")
    pool.shutdown(wait=False, cancel_futures=True)
    return verdicts


def sweep(
    family: str, rows: int, shape: tuple[int, int], good: list[Candidate], copy: float, deadline: float
) -> dict[Candidate, float]:
    """Time the candidates of one product; print the best, the present choice and the yardsticks."""
    features, columns = shape
    problem = make_problem(family, rows, features, columns, copies=True)
    times: dict[Candidate, float] = {}
    for candidate in good:
        if time.monotonic() > deadline:
            print(f"out of time: {len(good) - len(times)} candidates not timed")
            break
        try:
            times[candidate] = graph_us([lambda w=w, c=candidate: problem.run(c, w) for w in problem.weights])
        except Exception as failure:
            print(f"  {candidate}: {type(failure).__name__}: {str(failure)[:100]}")
            torch.cuda.synchronize()
    flops = 2 * rows * features * columns

    def line(label: str, us: float, num_bytes: int) -> str:
        share = f"{num_bytes / us / copy:5.0%} of copy"
        return f"  {us:9.2f} us  {flops / us / 1e6:7.1f} TFLOP/s  {share}  {label}"

    print(f"\n{family}: M={rows} N={features} K={columns}, {problem.num_bytes / 1e6:.1f} MB")
    best = sorted(times, key=times.__getitem__)
    present = Candidate(family, rows, launches.tile_of(family, rows), launches.shares(family, rows, features, columns))
    for candidate in best[:5]:
        print(line(str(candidate), times[candidate], problem.num_bytes))
    if present in times:
        print(line(f"{present}  <- TILES, number {best.index(present) + 1}", times[present], problem.num_bytes))
    for label, us in yardsticks(family, rows, features, columns, problem).items():
        print(line(label, us, features * columns * 2 + rows * (features + columns) * 2))
    return times


def suggest(times: dict[Candidate, float]) -> None:
    """The table that these times speak for; within SKINNY rows one split and one kind of instruction for a family."""
    print("\nbest tiles (rows: tile, microseconds):")
    for family in dict.fromkeys(candidate.family for candidate in times):
        mine = {c: us for c, us in times.items() if c.family == family}
        best: tuple[float, Any] = (float("inf"), None)
        for split, wgmma in itertools.product((1, 2, 4, 8), (False, True)):
            chosen = {}
            for rows in sorted({c.rows for c in mine if c.rows <= launches.SKINNY}):
                fitting = [
                    c
                    for c in mine
                    if c.rows == rows and c.split == split and wgmma == (c.tile.warps >= 4 and c.tile.block_n >= 64)
                ]
                if fitting:
                    chosen[rows] = min(fitting, key=mine.__getitem__)
            needed = {c.rows for c in mine if c.rows <= launches.SKINNY}
            cost = sum(mine[c] for c in chosen.values()) if set(chosen) == needed else float("inf")
            best = min(best, (cost, (split, chosen)), key=lambda found: found[0])
        split, chosen = best[1] or (1, {})
        wide = {
            rows: min((c for c in mine if c.rows == rows), key=mine.__getitem__)
            for rows in sorted({c.rows for c in mine if c.rows > launches.SKINNY})
        }
        parts = [f"{rows}: {tuple(c.tile)} {mine[c]:.1f}" for rows, c in {**chosen, **wide}.items()]
        print(f"  {family}: split {split}; " + "; ".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=sorted(FORMATS), default=list(FORMATS))
    parser.add_argument("--shape", nargs="+", default=["12288x4096"], help="NxK")
    parser.add_argument("--rows", nargs="+", type=int, help="M; default: a few for each family")
    parser.add_argument("--seconds", type=float, default=225, help="time for everything")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 1)))
    parser.add_argument("--out", type=Path, help="folder for gemm_sweep.json")
    options = parser.parse_args()
    started = time.monotonic()
    if not torch.cuda.is_available():
        sys.exit("gemm_sweep needs a CUDA device")
    load_backends("triton")
    shapes = [tuple(int(size) for size in shape.split("x")) for shape in options.shape]
    wanted = {
        (family, rows): list(dict.fromkeys(candidates(family, rows)))
        for family in options.family
        for rows in (options.rows or ROWS[family])
        if rows <= launches.SKINNY or max(launches.TILES[family]) > launches.SKINNY
    }
    # In turn, so that every product has some if time runs out.
    turns = itertools.chain.from_iterable(itertools.zip_longest(*wanted.values()))
    everything = [candidate for candidate in turns if candidate is not None]
    print(f"{torch.cuda.get_device_name()}: {len(everything)} candidates, {options.workers} processes", flush=True)
    verdicts = compile_all(everything, options.workers, started + 0.6 * options.seconds)
    print(f"compiled and checked after {time.monotonic() - started:.0f} s")
    for candidate, wrong in verdicts.items():
        if wrong is not None:
            print(f"  skipped: {candidate.family} {candidate.rows} {candidate}: {wrong}")
    copy = copy_bytes_per_us()
    print(f"copy: {copy / 1e6:.2f} TB/s")
    results: list[dict[str, Any]] = []
    for shape in shapes:
        times: dict[Candidate, float] = {}
        for (family, rows), listed in wanted.items():
            good = [candidate for candidate in listed if verdicts.get(candidate, "") is None]
            times |= sweep(family, rows, shape, good, copy, started + options.seconds)
        suggest(times)
        results += [{"shape": shape, **c._asdict(), "us": us} for c, us in times.items()]
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        found = {"environment": environment(), "copy_bytes_per_us": copy, "times": results}
        (options.out / "gemm_sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    main()
