"""/v1/completions: what comes in and what goes out."""

from __future__ import annotations

from typing import Literal

from rorqual.server.schemas.answer import AnswerModel, PromptLogprobs, Usage
from rorqual.server.schemas.request import GenerationRequest


class CompletionRequest(GenerationRequest):
    """Texts to go on with."""

    prompt: str | list[str] | list[int] | list[list[int]]
    """A text, token ids, or several of either."""
    best_of: int | None = None
    """Must equal n, or be left out."""
    echo: bool | None = None
    """Begin each answer with its prompt."""
    logprobs: int | None = None
    """Log-probabilities of this many most likely tokens, and of the token itself; 0 is the token's alone."""
    suffix: str | None = None
    """Not supported: must be empty."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add BOS and EOS as it is set up to. Default: true."""


class CompletionLogprobs(AnswerModel):
    """Lists with one entry per token; the first of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where the token begins in the choice's text."""


CompletionFinishReason = Literal["stop", "length"]


class CompletionChoice(AnswerModel):
    """One answer; there are n per prompt, in the prompts' order."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: CompletionFinishReason
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class TextCompletion(AnswerModel):
    """All of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(AnswerModel):
    """What is new of one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: CompletionFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionChunk(AnswerModel):
    """One event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None = None
