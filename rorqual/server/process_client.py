"""The engine in a process of its own, as the server's event loop sees it. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Self

import msgspec

from rorqual.platform import describe_exit
from rorqual.sampling_params import SamplingParams
from rorqual.server.engine_client import (
    RESPONSE_S,
    EngineClient,
    EngineDead,
    EngineState,
    RequestHandle,
    RequestRefused,
)
from rorqual.server.frames import FrameReader, MalformedFrame, pack
from rorqual.server.messages import (
    Abort,
    Delta,
    Deltas,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    FromEngine,
    Ping,
    Pong,
    Ready,
    Refused,
    ResetPrefixCache,
    Shutdown,
    Start,
    Stats,
    Submit,
    TokenLogprob,
)

COMMAND = (sys.executable, "-m", "rorqual.server.engine_process")
"""What is run, with the number of its socket behind."""
SECONDS_TO_END = 5.0
"""What the process gets to end by itself before it is killed."""

_CHUNK_BYTES = 1 << 20
_MOST_QUEUED = 64
_log = logging.getLogger(__name__)


class ProcessRequestHandle(RequestHandle):
    """One request, and what has come of it that nobody has read yet."""

    def __init__(self, request_id: str, send_abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._send_abort = send_abort
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Delta | Finished | Exception] = deque()
        self._arrived = asyncio.Event()
        self._merge_at = _MOST_QUEUED
        self._has_ended = self._is_aborted = False

    def __aiter__(self) -> AsyncIterator[Delta | Finished]:
        """See `RequestHandle`. Whoever stops reading early, or is cancelled, ends the request."""
        return _Items(self)

    def abort(self) -> None:
        """See `RequestHandle`."""
        if not (self._has_ended or self._is_aborted):
            self._is_aborted = True
            self._send_abort(self.request_id)

    def abort_soon(self) -> None:
        """The same from any thread."""
        if not (self._has_ended or self._is_aborted):
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the engine with it
                self._loop.call_soon_threadsafe(self.abort)

    def put(self, delta: Delta) -> None:
        """Queue a delta. A long queue becomes one delta per answer, so that it holds little more than their text."""
        self._queue.append(delta)
        if len(self._queue) >= self._merge_at:
            by_answer: dict[int, list[Delta]] = {}
            for queued in self._queue:
                assert isinstance(queued, Delta)
                by_answer.setdefault(queued.index, []).append(queued)
            self._queue = deque(map(merged, by_answer.values()))
            self._merge_at = max(_MOST_QUEUED, 2 * len(self._queue))
        self._arrived.set()

    def end(self, last: Finished | Exception) -> None:
        """Queue the last that is said of it."""
        self._has_ended = True
        self._queue.append(last)
        self._arrived.set()

    async def next(self) -> Delta | Finished:
        """Wait for what comes next. Raises RequestRefused and EngineDead."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        item = self._queue.popleft()
        if isinstance(item, Exception):
            raise item
        return item


class _Items(AsyncIterator[Delta | Finished]):
    """What a handle gives. No generator: one that was never advanced would not notice that it is let go."""

    def __init__(self, handle: ProcessRequestHandle) -> None:
        self._handle = handle
        self._is_done = False

    async def __anext__(self) -> Delta | Finished:
        if self._is_done:
            raise StopAsyncIteration
        try:
            item = await self._handle.next()
        except BaseException:  # refused, dead, or the reader was cancelled
            self._is_done = True
            self._handle.abort()
            raise
        self._is_done = isinstance(item, Finished)
        return item

    async def aclose(self) -> None:
        """Stop reading."""
        self._is_done = True
        self._handle.abort()

    def __del__(self) -> None:
        self._handle.abort_soon()


