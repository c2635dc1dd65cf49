"""A worker whose scheduler goes its own way: from some step on it forgets the last of what it should compute."""

from __future__ import annotations

import os
import sys

from rorqual.engine import worker
from rorqual.engine.scheduler import Scheduler

schedule, sound_steps = Scheduler.schedule, int(os.environ["SOUND_STEPS"])
steps: list[int] = []


def forgetful(self, prompt_limit=None):
    """As `Scheduler.schedule`, for a while."""
    steps.append(1)
    chunks = schedule(self, prompt_limit)
    return chunks if len(steps) <= sound_steps or len(chunks) < 2 else chunks[:-1]


if __name__ == "__main__":
    Scheduler.schedule = forgetful
    code = worker.main()
    sys.stderr.flush()
    os._exit(code)
