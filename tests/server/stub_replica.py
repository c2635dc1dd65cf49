"""Servers that answer as a test tells them, and a router in front of them, all in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import h11
import httpx

from rorqual.server.listener import HTTPServer, address_of, bind
from rorqual.server.router.app import RouterState, create_router
from rorqual.server.router.policy import Replica
from rorqual.server.router.settings import RoutingSettings
from rorqual.server.settings import ListenerSettings

STREAM_HEADERS = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]


@dataclass
class Seen:
    """A request that a stub got."""

    method: str
    target: str
    headers: dict[str, str]
    body: Any


@dataclass
class Stub:
    """A replica: it answers a completion with as many pieces as it wants tokens, each of which names it.

    `faults` are taken one per completion or response: "lost" closes the connection before an answer, "cut" after two
    pieces and half of a third (or after half of an answer that is no stream), "hang" waits after two pieces for
    `release`, a number is a status.
    """

    name: str
    port: int = 0
    ready: int = 200
    load: int = 0
    faults: deque[str | int] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    """Requests but those for its health."""
    running: int = 0
    left: int = 0
    """Clients that went away from a stream that hangs."""
    num_checks: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    silent: bool = False
    """Answer nothing at all."""
    num_responses: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port each time."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=1 << 24)
        self.port = self._server.sockets[0].getsockname()[1]

    def kill(self) -> None:
        """Die as a process that is killed."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        connection = h11.Connection(h11.SERVER)
        try:
            while True:
                request, body = None, b""
                while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                    if event is h11.NEED_DATA:
                        connection.receive_data(await reader.read(1 << 16))
                    elif isinstance(event, h11.Request):
                        request = event
                    elif isinstance(event, h11.Data):
                        body += bytes(event.data)
                    else:
                        return
                if self.silent:
                    await asyncio.sleep(60)
                await self._answer(request, body, connection, reader, writer)
                connection.start_next_cycle()
        except (ConnectionError, h11.ProtocolError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request, body, connection, reader, writer) -> None:
        target, method = request.target.decode(), request.method.decode()

        async def send(*events) -> None:
            for event in events:
                writer.write(connection.send(event) or b"")
            await writer.drain()

        async def whole(status: int, content: Any, kind: str = "application/json") -> None:
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            headers = [("content-type", kind), ("content-length", str(len(data))), ("x-stub", self.name)]
            await send(h11.Response(status_code=status, headers=headers), h11.Data(data=data), h11.EndOfMessage())

        if target in ("/ready", "/load", "/metrics"):
            self.num_checks += target == "/ready"
            if target == "/ready":
                await whole(self.ready, {"error": {"message": "busy with itself", "code": "engine_dead"}})
            elif target == "/load":
                await whole(200, {"server_load": self.load})
            else:
                await whole(200, "# HELP vllm:x X.\n# TYPE vllm:x counter\nvllm:x_total 3.0\n", "text/plain")
            return
        headers = {name.decode(): value.decode() for name, value in request.headers}
        asked = json.loads(body) if body else None
        self.seen.append(Seen(method, target, headers, asked))
        path = target.partition("?")[0]
        if path.startswith("/v1/responses/"):
            mine = path.rsplit("/", 1)[1].startswith(f"resp_{self.name}")
            await whole(200 if mine else 404, {"id": path.rsplit("/", 1)[1]} if mine else {"error": {"message": "no"}})
            return
        if method != "POST" or path not in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
            await whole(200, {"name": self.name})
            return
        fault = self.faults.popleft() if self.faults else None
        if fault == "lost":
            writer.transport.abort()
            raise ConnectionError
        if isinstance(fault, int):
            await whole(fault, {"error": {"message": f"{self.name} says {fault}"}})
            return
        self.running += 1
        try:
            pieces = self._pieces(path, asked)
            if not asked.get("stream"):
                if fault == "hang":
                    await self._hang(reader)
                if fault == "cut":
                    await send(h11.Response(status_code=200, headers=[("content-length", "9")]), h11.Data(data=b"half"))
                    await asyncio.sleep(0.01)
                    writer.transport.abort()
                    raise ConnectionError
                await whole(200, {"id": f"resp_{self.name}{self.num_responses}", "name": self.name})
                return
            await send(h11.Response(status_code=200, headers=STREAM_HEADERS))
            for number, piece in enumerate(pieces):
                if number == 2 and fault == "cut":
                    await send(h11.Data(data=piece[: len(piece) // 2]))
                    await asyncio.sleep(0.01)
                    writer.transport.abort()
                    raise ConnectionError
                if number == 2 and fault == "hang":
                    await self._hang(reader)
                await send(h11.Data(data=piece))
            await send(h11.EndOfMessage())
        finally:
            self.running -= 1

    def _pieces(self, path: str, asked: dict[str, Any]) -> list[bytes]:
        self.num_responses += 1
        count = asked.get("max_tokens") or 3
        if path == "/v1/responses":
            response = {"id": f"resp_{self.name}{self.num_responses}", "status": "in_progress", "output": []}
            events = [{"type": "response.created", "sequence_number": 0, "response": response}]
            events += [
                {"type": "response.output_text.delta", "sequence_number": i + 1, "delta": "x"} for i in range(count)
            ]
            return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]
        texts = [json.dumps({"choices": [{"text": self.name}]})] * count
        return [f"data: {text}\n\n".encode() for text in (*texts, "[DONE]")]

    async def _hang(self, reader: asyncio.StreamReader) -> None:
        gone, released = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(self.release.wait())
        done, _ = await asyncio.wait((gone, released), return_when=asyncio.FIRST_COMPLETED)
        if gone in done:
            self.left += 1
            raise ConnectionError
        gone.cancel()


@dataclass
class Routed:
    """A router that runs."""

    url: str
    client: httpx.AsyncClient
    state: RouterState
    server: HTTPServer
    stubs: list[Stub]

    async def complete(self, prompt: Any = "x", *, headers: dict[str, str] | None = None, **fields: Any) -> str:
        """Send a completion; returns the name of the stub that answered."""
        answer = await self.client.post("/v1/completions", json={"prompt": prompt} | fields, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()["name"]

    async def stream(self, path: str = "/v1/completions", **fields: Any) -> list[str]:
        """The lines of a stream that say something, without "data: "."""
        async with self.client.stream("POST", path, json={"prompt": "x", "stream": True} | fields) as answer:
            assert answer.status_code == 200
            return [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]

    def replica(self, stub: Stub) -> Replica:
        return next(r for r in self.state.balancer.replicas if r.url == stub.url)

    def by_name(self, name: str) -> tuple[Stub, Stub]:
        """A stub of two, and the other."""
        first, second = self.stubs
        return (first, second) if first.name == name else (second, first)


@contextlib.asynccontextmanager
async def routed(
    *names: str, publish_replicas: bool = False, listener: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Routed]:
    """A router in front of stubs. Health is checked often."""
    stubs = [Stub(name) for name in names]
    for stub in stubs:
        await stub.start()
    routing = RoutingSettings(**({"health_check_interval": 0.05} | settings))
    listening = ListenerSettings(**({"port": 0, "drain_timeout": 0.5} | (listener or {})))
    replicas = [Replica(stub.url, routing) for stub in stubs]
    app = create_router(replicas, routing, listening, publish_replicas=publish_replicas)
    server = HTTPServer(app, listening)
    with bind(listening) as sock:
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        url = address_of(sock, listening)
        async with httpx.AsyncClient(base_url=url, timeout=10) as client:
            try:
                yield Routed(url, client, app.state.serving, server, stubs)
            finally:
                for stub in stubs:
                    stub.release.set()
                    stub.kill()
                server.should_exit = True
                await serving


async def soon(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
