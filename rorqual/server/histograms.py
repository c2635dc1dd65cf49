"""Histograms that cost a fraction of a microsecond to feed, and the bounds of those that the server keeps. No torch.

prometheus_client's own take a lock for every observation and publish a time of creation for each, which only a switch
for the whole process turns off.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily

TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Lengths of prompts and answers."""
TOKENS_PER_STEP = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
"""vLLM's, and three below, since a small model takes milliseconds."""
REQUEST_S = (
    *(0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's, and three below, since a queue is usually empty."""


class Histogram:
    """Counts of values by upper bounds. For one thread."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self.name, self._documentation, self._bounds = name, documentation, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times; it belongs to the first bound that is not below it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, label: str, value: str, name: str | None = None) -> HistogramMetricFamily:
        """What is published, with one label; under another name if one is given."""
        bounds = [*map(str, self._bounds), "+Inf"]
        family = HistogramMetricFamily(name or self.name, self._documentation, labels=[label])
        family.add_metric([value], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)
        return family
