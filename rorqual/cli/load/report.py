"""What a load measured: counts, rates, percentiles, goodput, and throughput against speed per user. No torch."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rorqual.cli.load.requests import Record

PERCENTILES = (90, 95, 99)
LATENCIES: dict[str, str] = {
    "ttft": "time to first token",
    "itl": "between pieces",
    "tpot": "per token after the first",
    "e2e": "whole answer",
}
"""In the order of the table; all in milliseconds."""
_LIMITS: dict[str, Callable[[Record], float | None]] = {
    "ttft": lambda record: record.ttft_s,
    "tpot": lambda record: record.tpot_s,
    "e2e": lambda record: record.e2e_s,
}


def parse_goodput(texts: Iterable[str]) -> dict[str, float]:
    """Read ["ttft:500", "tpot:50,e2e:9000"] as milliseconds by name.

    Raises:
        ValueError: another name, or no number.
    """
    limits = {}
    for text in (part for each in texts for part in re.split(r"[,\s]+", each) if part):
        name, _, number = text.partition(":")
        name = "e2e" if name == "e2el" else name
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = math.nan
        if name not in _LIMITS or not limits[name] > 0:
            raise ValueError(
                f"--goodput takes NAME:MILLISECONDS with NAME one of {', '.join(_LIMITS)}, as in ttft:500; got {text!r}"
            )
    return limits


def is_good(record: Record, limits: Mapping[str, float]) -> bool:
    """Whether an answer is whole and within every limit; what it has not (an answer of one token no tpot) is."""
    values = [(_LIMITS[name](record), limit) for name, limit in limits.items()]
    return record.error is None and all(value is None or 1e3 * value <= limit for value, limit in values)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of sorted values, between the two nearest ones in proportion."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values_s: Iterable[float | None]) -> dict[str, float] | None:
    """Mean, median, percentiles and maximum in milliseconds; None of nothing."""
    ordered = sorted(1e3 * value for value in values_s if value is not None)
    if not ordered:
        return None
    found = {"mean": statistics.fmean(ordered), "median": percentile(ordered, 50)}
    return found | {f"p{p}": percentile(ordered, p) for p in PERCENTILES} | {"max": ordered[-1]}


def summary(records: Sequence[Record], limits: Mapping[str, float]) -> dict[str, Any]:
    """Counts, rates and latencies. Rates and latencies are of whole answers; errors are counted by kind."""
    whole = [record for record in records if record.error is None]
    duration = max(record.ended_s for record in records) - min(record.sent_s for record in records)
    faults = Counter(record.error for record in records if record.error is not None)
    prompt = [record.prompt_tokens for record in whole]
    output = sum(record.output_tokens for record in whole)
    tpot = spread(record.tpot_s for record in whole)
    result: dict[str, Any] = {
        "num_requests": len(records),
        "num_completed": len(whole),
        "errors": dict(faults.most_common()),
        "error_examples": {kind: next(r.error_text for r in records if r.error == kind) for kind in faults},
        "duration_s": duration,
        "requests_per_s": len(whole) / duration,
        "prompt_tokens": None if None in prompt else sum(filter(None, prompt)),
        "output_tokens": output,
        "output_tokens_counted_by": "server" if all(r.completion_tokens is not None for r in whole) else "pieces",
        "output_tokens_per_s": output / duration,
        "total_tokens_per_s": None if None in prompt else (sum(filter(None, prompt)) + output) / duration,
        "most_at_a_time": _most_at_a_time(records),
        "sent_late_ms": 1e3 * max(record.sent_s - record.due_s for record in records),
        "ttft_ms": spread(record.ttft_s for record in whole),
        "itl_ms": spread(gap for record in whole for gap in record.itl_s),
        "tpot_ms": tpot,
        "e2e_ms": spread(record.e2e_s for record in whole),
        "tokens_per_s_per_user": 1e3 / tpot["median"] if tpot and tpot["median"] else None,
    }
    if limits:
        good = sum(is_good(record, limits) for record in records)
        result["goodput"] = {"limits_ms": dict(limits), "num_good": good, "requests_per_s": good / duration}
    return result


def _most_at_a_time(records: Sequence[Record]) -> int:
    running = most = 0
    for _, change in sorted(
        [*((record.ended_s, -1) for record in records), *((record.sent_s, 1) for record in records)]
    ):
        running += change
        most = max(most, running)
    return most


def requests_as_json(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each request in a line, times from the first one's."""
    start = min(record.sent_s for record in records)
    return [
        {
            "sent_s": record.sent_s - start,
            "ttft_s": record.ttft_s,
            "tpot_s": record.tpot_s,
            "e2e_s": record.e2e_s,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "finish_reason": record.finish_reason,
            "error": record.error,
        }
        for record in records
    ]


