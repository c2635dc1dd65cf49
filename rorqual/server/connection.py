"""Answers that stop when their client does: the wait for a result, and server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from rorqual.server.errors import APIError, as_api_error

log = logging.getLogger("rorqual.server")

T = TypeVar("T")

EVENTS_DECLARED = {
    "text/event-stream": {
        "itemSchema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
            "required": ["data"],
        }
    }
}
"""For `content` of a route's answer that may be a stream."""

DONE = "data: [DONE]\n\n"


STALLED_S = 120.0
"""How long a client may leave an event unread, before it counts as one that has left."""
GONE = 499
"""The status that nobody sees, for a client that did not wait."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class _Stalled(Exception):
    """The client does not read."""


def event(data: str, *, name: str | None = None) -> str:
    """One server-sent event."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def error_event(error: APIError) -> str:
    """What ends a stream that went wrong."""
    return event(error.body.model_dump_json())


async def while_connected(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """The result of `work`, which is cancelled when the client disconnects. Raises ClientGone then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they are made, and closes their generator when the client goes away or the time is over."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: str,
        rest: AsyncGenerator[str],
        *,
        abort: Callable[[], None],
        deadline: float | None,
        on_error: Callable[[APIError], str],
    ) -> None:
        """See `stream`; `deadline` is on the event loop's clock."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest, self._abort = first, rest, abort
        self._deadline, self._on_error = deadline, on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as an ASGI app."""
        try:
            await while_connected(receive, self._send(send))
        except ClientGone:
            pass
        except _Stalled:  # uvicorn closes what ends without its end
            log.warning("a client did not read its stream for %g s", STALLED_S)
        finally:
            self._abort()
            await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._send_text(send, self._first)
                async for text in self._rest:
                    await self._send_text(send, text)
        except _Stalled:
            raise
        except Exception as error:
            await self._send_text(send, self._on_error(as_api_error(error)), within_s=1.0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    async def _send_text(send: Send, text: str, *, within_s: float | None = None) -> None:
        stalled = asyncio.timeout(STALLED_S if within_s is None else within_s)
        try:
            async with stalled:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        except TimeoutError:
            if stalled.expired():
                raise _Stalled from None
            raise


async def stream(
    request: Request,
    events: AsyncGenerator[str],
    *,
    abort: Callable[[], None],
    timeout_s: float | None,
    on_error: Callable[[APIError], str] = error_event,
) -> Response:
    """An answer made of `events`, begun once there is a first one: what fails before has a status of its own.

    Args:
        request: whose client must stay.
        events: as they are sent; closed in any case.
        abort: ends what makes the events; called in any case.
        timeout_s: seconds that the whole may take; None for any.
        on_error: makes the last event of a stream that went wrong.

    Raises: ClientGone, TimeoutError, and what `events` raises first.
    """
    deadline = _deadline(timeout_s)
    try:
        async with asyncio.timeout_at(deadline):
            first = await while_connected(request.receive, _next(events))
    except BaseException:
        abort()
        await events.aclose()
        raise
    return EventStream(first, events, abort=abort, deadline=deadline, on_error=on_error)


async def answer(
    request: Request, work: Coroutine[object, object, T], *, abort: Callable[[], None], timeout_s: float | None
) -> T:
    """The result of `work`; see `stream`. Raises ClientGone, TimeoutError, and what `work` raises."""
    try:
        async with asyncio.timeout_at(_deadline(timeout_s)):
            return await while_connected(request.receive, work)
    finally:
        abort()


async def _next(events: AsyncGenerator[str]) -> str:
    return await anext(events)


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
