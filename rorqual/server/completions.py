"""/v1/completions: texts or token ids to go on with."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from rorqual.sampling_params import SamplingParams
from rorqual.server import connection
from rorqual.server.connection import DONE, EVENTS_DECLARED, event
from rorqual.server.errors import DECLARED, bad_value
from rorqual.server.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs
from rorqual.server.messages import Delta, Finished, TokenLogprob
from rorqual.server.schemas.answer import Usage
from rorqual.server.schemas.completions import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionFinishReason,
    CompletionLogprobs,
    CompletionRequest,
    TextCompletion,
)
from rorqual.server.serving import Generation, Prompt, Serving, serving

router = APIRouter(tags=["OpenAI"])


async def read_prompts(state: Serving, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a request. Raises APIError (400)."""
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise bad_value("prompt must be a text, token ids, or a list of either, got an empty list", param="prompt")
    special = request.add_special_tokens is not False
    prompts = []
    for place, text_or_ids in enumerate(given):
        param = "prompt" if len(given) == 1 else f"prompt.{place}"
        if isinstance(text_or_ids, str):
            ids = await state.encode(text_or_ids, add_special_tokens=special, param=param)
            prompt = Prompt(ids, text_or_ids)
        else:
            prompt = Prompt(text_or_ids)
        prompts.append(state.check_prompt(prompt, param=param))
    return prompts


def read_params(state: Serving, request: CompletionRequest) -> SamplingParams:
    """The parameters of a request. Raises APIError (400)."""
    if request.suffix:
        raise bad_value("suffix is not supported: leave it out", param="suffix")
    n = request.n or 1
    if request.best_of is not None and request.best_of != n:
        raise bad_value(f"best_of must equal n ({n}) or be left out, got {request.best_of}", param="best_of")
    scored = [k for k in (request.prompt_logprobs, request.logprobs if request.echo else None) if k is not None]
    return state.sampling_params(
        request,
        logprobs=request.logprobs,
        prompt_logprobs=max(scored, default=None),
        # A model cannot be run for no token: one is made, and left out.
        max_tokens=1 if only_scores(request) else request.max_tokens,
    )


def only_scores(request: CompletionRequest) -> bool:
    """Whether the prompt comes back with its logprobs, and nothing is added."""
    return request.max_tokens == 0 and bool(request.echo)


class CompletionAnswer:
    """One choice on its way."""

    def __init__(
        self, index: int, request: CompletionRequest, prompt: Prompt, writer: CompletionLogprobsWriter | None, text: str
    ) -> None:
        self.index, self._request, self._prompt, self._writer = index, request, prompt, writer
        self._prompt_text = text
        self._begun = False

    def push(
        self, delta: Delta, scored: Sequence[Sequence[TokenLogprob] | None] | None
    ) -> CompletionChunkChoice | None:
        """What a delta adds, or None if that is nothing; `scored` are the prompt's logprobs, if they were asked for."""
        first, self._begun = not self._begun, True
        text, logprobs = delta.text, None
        if first and self._request.echo:
            text = self._prompt_text + text
            if self._writer is not None and scored is not None:
                logprobs = self._writer.prompt(self._prompt.token_ids, self._prompt_text, scored)
        if self._writer is not None:
            of_answer = self._writer.answer(delta)
            logprobs = of_answer if logprobs is None else _extended(logprobs, of_answer)
        shows_ids = bool(self._request.return_token_ids)
        if not (text or delta.finish_reason or first or (delta.token_ids and (logprobs is not None or shows_ids))):
            return None
        reason: CompletionFinishReason | None = None
        if delta.finish_reason is not None:
            reason = "length" if delta.finish_reason == "length" else "stop"
        choice = CompletionChunkChoice(index=self.index, text=text, logprobs=logprobs, finish_reason=reason)
        if reason is not None:
            choice.stop_reason = delta.stop_reason
        if shows_ids:
            choice.token_ids = delta.token_ids
            if first:
                choice.prompt_token_ids = self._prompt.token_ids
        if first and scored is not None and self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(scored)
        return choice


def _extended(to: CompletionLogprobs, more: CompletionLogprobs) -> CompletionLogprobs:
    to.tokens += more.tokens
    to.token_logprobs += more.token_logprobs
    to.top_logprobs += more.top_logprobs
    to.text_offset += more.text_offset
    return to


