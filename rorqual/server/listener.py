"""The socket, uvicorn on it, and how both end: a signal drains, a second one does not wait."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from rorqual.server.errors import bad_value
from rorqual.server.settings import ListenerSettings

log = logging.getLogger("rorqual.server")

SECONDS_TO_SAY_SO = 2
"""What answers get, once their time to drain is over, to tell their clients."""


def bind(settings: ListenerSettings) -> socket.socket:
    """A listening socket. Raises ValueError if the address cannot be had."""
    if settings.uds is not None:
        return _bind_uds(settings.uds)
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(2048)  # at once: until then another server could bind the same port
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise ValueError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}; "
            "choose another --host or --port (0 takes any free one)"
        ) from None
    return sock


def _bind_uds(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path):
            with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
                if probe.connect_ex(path) == 0:
                    raise OSError("another server listens there")
            os.unlink(path)  # left behind by one that is gone
        sock.bind(path)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ValueError(
            f"cannot listen on the Unix socket {path}: {error.strerror or error}; choose another --uds"
        ) from None
    return sock


def address_of(sock: socket.socket, settings: ListenerSettings) -> str:
    """The socket's URL."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Drainable(Protocol):
    """What an app tells of its requests, as `app.state.serving`."""

    draining: bool
    """Whether no new requests are taken."""
    num_http_requests: int
    """Requests to other paths than those that watch the server, until the last byte of their answers."""

    def abort_all(self) -> None:
        """End all requests; their clients are told."""
        ...


class ImpatientProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, for which a client that does not finish its headers in time is none."""

    headers_timeout_s = 30.0

    _headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        super().connection_made(transport)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """A client has gone."""
        self._forget_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Part of a request has come."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_headers()
        elif self._headers_timer is None:
            self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape of all errors."""
        body = bad_value(msg).body.model_dump_json()
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # an answer is on its way already
            return
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body.encode())
        self.transport.close()

    def _watch_headers(self) -> None:
        self._headers_timer = self.loop.call_later(self.headers_timeout_s, self.transport.close)

    def _forget_headers(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None


class HTTPServer(uvicorn.Server):
    """uvicorn, which drains when it is told to end."""

    def __init__(self, app: FastAPI, settings: ListenerSettings) -> None:
        """Raises ValueError for TLS files that cannot be used."""
        self._state: Drainable = app.state.serving
        self._drain_timeout = settings.drain_timeout
        self._drain_until: float | None = None
        protocol = type("Protocol", (ImpatientProtocol,), {"headers_timeout_s": settings.body_timeout})
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level=settings.uvicorn_log_level,
            access_log=settings.access_log,
            server_header=False,
            root_path=settings.root_path,
            timeout_keep_alive=settings.timeout_keep_alive,
            timeout_graceful_shutdown=SECONDS_TO_SAY_SO,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_certfile=settings.ssl_certfile,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"ssl_keyfile and ssl_certfile cannot be used: {error}") from None
        super().__init__(config)

    def drain(self) -> None:
        """Take no more requests, and end when those that run have ended, or their time is over."""
        self._state.draining = True
        self._drain_until = time.monotonic() + self._drain_timeout

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT has come."""
        if self._drain_until is None:
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; asked ten times a second."""
        if self._drain_until is not None and not self.should_exit:
            late = time.monotonic() >= self._drain_until
            if late and self._state.num_http_requests:
                log.warning("%d requests did not end in time", self._state.num_http_requests)
                self._state.abort_all()
            self.should_exit = late or not self._state.num_http_requests
        return await super().on_tick(counter)
