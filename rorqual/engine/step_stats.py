"""What the steps of an engine took and did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepStats:
    """Where the time of all steps went, in seconds by stage, and how much was done."""

    seconds: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Computed tokens that were known before; recomputed ones count again."""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_queried_tokens: int = 0
    """Prompt tokens of sequences that looked into it."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