def joined(pieces: Sequence[CompletionChunkChoice]) -> CompletionChoice:
    """The choice that a stream's pieces make."""
    first, last = pieces[0], pieces[-1]
    assert last.finish_reason is not None
    logprobs = first.logprobs
    for piece in pieces[1:]:
        if logprobs is not None and piece.logprobs is not None:
            _extended(logprobs, piece.logprobs)
    choice = CompletionChoice(
        index=first.index,
        text="".join(piece.text for piece in pieces),
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
    if first.token_ids is not None:
        choice.token_ids = [token_id for piece in pieces for token_id in piece.token_ids or ()]
        choice.prompt_token_ids = first.prompt_token_ids
    if first.prompt_logprobs is not None:
        choice.prompt_logprobs = first.prompt_logprobs
    return choice


class CompletionCall:
    """One request on its way through the engine."""

    def __init__(
        self, state: Serving, request: CompletionRequest, prompts: Sequence[Prompt], params: SamplingParams, model: str
    ) -> None:
        self._request, self._prompts, self._n = request, prompts, params.n
        self._only_scores = only_scores(request)
        self._head: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        as_ids = request.return_tokens_as_token_ids
        names = TokenNames(
            state.tokenizer, params, as_ids=state.settings.return_tokens_as_token_ids if as_ids is None else as_ids
        )
        self._answers = []
        for number, prompt in enumerate(prompts):
            text = prompt.text if prompt.text is not None else ""
            if request.echo and prompt.text is None:
                text = state.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            for i in range(params.n):
                writer = None
                if request.logprobs is not None:
                    writer = CompletionLogprobsWriter(state.tokenizer, params, request.logprobs, names)
                self._answers.append(CompletionAnswer(number * params.n + i, request, prompt, writer, text))
        self._finished: dict[int, Finished] = {}
        self._num_completion_tokens = 0

    async def whole(self, generation: Generation) -> TextCompletion:
        """All answers at once."""
        pieces: list[list[CompletionChunkChoice]] = [[] for _ in self._answers]
        async with aclosing(self._pieces(generation)) as events:
            async for piece in events:
                pieces[piece.index].append(piece)
        return TextCompletion(**self._head, choices=[joined(of_answer) for of_answer in pieces], usage=self._usage())

    async def events(self, generation: Generation) -> AsyncGenerator[str]:
        """The stream's events, as they are sent."""
        options = self._request.stream_options
        include_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        async with aclosing(self._pieces(generation)) as pieces:
            async for piece in pieces:
                chunk = CompletionChunk(**self._head, choices=[piece])
                if continuous:
                    chunk.usage = self._usage()
                elif include_usage:
                    chunk.usage = None
                yield event(chunk.to_json())
        if include_usage:
            yield event(CompletionChunk(**self._head, choices=[], usage=self._usage()).to_json())
        yield DONE

    async def _pieces(self, generation: Generation) -> AsyncGenerator[CompletionChunkChoice]:
        async with aclosing(generation.events()) as events:
            async for number, item in events:
                if isinstance(item, Finished):
                    self._finished[number] = item
                    continue
                delta = _without_tokens(item) if self._only_scores else item
                self._num_completion_tokens += len(delta.token_ids)
                known = self._finished.get(number)
                scored = None if known is None else known.prompt_logprobs
                piece = self._answers[number * self._n + delta.index].push(delta, scored)
                if piece is not None:
                    yield piece

    def _usage(self) -> Usage:
        complete = len(self._finished) == len(self._prompts)
        return Usage.of(
            sum(len(prompt.token_ids) for prompt in self._prompts),
            self._num_completion_tokens,
            sum(finished.num_cached_tokens for finished in self._finished.values()) if complete else None,
        )


def _without_tokens(delta: Delta) -> Delta:
    """The same end of an answer, of which no token was wanted."""
    logprobs = None if delta.logprobs is None else list[list[TokenLogprob]]()
    return msgspec.structs.replace(
        delta, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None
    )


@router.post(
    "/v1/completions",
    response_model=TextCompletion,
    responses={**DECLARED, 200: {"description": "The answers, or their events.", "content": EVENTS_DECLARED}},
)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Go on with texts."""
    state = serving(request)
    model = state.model_name(body.model)
    state.note_unknown(body)
    params = read_params(state, body)
    prompts = await read_prompts(state, body)
    streamed = bool(body.stream)
    # Logprobs of a prompt are known at the end, and belong to the beginning.
    as_it_comes = streamed and params.prompt_logprobs is None
    call = CompletionCall(state, body, prompts, params, model)
    generation = state.generate(prompts, params, cache_salt=body.cache_salt, streamed=as_it_comes)
    abort, timeout_s = generation.abort, state.settings.request_timeout
    if streamed:
        return await connection.stream(request, call.events(generation), abort=abort, timeout_s=timeout_s)
    completion = await connection.answer(request, call.whole(generation), abort=abort, timeout_s=timeout_s)
    return Response(completion.to_json(), media_type="application/json")
