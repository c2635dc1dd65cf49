"""The process in which the engine runs: `python -m rorqual.server.engine_process FD`, FD a connected stream socket.

A plain loop: take what has arrived, step, say what came of it. It ends with the connection, and on Linux with the
process that started it, whatever it is doing then.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import msgspec

from rorqual.sampling_params import SamplingParams
from rorqual.server.frames import FrameReader, MalformedFrame, pack
from rorqual.server.messages import (
    Abort,
    Completion,
    Delta,
    Deltas,
    EngineInfo,
    EngineStats,
    Failed,
    Finished,
    Ping,
    Pong,
    Ready,
    Refused,
    ResetPrefixCache,
    Shutdown,
    Start,
    Stats,
    Submit,
    ToEngine,
    TokenLogprob,
)

if TYPE_CHECKING:
    from rorqual.engine.engine import Engine
    from rorqual.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
    from rorqual.structured import Grammar

MAX_UNSENT_BYTES = 64 << 20
"""While more than this waits for the server to read it, no step is computed."""
MAX_UNREAD_S = 30.0
"""If the server then reads nothing for so long, the engine ends."""
STATS_INTERVAL_S = 1.0
IDLE_STEP_S = 0.005
"""Replicas that share experts begin every step together: how soon one without work looks whether another has some."""

_CHUNK_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Disconnected(Exception):
    """The server's end of the connection is closed."""


class Channel:
    """The engine's end of the connection. Nothing here waits for the server to read."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = FrameReader(ToEngine)
        self._unsent = bytearray()
        self.sent_s = time.monotonic()
        """When the server last took something, or nothing waited for it, on time.monotonic's clock."""

    @property
    def num_unsent_bytes(self) -> int:
        """What waits for the server to read."""
        return len(self._unsent)

    @property
    def peer_is_gone(self) -> bool:
        """Whether the server has closed its end; what it sent before may still be there to read."""
        poll = select.poll()
        poll.register(self._sock, 0)
        return bool(poll.poll(0))

    def put(self, *messages: msgspec.Struct) -> None:
        """Queue messages."""
        if not self._unsent:
            self.sent_s = time.monotonic()
        for message in messages:
            self._unsent += pack(message)

    def flush(self) -> None:
        """Send what the socket takes at once. Raises Disconnected."""
        try:
            while self._unsent:
                with memoryview(self._unsent) as view, view[:_CHUNK_BYTES] as chunk:
                    num_sent = self._sock.send(chunk)
                del self._unsent[:num_sent]
                self.sent_s = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            raise Disconnected from None

    def flush_for(self, seconds: float) -> None:
        """Send everything, for so long at most. Raises Disconnected."""
        end = time.monotonic() + seconds
        self.flush()
        while self._unsent and (left := end - time.monotonic()) > 0:
            self.wait(left)
            self.flush()

    def wait(self, seconds: float | None, *, or_readable: int | None = None) -> None:
        """Return when something has arrived, or something unsent can be sent, or there is something to read from
        another descriptor, or after so many seconds."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        if or_readable is not None:
            poll.register(or_readable, select.POLLIN)
        poll.poll(None if seconds is None else seconds * 1000)

    def receive(self) -> list[ToEngine]:
        """All that has arrived, without waiting. Raises Disconnected and MalformedFrame."""
        messages: list[ToEngine] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self._sock.recv(_CHUNK_BYTES)
                except ConnectionError:
                    data = b""
                if not data:
                    raise Disconnected
                messages += self._reader.feed(data)
                if len(data) < _CHUNK_BYTES:
                    break
        return messages


class _Compiling(NamedTuple):
    """A request that waits for its grammar."""

    message: Submit
    params: SamplingParams
    grammar: Future[Grammar]


@dataclass(slots=True, eq=False)
class _Request:
    """One that runs."""

    request_id: str
    """The server's."""
    num_sent: list[int] | None
    """Of a streamed one: characters that deltas have brought, per answer."""


