"""Replicas on this host, as servers that this process starts, watches, starts again and ends. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rorqual.server.listener import bind
from rorqual.server.process_client import described
from rorqual.server.router.policy import Replica
from rorqual.server.router.settings import RoutingSettings
from rorqual.server.settings import ListenerSettings

log = logging.getLogger("rorqual.server")

HOST = "127.0.0.1"
SECONDS_TO_END = 10.0
"""What a replica without requests gets to end by itself before it is killed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a replica is started again; each time twice as long, until it has lived for a minute."""
_LOOK_S = 0.5


class Order(msgspec.Struct, frozen=True):
    """What a replica's process has to do, from its standard input."""

    number: int
    parent: int
    """Process id of the one that it must not outlive."""
    config: dict[str, Any]
    """Fields of EngineConfig."""
    settings: dict[str, Any]
    """Fields of ServerSettings."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one replica is to be."""

    config: dict[str, Any]
    settings: dict[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside this process's own."""


class _Child:
    """A replica and its process, the newest one."""

    def __init__(self, number: int, plan: Plan, sock: socket.socket, settings: RoutingSettings) -> None:
        self.number, self.plan = number, plan
        self.sock: socket.socket | None = sock
        """It listens; None once the process has it."""
        self.port: int = sock.getsockname()[1]
        self.replica = Replica(f"http://{HOST}:{self.port}", settings)
        self.process: asyncio.subprocess.Process | None = None
        self.started_s = 0.0


class ReplicaProcesses:
    """Starts a replica for each plan, each on a port of its own that the system chooses and that it keeps.

    A replica that ends, or whose engine does, is started again. If it has never been well, or if they are `tied`, that
    would be in vain: then all is over.

    Args:
        command: the program; it gets the number of its listening socket as last argument and an `Order`.
        plans: one per replica.
        settings: of the router.
        tied: whether none of them can go on without the others.
    """

    def __init__(
        self, command: Sequence[str], plans: Sequence[Plan], settings: RoutingSettings, *, tied: bool = False
    ) -> None:
        self._command, self._tied = command, tied
        self._children = [_Child(i, plan, _listen(0), settings) for i, plan in enumerate(plans)]
        self._watching: list[asyncio.Task[None]] = []
        self.failure: str | None = None
        """Why all is over, if it is."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called then."""

    @property
    def replicas(self) -> list[Replica]:
        """As the router knows them."""
        return [child.replica for child in self._children]

    @property
    def have_started(self) -> bool:
        """Whether all have been well once."""
        return all(child.replica.has_been_healthy for child in self._children)

    async def start(self) -> None:
        """Start all. Raises OSError if a process cannot be started."""
        for child in self._children:
            await self._spawn(child)
        self._watching = [asyncio.create_task(self._watch(child)) for child in self._children]

    async def stop(self) -> None:
        """End all, and wait for it."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        processes = [child.process for child in self._children if child.process is not None]
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_TO_END):
                for process in processes:
                    await process.wait()
        for process in processes:
            _kill(process)
            await process.wait()
        for child in self._children:
            if child.sock is not None:
                child.sock.close()

    async def _spawn(self, child: _Child) -> None:
        """Start its process. Raises ValueError if its port is taken, and OSError."""
        sock = child.sock or _listen(child.port)
        child.sock = None
        order = Order(child.number, os.getpid(), child.plan.config, child.plan.settings)
        with sock:
            child.process = await asyncio.create_subprocess_exec(
                *self._command,
                str(sock.fileno()),
                pass_fds=[sock.fileno()],
                stdin=asyncio.subprocess.PIPE,
                env={**os.environ, **child.plan.environment},
                start_new_session=True,  # Ctrl-C in a terminal is for this process alone, which ends them
            )
        child.started_s = time.monotonic()
        child.replica.failure_code = None
        stdin = child.process.stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(order))
        with contextlib.suppress(ConnectionError):  # how it ends will be seen
            await stdin.drain()
        stdin.close()

    async def _watch(self, child: _Child) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            said = f"replica {child.number} has ended ({await self._end_of(child)})"
            if self._tied or not child.replica.has_been_healthy:
                self.failure = self.failure or said
                self.on_failure()
                return
            if time.monotonic() - child.started_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            log.error("%s; it is started again in %g s", said, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                await self._spawn(child)
            except (OSError, ValueError) as error:
                log.error("replica %d cannot be started: %s", child.number, error)

    async def _end_of(self, child: _Child) -> str:
        """Wait for its process to end, or see that it does where its engine is dead. Returns how it ended."""
        process = child.process
        assert process is not None
        ending = asyncio.create_task(process.wait())
        try:
            while not (await asyncio.wait([ending], timeout=_LOOK_S))[0]:
                if child.replica.failure_code == "engine_dead" and child.replica.has_been_healthy:
                    _kill(process)
                    await ending
                    return str(child.replica.failure)
            return described(await ending)
        finally:
            ending.cancel()


def _listen(port: int) -> socket.socket:
    return bind(ListenerSettings(host=HOST, port=port))


def _kill(process: asyncio.subprocess.Process) -> None:
    """End a process and all that it has started; nothing if it has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