def table(result: Mapping[str, Any]) -> str:
    """A summary for people."""
    lines = [f"requests      {result['num_completed']} of {result['num_requests']} answered"]
    for kind, count in result["errors"].items():
        lines.append(f"  {count} x {kind}: {result['error_examples'][kind]}")
    lines.append(f"duration      {result['duration_s']:.2f} s, {result['requests_per_s']:.2f} answers/s")
    if result["prompt_tokens"] is not None:
        lines.append(f"prompt        {result['prompt_tokens']} tokens")
    how = "" if result["output_tokens_counted_by"] == "server" else " (counted as pieces: the server sends no usage)"
    lines.append(f"output        {result['output_tokens']} tokens, {result['output_tokens_per_s']:.1f} tok/s{how}")
    if result["total_tokens_per_s"] is not None:
        lines.append(f"together      {result['total_tokens_per_s']:.1f} tok/s")
    if result["tokens_per_s_per_user"] is not None:
        lines.append(f"per user      {result['tokens_per_s_per_user']:.1f} tok/s, the median answer")
    lines.append(f"at a time     {result['most_at_a_time']} at most; sent {result['sent_late_ms']:.1f} ms late at most")
    if goodput := result.get("goodput"):
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in goodput["limits_ms"].items())
        lines.append(f"goodput       {goodput['requests_per_s']:.2f} answers/s ({goodput['num_good']}) with {limits}")
    columns = ("mean", "median", *(f"p{p}" for p in PERCENTILES), "max")
    lines += ["", f"{'milliseconds':<34}" + "".join(f"{name:>10}" for name in columns)]
    for name, what in LATENCIES.items():
        if found := result[f"{name}_ms"]:
            label = f"{name.upper():<5} {what}"
            lines.append(f"{label:<34}" + "".join(f"{found[column]:>10.1f}" for column in columns))
    return "\n".join(lines)


def sweep_table(points: Sequence[Mapping[str, Any]]) -> str:
    """One line per concurrency."""
    head = f"{'streams':>8}{'tok/s':>10}{'tok/s/user':>12}{'TTFT p50':>11}{'TTFT p99':>11}{'ITL p99':>11}{'errors':>8}"
    lines = [head]
    for point in points:
        latencies = [
            point["ttft_ms"] and point["ttft_ms"]["median"],
            point["ttft_ms"] and point["ttft_ms"]["p99"],
            point["itl_ms"] and point["itl_ms"]["p99"],
        ]
        per_user = point["tokens_per_s_per_user"]
        lines.append(
            f"{point['concurrency']:>8}{point['output_tokens_per_s']:>10.1f}"
            + (f"{per_user:>12.1f}" if per_user else f"{'-':>12}")
            + "".join(f"{value:>8.1f} ms" if value is not None else f"{'-':>11}" for value in latencies)
            + f"{sum(point['errors'].values()):>8}"
        )
    return "\n".join(lines)


def best(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The Pareto front: the points that no other beats in both throughput and speed per user."""
    placed = [p for p in points if p["tokens_per_s_per_user"] is not None]

    def beaten(point: Mapping[str, Any]) -> bool:
        x, y = point["tokens_per_s_per_user"], point["output_tokens_per_s"]
        return any(
            (a := other["tokens_per_s_per_user"]) >= x and (b := other["output_tokens_per_s"]) >= y and (a, b) != (x, y)
            for other in placed
        )

    return sorted((p for p in placed if not beaten(p)), key=lambda p: float(p["tokens_per_s_per_user"]))


def plot(points: Sequence[Mapping[str, Any]], path: str, title: str) -> None:
    """Write throughput against speed per user as PNG.

    Raises:
        ImportError: matplotlib is not there.
        ValueError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    front = best(points)
    speeds, rates = ([float(p[key]) for p in front] for key in ("tokens_per_s_per_user", "output_tokens_per_s"))
    axes.plot(speeds, rates, "o-", color="#0b6a8f", label="Pareto front")
    for point in points:
        at = (point["tokens_per_s_per_user"], point["output_tokens_per_s"])
        if at[0] is None:
            continue
        if point not in front:
            axes.plot(*at, "o", color="#9aaab6")
        axes.annotate(str(point["concurrency"]), at, xytext=(5, 5), textcoords="offset points")
    axes.set(xlabel="output tokens/s per user (median)", ylabel="output tokens/s, all users", title=title)
    axes.margins(0.1)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(title="numbers: concurrent streams")
    try:
        target = Path(path).expanduser()
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, format="png", dpi=150)
    except OSError as error:
        raise ValueError(f"cannot write --plot-out {path}: {error}") from None
