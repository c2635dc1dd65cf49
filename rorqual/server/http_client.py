"""HTTP/1.1 over asyncio's streams, by h11, that says when each piece arrived. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

Header = tuple[bytes, bytes]

REFUSED = "connection refused"
"""The kind of `NoConnection` where nobody listens."""
_READ_SIZE = 1 << 16


class HttpError(Exception):
    """There was no whole answer. `kind` is counted, the text is for people."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class NoConnection(HttpError):
    """There was not even a connection: nothing was sent."""


class Piece(NamedTuple):
    """A part of a body, and when it arrived (time.perf_counter)."""

    data: bytes
    at: float


class HttpResponse:
    """An answer whose body is read as it comes."""

    def __init__(self, head: h11.Response, connection: _Connection) -> None:
        self.status: int = head.status_code
        self.headers: list[Header] = [(bytes(name), bytes(value)) for name, value in head.headers]
        """Names in lower case."""
        self._connection = connection

    async def pieces(self) -> AsyncIterator[Piece]:
        """The body. Raises HttpError if it ends early."""
        while not isinstance(event := await self._connection.event(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                yield Piece(bytes(event.data), self._connection.arrived)

    async def bursts(self) -> AsyncIterator[bytes]:
        """The body; what has arrived together comes together. Raises HttpError if it ends early."""
        connection, burst = self._connection, bytearray()
        while True:
            try:
                event = connection.poll()
            except HttpError:
                if burst:
                    yield bytes(burst)
                raise
            if isinstance(event, h11.Data):
                burst += event.data
                continue
            if burst:
                yield bytes(burst)
                burst.clear()
            if isinstance(event, h11.EndOfMessage):
                return
            await connection.fill()

    async def body(self) -> bytes:
        """All of it. Raises HttpError."""
        return b"".join([piece.data async for piece in self.pieces()])


class HttpClient:
    """Requests to one server, over as many connections as there are requests at a time; they are kept and used again.

    Args:
        base_url: "http://host:port" or "https://...", and what all paths begin with.
        headers: sent with every request.
        max_idle_s: how long a connection may have been idle to be used again; no request is ever sent twice then.
            None: for ever, and a request is sent again where such a connection turns out to be closed.
        connect_s: how long it may take to connect; None for as long as the system tries.

    Raises:
        ValueError: not such a URL.
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_idle_s: float | None = None,
        connect_s: float | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the base URL must begin with http:// or https:// and name a host, got {base_url!r}")
        if not (base_url.isascii() and base_url.isprintable()) or " " in base_url:
            raise ValueError(f"the base URL must be of visible ASCII characters (others as %20), got {base_url!r}")
        self._host, self._tls = parts.hostname, ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").encode()
        fixed = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._headers = [(name.encode(), value.encode()) for name, value in fixed.items()]
        self._max_idle_s, self._connect_s = max_idle_s, connect_s
        self._idle: list[_Connection] = []
        self._used: set[_Connection] = set()

    @contextlib.asynccontextmanager
    async def request(
        self,
        method: str | bytes,
        path: str | bytes,
        body: bytes = b"",
        *,
        headers: Sequence[Header] = ((b"Content-Type", b"application/json"),),
    ) -> AsyncIterator[HttpResponse]:
        """Send a request; leaving before its body has ended closes the connection.

        Args:
            method: as GET.
            path: behind the base URL, with its query.
            body: all of it.
            headers: beside those of every request and the body's length.

        Raises: HttpError; NoConnection; h11.LocalProtocolError for what is no HTTP.
        """
        target = self._prefix + (path.encode() if isinstance(path, str) else path)
        sent = [*self._headers, *headers, (b"Content-Length", str(len(body)).encode())]
        connection, response = await self._exchange(h11.Request(method=method, target=target, headers=sent), body)
        try:
            yield response
        finally:
            self._used.discard(connection)
            if connection.is_reusable():
                self._idle.append(connection)
            else:
                connection.close()

    async def _exchange(self, asked: h11.Request, body: bytes) -> tuple[_Connection, HttpResponse]:
        while self._idle:  # the server may have closed them meanwhile, which may only show when they are used
            connection = self._idle.pop()
            if self._max_idle_s is not None and not connection.is_fresh(self._max_idle_s):
                connection.close()
                continue
            try:
                return connection, await self._on(connection, asked, body)
            except HttpError:
                if self._max_idle_s is not None:
                    raise
        connection = await self._connect()
        return connection, await self._on(connection, asked, body)

    async def _on(self, connection: _Connection, asked: h11.Request, body: bytes) -> HttpResponse:
        self._used.add(connection)
        try:
            return await connection.exchange(asked, body)
        except BaseException:
            self._used.discard(connection)
            connection.close()
            raise

    async def _connect(self) -> _Connection:
        where = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except ConnectionRefusedError:
            raise NoConnection(REFUSED, f"nothing listens on {where}") from None
        except TimeoutError:
            raise NoConnection("no connection", f"cannot connect to {where} within {self._connect_s} s") from None
        except OSError as error:
            raise NoConnection("no connection", f"cannot connect to {where}: {error}") from None
        return _Connection(reader, writer)

    def abort(self) -> None:
        """End all requests: they raise HttpError."""
        for connection in self._used:
            connection.abort()

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
        return HttpResponse(event, self)

    async def event(self) -> object:
        """What comes next. Raises HttpError."""
        while (event := self.poll()) is h11.NEED_DATA:
            await self.fill()
        return event

    def poll(self) -> object:
        """What comes next, or h11.NEED_DATA if it has not come yet. Raises HttpError."""
        try:
            event = self._protocol.next_event()
        except h11.RemoteProtocolError as error:
            raise HttpError("connection closed", f"the connection was closed: {error}") from None
        if isinstance(event, h11.ConnectionClosed):
            raise HttpError("connection closed", "the connection was closed before the answer")
        return event

    async def fill(self) -> None:
        """Wait for more to arrive, or for the end. Raises HttpError."""
        try:
            data = await self._reader.read(_READ_SIZE)
        except OSError as error:
            raise HttpError("connection closed", f"the connection was closed: {error}") from None
        self.arrived = time.perf_counter()
        self._protocol.receive_data(data)

    def is_reusable(self) -> bool:
        """Whether another request can be sent; makes it ready for it."""
        if self._protocol.our_state is not h11.DONE or self._protocol.their_state is not h11.DONE:
            return False
        self._protocol.start_next_cycle()
        return True

    def is_fresh(self, max_idle_s: float) -> bool:
        """Whether the server has not closed it, and is not about to as far as its age tells."""
        return not self._reader.at_eof() and time.perf_counter() - self.arrived < max_idle_s

    def abort(self) -> None:
        """Close it at once: whoever reads from it sees its end."""
        self._writer.transport.abort()

    def close(self) -> None:
        """Close it, whatever it does."""
        self._writer.close()
