"""/v1/responses: chats in the form of items, and as a stream of typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response as HTTPResponse

from rorqual.server import connection
from rorqual.server.chat import PreparedChat, chat_output, prepare
from rorqual.server.connection import EVENTS_DECLARED
from rorqual.server.errors import DECLARED, APIError, as_api_error, bad_value
from rorqual.server.logprobs import TokenNames, chat_logprobs
from rorqual.server.messages import Delta, Finished
from rorqual.server.parsing.events import Content, Reasoning, ToolCallArguments, ToolCallStart
from rorqual.server.parsing.reasoning import ReasoningParser, count_reasoning_tokens
from rorqual.server.response_events import ResponseBuilder
from rorqual.server.response_items import Message, messages_of, turn_starts, without_oldest
from rorqual.server.response_store import ResponseStore
from rorqual.server.schemas import responses as api
from rorqual.server.schemas.answer import AnswerModel
from rorqual.server.schemas.chat import ChatRequest
from rorqual.server.schemas.request import SamplingFields
from rorqual.server.serving import Generation, Serving, serving

router = APIRouter(tags=["OpenAI"])

LOGPROBS = "message.output_text.logprobs"
"""The member of `include` that asks for them."""
_ONLY_ONE = ("n", "prompt_logprobs", "max_tokens")
"""Sampling options that a response has no place for."""
_RENAMED = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat by the name that a response's request has for them."""


def _store(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


def chat_request(body: api.ResponseRequest, messages: list[Message]) -> ChatRequest:
    """The same request as one for a chat. Raises APIError (400) for what a chat does not have."""
    for name in ("background", "conversation", "prompt"):
        if getattr(body, name):
            raise bad_value(f"{name} is not supported: leave it out", param=name)
    for name in _ONLY_ONE:
        if getattr(body, name) not in (None, 1 if name == "n" else None):
            raise bad_value(f"{name} has no meaning for a response: leave it out", param=name)
    tools, choice = _tools(body)
    wants_logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    fields: dict[str, Any] = {name: getattr(body, name) for name in SamplingFields.model_fields}
    fields |= {
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body),
        "logprobs": True if wants_logprobs else None,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "cache_salt": body.cache_salt,
    }
    return ChatRequest(**{name: value for name, value in fields.items() if value is not None})


def _tools(body: api.ResponseRequest) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """The tools and the choice among them, as a chat has them."""
    offered: list[dict[str, Any]] = []
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise bad_value(
                f"tools.{i}.type must be 'function', got {tool.type!r}: this server has no built-in tools",
                param=f"tools.{i}.type",
            )
        if not tool.name:
            raise bad_value(f"tools.{i}.name is required", param=f"tools.{i}.name")
        function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        offered.append({"type": "function", "function": function})
    choice = body.tool_choice
    if choice not in (None, "none", "auto") and not offered:
        raise bad_value("tool_choice needs tools, got none", param="tool_choice")
    if not isinstance(choice, api.ResponseToolChoice):
        return offered or None, choice
    if choice.type == "function" and choice.name:
        names = [tool["function"]["name"] for tool in offered]
        if choice.name not in names:
            raise bad_value(
                f"tool_choice.name must be one of the tools ({', '.join(names)}), got {choice.name!r}",
                param="tool_choice.name",
            )
        return offered, {"type": "function", "function": {"name": choice.name}}
    if choice.type == "allowed_tools":
        allowed = [tool.name for tool in choice.tools or ()]
        kept = [tool for tool in offered if tool["function"]["name"] in allowed]
        if not kept:
            raise bad_value(f"tool_choice.tools must name some of the tools, got {allowed}", param="tool_choice.tools")
        return kept, choice.mode or "auto"
    raise bad_value(
        f"tool_choice must be none, auto, required, a function with its name, or allowed_tools, got {choice.type!r}",
        param="tool_choice.type",
    )


def _response_format(body: api.ResponseRequest) -> dict[str, Any] | None:
    form = body.text.format if body.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    wrapped = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {k: v for k, v in wrapped.items() if v is not None}}


def _as_said_here(error: APIError) -> APIError:
    """The same error under the names that this request has for things."""
    old = error.body.error.param
    new = _RENAMED.get(old or "")
    if old is None or new is None:
        return error
    message = error.body.error.message.replace(old, new, 1)
    return APIError(error.status, message, param=new, code=_text_or_none(error.body.error.code))


def _text_or_none(code: str | int | None) -> str | None:
    return None if code is None else str(code)


