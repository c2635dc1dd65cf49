"""/v1/chat/completions: what comes in and what goes out."""

from __future__ import annotations

from typing import Any, Literal

from rorqual.server.schemas.answer import AnswerModel, PromptLogprobs, Usage
from rorqual.server.schemas.request import GenerationRequest, RequestModel


class ChatMessage(RequestModel):
    """One message; what else it holds reaches the chat template."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(GenerationRequest):
    """A conversation, and how its next message is made."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; wins over it."""
    logprobs: bool | None = None
    """Add the log-probability of each token."""
    top_logprobs: int | None = None
    """And of this many most likely ones."""
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    """none, auto, required, or the one function: {"type": "function", "function": {"name": ...}}."""
    parallel_tool_calls: bool | None = None
    """False keeps only the first call."""
    echo: bool | None = None
    """Begin the answer with the last message's content, if its role is the assistant's."""
    add_generation_prompt: bool | None = None
    """Open a message of the assistant behind the conversation. Default: unless continue_final_message."""
    continue_final_message: bool | None = None
    """Go on with the last message."""
    add_special_tokens: bool | None = None
    """Let the tokenizer add BOS and EOS to what the chat template made."""
    chat_template: str | None = None
    """A template's text (if the server allows it), or the name of one of the model's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    reasoning_effort: str | None = None
    """Passed to the chat template."""


class TopLogprob(AnswerModel):
    """A candidate."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(TopLogprob):
    """A token of the answer; `bytes` is null for one that is not in the text."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerModel):
    """One entry per token."""

    content: list[ChatTokenLogprob] | None = None
    refusal: None = None


class FunctionCall(AnswerModel):
    """A call's name and arguments; in a stream the arguments come in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(AnswerModel):
    """Part of a tool call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ToolCall(AnswerModel):
    """A tool call."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(AnswerModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatDelta(AnswerModel):
    """What is new of the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(AnswerModel):
    """One of n answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it."""
    token_ids: list[int] | None = None


class ChatCompletion(AnswerModel):
    """All of them."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(AnswerModel):
    """What is new of one of n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(AnswerModel):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
