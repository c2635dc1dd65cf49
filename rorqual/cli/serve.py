"""`rorqual serve`: the OpenAI-compatible server, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig
from rorqual.server.settings import ServerSettings

if TYPE_CHECKING:
    from rorqual.server.listener import HTTPServer
    from rorqual.server.process_client import ProcessEngineClient
    from rorqual.tokenizer.tokenizer import Tokenizer

ENDPOINTS = "/v1/chat/completions  /v1/completions  /v1/models  /health  /metrics  /openapi.json, and a chat page at /"


def run(settings: Settings) -> int:
    """Serve until a signal; the address is taken, and what can be wrong with the model is, before it loads."""
    if settings.positionals:
        if "model" in settings.values(EngineConfig):
            raise ValueError(
                f"the model is given twice, as {settings.positionals[0]!r} and by "
                f"{settings.origin(EngineConfig, 'model')}: leave one out"
            )
        settings.set(EngineConfig, "model", settings.positionals[0], origin="MODEL")
    config, options = settings.build(EngineConfig), settings.build(ServerSettings)
    _log_to_stderr()
    # Until the server listens to signals; process 1 of a container would not even end by them.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        return _run(config, options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(config: EngineConfig, options: ServerSettings) -> int:
    from rorqual.engine.model_files import open_tokenizer
    from rorqual.server.listener import bind
    from rorqual.server.serving import chosen_parsers

    sock = bind(options)
    try:
        tokenizer, model_config = open_tokenizer(config)
        if tokenizer is None:
            raise ValueError("the server needs a tokenizer: give one with --tokenizer")
        parsers = chosen_parsers(options, tokenizer, model_config)
        options = options.model_copy(
            update={
                "served_model_name": options.served_model_name or (config.model,),
                "tool_call_parser": parsers.tool_call or "none",
                "reasoning_parser": parsers.reasoning or "none",
            }
        )
        failure = asyncio.run(_serve(config, options, tokenizer, sock))
    finally:
        sock.close()
        if options.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(options.uds)
    if failure is not None:
        raise ValueError(failure)
    return 0


async def _serve(
    config: EngineConfig, options: ServerSettings, tokenizer: Tokenizer, sock: socket.socket
) -> str | None:
    """Serve; returns why the model could not be loaded, if it could not."""
    from rorqual.server.app import create_app
    from rorqual.server.listener import HTTPServer, address_of
    from rorqual.server.process_client import ProcessEngineClient

    engine = await ProcessEngineClient.start(config.model_dump(exclude_unset=True, mode="json"))
    app = create_app(engine, options, tokenizer)
    server = HTTPServer(app, options)
    engine.on_steps = app.state.metrics.on_steps
    starting = asyncio.create_task(_announce(engine, server, address_of(sock, options)))
    try:
        await server.serve(sockets=[sock])
    finally:
        starting.cancel()
        await engine.close()
    return (await starting) if starting.done() and not starting.cancelled() else None


async def _announce(engine: ProcessEngineClient, server: HTTPServer, address: str) -> str | None:
    """Print the banner once the model is loaded; or end the server, and return why it is not."""
    from rorqual.server.engine_client import EngineDead

    try:
        info = await engine.wait_ready()
    except EngineDead as error:
        server.should_exit = True
        return str(error)
    _say(f"{info.banner}\nserving  {address}\npaths    {ENDPOINTS}")
    return None


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe behind stderr is no reason to end
        print(text, file=sys.stderr, flush=True)


def _log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.raiseExceptions = False  # what cannot be logged, because the disk is full, is lost


COMMAND = Command(
    words=("serve",),
    summary="serve a model over an OpenAI-compatible HTTP API",
    details="Serve a model over HTTP, as OpenAI's API. SIGTERM lets running requests end; a second one does not.",
    models=(ServerSettings, EngineConfig),
    run=run,
    usage="[MODEL] [OPTIONS]",
    max_positionals=1,
)
