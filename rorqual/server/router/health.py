"""Which replicas take requests: each is asked now and then, and at once after a request has lost one. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

from rorqual.server.http_client import REFUSED, HttpError
from rorqual.server.router.policy import Balancer, Replica
from rorqual.server.router.settings import RoutingSettings

log = logging.getLogger("rorqual.server")

SECONDS_TO_BEGIN = 1.0
"""How long the router waits for the first answers before it takes requests."""


class HealthChecks:
    """Keeps `Replica.is_healthy` true to the facts."""

    def __init__(self, balancer: Balancer, settings: RoutingSettings) -> None:
        self._balancer, self._settings = balancer, settings
        self._soon = {replica: asyncio.Event() for replica in balancer.replicas}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Ask all, and go on asking. Returns when all have answered, or after a second."""
        firsts = [asyncio.Event() for _ in self._soon]
        for replica, first in zip(self._soon, firsts, strict=True):
            self._tasks.append(asyncio.create_task(self._watch(replica, first)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_TO_BEGIN):
                for first in firsts:
                    await first.wait()

    async def stop(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def note_lost(self, replica: Replica, error: HttpError) -> None:
        """A request could not be sent to a replica, or got no whole answer: nobody else gets sent there before it has
        answered again."""
        self._out(replica, str(error))
        self.ask_soon(replica)

    def ask_soon(self, replica: Replica) -> None:
        """A replica has refused a request, and may say why."""
        self._soon[replica].set()

    async def _watch(self, replica: Replica, first: asyncio.Event) -> None:
        while True:
            self._soon[replica].clear()
            await self.check(replica)
            first.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.health_check_interval):
                    await self._soon[replica].wait()

    async def check(self, replica: Replica) -> None:
        """Ask one replica."""
        timeout_s = self._settings.health_check_timeout
        try:
            async with asyncio.timeout(timeout_s):
                status, body = await self._get(replica, self._settings.health_check_path)
                load = (await self._get(replica, "/load"))[1] if status == 200 else b""
        except TimeoutError:
            self._silent(replica, f"it has not answered a health check for {timeout_s:g} s")
        except HttpError as error:
            if error.kind == REFUSED:  # its process is gone, or ends what it has begun before it goes
                self._out(replica, str(error))
                self._balancer.forget(replica)
            else:
                self._silent(replica, str(error))
        else:
            replica.num_silent_checks = 0
            if status == 200:
                # What is not this router's: other routers' requests, and of those for several answers all but one.
                replica.num_foreign = max(0, _number(load, "server_load") - replica.num_running)
                self._in(replica)
            else:
                self._out(replica, *_complaint(status, body))

    async def _get(self, replica: Replica, path: str) -> tuple[int, bytes]:
        async with replica.client.request("GET", path) as answer:
            return answer.status, await answer.body()

    def _silent(self, replica: Replica, failure: str) -> None:
        replica.num_silent_checks += 1
        self._out(replica, failure)
        if replica.num_silent_checks == self._settings.health_check_failures:
            self._balancer.forget(replica)
            replica.client.abort()

    def _in(self, replica: Replica) -> None:
        if not replica.is_healthy:
            log.info("replica %s takes requests", replica.url)
        replica.is_healthy = replica.has_been_healthy = True
        replica.failure = replica.failure_code = None

    def _out(self, replica: Replica, failure: str, code: str | None = None) -> None:
        if replica.is_healthy:
            log.warning("replica %s gets no more requests: %s", replica.url, failure)
        replica.is_healthy, replica.failure, replica.failure_code = False, failure, code


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _number(body: bytes, name: str) -> int:
    value = _fields(body).get(name)
    return value if isinstance(value, int) else 0


def _complaint(status: int, body: bytes) -> tuple[str, str | None]:
    """What a replica says of why it is not well, for people and for programs."""
    error = _fields(body).get("error")
    said: dict[str, Any] = error if isinstance(error, dict) else {}
    message, code = said.get("message"), said.get("code")
    return str(message or f"its health check says {status}"), code if isinstance(code, str) else None
