"""One request to an OpenAI-compatible server, and when what came back. No torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from rorqual.server.http_client import HttpClient, HttpError

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether it shows that there is a new token, be its text empty; a chat's opening and its end do not."""
        if self.delta is None:
            return bool(self.text) or (self.text is not None and self.finish_reason is None)
        said = self.delta.content or self.delta.reasoning_content or self.delta.reasoning or self.delta.tool_calls
        return bool(said) or (self.delta.role is None and self.finish_reason is None)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Record:
    """What became of one request. Times are seconds of time.perf_counter."""

    due_s: float
    """When it was to be sent."""
    sent_s: float = 0.0
    token_times_s: list[float] = field(default_factory=list)
    """When each piece with tokens came."""
    ended_s: float = 0.0
    prompt_tokens: int | None = None
    """As the server says; None if it does not."""
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The kind of fault; None for a whole answer."""
    error_text: str = ""

    @property
    def output_tokens(self) -> int:
        """The server's count, or else how often tokens came."""
        return len(self.token_times_s) if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def itl_s(self) -> list[float]:
        """From each piece with tokens to the next."""
        return [after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the first."""
        if self.output_tokens < 2 or not self.token_times_s:
            return None
        return (self.token_times_s[-1] - self.token_times_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.ended_s - self.sent_s


async def send(client: HttpClient, endpoint: Endpoint, body: bytes, *, due_s: float, timeout_s: float) -> Record:
    """Send a streaming request and read its answer. A fault is in the record, not raised."""
    record = Record(due_s, sent_s=time.perf_counter())
    try:
        async with asyncio.timeout(timeout_s):
            await _read_answer(client, PATHS[endpoint], body, record)
    except TimeoutError:
        record.error, record.error_text = "timeout", f"no whole answer within {timeout_s:g} s"
    except HttpError as error:
        record.error, record.error_text = error.kind, str(error)
    record.ended_s = record.ended_s or time.perf_counter()
    return record


async def _read_answer(client: HttpClient, path: str, body: bytes, record: Record) -> None:
    async with client.request("POST", path, body) as response:
        if response.status != 200:
            raise HttpError(f"HTTP {response.status}", error_text(await response.body()))
        lines = _Lines()
        async for piece in response.pieces():
            for data in lines.push(piece.data):
                if data != b"[DONE]":
                    _take(record, data, piece.at)
            record.ended_s = piece.at
    if record.finish_reason is None:
        raise HttpError("cut short", "the stream ended without a finish reason")
    if record.finish_reason == "error":
        raise HttpError("error in the stream", "finish_reason is error")


def _take(record: Record, data: bytes, at: float) -> None:
    try:
        chunk = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpError("not understood", f"{error}: {data[:200]!r}") from None
    if chunk.error is not None:
        raise HttpError("error in the stream", error_text(data))
    if chunk.usage is not None:
        record.prompt_tokens, record.completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
    for choice in chunk.choices:
        record.finish_reason = choice.finish_reason or record.finish_reason
    if any(choice.has_tokens for choice in chunk.choices):
        record.token_times_s.append(at)


class _Lines:
    """The data of server-sent events, each on a line of its own as OpenAI's are."""

    def __init__(self) -> None:
        self._rest = b""

    def push(self, data: bytes) -> Iterator[bytes]:
        """The data of the lines that are complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def error_text(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        parsed = msgspec.json.decode(body)
        said = parsed["error"]["message"] if isinstance(parsed["error"], dict) else parsed["error"]
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        said = body.decode(errors="replace")
    return " ".join(str(said).split())[:300]
