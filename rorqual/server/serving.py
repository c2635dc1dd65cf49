"""What all routes share: the engine, the tokenizer, the settings, and who may submit what."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from rorqual.sampling_params import SamplingParams
from rorqual.server.engine_client import EngineClient, RequestHandle
from rorqual.server.errors import APIError, bad_value, form_asked_as
from rorqual.server.messages import Delta, EngineInfo, Finished
from rorqual.server.parsing import ParserFactory, ParserNames
from rorqual.server.parsing.factory import REASONING_PARSERS, TOOL_CALL_PARSERS
from rorqual.server.schemas.request import GenerationRequest, RequestModel, SamplingFields
from rorqual.server.settings import ServerSettings
from rorqual.server.structured import structured_outputs
from rorqual.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("rorqual.server")

MAX_ANSWERS = 128
"""Most answers per prompt, as OpenAI's."""
MOST_TOKENS = 2**31 - 1
"""A larger max_tokens means the same, and would not fit everywhere."""
MOST_STRINGS = 1024
"""Most stop strings or bad words: each is looked for after every token."""
LONG_TEXT = 10_000
"""Characters above which a text is tokenized beside the event loop."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an answer goes on with."""

    token_ids: list[int]
    text: str | None = None
    """None if it came as ids."""


class Serving:
    """The server's state; routes get it by `serving(request)`."""

    def __init__(self, engine: EngineClient, settings: ServerSettings, tokenizer: Tokenizer) -> None:
        self.engine, self.settings, self.tokenizer = engine, settings, tokenizer
        self.started = int(time.time())
        """Seconds since 1970."""
        self.draining = False
        self.num_http_requests = 0
        self.num_answers = 0
        """Answers that wait or run."""
        self._running: set[Generation] = set()
        self.parser_names = chosen_parsers(settings, tokenizer, {})
        """Of those that read chat answers."""
        special = {tokenizer.token_text(token_id) for token_id in tokenizer.special_token_ids}
        calls = TOOL_CALL_PARSERS.get(self.parser_names.tool_call or "")
        self.calls_are_special = calls is not None and not special.isdisjoint(calls.starts)
        """Whether tool calls begin with a special token, which is left out of texts by default."""
        thinking = REASONING_PARSERS.get(self.parser_names.reasoning or "")
        self.thinking_is_special = thinking is not None and not special.isdisjoint(
            (thinking.start_tag, thinking.end_tag)
        )
        """The same of thinking."""
        self._said: set[str] = set()

    # ---- the model

    @property
    def info(self) -> EngineInfo:
        """Of the model. Raises APIError (503) while there is none."""
        if self.engine.state == "loading":
            raise APIError(503, "the model is loading: try again in a while", code="loading")
        return self.engine.info

    @property
    def model_names(self) -> tuple[str, ...]:
        """What clients may call the model."""
        return self.settings.served_model_name or (self.info.model_path,)

    def model_name(self, asked: str | None) -> str:
        """The name for the answer. Raises APIError (404)."""
        names = self.model_names
        if asked is not None and asked not in names:
            raise APIError(
                404,
                f"there is no model {asked!r}: this server has {', '.join(map(repr, names))}",
                param="model",
                code="model_not_found",
            )
        return asked or names[0]

    # ---- prompts and parameters

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Ids of a text. Raises APIError (400) if it is not valid Unicode."""
        tokenizer = self.tokenizer
        try:
            if len(text) > LONG_TEXT:
                return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except ValueError as error:
            raise bad_value(f"{param}: {error}", param=param) from None

    def check_prompt(self, prompt: Prompt, *, param: str) -> Prompt:
        """The same prompt. Raises APIError (400) if it is empty, too long, or holds what is no token."""
        info, ids = self.info, prompt.token_ids
        if not ids:
            raise bad_value(f"{param} must have at least one token, got none: add text", param=param)
        if len(ids) >= info.max_model_len:
            raise bad_value(
                f"this model's context is {info.max_model_len} tokens, and {param} has {len(ids)}: "
                f"it must leave room for an answer, so shorten it to {info.max_model_len - 1} at most",
                param=param,
                code="context_length_exceeded",
            )
        wrong = next((t for t in (min(ids), max(ids)) if not 0 <= t < info.vocab_size), None)
        if wrong is not None:
            raise bad_value(
                f"{param} must hold token ids of this model's vocabulary, 0 to {info.vocab_size - 1}, got {wrong}",
                param=param,
            )
        return prompt

    def sampling_params(
        self, request: GenerationRequest, *, renamed: Mapping[str, str] | None = None, **decided: Any
    ) -> SamplingParams:
        """The request's parameters over the model's defaults.

        Args:
            request: its fields that are not null count.
            renamed: names in the request by fields of SamplingParams, for messages.
            decided: fields that do not follow from those alone; None leaves one out.

        Raises: APIError (400) for a value that is wrong, or that this model cannot serve.
        """
        given = {name: getattr(request, name) for name in SamplingFields.model_fields}
        asked_as, given["structured_outputs"] = structured_outputs(request)
        form_asked_as.set(asked_as)
        given |= decided
        values = {name: value for name, value in given.items() if value is not None}
        if (limit := values.get("max_tokens")) is not None:
            values["max_tokens"] = min(limit, MOST_TOKENS)
        info = self.info
        try:
            params = SamplingParams(**(info.generation_config | values))
            params.validate_for(info.vocab_size, info.max_logprobs)
        except ValueError as error:
            names = {"structured_outputs": asked_as, **(renamed or {})}
            raise named_fault(error, SamplingParams.model_fields, names) from None
        for name, size, most in (
            ("n", params.n, MAX_ANSWERS),
            ("stop", len(params.stop), MOST_STRINGS),
            ("bad_words", len(params.bad_words or ()), MOST_STRINGS),
        ):
            if size > most:
                strings = "" if name == "n" else " strings"
                raise bad_value(f"{name} must be at most {most}{strings}, got {size}: ask for fewer", param=name)
        return params

    def note_unknown(self, request: RequestModel) -> None:
        """Log names that mean nothing here, each once: a misspelt one should not go unnoticed."""
        for name in request.unknown():
            shown = repr(name[:80])
            self.log_once(f"field {shown}", "requests have a field that is not known and has no effect: %s", shown)

    def log_once(self, key: str, message: str, *arguments: Any) -> None:
        """Log a line the first time that this key is seen."""
        if key not in self._said and len(self._said) < 1000:
            self._said.add(key)
            log.warning(message, *arguments)

    # ---- requests

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, cache_salt: str | None, streamed: bool
    ) -> Generation:
        """Submit prompts. Raises APIError: 503 if too many requests wait, 400 if these are too many even alone."""
        capacity, wanted = self.info.max_num_seqs + self.settings.max_queue, len(prompts) * params.n
        if wanted > capacity:
            raise bad_value(f"this asks for {wanted} answers, and the server takes {capacity} at once: ask for fewer")
        if self.num_answers + wanted > capacity:
            raise APIError(
                503,
                f"the queue is full: {self.num_answers} answers run or wait, of at most {capacity}, and this asks for "
                f"{wanted} more; try again later",
                code="queue_full",
            )
        if self.settings.enable_log_requests:
            log.info(
                "request: prompts of %s tokens, %s, streamed: %s",
                [len(prompt.token_ids) for prompt in prompts],
                params.model_dump(exclude_unset=True),
                streamed,
            )
        return Generation(self, prompts, params, cache_salt=cache_salt or "", streamed=streamed)

    def note_begin(self, generation: Generation, num_answers: int) -> None:
        """Count a generation's answers."""
        self.num_answers += num_answers
        self._running.add(generation)

    def note_end(self, generation: Generation, num_answers: int) -> None:
        """Count them no more; more calls do nothing."""
        if generation in self._running:
            self._running.remove(generation)
            self.num_answers -= num_answers

    def abort_all(self) -> None:
        """End all requests; their clients are told."""
        for generation in self._running:
            generation.stop()


