"""HTTP/1.1 over asyncio's streams, by h11, that says when each piece arrived. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

_READ_SIZE = 1 << 16


class HttpError(Exception):
    """There was no whole answer. `kind` is counted, the text is for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Piece(NamedTuple):
    """A part of a body, and when it arrived (time.perf_counter)."""

    data: bytes
    at: float


class HttpResponse:
    """An answer whose body is read as it comes."""

    def __init__(self, status: int, connection: _Connection) -> None:
        self.status, self._connection = status, connection

    async def pieces(self) -> AsyncIterator[Piece]:
        """The body. Raises HttpError if it ends early."""
        while not isinstance(event := await self._connection.event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield Piece(bytes(event.data), self._connection.arrived)

    async def body(self) -> bytes:
        """All of it. Raises HttpError."""
        return b"".join([piece.data async for piece in self.pieces()])


class HttpClient:
    """Requests to one server, over as many connections as there are requests at a time; they are kept and used again.

    Args:
        base_url: "http://host:port" or "https://...", and what all paths begin with.
        headers: sent with every request.

    Raises:
        ValueError: not such a URL.
    """

    def __init__(self, base_url: str, *, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the base URL must begin with http:// or https:// and name a host, got {base_url!r}")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._idle: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"") -> AsyncIterator[HttpResponse]:
        """Send a request; leaving before its body has ended closes the connection. Raises HttpError."""
        headers = {**self._headers, "Content-Type": "application/json", "Content-Length": str(len(body))}
        asked = h11.Request(method=method, target=self._prefix + path, headers=list(headers.items()))
        connection, response = await self._exchange(asked, body)
        try:
            yield response
        finally:
            if connection.is_reusable():
                self._idle.append(connection)
            else:
                connection.close()

    async def _exchange(self, asked: h11.Request, body: bytes) -> tuple[_Connection, HttpResponse]:
        while self._idle:  # the server may have closed them meanwhile, which shows when they are used
            connection = self._idle.pop()
            try:
                return connection, await connection.exchange(asked, body)
            except HttpError:
                connection.close()
            except BaseException:
                connection.close()
                raise
        connection = await self._connect()
        try:
            return connection, await connection.exchange(asked, body)
        except BaseException:
            connection.close()
            raise

    async def _connect(self) -> _Connection:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except ConnectionRefusedError:
            raise HttpError("connection refused", f"nothing listens on {self._host}:{self._port}") from None
        except OSError as error:
            raise HttpError("no connection", f"cannot connect to {self._host}:{self._port}: {error}") from None
        return _Connection(reader, writer)

    def close(self) -> None:
        """Close the connections that no request uses."""
        while self._idle:
            self._idle.pop().close()


class _Connection:
    """One connection, for one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._protocol = h11.Connection(h11.CLIENT)
        self.arrived = 0.0
        """When the newest data came."""

    async def exchange(self, asked: h11.Request, body: bytes) -> HttpResponse:
        """Send a request and wait for the head of its answer."""
        try:
            for sent in (asked, h11.Data(data=body), h11.EndOfMessage()):
                self._writer.write(self._protocol.send(sent) or b"")
            await self._writer.drain()
        except (OSError, h11.LocalProtocolError) as error:
            raise HttpError("connection closed", f"the connection was closed: {error}") from None
        while not isinstance(event := await self.event(), h11.Response):
            pass  # 100 Continue and its kin
        return HttpResponse(event.status_code, self)

    async def event(self) -> object:
        """What comes next. Raises HttpError."""
        try:
            while (event := self._protocol.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(_READ_SIZE)
                self.arrived = time.perf_counter()
                self._protocol.receive_data(data)
        except (OSError, h11.RemoteProtocolError) as error:
            raise HttpError("connection closed", f"the connection was closed: {error}") from None
        if isinstance(event, h11.ConnectionClosed):
            raise HttpError("connection closed", "the connection was closed before the answer")
        return event

    def is_reusable(self) -> bool:
        """Whether another request can be sent; makes it ready for it."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return True

    def close(self) -> None:
        """Close it, whatever it does."""
        self._writer.close()
