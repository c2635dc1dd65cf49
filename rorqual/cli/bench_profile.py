"""`--profile`: some steady steps under torch's profiler, as a trace and as a timeline of a step."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from rorqual.cli.bench_steady import long_enough, running, step_until_decoding
from rorqual.cli.bench_workload import Workload
from rorqual.engine.engine import Engine
from rorqual.engine.step_stats import StepStats
from rorqual.ops.registry import OPS, Op, around

if TYPE_CHECKING:
    from rorqual.llm import LLM

_DECODE_STEPS = 10
_PROMPT_STEPS = 4
_TOP = 15
_SMALL_GAP_US = 1.0
"""Shorter pauses of the device are the distance between two kernels that follow each other."""
_STEP = "engine step"
_LAUNCH = re.compile(r"cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")
"""The CUDA calls that hand work to the device."""


class Span(NamedTuple):
    """Something that ran on the device."""

    name: str
    start_us: float
    end_us: float


class Total(NamedTuple):
    """All that has one name."""

    name: str
    num: int
    us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where the time of some steps went, summed over them; times in microseconds."""

    kind: str
    """What the steps did: "decode" or "prompt"."""
    num_steps: int
    wall_us: float
    stages: dict[str, float]
    """The host's time by stage of the engine's step."""
    launches: Total
    """Calls that hand work to the device, and the host's time in them."""
    busy_us: float
    """Time in which the device ran anything; 0 where all runs on the host."""
    span_us: float
    """From the start of the first to the end of the last of what it ran."""
    gaps: Total
    """Pauses of the device of more than a microsecond between the two."""
    top: list[Total]
    """What took most: kernels on the device, or, without one, ops on the host without the ops inside them."""

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        named = {"launches": self.launches._asdict(), "gaps": self.gaps._asdict()}
        return asdict(self) | named | {"top": [each._asdict() for each in self.top]}

    def table(self) -> str:
        """One step for people, the mean of all."""
        n = self.num_steps

        def line(name: str, us: float, more: str = "") -> str:
            return f"{name:<22} {us / n / 1e3:>9.3f} ms{more}"

        lines = [
            f"profile of {n} {self.kind} steps, under the profiler, which slows the host; the mean step:",
            line("step", self.wall_us),
            *(line(f"  host: {stage}", us) for stage, us in self.stages.items()),
        ]
        if self.busy_us:
            calls, gaps = self.launches.num / n, self.gaps.num / n
            lines += [
                line("  host: launches", self.launches.us, f" in {calls:.1f} calls, part of the above"),
                line("device busy", self.busy_us, f", {100 * self.busy_us / self.wall_us:.1f}% of the step"),
                line("device gaps", self.gaps.us, f" in {gaps:.1f} of more than {_SMALL_GAP_US:.0f} us"),
                line("device small gaps", self.span_us - self.busy_us - self.gaps.us),
            ]
        whole = self.busy_us or self.wall_us
        what = "kernel" if self.busy_us else "op, without those inside"
        lines += ["", f"{'ms/step':>9} {'share':>6} {'calls':>7} {'us each':>9}  {what}"]
        lines += [
            f"{t.us / n / 1e3:>9.3f} {100 * t.us / whole:>5.1f}% {t.num / n:>7.1f} {t.us / t.num:>9.2f}  {t.name[:100]}"
            for t in self.top
        ]
        return "\n".join(lines)


def profile_steps(llm: LLM, load: Workload, path: str, *, temperature: float) -> Timeline:
    """Profile steady steps of a workload: decoding, or prompts where one token each is wanted.

    Writes a Chrome trace to `path`. Raises ValueError where that cannot be, or where requests end too early.
    """
    engine = llm.engine
    if max(load.output_lens) > 1:
        with running(engine, long_enough(engine, load, _DECODE_STEPS), temperature=temperature, salt="profile"):
            step_until_decoding(engine)
            return _profiled(engine, "decode", _DECODE_STEPS, path)
    with running(engine, load, temperature=temperature, salt="profile"):
        return _profiled(engine, "prompt", _PROMPT_STEPS, path)


