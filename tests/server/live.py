"""The app on a real port, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from rorqual.server.app import create_app
from rorqual.server.engine_client import EngineClient
from rorqual.server.listener import HTTPServer, address_of, bind
from rorqual.server.settings import ServerSettings
from rorqual.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngineClient, Script, chat_tokenizer, echoes

MODEL = "fake"
HTTP = httpx.Client(verify=False, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))
"""For plain requests; making a client each time would take longer than most of them."""


class Live:
    """A server that runs, and the engine behind it."""

    def __init__(self, engine: Any, server: HTTPServer, url: str) -> None:
        self.engine, self.server, self.url = engine, server, url
        self.state = server._state

    def client(self, **options: Any) -> OpenAI:
        """OpenAI's client, which refuses what is not as the API says."""
        return OpenAI(**self._options(options))

    def async_client(self, **options: Any) -> AsyncOpenAI:
        """The same for asyncio."""
        return AsyncOpenAI(**self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        fixed = {"base_url": f"{self.url}/v1", "api_key": "any", "max_retries": 0, "timeout": 30}
        return fixed | {"_strict_response_validation": True} | options


@contextmanager
def live(
    script: Script = echoes,
    *,
    engine: EngineClient | None = None,
    tokenizer: Tokenizer | None = None,
    settings: dict[str, Any] | None = None,
    **engine_options: Any,
) -> Iterator[Live]:
    """A server over a `FakeEngineClient`, or over another engine."""
    engine = engine or FakeEngineClient(script, **engine_options)
    chosen = ServerSettings(**({"port": 0, "served_model_name": (MODEL,), "drain_timeout": 5.0} | (settings or {})))
    server = HTTPServer(create_app(engine, chosen, tokenizer or chat_tokenizer()), chosen)
    with bind(chosen) as sock:
        url = address_of(sock, chosen)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
        thread.start()
        try:
            yield Live(engine, server, url)
        finally:
            server.should_exit = True
            thread.join(timeout=20)
            assert not thread.is_alive()
