"""Hands requests on to replicas, and what they answer back, piece by piece as it comes. No torch."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Literal

from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from rorqual.server.connection import ClientGone, while_connected
from rorqual.server.errors import APIError
from rorqual.server.http_client import Header, HttpError, HttpResponse, NoConnection
from rorqual.server.router.health import HealthChecks
from rorqual.server.router.policy import Balancer, Replica
from rorqual.server.router.prompt import Wanted, wanted
from rorqual.server.router.reply import HOP_BY_HOP, Reply, handed_on
from rorqual.server.router.settings import RoutingSettings

_NOT_ASKED = HOP_BY_HOP | frozenset((b"host", b"content-length", b"expect"))
Fate = Literal["unsent", "refused", "lost"]
"""There was no connection; a 503; a connection that broke."""
_ID = re.compile(r"[\w-]{1,256}")
MOST_LOST = 2
"""A request that so many replicas were lost with may be what they died of: no other gets it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    method: str
    target: bytes
    """Path, without the router's own root path, and query."""
    headers: list[Header]
    """That are handed on; names in lower case."""
    body: bytes
    wanted: Wanted


class Unanswered(Exception):
    """A replica has not answered, and the client knows nothing yet."""

    def __init__(self, answer: Response, fate: Fate) -> None:
        super().__init__()
        self.answer = answer
        """For the client, if nobody else answers."""
        self.fate = fate


class Proxy:
    """The ASGI app."""

    def __init__(self, balancer: Balancer, checks: HealthChecks, settings: RoutingSettings) -> None:
        self._balancer, self._checks, self._settings = balancer, checks, settings
        self._is_ending = False
        self.num_unserved = 0
        """Requests that no replica was there for."""

    def abort_all(self) -> None:
        """End all requests; their clients are told."""
        self._is_ending = True
        for replica in self._balancer.replicas:
            replica.client.abort()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises APIError where no replica does."""
        try:
            asked = await _read(scope, receive)
            await while_connected(receive, self._serve(asked, send))
        except ClientGone:
            pass

    async def everywhere(self, scope: Scope, receive: Receive) -> Response:
        """Send a request to all replicas that are healthy. The answer of the first that refuses it, or else of any."""
        asked = await _read(scope, receive)
        there = [replica for replica in self._balancer.replicas if replica.is_healthy]
        if not there:
            raise self._nobody()
        answers = await asyncio.gather(*(self._whole(replica, asked) for replica in there))
        return next((answer for answer in answers if answer.status_code >= 400), answers[0])

    # ---- one request

    async def _serve(self, asked: Asked, send: Send) -> None:
        balancer, response_id = self._balancer, asked.wanted.response_id
        if response_id is not None:
            await self._find_owner(asked, response_id)
        tried: list[Replica] = []
        num_lost = 0
        answer: Response | None = None
        while (replica := balancer.choose(asked.wanted, without=tried)) is not None:
            if tried:
                tried[-1].num_retries += 1
            try:
                await self._exchange(replica, asked, send)
                return
            except Unanswered as failed:
                tried.append(replica)
                answer = failed.answer
                num_lost += failed.fate == "lost"
                policy_ends_it = failed.fate != "unsent" and self._settings.on_failure == "fail"
                if policy_ends_it or num_lost == MOST_LOST or response_id is not None or self._is_ending:
                    break
        if answer is None:
            raise self._nobody()
        await answer({"type": "http"}, _nothing_more, send)

    async def _exchange(self, replica: Replica, asked: Asked, send: Send) -> None:
        """Let one replica answer. Raises Unanswered."""
        reply = Reply(send, makes_response=asked.wanted.makes_response)
        replica.num_running += 1
        try:
            async with replica.client.request(
                asked.method, asked.target, asked.body, headers=asked.headers
            ) as response:
                replica.num_errors += response.status >= 500
                if response.status == 503:
                    self._checks.ask_soon(replica)
                    raise Unanswered(await _whole(response), "refused")
                reply.begin(response)
                async for burst in response.bursts():
                    await reply.push(burst)
                await reply.finish()
        except HttpError as error:
            replica.num_errors += 1
            if not self._is_ending:
                self._checks.note_lost(replica, error)
            lost = self._lost(replica, error)
            if not reply.has_begun:
                fate: Fate = "unsent" if isinstance(error, NoConnection) else "lost"
                raise Unanswered(lost.response(), fate) from None
            await reply.break_off(lost)
        finally:
            replica.num_running -= 1
            if reply.response_id is not None:
                self._balancer.note_response(reply.response_id, replica)

    async def _whole(self, replica: Replica, asked: Asked) -> Response:
        """One replica's answer, or that there is none."""
        try:
            async with replica.client.request(
                asked.method, asked.target, asked.body, headers=asked.headers
            ) as response:
                return await _whole(response)
        except HttpError as error:
            replica.num_errors += 1
            self._checks.note_lost(replica, error)
            return self._lost(replica, error).response()

    async def _find_owner(self, asked: Asked, response_id: str) -> None:
        """See that the balancer knows who has a stored response, if anybody has. Raises APIError (503) if that replica
        cannot be asked."""
        owner = self._balancer.owner(response_id)
        if owner is not None:
            if not owner.is_healthy:
                raise APIError(
                    503,
                    f"the replica that has the response {response_id!r} is not there ({owner.failure}): try again "
                    "later, or send the whole conversation as input",
                    code="no_replica",
                )
            return
        there = [replica for replica in self._balancer.replicas if replica.is_healthy]
        if len(there) < 2 or not _ID.fullmatch(response_id):
            return
        kept = [(name, value) for name, value in asked.headers if name == b"authorization"]
        look = Asked("GET", f"/v1/responses/{response_id}".encode(), kept, b"", Wanted())
        answers = await asyncio.gather(*(self._whole(replica, look) for replica in there))
        for replica, answer in zip(there, answers, strict=True):
            if answer.status_code == 200:
                self._balancer.note_response(response_id, replica)

    # ---- faults

    def _nobody(self) -> APIError:
        self.num_unserved += 1
        said = "; ".join(f"{replica.url}: {replica.failure}" for replica in self._balancer.replicas)
        return APIError(503, f"no replica takes requests ({said}): try again later", code="no_replica")

    def _lost(self, replica: Replica, error: HttpError) -> APIError:
        if self._is_ending:
            return APIError(500, "this request was ended by the server", code="aborted")
        return APIError(
            503, f"the replica {replica.url} was lost while it had this request: {error}", code="replica_lost"
        )


async def _whole(response: HttpResponse) -> Response:
    """The answer as one that can be sent later. Raises HttpError."""
    whole = Response(await response.body(), status_code=response.status)
    whole.raw_headers += [header for header in handed_on(response) if header[0] != b"content-length"]
    return whole


async def _read(scope: Scope, receive: Receive) -> Asked:
    """The request. Raises ClientGone."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body, root = b"".join(parts), scope.get("root_path", "")
    path = scope["path"].removeprefix(root) or "/"
    target = scope["raw_path"].removeprefix(root.encode()) or b"/"
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_ASKED]
    return Asked(scope["method"], target, headers, body, wanted(scope["method"], path, dict(headers), body))


async def _nothing_more() -> Message:
    return {"type": "http.disconnect"}