class EngineLoop:
    """Serves one engine to one connection."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._running: dict[str, _Request] = {}
        """By the engine's id."""
        self._engine_ids: dict[str, str] = {}
        """The engine's ids by the server's."""
        self._compiling: dict[str, _Compiling] = {}
        """By the server's id."""
        self._wake, self._waker = os.pipe()
        """Read and written by grammars that are ready."""
        os.set_blocking(self._waker, False)
        os.set_blocking(self._wake, False)
        self._ended: list[tuple[_Request, RequestOutput]] = []
        """What `on_finish` has told since the last report."""
        engine.when_rank_fails(self._wake_up)
        self._stats_sent_s = time.monotonic()
        self._tokens_per_step: list[int] = []
        self._num_steps = self._num_tokens = 0

    def run(self, messages: list[ToEngine]) -> None:
        """Act on these messages and all that follow, until `Shutdown`.

        Raises RankFailure when another rank fails, Disconnected, MalformedFrame, and whatever a step raises.
        """
        channel = self._channel
        while True:
            self._engine.check()
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                self._act(message)
            if self._compiling:
                self._add_compiled()
            is_full = channel.num_unsent_bytes > MAX_UNSENT_BYTES
            if (self._running or self._engine.steps_with_others) and not is_full:
                self._step()
            channel.flush()
            if is_full or not (self._running or self._engine.others_work):
                channel.wait(self._seconds_to_wait() if is_full else self._seconds_idle(), or_readable=self._wake)
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, _CHUNK_BYTES)
                channel.flush()
            messages = channel.receive()

    def _seconds_idle(self) -> float | None:
        return IDLE_STEP_S if self._engine.steps_with_others else None

    def _seconds_to_wait(self) -> float:
        left = self._channel.sent_s + MAX_UNREAD_S - time.monotonic()
        if left <= 0:
            raise RuntimeError(
                f"the server has read nothing for {MAX_UNREAD_S:.0f} s while {self._channel.num_unsent_bytes} bytes of "
                "answers wait for it"
            )
        return left

    # ---- what the server says

    def _act(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort():
                if (engine_id := self._engine_ids.get(message.request_id)) is not None:
                    self._engine.abort(engine_id)
                    self._report([])
                elif (waiting := self._compiling.pop(message.request_id, None)) is not None:
                    waiting.grammar.cancel()
                    self._channel.put(*_never_begun(waiting))
            case Ping():
                self._channel.put(Pong(message.number))
            case ResetPrefixCache():
                self._engine.reset_prefix_cache()
            case _:
                raise MalformedFrame(f"the server sent {type(message).__name__} to an engine that runs")

    def _submit(self, message: Submit) -> None:
        if message.request_id in self._engine_ids or message.request_id in self._compiling:
            raise MalformedFrame(f"the server sent request {message.request_id!r} twice")
        try:
            params = SamplingParams(**message.params)
            grammar = self._engine.prepare(params)
        except ValueError as error:
            self._channel.put(Refused(message.request_id, str(error)))
            return
        if grammar is None:
            self._add(message, params, None)
        else:
            self._compiling[message.request_id] = _Compiling(message, params, grammar)
            grammar.add_done_callback(self._wake_up)

    def _wake_up(self, _grammar: Future[Grammar] | None = None) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it will wake in any case
            os.write(self._waker, b"g")

    def _add_compiled(self) -> None:
        """Queue the requests whose grammars are ready."""
        for request_id, (message, params, grammar) in list(self._compiling.items()):
            if not grammar.done():
                continue
            del self._compiling[request_id]
            try:
                compiled = grammar.result()
            except ValueError as error:
                self._channel.put(Refused(request_id, str(error)))
            else:
                self._add(message, params, compiled)

    def _add(self, message: Submit, params: SamplingParams, grammar: Grammar | None) -> None:
        request = _Request(message.request_id, None)
        was_idle = not self._running
        try:
            engine_id = self._engine.add_request(
                message.prompt_token_ids,
                params,
                cache_salt=message.cache_salt,
                streamed=message.streamed,
                grammar=grammar,
                on_finish=functools.partial(self._note_end, request),
            )
        except ValueError as error:
            self._channel.put(Refused(message.request_id, str(error)))
            return
        if message.streamed:
            request.num_sent = [0] * params.n
        self._running[engine_id] = request
        self._engine_ids[message.request_id] = engine_id
        if was_idle:
            self._stats_sent_s = time.monotonic()

    def _note_end(self, request: _Request, output: RequestOutput) -> None:
        self._ended.append((request, output))

    # ---- what the engine says

    def _step(self) -> None:
        deltas = self._engine.step()
        stats = self._engine.stats
        if stats.num_steps != self._num_steps:
            num_tokens = stats.num_prompt_tokens + stats.num_output_tokens
            self._tokens_per_step.append(num_tokens - self._num_tokens)
            self._num_steps, self._num_tokens = stats.num_steps, num_tokens
        self._report(deltas)

    def _report(self, deltas: list[StreamDelta]) -> None:
        """Say what was gained and who has ended, in this order; and now and then how things stand."""
        items: list[Delta] = []
        for delta in deltas:
            request = self._running[delta.request_id]
            assert request.num_sent is not None
            request.num_sent[delta.index] += len(delta.text)
            items.append(
                Delta(
                    request.request_id,
                    delta.index,
                    delta.text,
                    delta.token_ids,
                    _token_logprobs(delta.logprobs),
                    delta.finish_reason,
                    delta.stop_reason,
                    delta.error,
                )
            )
        for request, output in self._ended:
            items += _last_words(request, output)
        if items:
            self._channel.put(Deltas(items))
        for request, output in self._ended:
            del self._running[output.request_id], self._engine_ids[request.request_id]
            self._channel.put(_finished(request, output))
        has_ended = bool(self._ended) and not self._running
        self._ended.clear()
        now = time.monotonic()
        if has_ended or now - self._stats_sent_s >= STATS_INTERVAL_S:
            self._channel.put(Stats(self._stats(), self._tokens_per_step))
            self._stats_sent_s, self._tokens_per_step = now, []

    def _stats(self) -> EngineStats:
        engine = self._engine
        scheduler, counts = engine.scheduler, engine.stats
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=engine.cache.usage(),
            num_prompt_tokens=counts.num_prompt_tokens,
            num_output_tokens=counts.num_output_tokens,
            num_cached_tokens=counts.num_cached_tokens,
            num_queried_tokens=counts.num_queried_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=counts.num_steps,
        )


