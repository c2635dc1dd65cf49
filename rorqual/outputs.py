"""What comes out of the engine: requests, their completions, and the pieces of a stream. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why a completion ended: EOS or a stop condition; max_tokens or the context; the caller; a fault in this request."""


class Logprob(NamedTuple):
    """One token's natural log-probability under the model's raw logits (before penalties and temperature)."""

    logprob: float
    rank: int
    """1 for the most likely token; ties count every token that is at least as likely."""
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` answers to a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """Generated ids, including a final EOS or stop token."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    """Per generated token: the top candidates and the token itself, keyed by id. None when not asked for."""
    finish_reason: FinishReason | None = None
    """None while running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for EOS, length and abort."""
    error: str | None = None
    """What went wrong, when finish_reason is "error"."""


@dataclass(slots=True)
class RequestTimes:
    """Seconds on time.perf_counter's clock; None until it happened."""

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers. `out["text"]` and `out.text` read the first answer, `out.outputs` holds all."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    times: RequestTimes
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token; the first is None because nothing predicts it."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache (of the first answer)."""

    @property
    def finished(self) -> bool:
        """Whether every answer has ended."""
        return all(o.finish_reason is not None for o in self.outputs)

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first answer's generated ids."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first answer ended; None while it runs."""
        return self.outputs[0].finish_reason

    def __getitem__(self, key: str) -> Any:
        if key.startswith("_") or not hasattr(self, key):
            raise KeyError(key)
        return getattr(self, key)


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What one step added to one answer of a streamed request."""

    request_id: str
    index: int
    text: str
    """New text; may be empty while characters or stop strings are incomplete."""
    token_ids: list[int]
    """New ids."""
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    error: str | None = None
