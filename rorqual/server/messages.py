"""What the server's process and the engine's say to each other: msgpack of these types, and nothing else. No torch."""

from __future__ import annotations

from typing import Any

import msgspec

# --- from the server to the engine


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: load the model."""

    options: dict[str, Any]
    """Fields of `EngineConfig` that were set."""


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Queue a request."""

    request_id: str
    """The server's own; unique while the request lives."""
    prompt_token_ids: list[int]
    params: dict[str, Any]
    """Fields of `SamplingParams` that were set."""
    cache_salt: str = ""
    streamed: bool = False
    """Whether `Deltas` are wanted as tokens come; there is a `Finished` in any case."""


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End a request, if it still runs. Its blocks are free before the next step; a `Finished` follows."""

    request_id: str


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Pong` between two steps: shows that the engine is not stuck."""

    number: int


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Forget the prefix cache."""


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    """End the process; running requests are dropped. The end of the connection means the same."""


ToEngine = Start | Submit | Abort | Ping | ResetPrefixCache | Shutdown

# --- from the engine to the server


class EngineInfo(msgspec.Struct, frozen=True):
    """What the server has to know of the loaded model."""

    model_path: str
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logprobs: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    """Of the smallest group."""
    dtype: str
    device: str
    generation_config: dict[str, Any]
    """The checkpoint's own defaults for sampling."""
    banner: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded and has run once."""

    info: EngineInfo


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """One candidate; see `rorqual.outputs.Logprob`."""

    token_id: int
    logprob: float
    rank: int
    text: str


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """What one step added to one answer; see `rorqual.outputs.StreamDelta`."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None
    """Per new token, its candidates as the engine orders them."""
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None


class Deltas(msgspec.Struct, tag=True, frozen=True):
    """Those of one step."""

    items: list[Delta]


class Completion(msgspec.Struct, array_like=True, frozen=True):
    """One whole answer; see `rorqual.outputs.CompletionOutput`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    error: str | None


class Finished(msgspec.Struct, tag=True, frozen=True):
    """A request has ended: the last thing said of it. Of a streamed one, all its deltas were sent before."""

    request_id: str
    completions: list[Completion]
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    queue_s: float = 0.0
    """From its arrival in the engine to its first step."""
    prefill_s: float = 0.0
    """From there to the first token."""
    decode_s: float = 0.0
    """From there to the end."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request was not queued: its prompt or parameters can never be served. Nothing else is said of it."""

    request_id: str
    message: str


class EngineStats(msgspec.Struct, frozen=True):
    """Counters since the start, and how things stand."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """0 to 1"""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_queried_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Sent once a second while there is work, and once when it ends."""

    stats: EngineStats
    tokens_per_step: list[int] = []
    """Of the steps since the last one."""


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to a `Ping`."""

    number: int


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine ends: the model could not be loaded, or a step went wrong."""

    message: str


FromEngine = Ready | Deltas | Finished | Refused | Stats | Pong | Failed
