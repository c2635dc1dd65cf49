"""Timing on a GPU, shared by the benchmarks: `graph_us` is the package's, and what a plain copy reaches."""

from __future__ import annotations

import statistics

import torch

from rorqual.engine.device_timing import CACHE_BYTES, graph_us

__all__ = ["L2_BYTES", "copy_bytes_per_us", "graph_us"]

L2_BYTES = CACHE_BYTES["cuda"]
"""Second-level cache of the largest GPU measured: inputs that take turns should be larger together."""


def copy_bytes_per_us() -> float:
    """What a plain copy of four gigabytes moves, read and written."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(8):  # not in a graph, where a copy becomes a node of its own kind, and a slower one
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])
