"""What clients do to `rorqual serve`: the request at fault fails, and nothing else does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.served import LONG, NAME, SHORT, Served, complete, serve

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")

BODY_TIMEOUT_S = 2


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(f"--body-timeout={BODY_TIMEOUT_S}", "--max-queue=4", "--max-body-size=12MiB") as server:
        yield server


@pytest.fixture
def right(served: Served) -> Iterator[str]:
    """A short answer; it is the same after the test, and nothing is left of what happened in between."""
    before = complete(served)
    yield before
    assert complete(served) == before
    assert served.is_idle()
    end = time.monotonic() + 3
    while (usage := served.load()["kv_cache_usage"]) and time.monotonic() < end:
        time.sleep(0.1)
    assert usage == 0


def chunks(lines: Iterator[str]) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in lines if line)


def generated(served: Served) -> float:
    """Tokens that the engine has generated."""
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


# --- clients


@pytest.mark.usefixtures("right")
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_clients_that_leave_at_each_chunk(served: Served, path: str) -> None:
    before, leaving = generated(served), range(0, 24, 2)
    messages = [{"role": "user", "content": "Hello"}]
    body = {"completions": LONG, "chat/completions": LONG | {"messages": messages}}.get(
        path, {"model": NAME, "input": "Hello", "ignore_eos": True, "max_output_tokens": 200, "temperature": 0}
    )
    body = {k: v for k, v in body.items() if k != "prompt" or path == "completions"}
    for number in leaving:
        with httpx.stream("POST", f"{served.url}/v1/{path}", json=body | {"stream": True}, timeout=60) as answer:
            assert answer.status_code == 200
            for _, _ in zip(range(number), chunks(answer.iter_lines()), strict=False):
                pass
        assert served.is_idle(2.0)
    time.sleep(1.2)  # the engine's numbers come once a second
    assert generated(served) - before < len(leaving) * 150


@pytest.mark.usefixtures("right")
def test_clients_that_do_not_wait_for_a_whole_answer(served: Served) -> None:
    before = generated(served)
    for _ in range(4):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.url}/v1/completions", json=LONG | {"n": 8}, timeout=0.1)
        assert served.is_idle(2.0)
    time.sleep(1.2)
    assert generated(served) - before < 4 * 8 * 200


@pytest.mark.usefixtures("right")
@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "../tokenize"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1, 2]", b"null", b'"x"', b"\xff\xfe", b'{"model": ', b'{"a": NaN}', b"[" * 100_000, b'{"a":' * 5000],
    ids=["empty", "open", "list", "null", "string", "bytes", "cut", "NaN", "deep list", "deep object"],
)
def test_malformed_json(served: Served, path: str, content: bytes) -> None:
    url = httpx.URL(f"{served.url}/v1/").join(path)
    answer = httpx.post(url, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.usefixtures("right")
@pytest.mark.parametrize(("size", "status"), [(10_000_000, 200), (13_000_000, 413), (100_000_000, 413)])
def test_large_bodies(served: Served, size: int, status: int) -> None:
    content = json.dumps(SHORT | {"user": "x" * size}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        answer = httpx.post(f"{served.url}/v1/completions", content=content, headers=headers, timeout=60)
    except httpx.TransportError:
        assert size == 100_000_000  # it may close before it has read all that
        return
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.usefixtures("right")
def test_a_large_prompt_does_not_stop_the_others(served: Served) -> None:
    async def both() -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            start = time.monotonic()
            large = asyncio.create_task(client.post("/v1/completions", json=SHORT | {"prompt": "word " * 400_000}))
            longest = 0.0
            while not large.done():
                asked = time.monotonic()
                assert (await client.get("/version")).status_code == 200
                longest = max(longest, time.monotonic() - asked)
                await asyncio.sleep(0.01)
            assert large.result().json()["error"]["code"] == "context_length_exceeded"
            return longest, time.monotonic() - start

    longest, whole = asyncio.run(both())
    assert longest < whole / 2


@pytest.mark.usefixtures("right")
def test_slow_headers_and_slow_bodies(served: Served, right: str) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    slow = [socket.create_connection((host, int(port)), timeout=BODY_TIMEOUT_S + 8) for _ in range(60)]
    for sock in slow[:30]:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    for sock in slow[30:]:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        )
    start = time.monotonic()
    while time.monotonic() - start < BODY_TIMEOUT_S + 2:
        for sock in slow:
            with contextlib.suppress(OSError):
                sock.sendall(b"x")
        assert complete(served) == right
        time.sleep(0.2)
    answers = []
    for sock in slow:
        said = b""
        with contextlib.suppress(ConnectionError):
            while more := sock.recv(4096):
                said += more
        answers.append(said)
        sock.close()
    assert all(b" 408 " in said or not said for said in answers[30:]), answers[30:]
    assert any(b" 408 " in said for said in answers[30:])
    assert not any(b" 200 " in said for said in answers)


@pytest.mark.usefixtures("right")
def test_a_full_queue(served: Served) -> None:
    async def crowd() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=LONG) for _ in range(40)))

    answers = asyncio.run(crowd())
    refused = [a for a in answers if a.status_code != 200]
    assert {a.status_code for a in refused} == {503}
    assert all(int(a.headers["retry-after"]) > 0 and a.json()["error"]["code"] == "queue_full" for a in refused)
    served_texts = [a.json()["choices"][0]["text"] for a in answers if a.status_code == 200]
    assert 16 <= len(served_texts) < 40
    assert len(set(served_texts)) == 1