def _token_logprobs(entries: list[dict[int, Logprob]] | None) -> list[list[TokenLogprob]] | None:
    return None if entries is None else [_candidates(entry) for entry in entries]


def _candidates(entry: dict[int, Logprob]) -> list[TokenLogprob]:
    return [TokenLogprob(token_id, *logprob) for token_id, logprob in entry.items()]


def _last_words(request: _Request, output: RequestOutput) -> list[Delta]:
    """Of a streamed request whose end no step has told, for it was aborted: the ends, and the text held back so far."""
    if request.num_sent is None:
        return []
    return [
        Delta(request.request_id, a.index, a.text[num_sent:], [], None, a.finish_reason, a.stop_reason, a.error)
        for a, num_sent in zip(output.outputs, request.num_sent, strict=True)
        if a.finish_reason == "abort"
    ]


def _never_begun(waiting: _Compiling) -> list[Deltas | Finished]:
    """What is said of a request that is aborted before its grammar is there."""
    message, params, _ = waiting
    answers = range(params.n)
    ends = [Delta(message.request_id, i, "", [], None, "abort", None, None) for i in answers]
    whole = [Completion(i, "", [], None, "abort", None, None) for i in answers]
    finished = Finished(message.request_id, whole, len(message.prompt_token_ids), 0)
    return [Deltas(ends), finished] if message.streamed else [finished]


