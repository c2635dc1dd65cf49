"""One log line per interval while there is work; silence while there is none. No torch."""

from __future__ import annotations

import asyncio
import logging
import time

from rorqual.server.engine_client import EngineClient
from rorqual.server.messages import EngineStats

logger = logging.getLogger("rorqual.server")


def stats_line(before: EngineStats, now: EngineStats, seconds: float) -> str | None:
    """What happened between two looks at the engine, in one line; None if nothing did and nothing waits.

    Prompt tokens are those that were computed; what the prefix cache had is a share of those it was asked for.
    """
    prompt = now.num_prompt_tokens - before.num_prompt_tokens
    output = now.num_output_tokens - before.num_output_tokens
    if not (prompt or output or now.num_running or now.num_waiting):
        return None
    parts = [
        f"prompt {prompt / seconds:.1f} tok/s",
        f"generation {output / seconds:.1f} tok/s",
        f"running {now.num_running}",
        f"waiting {now.num_waiting}",
        f"KV cache {now.kv_cache_usage:.1%}",
    ]
    if queried := now.num_queried_tokens - before.num_queried_tokens:
        parts.append(f"prefix hits {(now.num_cached_tokens - before.num_cached_tokens) / queried:.1%}")
    if preemptions := now.num_preemptions - before.num_preemptions:
        parts.append(f"preemptions {preemptions}")
    return ", ".join(parts)


async def log_stats(engine: EngineClient, interval_s: float = 10.0) -> None:
    """Log such a line every so many seconds, until cancelled or the engine is dead."""
    before, then = engine.stats, time.monotonic()
    while engine.state != "dead":
        await asyncio.sleep(interval_s)
        now, at = engine.stats, time.monotonic()
        if line := stats_line(before, now, at - then):
            logger.info(line)
        before, then = now, at
