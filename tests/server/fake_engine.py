"""An engine without a model: it answers scripted token ids through the real `Answer` and a real tokenizer."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rorqual.engine.answer import Answer
from rorqual.outputs import Logprob
from rorqual.sampling_params import SamplingParams
from rorqual.sequence import Sequence as EngineSequence
from rorqual.server.engine_client import EngineDead, EngineState, RequestRefused
from rorqual.server.messages import Completion, Delta, EngineInfo, EngineStats, Finished, TokenLogprob
from rorqual.tokenizer.tokenizer import Tokenizer
from tests.unit.tiny_tokenizers import byte_level, save

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif -%}
{%- endif -%}
"""
"""ChatML with tools and a switch for thinking, as Qwen3's."""

EOS = "<|im_end|>"

Script = Callable[[Sequence[int], SamplingParams, int], Sequence[int]]
"""(prompt ids, parameters, index of the answer) -> the ids that the model says."""


@functools.cache
def chat_tokenizer() -> Tokenizer:
    """A small byte-level tokenizer with ChatML's tokens and `CHAT_TEMPLATE`."""
    folder = save(
        byte_level("qwen2"),
        Path(tempfile.mkdtemp(prefix="rorqual-chat-tokenizer-")),
        {"eos_token": EOS, "chat_template": CHAT_TEMPLATE},
    )
    return Tokenizer.from_folder(folder)


def says(text: str, *, end: bool = True) -> Script:
    """A model that always says `text`, and then, if it `end`s, the end token."""
    tokenizer = chat_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return lambda _prompt, _params, _index: [*ids, *(tokenizer.eos_token_ids if end else ())]


def echoes(prompt: Sequence[int], _params: SamplingParams, index: int) -> list[int]:
    """A model that says the index of the answer, the prompt again, and the end token."""
    tokenizer = chat_tokenizer()
    return [*tokenizer.encode(f"{index}:"), *prompt, *tokenizer.eos_token_ids]


def candidates(token_id: int, count: int, vocab_size: int) -> dict[int, Logprob]:
    """Made-up logprobs: `count` candidates of which the first is the most likely, and the token itself.

    Every third token is not among the candidates; the least likely candidate has probability 0.
    """
    tokenizer = chat_tokenizer()
    first = token_id + (1 if token_id % 3 == 0 else 0)
    ids = [(first + i) % vocab_size for i in range(count)]
    values = {t: -0.25 - i if i < 3 else float("-inf") for i, t in enumerate(ids)}
    values.setdefault(token_id, -7.5)
    return {t: Logprob(v, i + 1, tokenizer.token_text(t)) for i, (t, v) in enumerate(values.items())}


def prompt_candidates(prompt: Sequence[int], count: int, vocab_size: int) -> list[dict[int, Logprob] | None]:
    """Made-up logprobs of a prompt."""
    return [None if i == 0 else candidates(t, count, vocab_size) for i, t in enumerate(prompt)]


def _listed(candidates: Mapping[int, Logprob]) -> list[TokenLogprob]:
    return [TokenLogprob(t, c.logprob, c.rank, c.decoded_token) for t, c in candidates.items()]


