"""`rorqual serve`: the OpenAI-compatible server, with the engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import EngineConfig
from rorqual.server.router.settings import RoutingSettings
from rorqual.server.settings import ServerSettings

if TYPE_CHECKING:
    from rorqual.server.listener import HTTPServer
    from rorqual.server.process_client import ProcessEngineClient
    from rorqual.server.router.processes import ReplicaProcesses
    from rorqual.tokenizer.tokenizer import Tokenizer

ENDPOINTS = "/v1/chat/completions  /v1/completions  /v1/models  /health  /metrics  /openapi.json, and a chat page at /"
REPLICA = (sys.executable, "-m", "rorqual.cli.replica")
"""The program that one of several replicas is."""


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
    routing = settings.build(RoutingSettings)
    log_to_stderr()
    if config.node_rank or config.distributed_executor_backend == "torchrun":
        from rorqual.engine.worker import follow_first_rank

        if (code := follow_first_rank(config)) is not None:
            return code

    from rorqual.server.listener import bind

    with ending_by_sigterm():
        sock = bind(options)
        if config.data_parallel_size > 1 and config.data_parallel_rank is None:
            return _serve_replicas(sock, config, options, routing)
        return serve_on(sock, config, options)


def serve_on(sock: socket.socket, config: EngineConfig, options: ServerSettings, *, replica: int | None = None) -> int:
    """Serve on a socket until a signal, and close it; returns the exit code, 1 if the engine has died.

    Args:
        sock: listens.
        config: the engine.
        options: the server.
        replica: its number where it is one of several, which people reach by another address.

    Raises: ValueError for what is wrong with the model.
    """
    with _closing(sock, options):
        options, tokenizer = _open(config, options)
        failure, has_served = asyncio.run(_serve(config, options, tokenizer, sock, replica))
    if failure is None:
        return 0
    if not has_served:
        raise ValueError(failure)
    say(f"rorqual: error: the engine has died: {failure}")
    return 1


def _serve_replicas(
    sock: socket.socket, config: EngineConfig, options: ServerSettings, routing: RoutingSettings
) -> int:
    """Serve several replicas on a socket until a signal, and close it; returns the exit code. Raises ValueError where
    they cannot be started."""
    from rorqual.server.router.plans import plans_for
    from rorqual.server.router.processes import ReplicaProcesses

    with _closing(sock, options):
        options, _ = _open(config, options)  # so that what is wrong is said once
        plans = plans_for(config, options)
        processes = ReplicaProcesses(REPLICA, plans, routing, tied=config.enable_expert_parallel)
        asyncio.run(_route(processes, options, routing, sock))
    if processes.failure is None:
        return 0
    if not processes.have_started:
        raise ValueError(processes.failure)
    say(f"rorqual: error: {processes.failure}")
    return 1


@contextlib.contextmanager
def _closing(sock: socket.socket, options: ServerSettings) -> Iterator[None]:
    """Let go of the address in the end."""
    try:
        yield
    finally:
        sock.close()
        if options.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(options.uds)


def _open(config: EngineConfig, options: ServerSettings) -> tuple[ServerSettings, Tokenizer]:
    """The tokenizer, and the options with what follows from the model. Raises ValueError."""
    from rorqual.engine.model_files import open_tokenizer
    from rorqual.server.serving import chosen_parsers

    tokenizer, model_config = open_tokenizer(config)
    if tokenizer is None:
        raise ValueError("the server needs a tokenizer: give one with --tokenizer")
    parsers = chosen_parsers(options, tokenizer, model_config)
    found = {
        "served_model_name": options.served_model_name or (config.model,),
        "tool_call_parser": parsers.tool_call or "none",
        "reasoning_parser": parsers.reasoning or "none",
    }
    return options.model_copy(update=found), tokenizer


async def _serve(
    config: EngineConfig, options: ServerSettings, tokenizer: Tokenizer, sock: socket.socket, replica: int | None
) -> tuple[str | None, bool]:
    """Serve; returns why the model could not be loaded or the engine has died, if so, and whether it was loaded."""
    from rorqual.server.app import create_app
    from rorqual.server.listener import HTTPServer, address_of
    from rorqual.server.process_client import ProcessEngineClient

    engine = await ProcessEngineClient.start(config.model_dump(exclude_unset=True, mode="json"))
    app = create_app(engine, options, tokenizer)
    server = HTTPServer(app, options)
    engine.on_steps = app.state.metrics.on_steps
    address = address_of(sock, options)
    place = f"serving  {address}\npaths    {ENDPOINTS}" if replica is None else f"replica  {replica}, {address}"
    starting = asyncio.create_task(_announce(engine, server, place))
    try:
        await server.serve(sockets=[sock])
    finally:
        starting.cancel()
        death = (engine.failure or "it has ended") if engine.state == "dead" else None
        await engine.close()
    if starting.done() and not starting.cancelled() and (failure := await starting) is not None:
        return failure, False
    return death, True


async def _announce(engine: ProcessEngineClient, server: HTTPServer, place: str) -> str | None:
    """Print the banner once the model is loaded, and the place; or end the server, and return why it is not."""
    from rorqual.server.engine_client import EngineDead

    try:
        info = await engine.wait_ready()
    except EngineDead as error:
        server.should_exit = True
        return str(error)
    say(f"{info.banner}\n{place}")
    return None


async def _route(
    processes: ReplicaProcesses, options: ServerSettings, routing: RoutingSettings, sock: socket.socket
) -> None:
    """Start replicas and serve what they do."""
    from rorqual.server.listener import HTTPServer, address_of
    from rorqual.server.router.app import create_router

    app = create_router(processes.replicas, routing, options, publish_replicas=True)
    server = HTTPServer(app, options)
    announcing = asyncio.create_task(_announce_replicas(processes, address_of(sock, options)))

    def end() -> None:
        server.should_exit = True

    processes.on_failure = end
    try:
        await processes.start()
        await server.serve(sockets=[sock])
    finally:
        announcing.cancel()
        app.state.serving.abort_all()
        await processes.stop()


async def _announce_replicas(processes: ReplicaProcesses, address: str) -> None:
    """Print the banner once all are there."""
    while not processes.have_started:
        await asyncio.sleep(0.1)
    say(f"serving  {address}\nreplicas {len(processes.replicas)}\npaths    {ENDPOINTS}")


@contextlib.contextmanager
def ending_by_sigterm() -> Iterator[None]:
    """Until the server listens to signals, SIGTERM ends: process 1 of a container would not even end by it."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def say(text: str) -> None:
    """Tell people."""
    with contextlib.suppress(OSError):  # a full disk or a closed pipe behind stderr is no reason to end
        print(text, file=sys.stderr, flush=True)


def log_to_stderr(who: str = "") -> None:
    """Log for people; `who` begins each message."""
    shown = who.replace("%", "%%")
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s %(levelname)s {shown}%(message)s")
    logging.raiseExceptions = False  # what cannot be logged, because the disk is full, is lost


COMMAND = Command(
    words=("serve",),
    summary="serve a model over an OpenAI-compatible HTTP API",
    details="Serve a model over HTTP, as OpenAI's API. SIGTERM lets running requests end; a second one does not.",
    models=(ServerSettings, EngineConfig, RoutingSettings),
    run=run,
    usage="[MODEL] [OPTIONS]",
    max_positionals=1,
)