class Generation:
    """The engine's requests that belong to one HTTP request, one per prompt."""

    def __init__(
        self, serving: Serving, prompts: Sequence[Prompt], params: SamplingParams, *, cache_salt: str, streamed: bool
    ) -> None:
        self._serving, self._streamed = serving, streamed
        self._num_answers = len(prompts) * params.n
        self._handles: list[RequestHandle] = []
        serving.note_begin(self, self._num_answers)
        try:
            for prompt in prompts:
                self._handles.append(
                    serving.engine.submit(
                        prompt.token_ids,
                        params,
                        request_id=uuid.uuid4().hex,  # a client's own id could be there twice
                        cache_salt=cache_salt,
                        streamed=streamed,
                    )
                )
        except BaseException:
            self.abort()
            raise

    def stop(self) -> None:
        """Have the engine end what still runs; `events` says so then."""
        for handle in self._handles:
            handle.abort()

    def abort(self) -> None:
        """End what still runs, and wait for nothing; more calls do nothing."""
        self.stop()
        self._serving.note_end(self, self._num_answers)

    async def events(self) -> AsyncGenerator[tuple[int, Delta | Finished]]:
        """(number of the prompt, what has come of it): the deltas of its answers, then a `Finished`.

        What was not streamed comes the other way round: `Finished`, then one delta per answer. Closing the generator
        aborts the requests.

        Raises: APIError for an answer that ended in an error; RequestRefused; EngineDead.
        """
        try:
            source = self._one() if len(self._handles) == 1 else self._several()
            async with contextlib.aclosing(source):
                async for number, item in source:
                    yield number, _checked(item) if isinstance(item, Delta) else item
                    if isinstance(item, Finished) and not self._streamed:
                        for delta in _whole_answers(item):
                            yield number, _checked(delta)
        finally:
            self.abort()

    async def _one(self) -> AsyncGenerator[tuple[int, Delta | Finished]]:
        async for item in self._handles[0]:
            yield 0, item

    async def _several(self) -> AsyncGenerator[tuple[int, Delta | Finished]]:
        merged: asyncio.Queue[tuple[int, Delta | Finished | Exception]] = asyncio.Queue(maxsize=len(self._handles))

        async def pump(number: int, items: AsyncIterator[Delta | Finished]) -> None:
            try:
                async for item in items:
                    await merged.put((number, item))
            except Exception as error:
                await merged.put((number, error))

        tasks = [asyncio.create_task(pump(i, aiter(handle))) for i, handle in enumerate(self._handles)]
        try:
            running = len(tasks)
            while running:
                number, item = await merged.get()
                if isinstance(item, Exception):
                    raise item
                running -= isinstance(item, Finished)
                yield number, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _checked(delta: Delta) -> Delta:
    if delta.finish_reason == "error":
        raise APIError(500, f"this answer failed: {delta.error}", code="answer_failed")
    if delta.finish_reason == "abort":
        raise APIError(500, "this request was ended by the server", code="aborted")
    return delta


