"""Responses kept in memory for the turns after them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rorqual.server.errors import APIError
from rorqual.server.schemas.responses import Response


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and what the next turn goes on with."""

    response: Response
    messages: list[dict[str, Any]]
    """The conversation up to here as messages of a chat, without instructions."""
    size: int
    """Bytes of JSON, about."""
    expires_s: float


class ResponseStore:
    """The newest responses; the oldest give way.

    Args:
        ttl_s: how long one is kept.
        max_count, max_bytes: how many are kept at most.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        ttl_s: float = 3600.0,
        max_count: int = 1000,
        max_bytes: int = 64 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s, self._max_count, self._max_bytes, self._clock = ttl_s, max_count, max_bytes, clock
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: Response, messages: list[dict[str, Any]], size: int) -> None:
        """Keep a response. One that is larger than all that may be kept is not."""
        self._kept[response.id] = StoredResponse(response, messages, size, self._clock() + self._ttl_s)
        self._num_bytes += size
        while self._kept and (len(self._kept) > self._max_count or self._num_bytes > self._max_bytes or self._is_old()):
            self._drop(next(iter(self._kept)))

    def get(self, response_id: str, *, param: str | None = None) -> StoredResponse:
        """The response. Raises APIError (404)."""
        while self._kept and self._is_old():
            self._drop(next(iter(self._kept)))
        stored = self._kept.get(response_id)
        if stored is None:
            raise APIError(
                404,
                f"there is no response {response_id!r}: responses are kept in memory for {self._ttl_s:.0f} s, unless "
                "they were made with store=false or have given way to newer ones; send the whole conversation as input",
                param=param,
                code="response_not_found",
            )
        return stored

    def delete(self, response_id: str) -> None:
        """Forget a response. Raises APIError (404)."""
        self.get(response_id)
        self._drop(response_id)

    def _is_old(self) -> bool:
        return next(iter(self._kept.values())).expires_s <= self._clock()

    def _drop(self, response_id: str) -> None:
        self._num_bytes -= self._kept.pop(response_id).size
