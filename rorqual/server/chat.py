"""/v1/chat/completions: a conversation becomes a prompt, and the model's text a message."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response

from rorqual.sampling_params import SamplingParams
from rorqual.server import connection
from rorqual.server.connection import DONE, EVENTS_DECLARED, event
from rorqual.server.errors import DECLARED, bad_value
from rorqual.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from rorqual.server.messages import Delta, Finished
from rorqual.server.parsing import (
    ChatOutput,
    Content,
    Event,
    ParserFactory,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    read_tool_choice,
    tool_choice_schema,
)
from rorqual.server.schemas.answer import Usage
from rorqual.server.schemas.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    FunctionCall,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from rorqual.server.serving import LONG_TEXT, Generation, Prompt, Serving, named_fault, serving

router = APIRouter(tags=["OpenAI"])

_TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template")
_NOT_VARIABLES = frozenset({"self", "messages", "tools", "chat_template"})


@dataclass(frozen=True)
class PreparedChat:
    """A chat request, checked and ready to submit."""

    prompt: Prompt
    params: SamplingParams
    rendered: str
    """The prompt as the chat template made it."""
    variables: Mapping[str, Any]
    """What the chat template was given besides."""
    tools: Sequence[Mapping[str, Any]]
    """Those that may be called."""


async def render(
    state: Serving,
    messages: Sequence[ChatMessage],
    *,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    add_special_tokens: bool | None = None,
) -> Prompt:
    """The prompt for a conversation. Raises APIError (400) for what the chat template does not take."""
    variables = state.settings.default_chat_template_kwargs | dict(chat_template_kwargs or {})
    if wrong := sorted(_NOT_VARIABLES & variables.keys()):
        raise bad_value(
            f"chat_template_kwargs must not have {wrong[0]!r}: it is a field of the request",
            param="chat_template_kwargs",
        )
    for name, value in (
        ("add_generation_prompt", add_generation_prompt),
        ("continue_final_message", continue_final_message),
    ):
        if value is not None:
            variables[name] = value
    tokenizer = state.tokenizer
    if chat_template is not None and chat_template not in tokenizer.chat_templates:
        if not state.settings.trust_request_chat_template:
            raise bad_value(
                "chat_template must be the name of one of the model's templates "
                f"({', '.join(sorted(tokenizer.chat_templates)) or 'it has none'}): this server takes no others",
                param="chat_template",
            )
        try:
            tokenizer, chat_template = tokenizer.with_chat_template(chat_template), None
        except ValueError as error:
            raise bad_value(str(error), param="chat_template") from None
    plain = [message.model_dump(exclude_unset=True) for message in messages]
    plain_tools = [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None

    def make() -> str:
        return tokenizer.render_chat(plain, tools=plain_tools, chat_template=chat_template, **variables)

    foreign = tokenizer is not state.tokenizer
    try:
        text = await asyncio.to_thread(make) if foreign or _is_long(plain) else make()
    except ValueError as error:
        raise named_fault(error, _TEMPLATE_FIELDS, {}, default="messages") from None
    ids = await state.encode(text, add_special_tokens=bool(add_special_tokens), param="messages")
    return state.check_prompt(Prompt(ids, text), param="messages")


def _is_long(messages: Sequence[Mapping[str, Any]]) -> bool:
    return sum(len(m["content"]) if isinstance(m.get("content"), str) else 1000 for m in messages) > LONG_TEXT


async def prepare(state: Serving, request: ChatRequest) -> PreparedChat:
    """Check a request and make its prompt and parameters. Raises APIError."""
    state.note_unknown(request)
    if request.top_logprobs and not request.logprobs:
        raise bad_value("top_logprobs needs logprobs to be true", param="top_logprobs")
    tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()]
    try:
        choice = read_tool_choice(tools, request.tool_choice)
        forced = tool_choice_schema(
            tools, request.tool_choice, parallel_tool_calls=request.parallel_tool_calls is not False
        )
    except ValueError as error:
        raise bad_value(str(error), param="tool_choice") from None
    if choice.mode == "none":
        tools = []
    variables = state.settings.default_chat_template_kwargs | (request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    prompt = await render(
        state,
        request.messages,
        tools=request.tools if tools else None,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template,
        chat_template_kwargs=variables,
        add_special_tokens=request.add_special_tokens,
    )
    newer = request.max_completion_tokens
    skip_special = request.skip_special_tokens
    if skip_special is None and (state.thinking_is_special or (tools and state.calls_are_special)):
        skip_special = False  # the parsers have to see them
    params = state.sampling_params(
        request,
        renamed={"logprobs": "top_logprobs"} | ({} if newer is None else {"max_tokens": "max_completion_tokens"}),
        max_tokens=request.max_tokens if newer is None else newer,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        skip_special_tokens=skip_special,
        **({} if forced is None else {"structured_outputs": {"json": forced}}),
    )
    return PreparedChat(Prompt(prompt.token_ids), params, prompt.text or "", variables, tools)


class ChatAnswer:
    """One of the n answers on its way: deltas become pieces of a message."""

    def __init__(self, index: int, request: ChatRequest, output: ChatOutput, names: TokenNames, echo: str) -> None:
        self.index, self._request, self._output, self._names = index, request, output, names
        self._first: list[Event] = [Content(echo)] if echo else []

    def push(self, delta: Delta) -> list[ChatChunkChoice]:
        """What a delta adds; the last piece has the finish_reason."""
        events = [*self._first, *self._output.push(delta.text)]
        self._first = []
        if delta.finish_reason is not None:
            events += self._output.finish()
        deltas = [_delta(e) for e in events]
        if not deltas and (delta.logprobs or (self._request.return_token_ids and delta.token_ids)):
            deltas.append(ChatDelta())
        pieces = [ChatChunkChoice(index=self.index, delta=made, logprobs=None, finish_reason=None) for made in deltas]
        if pieces:
            pieces[0].logprobs = chat_logprobs(delta, self._request.top_logprobs or 0, self._names)
            if self._request.return_token_ids:
                pieces[0].token_ids = delta.token_ids
        if delta.finish_reason is not None:
            pieces.append(
                ChatChunkChoice(
                    index=self.index,
                    delta=ChatDelta(),
                    logprobs=None,
                    finish_reason=cast(ChatFinishReason, self._output.finish_reason(delta.finish_reason)),
                    stop_reason=delta.stop_reason,
                )
            )
        return pieces


def _delta(e: Event) -> ChatDelta:
    match e:
        case Content():
            return ChatDelta(content=e.text)
        case Reasoning():
            return ChatDelta(reasoning_content=e.text)
        case ToolCallStart():
            function = FunctionCall(name=e.name, arguments="")
            return ChatDelta(tool_calls=[ToolCallDelta(index=e.index, id=e.id, type="function", function=function)])
        case ToolCallArguments():
            return ChatDelta(tool_calls=[ToolCallDelta(index=e.index, function=FunctionCall(arguments=e.text))])


def joined(index: int, pieces: Sequence[ChatChunkChoice]) -> ChatChoice:
    """The message that a stream's pieces make."""
    last = pieces[-1]
    assert last.finish_reason is not None
    content = [p.delta.content for p in pieces if p.delta.content is not None]
    reasoning = [p.delta.reasoning_content for p in pieces if p.delta.reasoning_content is not None]
    calls: dict[int, ToolCall] = {}
    for call in (call for p in pieces for call in p.delta.tool_calls or ()):
        if call.id is not None:
            calls[call.index] = ToolCall(
                id=call.id, type="function", function=FunctionCall(name=call.function.name, arguments="")
            )
        function = calls[call.index].function
        function.arguments = (function.arguments or "") + (call.function.arguments or "")
    only_other = bool(calls or reasoning) and not content
    message = AssistantMessage(role="assistant", content=None if only_other else "".join(content), refusal=None)
    if reasoning:
        message.reasoning_content = "".join(reasoning)
    if calls:
        message.tool_calls = list(calls.values())
    logprobs = [entry for p in pieces if p.logprobs is not None for entry in p.logprobs.content or ()]
    has_logprobs = any(p.logprobs is not None for p in pieces)
    choice = ChatChoice(
        index=index,
        message=message,
        logprobs=ChatLogprobs(content=logprobs, refusal=None) if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    if any(p.token_ids is not None for p in pieces):
        choice.token_ids = [token_id for p in pieces for token_id in p.token_ids or ()]
    return choice


class ChatCall:
    """One chat request on its way through the engine."""

    def __init__(self, state: Serving, request: ChatRequest, prepared: PreparedChat, model: str) -> None:
        self._request, self._prepared = request, prepared
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        names = TokenNames(
            state.tokenizer,
            prepared.params,
            as_ids=_wanted(request.return_tokens_as_token_ids, state.settings.return_tokens_as_token_ids),
        )
        echo = _echoed(request)
        self._answers = [
            ChatAnswer(i, request, chat_output(state, request, prepared), names, echo) for i in range(prepared.params.n)
        ]
        self._num_completion_tokens = 0

    async def whole(self, generation: Generation) -> ChatCompletion:
        """All answers at once."""
        pieces: list[list[ChatChunkChoice]] = [[] for _ in self._answers]
        finished: Finished | None = None
        async with aclosing(generation.events()) as events:
            async for _, item in events:
                if isinstance(item, Finished):
                    finished = item
                else:
                    pieces[item.index] += self._push(item)
        assert finished is not None
        completion = ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=[joined(i, of_answer) for i, of_answer in enumerate(pieces)],
            usage=self._usage(finished.num_cached_tokens),
        )
        if finished.prompt_logprobs is not None:
            completion.prompt_logprobs = prompt_logprobs(finished.prompt_logprobs)
        if self._request.return_token_ids:
            completion.prompt_token_ids = self._prepared.prompt.token_ids
        return completion

    async def events(self, generation: Generation) -> AsyncGenerator[str]:
        """The stream's events, as they are sent."""
        options = self._request.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        begun: set[int] = set()
        finished: Finished | None = None

        def chunk(choice: ChatChunkChoice) -> ChatChunk:
            made = ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice])
            if continuous:
                made.usage = self._usage()
            elif include_usage:
                made.usage = None
            return made

        async with aclosing(generation.events()) as events:
            async for _, item in events:
                if isinstance(item, Finished):
                    finished = item
                    continue
                pieces = self._push(item)
                if item.index not in begun and (pieces or item.token_ids):
                    begun.add(item.index)
                    opening = ChatDelta(role="assistant", content="")
                    first = chunk(ChatChunkChoice(index=item.index, delta=opening, logprobs=None, finish_reason=None))
                    if self._request.return_token_ids and len(begun) == 1:
                        first.prompt_token_ids = self._prepared.prompt.token_ids
                    if finished is not None and finished.prompt_logprobs is not None and len(begun) == 1:
                        first.prompt_logprobs = prompt_logprobs(finished.prompt_logprobs)
                    yield event(first.to_json())
                for piece in pieces:
                    yield event(chunk(piece).to_json())
        assert finished is not None
        if include_usage:
            last = ChatChunk(
                **self._head,
                object="chat.completion.chunk",
                choices=[],
                usage=self._usage(finished.num_cached_tokens),
            )
            yield event(last.to_json())
        yield DONE

    def _push(self, delta: Delta) -> list[ChatChunkChoice]:
        self._num_completion_tokens += len(delta.token_ids)
        return self._answers[delta.index].push(delta)

    def _usage(self, cached: int | None = None) -> Usage:
        return Usage.of(len(self._prepared.prompt.token_ids), self._num_completion_tokens, cached)


