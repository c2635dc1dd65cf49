"""Sends requests as many at a time, or at such times, as asked. No torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from rorqual.cli.load.requests import Endpoint, Record, send
from rorqual.server.http_client import HttpClient

OnDone = Callable[[Record], object]


async def closed_loop(
    client: HttpClient, endpoint: Endpoint, bodies: Sequence[bytes], *, streams: int, timeout_s: float, on_done: OnDone
) -> list[Record]:
    """So many requests at a time: whoever has its answer sends the next. Records in the order of `bodies`."""
    records: dict[int, Record] = {}
    queue: Iterator[tuple[int, bytes]] = iter(enumerate(bodies))

    async def stream() -> None:
        for number, body in queue:
            record = await send(client, endpoint, body, due_s=time.perf_counter(), timeout_s=timeout_s)
            records[number] = record
            on_done(record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(bodies))):
            group.create_task(stream())
    return [records[number] for number in range(len(bodies))]


async def open_loop(
    client: HttpClient,
    endpoint: Endpoint,
    bodies: Sequence[bytes],
    times_s: Iterable[float],
    *,
    most: int | None,
    timeout_s: float,
    on_done: OnDone,
) -> list[Record]:
    """Each request when it is due, however many still run; with `most`, no more than that at a time."""
    started = time.perf_counter()
    slots = asyncio.Semaphore(most if most is not None else len(bodies))

    async def one(body: bytes, due_s: float) -> Record:
        async with slots:
            record = await send(client, endpoint, body, due_s=due_s, timeout_s=timeout_s)
        on_done(record)
        return record

    tasks = []
    async with asyncio.TaskGroup() as group:
        for body, at in zip(bodies, times_s, strict=False):
            await asyncio.sleep(started + at - time.perf_counter())
            tasks.append(group.create_task(one(body, started + at)))
    return [task.result() for task in tasks]
