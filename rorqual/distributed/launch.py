"""Ranks on this host, as processes that this one starts, watches and ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from rorqual.platform import describe_exit

WORKER = (sys.executable, "-m", "rorqual.engine.worker")
"""What is run; it reads an `RankOrder` from its standard input, which then stays open as long as it shall live."""
SECONDS_TO_END = 5.0
"""What a rank gets to end by itself before it is killed."""


class Seat(msgspec.Struct, frozen=True):
    """Where a rank sits, and where it finds the others."""

    rank: int
    local_rank: int
    """Among the ranks that were started together."""
    local_size: int
    """Ranks on its host, which share cores and memory."""
    host: str
    port: int
    """Of the store that the ranks meet at."""
    backend: str
    """Of the groups that exchange activations: "gloo" or "nccl"."""


class RankOrder(msgspec.Struct, frozen=True):
    """What a started rank has to do."""

    seat: Seat
    options: dict[str, Any]
    """The fields of EngineConfig that were given."""


class Children:
    """The ranks that this process has started."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, seats: Sequence[Seat], options: Mapping[str, Any], devices: Sequence[str] | None) -> None:
        """Start a rank for each seat; devices: what each local rank sees of the host's GPUs."""
        for seat in seats:
            env = dict(os.environ)
            if devices is not None:
                env["CUDA_VISIBLE_DEVICES"] = devices[seat.local_rank % len(devices)]
            process = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=sys.stderr, env=env)
            self._processes[seat.rank] = process
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # `fault` tells that it has ended
                process.stdin.write(msgspec.json.encode(RankOrder(seat, dict(options))) + b"\n")
                process.stdin.flush()

    def fault(self) -> str | None:
        """Which rank has ended, and how, if one has."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"rank {rank} has ended ({describe_exit(code)})"
        return None

    def kill(self) -> None:
        """End all at once."""
        for process in self._processes.values():
            process.kill()
        self._wait(SECONDS_TO_END)

    def end(self) -> None:
        """Wait for all, who were told to end, and kill those that do not."""
        self._wait(SECONDS_TO_END)
        self.kill()

    def wait(self) -> int:
        """Wait until all have ended; the first exit code that is not 0, if any."""
        return next((code for code in [process.wait() for process in self._processes.values()] if code), 0)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            if process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
