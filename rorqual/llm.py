"""LLM: generate, chat and stream in this process."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from rorqual.config import EngineConfig
from rorqual.engine.model_files import open_model, timed
from rorqual.outputs import RequestOutput, StreamDelta
from rorqual.sampling_params import SamplingParams
from rorqual.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rorqual.engine.engine import Engine

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text; token ids; or {"prompt": text} or {"prompt_token_ids": ids}, either with an optional "cache_salt"."""
Message = Mapping[str, Any]
"""{"role": ..., "content": ...} and what else the chat template reads."""


class LLM:
    """A model ready to answer.

        with LLM("smollm2") as llm:
            print(llm.generate("The blue whale is")[0].text)

    Options are the fields of EngineConfig. Several threads may use one LLM; they take turns, step by step.
    """

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        """Load a model. `progress` shows bars on stderr. Raises ValueError for a bad option, model or checkpoint.

        Where the options make this program one of ranks that only follow (torchrun's but the first, or a host that is
        not the first), it does so now, and then raises SystemExit.
        """
        self._lock = threading.RLock()
        self._deltas: dict[str, deque[StreamDelta]] = {}
        config = EngineConfig(model=model, **options)
        with _without_collections():
            files = open_model(config)
            with timed(files.seconds, "import"):
                from rorqual.engine.engine import Engine  # and torch with it
                from rorqual.engine.worker import follow_first_rank
            if (code := follow_first_rank(config)) is not None:
                raise SystemExit(code)
            self._engine: Engine | None = Engine(config, files, progress=progress)

    @property
    def engine(self) -> Engine:
        """The engine inside. Raises ValueError after close()."""
        if self._engine is None:
            raise ValueError("this LLM is closed: make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer all prompts; outputs come in their order.

        Args:
            prompts: one or many of `Prompt`. A list of ints is one prompt.
            sampling_params: one for all, or one per prompt. Default: `default_sampling_params()`.
            use_tqdm: show a bar with prompt and output tokens per second.

        Raises: ValueError for any bad prompt or parameter, before anything is computed.
        """
        several: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        params = self._params_for(several, sampling_params)
        # Nothing is queued until every prompt has been read.
        parsed = [self._parse(prompt) for prompt in several]
        outputs: dict[str, RequestOutput] = {}

        def keep(output: RequestOutput) -> None:
            outputs[output.request_id] = output

        ids: list[str] = []
        try:
            with self._lock:
                for (text, token_ids, salt), p in zip(parsed, params, strict=True):
                    ids.append(self.engine.add_request(token_ids, p, prompt=text, cache_salt=salt, on_finish=keep))
            with _Bar(len(ids), self.engine, disable=not use_tqdm) as bar:
                while len(outputs) < len(ids):
                    self._step()
                    bar.update(len(outputs))
        finally:
            with self._lock:
                for request_id in ids:
                    if request_id not in outputs and self._engine is not None:
                        self._engine.abort(request_id)
        return [outputs[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. `template_options` go to the chat template (tools, enable_thinking)."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [{"prompt_token_ids": self._encode_chat(c, template_options)} for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Stream:
        """Answer one prompt, token by token. Closing the iterator aborts the request.

        Raises ValueError for a bad prompt or parameter when called, not at the first token.
        """
        text, token_ids, salt = self._parse(prompt)
        params = sampling_params or self.default_sampling_params()
        with self._lock:
            request_id = self.engine.add_request(token_ids, params, prompt=text, cache_salt=salt, streamed=True)
            self._deltas[request_id] = mine = deque[StreamDelta]()
        return Stream(self, request_id, mine, params.n)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template_options: Any
    ) -> Stream:
        """Answer a conversation, token by token; see `stream` and `chat`."""
        return self.stream({"prompt_token_ids": self._encode_chat(messages, template_options)}, sampling_params)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError if it was loaded without one."""
        if self.engine.tokenizer is None:
            raise ValueError("this model was loaded without a tokenizer: pass token ids, or --tokenizer")
        return self.engine.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams with what the model's generation_config.json recommends (engine option generation_config)."""
        return self.engine.default_sampling_params()

    def close(self) -> None:
        """Free the model and its cache. The LLM cannot be used afterwards."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            self._deltas.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _parse(self, prompt: Prompt) -> tuple[str | None, Sequence[int], str]:
        """(text, token ids, cache salt) of a prompt."""
        salt = ""
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise ValueError(
                    "a prompt given as a dict has either 'prompt' or 'prompt_token_ids', and may have 'cache_salt'; "
                    f"got the keys {sorted(prompt)}"
                )
            salt = prompt.get("cache_salt", "")
            inner: str | Sequence[int] = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
            prompt = inner
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt), salt
        if isinstance(prompt, Sequence):
            return None, prompt, salt  # type: ignore[return-value]  # mypy does not see that a str has returned
        raise ValueError(f"a prompt is a string or a list of token ids, got {type(prompt).__name__}")

    def _encode_chat(self, messages: Sequence[Message], template_options: Mapping[str, Any]) -> list[int]:
        return self.get_tokenizer().encode_chat(messages, **template_options)

    def _params_for(
        self, prompts: list[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"there are {len(sampling_params)} sampling_params for {len(prompts)} prompts: "
                "pass one for all, or one each"
            )
        return list(sampling_params)

    def _step(self) -> None:
        """One engine step, its deltas handed to whoever streams."""
        with self._lock:
            for delta in self.engine.step():
                if delta.request_id in self._deltas:
                    self._deltas[delta.request_id].append(delta)

    def _forget_stream(self, request_id: str) -> None:
        with self._lock:
            self._deltas.pop(request_id, None)
            if self._engine is not None:
                self._engine.abort(request_id)


class Stream(Iterator[StreamDelta]):
    """The deltas of one request. Closing it, or dropping it, aborts what is unfinished."""

    def __init__(self, llm: LLM, request_id: str, mine: deque[StreamDelta], num_answers: int) -> None:
        self._llm, self.request_id, self._mine, self._num_running = llm, request_id, mine, num_answers

    def __next__(self) -> StreamDelta:
        if not self._num_running:
            self.close()
            raise StopIteration
        while not self._mine:
            self._llm._step()
        delta = self._mine.popleft()
        self._num_running -= delta.finish_reason is not None
        return delta

    def close(self) -> None:
        """End the request; more calls do nothing."""
        self._num_running = 0
        self._llm._forget_stream(self.request_id)

    def __del__(self) -> None:
        self.close()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Switch the garbage collector off: loading makes hundreds of thousands of objects, and nearly all of them stay."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], int))


class _Bar:
    """A tqdm bar over requests that shows prompt and output tokens per second."""

    def __init__(self, total: int, engine: Engine, *, disable: bool) -> None:
        self._bar = tqdm(total=total, desc="Generating", dynamic_ncols=True, disable=disable)
        self._stats = engine.stats
        self._start = (self._stats.num_prompt_tokens, self._stats.num_output_tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._bar.close()

    def update(self, num_done: int) -> None:
        """Move to this many finished requests."""
        if self._bar.disable:
            return
        elapsed = max(1e-9, self._bar.format_dict["elapsed"])
        prompt, output = (
            (now - before) / elapsed
            for now, before in zip(
                (self._stats.num_prompt_tokens, self._stats.num_output_tokens), self._start, strict=True
            )
        )
        self._bar.set_postfix({"Prefill": f"{prompt:.0f}tok/s", "Decode": f"{output:.0f}tok/s"}, refresh=False)
        if num_done > self._bar.n:
            self._bar.update(num_done - self._bar.n)
