"""An engine's process for tests: `python -m tests.server.scripted_engine FD`. The same loop, and faults on demand.

`Start.options` may hold, beside the engine's own:

- `scripts`: first prompt token -> the tokens that follow it, and `prompt_lens` (default 1 each); see `scripted_llm`.
  Without it the model is the one that `model` names.
- `load_s`: seconds that loading sleeps before it does anything; `step_s`: the same for each step.
- `fail_at_step`, `crash_at_step`: the step, counted from 0, that raises or is a segmentation fault.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rorqual.outputs import StreamDelta
from rorqual.server.engine_process import leave, load_engine, main

if TYPE_CHECKING:
    from rorqual.engine.engine import Engine

COMMAND = (sys.executable, "-m", "tests.server.scripted_engine")
REPOSITORY = Path(__file__).parents[2]


def load(options: dict[str, Any]) -> Engine:
    """The engine, with its faults."""
    hooks = {name: options.pop(name, None) for name in ("load_s", "step_s", "fail_at_step", "crash_at_step")}
    scripts, prompt_lens = options.pop("scripts", None), options.pop("prompt_lens", None)
    time.sleep(hooks["load_s"] or 0)
    if scripts is None:
        engine = load_engine(options)
    else:
        from tests.engine.engines import scripted_llm

        llm, _ = scripted_llm(scripts, prompt_lens=prompt_lens, **options)
        engine = llm.engine
    real_step, num_steps = engine.step, 0

    def step() -> list[StreamDelta]:
        nonlocal num_steps
        time.sleep(hooks["step_s"] or 0)
        if num_steps == hooks["fail_at_step"]:
            raise RuntimeError("this step was meant to fail")
        if num_steps == hooks["crash_at_step"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        num_steps += 1
        return real_step()

    engine.step = step  # type: ignore[method-assign]
    return engine


if __name__ == "__main__":
    leave(main(int(sys.argv[1]), load))