def merged(deltas: Sequence[Delta]) -> Delta:
    """Consecutive deltas of one answer as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    logprobs: list[list[TokenLogprob]] | None = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Delta(
        last.request_id,
        last.index,
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        logprobs,
        last.finish_reason,
        last.stop_reason,
        last.error,
    )


class ProcessEngineClient(EngineClient):
    """An engine in a process that this one starts, and that does not outlive it. Make one with `start`."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._writer = process, writer
        self._state: EngineState = "loading"
        self._failure: str | None = None
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._requests: dict[str, ProcessRequestHandle] = {}
        self._is_closing = False
        self._no_longer_loading = asyncio.Event()
        self._num_pings = 0
        self._pong: asyncio.Future[bool] | None = None
        self._asked_s = 0.0
        """When the ping was sent that it answers, on the event loop's clock."""
        """The outstanding ping's, which everybody who asks waits for."""
        self.on_steps: Callable[[list[int]], None] = lambda _tokens_per_step: None
        """Called with each `Stats.tokens_per_step` as it comes."""
        self._reading = asyncio.create_task(self._read(reader))

    @classmethod
    async def start(cls, options: dict[str, Any], *, command: Sequence[str] | None = None) -> Self:
        """Start the process and return; the model loads meanwhile, see `wait_ready`.

        Linux ends the process with the thread that calls this, not only with the whole program.

        Args:
            options: fields of EngineConfig that were set, and `progress` (of `LLM`) where it is given.
            command: another program that speaks the same; it gets the number of its socket as last argument.

        Raises: OSError if the process cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(command or COMMAND),
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except BaseException:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=_CHUNK_BYTES)
        client = cls(process, reader, writer)
        client._send(Start(options))
        return client

    # ---- how it is

    @property
    def state(self) -> EngineState:
        """See `EngineClient`."""
        return self._state

    @property
    def failure(self) -> str | None:
        """See `EngineClient`."""
        return self._failure

    @property
    def info(self) -> EngineInfo:
        """See `EngineClient`."""
        if self._info is None:
            raise self._dead()
        return self._info

    @property
    def stats(self) -> EngineStats:
        """See `EngineClient`."""
        return self._stats

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def wait_ready(self) -> EngineInfo:
        """Wait until the model is loaded. Raises EngineDead if it cannot be."""
        await self._no_longer_loading.wait()
        if self._state == "dead":
            raise self._dead()
        return self.info

    async def is_responsive(self, timeout_s: float) -> bool:
        """See `EngineClient`."""
        if self._state != "ready":
            return False
        loop = asyncio.get_running_loop()
        if self._pong is None:
            self._pong, self._asked_s = loop.create_future(), loop.time()
            self._num_pings += 1
            self._send(Ping(self._num_pings))
        done, _ = await asyncio.wait([self._pong], timeout=min(timeout_s, RESPONSE_S))
        return all(pong.result() for pong in done) if done else loop.time() - self._asked_s < timeout_s

    # ---- requests

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        streamed: bool = False,
    ) -> ProcessRequestHandle:
        """See `EngineClient`. Also raises EngineDead while the model is loading."""
        if self._state != "ready":
            raise self._dead()
        handle = ProcessRequestHandle(request_id, self._abort)
        if request_id in self._requests:
            handle.end(RequestRefused(f"request id {request_id!r} is that of a request which still runs: use another"))
            return handle
        fields = params.model_dump(exclude_unset=True)
        try:
            if not {int}.issuperset(map(type, prompt_token_ids)):  # the engine takes what is no message for a fault
                raise ValueError("a prompt is a list of token ids")
            frame = pack(Submit(request_id, prompt_token_ids, fields, cache_salt, streamed))
        except (ValueError, TypeError, OverflowError) as error:
            handle.end(RequestRefused(f"this request cannot be sent to the engine: {error}"))
            return handle
        self._requests[request_id] = handle
        self._writer.write(frame)
        return handle

    async def reset_prefix_cache(self) -> None:
        """See `EngineClient`. Requests submitted later find it empty. Raises EngineDead."""
        if self._state != "ready":
            raise self._dead()
        self._send(ResetPrefixCache())

    async def close(self) -> None:
        """See `EngineClient`. Running requests raise EngineDead."""
        if not self._is_closing:
            self._is_closing = True
            if self._state == "ready":
                self._send(Shutdown())
            elif self._state == "loading":  # it would only see a message once it has loaded
                self._kill()
        _, still_there = await asyncio.wait([self._reading], timeout=SECONDS_TO_END)
        if still_there:
            self._kill()
            await asyncio.wait(still_there)

    # ---- the connection

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand on what the engine says, until its end; then tell everybody."""
        frames = FrameReader(FromEngine)
        fault: str | None = None
        try:
            while data := await self._read_some(reader):
                for message in frames.feed(data):
                    self._hear(message)
        except MalformedFrame as error:
            fault = f"the engine sent what the server cannot read ({error})"
            self._kill()
        except Exception as error:  # a fault of ours, which must not leave requests waiting for ever
            _log.exception("what the engine said could not be handed on")
            fault = f"the server failed at what the engine said ({type(error).__name__}: {error})"
            self._kill()
        finally:
            self._writer.close()
            code = await self._exit_code()
            self._die(fault, code)

    async def _read_some(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.read(_CHUNK_BYTES)
        except ConnectionError:  # it ended with messages unread
            return b""

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Deltas():
                for delta in message.items:
                    if (handle := self._requests.get(delta.request_id)) is not None:
                        handle.put(delta)
            case Finished():
                self._end(message.request_id, message)
            case Refused():
                self._end(message.request_id, RequestRefused(message.message))
            case Stats():
                self._stats = message.stats
                self.on_steps(message.tokens_per_step)
            case Pong():
                self._answer_ping(True)
            case Ready():
                self._info = message.info
                self._state = "ready"
                self._no_longer_loading.set()
            case Failed():
                self._failure = message.message

    def _end(self, request_id: str, last: Finished | Exception) -> None:
        if (handle := self._requests.pop(request_id, None)) is not None:
            handle.end(last)

    def _answer_ping(self, alive: bool) -> None:
        pong, self._pong = self._pong, None
        if pong is not None and not pong.done():
            pong.set_result(alive)

    async def _exit_code(self) -> int:
        """Wait for the process to end, and see that it does."""
        try:
            return await asyncio.wait_for(self._process.wait(), SECONDS_TO_END)
        except TimeoutError:
            self._kill()
            return await self._process.wait()

    def _die(self, fault: str | None, code: int) -> None:
        """The process is gone."""
        was_loading = self._state == "loading"
        if self._is_closing:
            self._failure = "the engine was closed"
        else:
            if self._failure is None:
                self._failure = fault or f"the engine's process ended while {'loading' if was_loading else 'serving'}"
            self._failure += f" ({described(code)})"
            _log.error("the engine is dead: %s", self._failure)
        self._state = "dead"
        requests, self._requests = self._requests, {}
        for handle in requests.values():
            handle.end(self._dead())
        self._answer_ping(False)
        self._no_longer_loading.set()

    def _dead(self) -> EngineDead:
        return EngineDead(self._failure or "the model is still loading: try again later")

    def _send(self, message: msgspec.Struct) -> None:
        if self._state != "dead":
            self._writer.write(pack(message))

    def _abort(self, request_id: str) -> None:
        self._send(Abort(request_id))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def described(exit_code: int) -> str:
    """An exit code for people."""
    often = ", as the system does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return describe_exit(exit_code) + often