@dataclass
class FakeRequest:
    """One submitted request: what was asked, and how far it came. Also its own handle."""

    engine: FakeEngineClient
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str
    streamed: bool
    aborted: bool = False
    steps: int = 0
    """Steps that were computed for it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    queue: asyncio.Queue[Delta | Finished | Exception] = field(default_factory=asyncio.Queue)

    def abort(self) -> None:
        """End it."""
        self.aborted = True

    async def __aiter__(self) -> AsyncIterator[Delta | Finished]:
        while True:
            item = await self.queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if isinstance(item, Finished):
                return


class FakeEngineClient:
    """See `rorqual.server.engine_client.EngineClient`.

    Args:
        script: what the model says.
        delay_s: how long a step takes.
        tokens_per_step: tokens that each answer gets per step.
        num_cached_tokens: what is said of the prefix cache.
        max_model_len, max_num_seqs, max_logprobs: of the model; max_num_seqs is reported, not kept.
        generation_config: the checkpoint's own defaults.
    """

    def __init__(
        self,
        script: Script = echoes,
        *,
        delay_s: float = 0.0,
        tokens_per_step: int = 1,
        num_cached_tokens: int = 0,
        max_model_len: int = 512,
        max_num_seqs: int = 8,
        max_logprobs: int = 20,
        generation_config: dict[str, Any] | None = None,
    ) -> None:
        self.tokenizer = chat_tokenizer()
        self.script, self.delay_s, self.tokens_per_step = script, delay_s, tokens_per_step
        self.num_cached_tokens = num_cached_tokens
        self.state: EngineState = "ready"
        self.failure: str | None = None
        self.responsive = True
        """What `is_responsive` says while it is ready."""
        self.stats = EngineStats()
        self.num_resets = 0
        self.closed = False
        self.refuses: str | None = None
        """What every request is refused with; None serves them."""
        self.error_at: int | None = None
        """The step in which answers end with an error; None for never."""
        self.requests: list[FakeRequest] = []
        """All that were submitted."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._info = EngineInfo(
            model_path="/models/fake",
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1024,
            max_logprobs=max_logprobs,
            eos_token_ids=list(self.tokenizer.eos_token_ids),
            block_size=16,
            num_blocks=1000,
            dtype="float32",
            device="cpu",
            generation_config=generation_config or {},
            banner="model    fake",
        )

    @property
    def info(self) -> EngineInfo:
        """Of the model."""
        if self.state != "ready":
            raise EngineDead(self.failure or "the model is loading")
        return self._info

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        streamed: bool = False,
    ) -> FakeRequest:
        """Start a request in a task of its own."""
        if self.state != "ready":
            raise EngineDead(self.failure or "the model is loading")
        assert request_id not in {r.request_id for r in self.requests if not r.ended.is_set()}
        request = FakeRequest(self, request_id, prompt_token_ids, params, cache_salt, streamed)
        self.requests.append(request)
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return request

    def die(self, failure: str = "the engine's process was killed") -> None:
        """End the engine as a crash would."""
        self.state, self.failure = "dead", failure

    async def is_responsive(self, timeout_s: float) -> bool:
        """Whether it is ready, and `responsive`."""
        return self.state == "ready" and self.responsive

    async def reset_prefix_cache(self) -> None:
        """Count it."""
        self.num_resets += 1

    async def close(self) -> None:
        """End all requests."""
        self.closed = True
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, request: FakeRequest) -> None:
        try:
            await self._answer(request)
        except (EngineDead, RequestRefused) as error:
            request.queue.put_nowait(error)
        finally:
            request.ended.set()

    async def _answer(self, request: FakeRequest) -> None:
        if self.refuses is not None:
            raise RequestRefused(self.refuses)
        prompt, params = request.prompt_token_ids, request.params
        limit = self._info.max_model_len
        max_len = min(limit, len(prompt) + (params.max_tokens or limit))
        answers = [
            Answer(
                EngineSequence(i, list(prompt), len(prompt), max_len, is_streamed=request.streamed),
                i,
                params,
                tokenizer=self.tokenizer,
                eos_token_ids=self._info.eos_token_ids,
            )
            for i in range(params.n)
        ]
        scripts = [list(self.script(prompt, params, i)) for i in range(params.n)]
        while not all(answer.finished for answer in answers):
            await asyncio.sleep(self.delay_s)
            if self.state != "ready":
                raise EngineDead(self.failure or "the engine is not there")
            request.steps += 1
            for answer, script in zip(answers, scripts, strict=True):
                if not answer.finished and (delta := self._step(request, answer, script)) and request.streamed:
                    request.queue.put_nowait(delta)
        request.queue.put_nowait(self._finished(request, answers))

    def _step(self, request: FakeRequest, answer: Answer, script: Sequence[int]) -> Delta:
        """What one step adds to an answer; after its script a model says the end token for ever."""
        before, text = len(answer.output.token_ids), ""
        if request.aborted:
            text = answer.end("abort")
        elif request.steps == self.error_at:
            text = answer.end("error", error="the model's numbers are not finite")
        for _ in range(self.tokens_per_step):
            if answer.finished:
                break
            place = len(answer.output.token_ids)
            token_id = script[place] if place < len(script) else self._info.eos_token_ids[0]
            count = request.params.logprobs
            logprobs = None if count is None else candidates(token_id, count, self._info.vocab_size)
            text += answer.push(token_id, logprobs)
        output = answer.output
        return Delta(
            request.request_id,
            output.index,
            text,
            output.token_ids[before:],
            None if output.logprobs is None else [_listed(c) for c in output.logprobs[before:]],
            output.finish_reason,
            output.stop_reason,
            output.error,
        )

    def _finished(self, request: FakeRequest, answers: Sequence[Answer]) -> Finished:
        scored = None
        if request.params.prompt_logprobs is not None:
            made = prompt_candidates(request.prompt_token_ids, request.params.prompt_logprobs, self._info.vocab_size)
            scored = [None if c is None else _listed(c) for c in made]
        completions = [
            Completion(
                o.index,
                o.text,
                o.token_ids,
                None if o.logprobs is None else [_listed(c) for c in o.logprobs],
                o.finish_reason or "abort",
                o.stop_reason,
                o.error,
            )
            for o in (answer.output for answer in answers)
        ]
        return Finished(
            request.request_id,
            completions,
            len(request.prompt_token_ids),
            self.num_cached_tokens,
            scored,
            queue_s=0.001,
            prefill_s=0.002,
            decode_s=0.003,
        )
