"""`rorqual route`: one address in front of several servers. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from rorqual.cli.command import Command
from rorqual.cli.serve import ending_by_sigterm, log_to_stderr, say
from rorqual.cli.settings import Settings
from rorqual.config import StrictModel
from rorqual.server.router.settings import RoutingSettings
from rorqual.server.settings import ListenerSettings

if TYPE_CHECKING:
    from rorqual.server.router.policy import Replica


def _urls(value: Any) -> Any:
    """Each of them, also of texts that name several."""
    if not isinstance(value, list | tuple):
        value = [value]
    if not all(isinstance(text, str) for text in value):
        return value
    return tuple(url.strip().rstrip("/") for text in value for url in text.split(",") if url.strip())


class RouteOptions(StrictModel):
    """What is routed to."""

    replicas: Annotated[tuple[str, ...], BeforeValidator(_urls), Field(min_length=1)] = ()
    """URL of a server, as http://host:8000, or several with commas between. Can be repeated."""


def run(settings: Settings) -> int:
    """Route until a signal."""
    options = settings.build(RouteOptions)
    routing, listener = settings.build(RoutingSettings), settings.build(ListenerSettings)
    if not options.replicas:
        raise ValueError("--replicas is needed: the URLs of the servers, as http://host:8000,http://other:8000")
    if len(set(options.replicas)) != len(options.replicas):
        raise ValueError(f"--replicas names a server twice: {', '.join(options.replicas)}")
    log_to_stderr()

    from rorqual.server.listener import bind
    from rorqual.server.router.policy import Replica

    replicas = [Replica(url, routing) for url in options.replicas]
    with ending_by_sigterm(), bind(listener) as sock:
        try:
            asyncio.run(_serve(replicas, routing, listener, sock))
        finally:
            if listener.uds is not None:
                with contextlib.suppress(OSError):
                    os.unlink(listener.uds)
    return 0


async def _serve(
    replicas: list[Replica], routing: RoutingSettings, listener: ListenerSettings, sock: socket.socket
) -> None:
    from rorqual.server.listener import HTTPServer, address_of
    from rorqual.server.router.app import create_router

    server = HTTPServer(create_router(replicas, routing, listener), listener)
    say(f"routing  {address_of(sock, listener)}\nreplicas {'  '.join(replica.url for replica in replicas)}")
    await server.serve(sockets=[sock])


COMMAND = Command(
    words=("route",),
    summary="one address in front of several servers",
    details="Hand requests on to servers that hold the same model: to the one that has the prompt's beginning in its "
    "cache, unless it is much busier than others. SIGTERM lets running requests end.",
    models=(RouteOptions, RoutingSettings, ListenerSettings),
    run=run,
    usage="--replicas URL[,URL...] [OPTIONS]",
)
