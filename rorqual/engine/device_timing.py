"""What a device reaches in a plain copy and a plain product, and how long calls take on it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rorqual.engine.roofline import Limits

Call = Callable[[], Any]

_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Much more than a cache holds."""
_MATRIX_SIZE = {"cuda": 8192, "cpu": 2048}
CACHE_BYTES = {"cuda": 60 << 20, "cpu": 64 << 20}
"""What a chip's last cache may hold: inputs that take turns should be larger together."""


def measure_limits(device: torch.device, dtype: torch.dtype, *, integer_products: bool = False) -> Limits:
    """The best of a few copies (bytes read and written) and products of square matrices.

    Products are in `dtype`, and of 8-bit integers too if the model multiplies those.
    """
    source, target = _two_buffers(_COPIED_BYTES[device.type], device)
    copy_s = _best_seconds(device, lambda: target.copy_(source), repeats=4)
    moved = 2 * source.nbytes
    source = target = source[:0]  # another tensor may want the room
    size = _MATRIX_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in "ab")
    product_s = _best_seconds(device, lambda: torch.mm(a, b), repeats=2)
    if integer_products:
        c, d = (torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device) for _ in "cd")
        product_s = min(product_s, _best_seconds(device, lambda: torch._int_mm(c, d), repeats=2))
    return Limits(moved / copy_s, 2.0 * size**3 / product_s)


def _two_buffers(num_bytes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of so many bytes each, or of a half or quarter where a loaded model leaves no more."""
    try:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        return source, torch.ones_like(source)
    except torch.OutOfMemoryError:
        if num_bytes <= CACHE_BYTES[device.type] * 4:
            raise
        return _two_buffers(num_bytes // 2, device)


class Timed(NamedTuple):
    """How long a call takes."""

    us: float
    """The median."""
    in_graph: bool
    """Whether a CUDA graph made the calls, so that the host's part is not in it."""


def call_us(device: torch.device, calls: Sequence[Call]) -> Timed:
    """Time calls that are made in turn: on a GPU inside a CUDA graph, if it can record them."""
    timers: dict[str, Callable[[Sequence[Call]], Timed]] = {"cuda": _cuda_us, "cpu": lambda c: Timed(loop_us(c), False)}
    return timers[device.type](calls)


def _cuda_us(calls: Sequence[Call]) -> Timed:
    try:
        return Timed(graph_us(calls), True)
    except RuntimeError:  # it waits for the device, which no graph records
        torch.cuda.synchronize()
        return Timed(loop_us(calls, wait=torch.cuda.synchronize), False)


def graph_us(calls: Sequence[Call], *, replays: int = 15, enough_ms: float = 400.0) -> float:
    """Median microseconds of one call, over replays of a CUDA graph that makes all of them in turn; over fewer of them,
    three at least, where they take longer than is enough.

    Raises RuntimeError for a call that waits for the device, which a graph cannot record.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
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
    times: list[float] = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in "12")  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
        if len(times) >= 6 and sum(times) * repeats * len(calls) > 1e3 * enough_ms:
            break
    return statistics.median(times[3:])


def loop_us(calls: Sequence[Call], *, seconds: float = 0.3, wait: Callable[[], Any] = lambda: None) -> float:
    """Median microseconds of one call by the host's clock, over rounds that make all of them in turn, for some time;
    `wait` ends each round.
    """
    times: list[float] = []
    while len(times) < 4 or (sum(times) < seconds and len(times) < 50):
        wait()
        start = time.perf_counter()
        for call in calls:
            call()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / len(calls) * 1e6


def _best_seconds(device: torch.device, call: Call, *, repeats: int, rounds: int = 6) -> float:
    """The fastest of a few rounds, per call."""
    wait = torch.get_device_module(device).synchronize
    call()
    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        times.append((time.perf_counter() - start) / repeats)
    return min(times)
