"""An engine kept at one kind of step, to be timed or profiled: all sequences decode, or all steps compute prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rorqual.cli.bench_workload import Workload

if TYPE_CHECKING:
    from rorqual.engine.engine import Engine

_STEADY_AFTER = 3
"""Steps without a prompt token after which decoding counts as steady."""

_TOO_SHORT = (
    "the requests ended before a few steps in a row had decoded all of them: lower --input-len or raise --max-model-len"
)


@contextmanager
def running(engine: Engine, load: Workload, *, temperature: float, salt: str = "steady") -> Iterator[None]:
    """A workload's requests are in the engine while the block runs, and gone behind it."""
    params = load.params(temperature=temperature, seed=0)
    ids = [engine.add_request(prompt, p, cache_salt=salt) for prompt, p in zip(load.prompts, params, strict=True)]
    try:
        yield
    finally:
        for request_id in ids:
            engine.abort(request_id)


def step_until_decoding(engine: Engine) -> None:
    """Step until a few steps in a row gave tokens and computed no prompt.

    Raises ValueError if the requests end before.
    """
    stats, steady = engine.stats, 0
    while steady < _STEADY_AFTER:
        if not engine.has_work:
            raise ValueError(_TOO_SHORT)
        before = stats.num_prompt_tokens, stats.num_output_tokens
        engine.step()
        steady = steady + 1 if stats.num_prompt_tokens == before[0] and stats.num_output_tokens > before[1] else 0
    if not engine.has_work:
        raise ValueError(_TOO_SHORT)


def seconds_per_step(engine: Engine, num_steps: int) -> float:
    """The mean of so many steps of running requests, one after the other."""
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    return (time.perf_counter() - start) / num_steps


def long_enough(engine: Engine, load: Workload, num_steps: int) -> Workload:
    """The workload with outputs that last until all prompts are computed and so many steps longer."""
    resolved = engine.resolved
    prompt_steps = -(-sum(map(len, load.prompts)) // resolved.max_num_batched_tokens)
    wanted = 2 * prompt_steps + 2 * num_steps + 32
    rooms = (resolved.max_model_len - len(prompt) for prompt in load.prompts)
    return Workload(
        load.prompts,
        [min(room, max(length, wanted)) for room, length in zip(rooms, load.output_lens, strict=True)],
    )