async def _prepare(
    state: Serving, body: api.ResponseRequest, messages: list[Message]
) -> tuple[ChatRequest, PreparedChat]:
    """The chat, checked; with truncation "auto" without the oldest turns that are too much."""
    chat = chat_request(body, messages)
    try:
        try:
            return chat, await prepare(state, chat)
        except APIError as error:
            if body.truncation != "auto" or error.body.error.code != "context_length_exceeded":
                raise
            fits: tuple[ChatRequest, PreparedChat] | None = None
            low, high = 1, len(turn_starts(messages)) - 1
            while low <= high:  # fewer turns are fewer tokens
                middle = (low + high) // 2
                chat = chat_request(body, without_oldest(messages, middle))
                try:
                    fits = chat, await prepare(state, chat)
                    high = middle - 1
                except APIError as again:
                    if again.body.error.code != "context_length_exceeded":
                        raise
                    low = middle + 1
            if fits is None:
                raise
            return fits
    except APIError as error:
        raise _as_said_here(error) from None


class ResponseCall:
    """One request on its way through the engine.

    Args:
        state: the server's.
        body: the request.
        history: the messages before those of `body`, without instructions.
        store: where the response is kept, if the request wants it.
    """

    def __init__(
        self, state: Serving, body: api.ResponseRequest, history: list[Message], store: ResponseStore, model: str
    ) -> None:
        self._state, self._body, self._store = state, body, store
        self._messages = history + messages_of(body.input)
        self._model = model

    async def prepare(self) -> PreparedChat:
        """Check the request. Raises APIError."""
        body, state = self._body, self._state
        state.note_unknown(body)
        system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        chat, prepared = await _prepare(state, body, system + self._messages)
        self._prepared = prepared
        self._parser = chat_output(state, chat, prepared)
        self._names = TokenNames(state.tokenizer, prepared.params, as_ids=state.settings.return_tokens_as_token_ids)
        end = state.tokenizer.encode(ReasoningParser.end_tag, add_special_tokens=False)
        self._thinking_end = end[0] if len(end) == 1 else None
        wants_summary = body.reasoning is not None and bool(body.reasoning.summary or body.reasoning.generate_summary)
        self._builder = ResponseBuilder(self._new_response(), summary=wants_summary)
        return prepared

    async def whole(self, generation: Generation) -> api.Response:
        """The response at once. Raises APIError if it fails."""
        async with aclosing(self._events(generation)) as events:
            async for _ in events:
                pass
        return self._builder.response

    async def events(self, generation: Generation) -> AsyncGenerator[str]:
        """The stream's events, as they are sent."""
        begun = False
        try:
            async with aclosing(self._events(generation)) as events:
                async for e in events:
                    yield connection.event(e.model_dump_json(), name=e.type)
                    begun = True
        except Exception as error:
            if not begun:
                raise
            yield self.failure(as_api_error(error))

    def failure(self, error: APIError) -> str:
        """The last events of a stream that went wrong."""
        closing = self._builder.finish("failed", None, error.body.error.message)
        return "".join(connection.event(e.model_dump_json(), name=e.type) for e in closing)

    async def _events(self, generation: Generation) -> AsyncGenerator[api.Event]:
        builder, count = self._builder, self._body.top_logprobs or 0
        token_ids: list[int] = []
        finished: Finished | None = None
        reason = ""
        thought = answered = begun = False
        logprobs: list[api.OutputLogprob] = []
        async with aclosing(generation.events()) as items:
            async for _, item in items:
                if not begun:
                    begun = True  # it was not refused
                    for e in builder.start():
                        yield e
                if isinstance(item, Finished):
                    finished = item
                    continue
                token_ids += item.token_ids
                logprobs += self._logprobs(item, count)
                if not answered and self._thinking_end in item.token_ids:
                    # What thinking consists of is not in the text.
                    after = len(item.token_ids) - item.token_ids.index(self._thinking_end) - 1
                    logprobs = logprobs[len(logprobs) - after :]
                parsed = self._parser.push(item.text)
                if item.finish_reason is not None:
                    reason = item.finish_reason
                    parsed = [*parsed, *self._parser.finish()]
                for event in parsed:
                    thought |= isinstance(event, Reasoning)
                    answered |= not isinstance(event, Reasoning)
                    if isinstance(event, Content):
                        said, logprobs = logprobs, []
                        pushed = builder.push([event], said)
                    else:
                        pushed = builder.push([event])
                    for e in pushed:
                        yield e
                    if isinstance(event, ToolCallStart | ToolCallArguments):
                        logprobs = []
        assert finished is not None
        thinking = 0
        if thought:
            thinking = count_reasoning_tokens(token_ids, end_token_id=self._thinking_end, starts_inside=not answered)
        usage = _usage(finished, len(token_ids), thinking)
        builder.add_logprobs(logprobs)
        for e in builder.finish("incomplete" if reason == "length" else "completed", usage):
            if isinstance(e, api.ResponseEvent):
                self._keep()  # before the client knows that it is there
            yield e

    def _logprobs(self, delta: Delta, count: int) -> list[api.OutputLogprob]:
        made = chat_logprobs(delta, count, self._names)
        return [
            api.OutputLogprob(
                token=entry.token,
                logprob=entry.logprob,
                bytes=entry.bytes or [],
                top_logprobs=[
                    api.OutputTopLogprob(token=top.token, logprob=top.logprob, bytes=top.bytes or [])
                    for top in entry.top_logprobs
                ],
            )
            for entry in (made.content or () if made is not None else ())
        ]

    def _new_response(self) -> api.Response:
        body, params = self._body, self._prepared.params
        form = body.text.format if body.text is not None else None
        shown: dict[str, Any] = {"type": "text"}
        if form is not None:
            shown = form.model_dump(exclude_none=True, by_alias=True)
            if form.type == "json_schema":
                shown.setdefault("name", "response")
        choice = body.tool_choice or "auto"
        return api.Response(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            model=self._model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning.model_dump(exclude_none=True) if body.reasoning is not None else {},
            safety_identifier=body.safety_identifier,
            store=body.store is not False,
            temperature=params.temperature,
            text={"format": shown},
            tool_choice=choice.model_dump(exclude_none=True) if isinstance(choice, api.ResponseToolChoice) else choice,
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )

    def _keep(self) -> None:
        if self._body.store is False:
            return
        response = self._builder.response
        said = [api.InputItem.model_validate(item.model_dump(exclude_none=True)) for item in response.output]
        size = len(self._prepared.rendered) + len(response.model_dump_json())
        self._store.put(response, self._messages + messages_of(said), size)