def chat_output(state: Serving, request: ChatRequest, prepared: PreparedChat) -> ChatOutput:
    """What reads the text of one answer."""
    names = state.parser_names
    reasoning = None
    if prepared.params.structured_outputs is None:  # else the text begins with what was asked for
        reasoning = ParserFactory.reasoning_parser(
            names.reasoning,
            prepared.rendered,
            prepared.variables,
            continues=bool(request.continue_final_message),
        )
    choice = request.tool_choice if prepared.tools else None
    tools = ParserFactory.tool_call_parser(names.tool_call, prepared.tools, choice)
    return ChatOutput(reasoning, tools, parallel_tool_calls=request.parallel_tool_calls is not False)


def _echoed(request: ChatRequest) -> str:
    """What the answer begins with besides what the model says."""
    last = request.messages[-1] if request.echo and request.messages else None
    return last.content if last is not None and last.role == "assistant" and isinstance(last.content, str) else ""


def _wanted(asked: bool | None, default: bool) -> bool:
    return default if asked is None else asked


@router.post(
    "/v1/chat/completions",
    response_model=ChatCompletion,
    responses={**DECLARED, 200: {"description": "The answer, or its events.", "content": EVENTS_DECLARED}},
)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    state = serving(request)
    model = state.model_name(body.model)
    prepared = await prepare(state, body)
    streamed = bool(body.stream)
    # Logprobs of the prompt are known at the end, and clients expect them at the beginning.
    as_it_comes = streamed and prepared.params.prompt_logprobs is None
    call = ChatCall(state, body, prepared, model)
    generation = state.generate([prepared.prompt], prepared.params, cache_salt=body.cache_salt, streamed=as_it_comes)
    abort, timeout_s = generation.abort, state.settings.request_timeout
    if streamed:
        return await connection.stream(request, call.events(generation), abort=abort, timeout_s=timeout_s)
    completion = await connection.answer(request, call.whole(generation), abort=abort, timeout_s=timeout_s)
    return Response(completion.to_json(), media_type="application/json")
