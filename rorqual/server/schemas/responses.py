"""/v1/responses: what comes in and what goes out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rorqual.server.schemas.answer import AnswerModel
from rorqual.server.schemas.request import RequestModel, SamplingFields, StreamOptions

# --- requests


class ContentPart(RequestModel):
    """A piece of a message; only text is understood."""

    type: str
    """input_text, output_text, reasoning_text, summary_text or text."""
    text: str | None = None
    refusal: str | None = None


class InputItem(RequestModel):
    """A message, a call that the model made, what came of it, or the model's thinking; which one says `type`."""

    type: str | None = None
    """message (or nothing), function_call, function_call_output or reasoning."""
    id: str | None = None
    status: str | None = None
    role: str | None = None
    """Of a message: user, assistant, system or developer."""
    content: str | list[ContentPart] | None = None
    """Of a message, or of thinking."""
    call_id: str | None = None
    """Of a call, and of what came of it."""
    name: str | None = None
    """Of the function called."""
    arguments: str | None = None
    """JSON text of a call."""
    output: str | list[ContentPart] | None = None
    """What came of a call."""
    summary: list[ContentPart] | None = None
    """Of thinking; read if there is no content."""


class FunctionTool(RequestModel):
    """A function that the model may call."""

    type: str
    """function: there are no built-in tools."""
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(RequestModel):
    """The function that must be called, or those that may be."""

    type: str
    """function or allowed_tools."""
    name: str | None = None
    """Of the function."""
    mode: Literal["auto", "required"] | None = None
    """Of allowed_tools."""
    tools: list[FunctionTool] | None = None
    """The allowed ones, by name."""


class TextFormat(RequestModel):
    """The form that the text must have."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(RequestModel):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: str | None = None
    """Accepted and not used."""


class ReasoningOptions(RequestModel):
    """How the model thinks."""

    effort: str | None = None
    """Passed to the chat template as reasoning_effort."""
    summary: str | None = None
    """If given, the thinking comes as `summary` and not as `content`; it is the same text, whole."""
    generate_summary: str | None = None
    """The older name of summary."""


class ResponseRequest(SamplingFields):
    """A conversation, and how its next turn is made."""

    model: str | None = None
    """A name from /v1/models. Default: the server's only model."""
    input: str | list[InputItem]
    """What the user says, or the conversation's items."""
    instructions: str | None = None
    """The system message; not kept for the next turn."""
    previous_response_id: str | None = None
    """Go on from this stored response."""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens to generate, with those of the thinking. Default: until the context is full."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False keeps only the first call."""
    include: list[str] | None = None
    """message.output_text.logprobs adds log-probabilities; others change nothing."""
    top_logprobs: int | None = None
    """Log-probabilities of this many most likely tokens, with the token's own."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto leaves out the oldest turns of a conversation that is too long. Default: disabled, which refuses it."""
    metadata: dict[str, str] | None = None
    """Given back."""
    store: bool | None = None
    """Keep the response for previous_response_id and GET, in this server's memory, for a while. Default: true."""
    stream: bool | None = None
    """Send the response as server-sent events while it comes."""
    stream_options: StreamOptions | None = None
    background: bool | None = None
    """Not supported: must be false."""
    conversation: str | dict[str, Any] | None = None
    """Not supported."""
    prompt: dict[str, Any] | None = None
    """Not supported."""
    max_tool_calls: int | None = None
    """About built-in tools, of which there are none."""
    user: str | None = None
    """Given back."""
    safety_identifier: str | None = None
    """Given back."""
    prompt_cache_key: str | None = None
    """Given back."""
    service_tier: str | None = None
    """Accepted and not used."""
    cache_salt: str | None = None
    """Prompts share cached prefixes only with equal salts."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""


# --- responses


class OutputTopLogprob(AnswerModel):
    """A candidate."""

    token: str
    logprob: float
    bytes: list[int]


class OutputLogprob(OutputTopLogprob):
    """A token of the text."""

    top_logprobs: list[OutputTopLogprob]


class OutputText(AnswerModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[dict[str, Any]] = Field(default_factory=list)
    logprobs: list[OutputLogprob] = Field(default_factory=list)


class ReasoningText(AnswerModel):
    """The text of thinking."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class SummaryText(AnswerModel):
    """The text of thinking, where a summary was asked for."""

    type: Literal["summary_text"] = "summary_text"
    text: str


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(AnswerModel):
    """What the model says."""

    type: Literal["message"] = "message"
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(AnswerModel):
    """What the model thinks."""

    type: Literal["reasoning"] = "reasoning"
    id: str
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(AnswerModel):
    """A call that the model wants made."""

    type: Literal["function_call"] = "function_call"
    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(AnswerModel):
    """Of the prompt's tokens."""

    cached_tokens: int = 0
    """Those found in the prefix cache."""
    cache_write_tokens: int = 0
    """Always 0: writing to the prefix cache is not counted."""


class OutputTokensDetails(AnswerModel):
    """Of the generated tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(AnswerModel):
    """What was read and written, in tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(AnswerModel):
    """Why a response failed."""

    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(AnswerModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(AnswerModel):
    """One turn."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    model: str
    output: list[OutputItem] = Field(default_factory=list)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = Field(default_factory=dict)
    safety_identifier: str | None = None
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = Field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class DeletedResponse(AnswerModel):
    """A response that is not kept any more."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# --- events of a stream


class Event(AnswerModel):
    """One event; `type` is its name."""

    type: str
    sequence_number: int
    """0, 1, ... within the stream."""


class ResponseEvent(Event):
    """response.created, .in_progress, .completed, .incomplete, .failed."""

    response: Response


class ItemEvent(Event):
    """response.output_item.added, .done."""

    output_index: int
    item: OutputItem


class PartEvent(Event):
    """response.content_part.added, .done."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class SummaryPartEvent(Event):
    """response.reasoning_summary_part.added, .done."""

    item_id: str
    output_index: int
    summary_index: int
    part: SummaryText


class TextDeltaEvent(Event):
    """response.output_text.delta."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[OutputLogprob]


class TextDoneEvent(Event):
    """response.output_text.done."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[OutputLogprob]


class ReasoningDeltaEvent(Event):
    """response.reasoning_text.delta."""

    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDoneEvent(Event):
    """response.reasoning_text.done."""

    item_id: str
    output_index: int
    content_index: int
    text: str


class SummaryDeltaEvent(Event):
    """response.reasoning_summary_text.delta."""

    item_id: str
    output_index: int
    summary_index: int
    delta: str


class SummaryDoneEvent(Event):
    """response.reasoning_summary_text.done."""

    item_id: str
    output_index: int
    summary_index: int
    text: str


class ArgumentsDeltaEvent(Event):
    """response.function_call_arguments.delta."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(Event):
    """response.function_call_arguments.done."""

    item_id: str
    output_index: int
    name: str
    arguments: str
