"""Timing on a GPU, shared by the benchmarks: calls in turn inside a CUDA graph, and what a plain copy reaches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

L2_BYTES = 60 << 20
"""Second-level cache of the largest GPU measured: inputs that take turns should be larger together."""


def graph_us(calls: list[Callable[[], Any]], *, replays: int = 15) -> float:
    """Median microseconds of one call, over replays of a graph that makes all of them in turn."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
            call()
    torch.cuda.synchronize()
    repeats = max(1, 24 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return statistics.median(times[3:])


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
