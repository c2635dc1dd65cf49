"""What every HTTP request passes before a route sees it: the key, whether requests are taken, and its body's limits."""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rorqual.server.connection import ClientGone
from rorqual.server.errors import APIError
from rorqual.server.listener import Drainable
from rorqual.server.settings import ListenerSettings

WATCHING = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/openapi.json"})
"""Paths that watch the server: they need no key, and are answered while it drains."""
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_DISCARDED = 4
"""How many times its limit a body may be for the server to read it to its end: only then do all clients see the 413."""


class Gateway:
    """The middleware. A request's body reaches the app in one piece.

    Args:
        app: what is behind it.
        state: whether requests are taken, and where they are counted.
        settings: the limits.
        keys: one of which each request needs; with none, what a request has is the app's to judge.
        request_ids: whether answers carry X-Request-Id.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: Drainable,
        settings: ListenerSettings,
        *,
        keys: Sequence[str] = (),
        request_ids: bool = False,
    ) -> None:
        self._app, self._state, self._settings, self._request_ids = app, state, settings, request_ids
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or hand on, one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._request_ids:
            send = _with_request_id(headers, send)
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        if path in WATCHING:
            await self._app(scope, receive, send)
            return
        self._state.num_http_requests += 1
        try:
            self._check_key(headers)
            if self._state.draining:
                raise APIError(503, "the server is about to end and takes no more requests", code="draining")
            if scope["method"] in _WITH_BODY:
                receive = _replay(await self._read_body(headers, receive), receive)
            await self._app(scope, receive, send)
        except APIError as error:  # raised here: the app's own are answered inside
            await error.response()(scope, receive, send)
        except ClientGone:
            pass
        finally:
            self._state.num_http_requests -= 1

    def _check_key(self, headers: Headers) -> None:
        if not self._keys:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode() if scheme.lower() == "bearer" else b""
        # Each is compared to its end, so that the time says nothing.
        if not sum([hmac.compare_digest(key, known) for known in self._keys]):
            raise APIError(
                401,
                "this server needs an API key, as the header Authorization: Bearer KEY; "
                + ("the one given is wrong" if given else "none was given"),
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read_body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._settings.max_body_size
        too_large = APIError(413, f"the body must have at most {limit} bytes: send less", code="body_too_large")
        said = headers.get("content-length", "")
        if said.isdigit() and int(said) > _DISCARDED * limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    size += len(message.get("body", b""))
                    if size > _DISCARDED * limit:
                        raise too_large
                    if size <= limit:
                        parts.append(message.get("body", b""))
                    else:
                        parts.clear()
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise APIError(
                408,
                f"the body did not come within {self._settings.body_timeout:g} s",
                code="timeout",
                headers={"Connection": "close"},
            ) from None
        if size > limit:
            raise too_large
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body, and then what else comes."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


def _with_request_id(headers: Headers, send: Send) -> Send:
    given = headers.get("x-request-id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["X-Request-Id"] = request_id
        await send(message)

    return with_id