def _usage(finished: Finished, num_output_tokens: int, num_reasoning_tokens: int) -> api.ResponseUsage:
    return api.ResponseUsage(
        input_tokens=finished.num_prompt_tokens,
        input_tokens_details=api.InputTokensDetails(cached_tokens=finished.num_cached_tokens),
        output_tokens=num_output_tokens,
        output_tokens_details=api.OutputTokensDetails(reasoning_tokens=num_reasoning_tokens),
        total_tokens=finished.num_prompt_tokens + num_output_tokens,
    )


def _json(answer: AnswerModel) -> HTTPResponse:
    return HTTPResponse(answer.model_dump_json(), media_type="application/json")


@router.post(
    "/v1/responses",
    response_model=api.Response,
    responses={**DECLARED, 200: {"description": "The response, or its events.", "content": EVENTS_DECLARED}},
)
async def create_response(request: Request, body: api.ResponseRequest) -> HTTPResponse:
    """Make the next turn of a conversation."""
    state, store = serving(request), _store(request)
    model = state.model_name(body.model)
    history: list[Message] = []
    if body.previous_response_id is not None:
        history = store.get(body.previous_response_id, param="previous_response_id").messages
    call = ResponseCall(state, body, history, store, model)
    prepared = await call.prepare()
    streamed = bool(body.stream)
    # Only step by step is it known which tokens are the text's.
    as_it_comes = streamed or prepared.params.logprobs is not None
    generation = state.generate([prepared.prompt], prepared.params, cache_salt=body.cache_salt, streamed=as_it_comes)
    abort, timeout_s = generation.abort, state.settings.request_timeout
    if streamed:
        events, on_error = call.events(generation), call.failure
        return await connection.stream(request, events, abort=abort, timeout_s=timeout_s, on_error=on_error)
    return _json(await connection.answer(request, call.whole(generation), abort=abort, timeout_s=timeout_s))


@router.get("/v1/responses/{response_id}", response_model=api.Response, responses=DECLARED)
async def get_response(request: Request, response_id: str) -> HTTPResponse:
    """A stored response."""
    if request.query_params.get("stream") == "true":
        raise bad_value("stream must be false: a stored response comes whole", param="stream")
    return _json(_store(request).get(response_id).response)


@router.delete("/v1/responses/{response_id}", response_model=api.DeletedResponse, responses=DECLARED)
async def delete_response(request: Request, response_id: str) -> HTTPResponse:
    """Forget a stored response."""
    _store(request).delete(response_id)
    return _json(api.DeletedResponse(id=response_id))


@router.post("/v1/responses/{response_id}/cancel", response_model=api.Response, responses=DECLARED)
async def cancel_response(request: Request, response_id: str) -> HTTPResponse:
    """Only background responses can be cancelled, and there are none; a running one ends with its connection."""
    _store(request).get(response_id)
    raise bad_value(
        f"response {response_id!r} has ended: only background responses can be cancelled, which this server does "
        "not have; close the connection to end a running one"
    )
