"""Ends of `rorqual serve` and of its engine, by signals, and a log that cannot be written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.served import LONG, SHORT, Served, complete, serve

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")


def soon(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


class Streams:
    """Streams that run at once, and how each ended."""

    def __init__(self, served: Served, count: int, **fields: Any) -> None:
        self._served, self._count, self._fields = served, count, fields
        self.begun = asyncio.Event()
        self.ends: list[list[str]] = []

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=self._count)
        async with httpx.AsyncClient(base_url=self._served.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(self._one(client) for _ in range(self._count)))

    async def _one(self, client: httpx.AsyncClient) -> None:
        said: list[str] = []
        self.ends.append(said)
        body = LONG | {"stream": True} | self._fields
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line:
                        said.append(line.removeprefix("data: "))
                    if all(len(s) > 2 for s in self.ends):
                        self.begun.set()
        except httpx.TransportError:
            said.append("broken")


def test_a_killed_engine() -> None:
    with serve() as served:

        async def kill() -> tuple[Streams, httpx.Response, float]:
            streams = Streams(served, 4)
            async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                running = asyncio.create_task(streams.run())
                whole = asyncio.create_task(client.post("/v1/completions", json=LONG))
                await streams.begun.wait()
                os.kill(served.engine_pid, signal.SIGKILL)
                start = time.monotonic()
                answer = await whole
                await running
                return streams, answer, time.monotonic() - start

        streams, answer, seconds = asyncio.run(kill())
        assert seconds < 5
        assert answer.status_code == 503
        assert "SIGKILL" in answer.json()["error"]["message"]
        for said in streams.ends:
            assert "error" in json.loads(said[-1]), said[-1]
        health = httpx.get(f"{served.url}/health")
        assert health.status_code == 503
        assert "SIGKILL" in health.json()["error"]["message"]
        refused = httpx.post(f"{served.url}/v1/completions", json=SHORT)
        assert refused.status_code == 503
        served.process.terminate()
        served.process.wait(10)


def test_a_killed_server() -> None:
    with serve() as server:
        engine = server.engine_pid
        port = int(server.url.rsplit(":", 1)[1])

        async def kill() -> Streams:
            streams = Streams(server, 4)
            running = asyncio.create_task(streams.run())
            await streams.begun.wait()
            server.process.kill()
            await running
            return streams

        streams = asyncio.run(kill())
        assert all(said[-1] == "broken" for said in streams.ends)
        assert soon(lambda: not alive(engine))
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", port))


def test_sigterm_drains_and_a_second_one_does_not() -> None:
    with serve() as server:
        engine = server.engine_pid

        async def drain() -> tuple[Streams, set[str]]:
            streams, said = Streams(server, 8), set[str]()
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                running = asyncio.create_task(streams.run())
                await streams.begun.wait()
                server.process.send_signal(signal.SIGTERM)
                await asyncio.sleep(0.3)
                while not running.done():
                    try:
                        for path in ("/ready", "/v1/completions"):
                            body = None if path == "/ready" else SHORT
                            answer = await client.request("POST" if body else "GET", path, json=body)
                            said.add(f"{path} {answer.status_code}")
                    except httpx.TransportError:
                        said.add("closed")
                    await asyncio.sleep(0.05)
                await running
            return streams, said

        streams, said = asyncio.run(drain())
        assert all(s[-1] == "[DONE]" and len(s) > 50 for s in streams.ends)
        assert said <= {"/ready 503", "/v1/completions 503", "closed"}
        assert server.process.wait(10) == 0
        assert soon(lambda: not alive(engine))


def test_a_second_sigterm_does_not_wait() -> None:
    with serve("--max-num-seqs=1") as server:
        engine = server.engine_pid

        async def end() -> tuple[Streams, float]:
            streams = Streams(server, 1, n=32)
            running = asyncio.create_task(streams.run())
            await streams.begun.wait()
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            start = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            await running
            return streams, time.monotonic() - start

        streams, seconds = asyncio.run(end())
        assert seconds < 3
        assert all(s[-1] != "[DONE]" for s in streams.ends)
        server.process.wait(10)
        assert soon(lambda: not alive(engine))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_for_the_log() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with serve(f"--port={port}", "--enable-log-requests", stderr="/dev/full") as server:
        assert complete(server) == complete(server)
        assert httpx.post(f"{server.url}/v1/completions", json=SHORT | {"foo": 1}).status_code == 200
        assert httpx.post(f"{server.url}/v1/completions", content=b"{").status_code == 400
        server.process.terminate()
        assert server.process.wait(10) == 0
