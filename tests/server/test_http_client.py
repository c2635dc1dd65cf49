"""The HTTP client as the router needs it: what it sends once only, what it reuses, and how a request is ended."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.server.errors import APIError
from rorqual.server.http_client import REFUSED, HttpClient, HttpError, NoConnection
from rorqual.server.router.reply import Reply
from tests.server.stub_replica import Stub, soon

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def answering(*answers, seen):
    """A server whose connections each answer so many requests, and then read one more and close."""
    left = list(answers)

    async def handle(reader, writer):
        for answer in [ANSWER] * left.pop(0):
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
        await reader.read(1 if left else 0)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def ask(client, **options):
    async with client.request("GET", "/x", **options) as answer:
        return answer.status, await answer.body()


@pytest.mark.asyncio
@pytest.mark.parametrize("resent", [True, False])
async def test_a_request_that_a_used_connection_lost_is_sent_again_only_if_it_may_be(resent):
    seen = []
    server, url = await answering(1, 5, seen=seen)
    client = HttpClient(url, max_idle_s=None if resent else 10)
    assert await ask(client) == (200, b"ok")
    if resent:
        assert await ask(client) == (200, b"ok")
    else:
        with pytest.raises(HttpError) as caught:
            await ask(client)
        assert not isinstance(caught.value, NoConnection)
        assert len(seen) == 1
    client.close()
    server.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(("pause_s", "max_idle_s", "connections"), [(0, 10, 1), (0.05, 0.01, 2)])
async def test_only_fresh_connections_are_used_again(pause_s, max_idle_s, connections):
    seen, count = [], 0

    async def handle(reader, writer):
        nonlocal count
        count += 1
        while data := await reader.read(1000):
            seen.append(data)
            writer.write(ANSWER)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", max_idle_s=max_idle_s)
    for _ in range(2):
        assert await ask(client) == (200, b"ok")
        await asyncio.sleep(pause_s)
    assert (len(seen), count) == (2, connections)
    client.close()
    server.close()


@pytest.mark.asyncio
async def test_all_requests_can_be_ended():
    stub = Stub("a")
    await stub.start()
    client = HttpClient(stub.url)
    stub.faults += ["hang"] * 3
    asking = [asyncio.create_task(_stream(client)) for _ in range(3)]
    await soon(lambda: stub.running == 3)
    client.abort()
    assert [str(await task)[:25] for task in asking] == ["the connection was closed"] * 3
    await soon(lambda: stub.running == 0)
    stub.kill()
    await asyncio.sleep(0)
    with pytest.raises(NoConnection) as caught:
        await ask(client)
    assert caught.value.kind == REFUSED


async def _stream(client):
    try:
        async with client.request("POST", "/v1/completions", b'{"stream": true}') as answer:
            async for _ in answer.bursts():
                pass
    except HttpError as error:
        return error


@pytest.mark.parametrize("url", ["http://a/b c", "http://ä", "http://a\n"])
def test_a_url_that_could_not_be_sent_is_refused(url):
    with pytest.raises(ValueError, match="visible ASCII"):
        HttpClient(url)


EVENTS = b"".join(b"data: %d\n\n" % i for i in range(6)) + b"event: x\r\ndata: y\r\n\r\n"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, len(EVENTS)), max_size=8), st.integers(0, len(EVENTS)))
def test_however_a_stream_is_split_whole_events_pass_and_only_those(places, cut):
    sent: list[bytes] = []

    async def send(message):
        sent.append(message.get("body", b""))

    async def pass_on():
        reply = Reply(send, makes_response=False)
        reply.begin(_Head())
        bounds = [0, *sorted(place for place in places if place < cut), cut]
        for start, stop in itertools.pairwise(bounds):
            await reply.push(EVENTS[start:stop])
        if cut == len(EVENTS):
            await reply.finish()
        else:
            await reply.break_off(APIError(503, "gone"))

    asyncio.run(pass_on())
    whole = b"".join(sent)
    if cut == len(EVENTS):
        assert whole == EVENTS
    else:
        passed, _, error = whole.rpartition(b'data: {"error":')
        assert b'"message":"gone"' in error
        assert EVENTS.startswith(passed)
        rest = EVENTS[len(passed) : cut]
        assert not passed or passed.endswith((b"\n\n", b"\r\n\r\n"))
        assert b"\n\n" not in rest
        assert b"\r\n\r\n" not in rest


class _Head:
    status = 200
    headers = ((b"content-type", b"text/event-stream"),)
