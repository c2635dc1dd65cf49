"""The engine as the server sees it: an asyncio interface that says nothing of processes or HTTP. No torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from rorqual.sampling_params import SamplingParams
from rorqual.server.messages import Delta, EngineInfo, EngineStats, Finished

EngineState = Literal["loading", "ready", "dead"]

RESPONSE_S = 1.0
"""Seconds that `EngineClient.is_responsive` may take."""


class RequestRefused(ValueError):
    """The prompt or the parameters can never be served; the text is for the user."""


class EngineDead(RuntimeError):
    """The engine is not there (any more); the text says what is known."""


class RequestHandle(Protocol):
    """One submitted request."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[Delta | Finished]:
        """Its deltas, if it is streamed, and then one `Finished`, after which it ends.

        Raises: RequestRefused, EngineDead.
        """
        ...

    def abort(self) -> None:
        """End it, whatever its state; its blocks are free within a step. More calls do nothing."""
        ...


class EngineClient(Protocol):
    """What `create_app` is given."""

    @property
    def state(self) -> EngineState:
        """Whether requests can be served."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it is not."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Of the loaded model. Raises EngineDead while there is none."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest ones."""
        ...

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        streamed: bool = False,
    ) -> RequestHandle:
        """Send a request. Raises EngineDead."""
        ...

    async def is_responsive(self, timeout_s: float) -> bool:
        """Whether the engine has answered every question of this kind within so many seconds, as it does between two
        steps; False if it is dead or loading. Itself takes RESPONSE_S at most: a step may be longer than that.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Forget the prefix cache."""
        ...

    async def close(self) -> None:
        """End the engine, and wait until it has ended."""
        ...
