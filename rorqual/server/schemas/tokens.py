"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from typing import Any

from rorqual.server.schemas.answer import AnswerModel
from rorqual.server.schemas.chat import ChatMessage, Tool
from rorqual.server.schemas.request import RequestModel


class TokenizeRequest(RequestModel):
    """A prompt, or a conversation that the chat template makes one of."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    """Let the tokenizer add BOS and EOS. Default: true for a prompt, false for messages."""
    return_token_strs: bool | None = None
    """Add each token's text."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class TokenizeAnswer(AnswerModel):
    """The ids."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(AnswerModel):
    """Their text."""

    prompt: str


class TokenizerInfo(AnswerModel):
    """What clients that tokenize themselves must know."""

    bos_token: str | None = None
    eos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: list[int]
    vocab_size: int
    chat_template: str | None = None
