"""What a client gets of a replica's answer. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import msgspec
from starlette.types import Message, Send

from rorqual.server.connection import error_event, event
from rorqual.server.errors import APIError
from rorqual.server.http_client import Header, HttpResponse

HOP_BY_HOP = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    )
)
"""Headers that are about one connection, and so are not handed on."""
STALLED_S = 1.0
"""How long a client may leave the last word of a broken stream unread."""
_HEAD_BYTES = 1 << 20
"""The id of a response is looked for in so much of an answer."""
_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w-]+)"')
_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d+)')


def handed_on(response: HttpResponse) -> list[Header]:
    """The headers that the client gets; the date comes from uvicorn."""
    return [header for header in response.headers if header[0] not in HOP_BY_HOP and header[0] != b"date"]


class Reply:
    """Sends an answer on, begun once there is something to send. Of a stream, only whole events are.

    Args:
        send: the client's.
        makes_response: whether it is an answer of /v1/responses, whose id is looked for.
    """

    def __init__(self, send: Send, *, makes_response: bool) -> None:
        self._send, self._makes_response = send, makes_response
        self._start: Message = {}
        self._is_stream = False
        self._held = b""
        """The beginning of an event whose end has not come: a client could do nothing with it."""
        self._head: bytes | None = None
        """The beginning of the answer, as long as an id is looked for."""
        self._created = b""
        """The event that a response begins with."""
        self._number = 0
        """Of the next event in it."""
        self.has_begun = False
        """Whether the client has got anything."""
        self.response_id: str | None = None

    def begin(self, response: HttpResponse) -> None:
        """The answer's head has come."""
        headers = handed_on(response)
        self._start = {"type": "http.response.start", "status": response.status, "headers": headers}
        of_body = dict(headers)
        is_event_stream = of_body.get(b"content-type", b"").startswith(b"text/event-stream")
        self._is_stream = is_event_stream and b"content-length" not in of_body
        self._makes_response = self._makes_response and response.status == 200
        self._head = b"" if self._makes_response else None

    async def push(self, data: bytes) -> None:
        """Part of the body has come."""
        if self._is_stream:
            data, self._held = _whole_events(self._held + data)
        if data:
            if self._makes_response:
                self._read_response(data)
            await self._body(data, more=True)

    async def finish(self) -> None:
        """The body has ended."""
        await self._body(self._held, more=False)

    async def break_off(self, error: APIError) -> None:
        """The body has been cut off. A stream ends with the error; anything else without its end, which clients see."""
        if self._is_stream:
            last = self._failed(error) if self._makes_response else error_event(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALLED_S):
                    await self._body(last.encode(), more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._send(self._start)
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    # ---- /v1/responses

    def _read_response(self, data: bytes) -> None:
        """Note the response's id, and of a stream what its last event would have to say."""
        if self._head is not None:
            self._head += data
            if found := _ID.search(self._head):
                self.response_id = found[1].decode()
                self._created = self._head if self._is_stream else b""
            if found or len(self._head) > _HEAD_BYTES:
                self._head = None
        if self._is_stream and (numbers := _NUMBER.findall(data)):
            self._number = int(numbers[-1]) + 1

    def _failed(self, error: APIError) -> str:
        """The last event of a response that failed, if its first one was read."""
        said = error.body.error
        for line in self._created.splitlines():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
                response: dict[str, Any] = msgspec.json.decode(line.removeprefix(b"data:"))["response"]
                response |= {"status": "failed", "error": {"code": "server_error", "message": said.message}}
                last = {"type": "response.failed", "sequence_number": self._number, "response": response}
                return event(msgspec.json.encode(last).decode(), name="response.failed")
        return error_event(error)


def _whole_events(data: bytes) -> tuple[bytes, bytes]:
    """The server-sent events that are complete, and what stands behind them."""
    end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in (b"\n\n", b"\r\n\r\n"))
    return data[:end], data[end:]