def _whole_answers(finished: Finished) -> Iterable[Delta]:
    for c in finished.completions:
        yield Delta(
            finished.request_id,
            c.index,
            c.text,
            c.token_ids,
            c.logprobs,
            c.finish_reason,
            c.stop_reason,
            c.error,
        )


def chosen_parsers(settings: ServerSettings, tokenizer: Tokenizer, model_config: Mapping[str, Any]) -> ParserNames:
    """Those of the settings; for "auto" what fits the model's config.json and chat template.

    Raises: ValueError for a name that is not known.
    """
    templates = tokenizer.chat_templates
    guessed = ParserFactory.guess(model_config, templates.get("tool_use") or templates.get("default"))
    known = ParserFactory.names()

    def choose(kind: str, asked: str, found: str | None) -> str | None:
        if asked in ("auto", "none"):
            return found if asked == "auto" else None
        if asked not in known[kind]:
            raise ValueError(f"{kind}_parser must be one of auto, none, {', '.join(known[kind])}, got {asked!r}")
        return asked

    return ParserNames(
        choose("tool_call", settings.tool_call_parser, guessed.tool_call),
        choose("reasoning", settings.reasoning_parser, guessed.reasoning),
    )


def named_fault(
    error: ValueError, fields: Iterable[str], renamed: Mapping[str, str], *, default: str | None = None
) -> APIError:
    """400 for a sentence that begins with the name of a field, told under the name that the request has for it."""
    message = str(error)
    name = message.split(" ", 1)[0].split(".", 1)[0].removesuffix(":")
    if name not in set(fields):
        return bad_value(message if default is None else f"{default}: {message}", param=default)
    said = renamed.get(name, name)
    return bad_value(said + message.removeprefix(name), param=said)


def serving(request: Request) -> Serving:
    """The state of the app that a request came to."""
    state: Serving = request.app.state.serving
    return state