def _profiled(engine: Engine, kind: str, most_steps: int, path: str) -> Timeline:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    wait = torch.get_device_module(engine.resolved.device).synchronize
    with profile(activities=activities):  # the first time, the profiler starts slowly
        torch.zeros(1, device=engine.resolved.device)
        wait()
    num_steps = 0
    with _stages_recorded(engine) as stats, around(_recorded), profile(activities=activities) as found:
        start = time.perf_counter()
        while num_steps < most_steps and engine.has_work:
            with record_function(_STEP):
                engine.step()
            num_steps += 1
        wait()
        wall_us = (time.perf_counter() - start) * 1e6
    try:
        found.export_chrome_trace(path)
    except (OSError, RuntimeError) as error:
        raise ValueError(f"cannot write --profile-out {path}: {error}") from None
    own = {_STEP, *stats.seconds}  # of these ranges a GPU's trace has copies among the kernels
    stages = {stage: seconds * 1e6 for stage, seconds in stats.seconds.items()}
    device, launches = device_spans(found.events() or [], own | OPS.keys())
    if device:
        busy_us, gaps = busy_and_gaps(device)
        span_us = max(s.end_us for s in device) - min(s.start_us for s in device)
        top = largest(device)
    else:
        busy_us, gaps, span_us, top = 0.0, Total("gaps", 0, 0.0), 0.0, _largest_ops(found, own)
    return Timeline(kind, num_steps, wall_us, stages, launches, busy_us, span_us, gaps, top)


class _RecordedStats(StepStats):
    """Statistics whose stages are ranges of the trace as well."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        with record_function(name), super().stage(name):
            yield


@contextmanager
def _stages_recorded(engine: Engine) -> Iterator[StepStats]:
    """The engine keeps other statistics while the block runs."""
    before, engine.stats = engine.stats, _RecordedStats()
    try:
        yield engine.stats
    finally:
        engine.stats = before


def _recorded(op: Op[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with record_function(op.name):
        return fn(*args, **kwargs)


def device_spans(events: Iterable[Any], own: set[str]) -> tuple[list[Span], Total]:
    """What ran on the device, without the ranges that are our own, and the calls that handed it over."""
    spans, count, launch_us = [], 0, 0.0
    for event in events:
        if event.device_type == DeviceType.CPU:
            if _LAUNCH.match(event.name):
                count, launch_us = count + 1, launch_us + event.time_range.elapsed_us()
        elif not (event.name in own or getattr(event, "is_user_annotation", False)):
            spans.append(Span(event.name, event.time_range.start, event.time_range.end))
    return spans, Total("launches", count, launch_us)


def busy_and_gaps(spans: Iterable[Span]) -> tuple[float, Total]:
    """Microseconds in which at least one span runs, and the pauses between them that are not small."""
    busy, count, idle = 0.0, 0, 0.0
    until: float | None = None
    for span in sorted(spans, key=lambda each: each.start_us):
        if until is None:
            until = span.start_us
        if (gap := span.start_us - until) > _SMALL_GAP_US:
            count, idle = count + 1, idle + gap
        busy += max(0.0, span.end_us - max(until, span.start_us))
        until = max(until, span.end_us)
    return busy, Total("gaps", count, idle)


def largest(spans: Iterable[Span]) -> list[Total]:
    """Spans of one name together, those with the most time first."""
    sums: dict[str, Total] = {}
    for name, start, end in spans:
        before = sums.get(name, Total(name, 0, 0.0))
        sums[name] = Total(name, before.num + 1, before.us + end - start)
    return sorted(sums.values(), key=lambda each: -each.us)[:_TOP]


def _largest_ops(found: profile, own: set[str]) -> list[Total]:
    totals = [Total(e.key, e.count, e.self_cpu_time_total) for e in found.key_averages() if e.key not in own]
    return sorted(totals, key=lambda each: -each.us)[:_TOP]