def _finished(request: _Request, output: RequestOutput) -> Finished:
    times = output.times
    end_s = times.finished_s or time.perf_counter()
    first_token_s = times.first_token_s or end_s
    scheduled_s = times.first_scheduled_s or first_token_s
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    if output.prompt_logprobs is not None:
        prompt_logprobs = [None if entry is None else _candidates(entry) for entry in output.prompt_logprobs]
    return Finished(
        request.request_id,
        [_completion(answer) for answer in output.outputs],
        len(output.prompt_token_ids),
        output.num_cached_tokens,
        prompt_logprobs=prompt_logprobs,
        queue_s=scheduled_s - times.arrival_s,
        prefill_s=first_token_s - scheduled_s,
        decode_s=end_s - first_token_s,
    )


def _completion(answer: CompletionOutput) -> Completion:
    return Completion(
        answer.index,
        answer.text,
        answer.token_ids,
        _token_logprobs(answer.logprobs),
        answer.finish_reason or "error",
        answer.stop_reason,
        answer.error,
    )


def load_engine(options: dict[str, Any]) -> Engine:
    """The engine that these fields of EngineConfig describe. Raises ValueError for what is wrong with them."""
    from rorqual.llm import LLM  # and so much else that a process about to end should not wait for it

    return LLM(**options).engine


def engine_info(engine: Engine) -> EngineInfo:
    """What the server has to know."""
    r = engine.resolved
    return EngineInfo(
        model_path=str(engine.path),
        vocab_size=engine.vocab_size,
        max_model_len=r.max_model_len,
        max_num_seqs=r.max_num_seqs,
        max_num_batched_tokens=r.max_num_batched_tokens,
        max_logprobs=engine.config.max_logprobs,
        eos_token_ids=list(engine.eos_token_ids),
        block_size=r.block_size,
        num_blocks=r.num_kv_tokens // r.block_size,
        dtype=str(r.dtype).removeprefix("torch."),
        device=str(r.device),
        generation_config=engine.default_sampling_params().model_dump(exclude_unset=True),
        banner=engine.banner(),
    )


def main(fd: int, load: Callable[[dict[str, Any]], Engine] = load_engine) -> int:
    """Serve the connection until it ends; returns the exit code: 0 for a wanted end, 1 for a fault, which is told."""
    # Ctrl-C in a terminal reaches this process too, and the server is the one to decide what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    faulthandler.enable()
    sys.stdout, sys.stderr = Lossy(sys.stdout), Lossy(sys.stderr)
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)  # or a compiler that this process starts would keep the connection open
    channel = Channel(sock)
    try:
        failure = _serve(channel, load)
        if failure is not None:
            channel.put(Failed(failure.encode(errors="replace").decode()))
            channel.flush_for(5.0)
    except Disconnected:
        return 0
    return 0 if failure is None else 1


def _serve(channel: Channel, load: Callable[[dict[str, Any]], Engine]) -> str | None:
    """Serve until `Shutdown`; returns what went wrong. Raises Disconnected."""
    try:
        first, *later = _first_messages(channel)
        if isinstance(first, Shutdown):
            return None
        if not isinstance(first, Start):
            return f"the server must send Start first, and sent {type(first).__name__}"
        if channel.peer_is_gone:  # since before `end_with_parent`
            raise Disconnected
        try:
            engine = load(first.options)
        except ValueError as error:
            return str(error)
        gc.freeze()  # what is there now stays until the end, so no collection need look at it again
        channel.put(Ready(engine_info(engine)))
        try:
            EngineLoop(engine, channel).run(later)
        finally:
            engine.close()
    except Disconnected:
        raise
    except MalformedFrame as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return None


def _first_messages(channel: Channel) -> list[ToEngine]:
    """The first message, and those that came with it."""
    while not (messages := channel.receive()):
        channel.wait(None)
    return messages


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that ends. Only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Lossy(io.TextIOBase):
    """A text stream that loses what cannot be written: a full disk behind the log is no reason to end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """See `TextIO`."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """See `TextIO`."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def fileno(self) -> int:
        """See `TextIO`."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """See `TextIO`."""
        return self._stream.isatty()


def leave(code: int) -> None:
    """End the process now: taking torch apart first would take a moment and change nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main(int(sys.argv[1])))
