"""An LLM without a model: it says "Ahoy" and the prompt, one token per character; it can be slow, full or faulty."""

from __future__ import annotations

import sys
import time
import types
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

from rorqual.config import EngineConfig
from rorqual.outputs import CompletionOutput, RequestOutput, RequestTimes, StreamDelta
from rorqual.sampling_params import SamplingParams

BANNER = "fake banner"


class Tokenizer:
    """One token per character; a chat prompt is "role:content|" for every message."""

    vocab_size = 128
    eos_token_ids = (0,)

    def encode(self, text, *, add_special_tokens=True):
        return [ord(c) for c in text]

    def decode(self, ids, *, skip_special_tokens=True):
        return "".join(map(chr, ids))

    def encode_chat(self, messages, **_):
        return self.encode("".join(f"{m['role']}:{m['content']}|" for m in messages))


class LLM:
    """Records what it was asked; `answer` decides what it says."""

    made: ClassVar[list[LLM]] = []
    generation_config: ClassVar[dict] = {}
    max_model_len = 100
    delay_s = 0.0
    fault: str | None = None

    def __init__(self, model="smollm2", *, progress=True, **options):
        self.config = EngineConfig(model=model, **options)
        self.progress = progress
        self.closed = False
        self.closed_streams = 0
        self.asked = []
        self.engine = SimpleNamespace(
            banner=lambda: BANNER,
            stats=SimpleNamespace(
                seconds={}, num_steps=0, num_prompt_tokens=0, num_output_tokens=0, num_cached_tokens=0
            ),
            resolved=SimpleNamespace(max_model_len=self.max_model_len, max_num_seqs=8, max_num_batched_tokens=64),
            vocab_size=128,
        )
        type(self).made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed = True

    def get_tokenizer(self):
        return Tokenizer()

    def default_sampling_params(self):
        return SamplingParams(**self.generation_config)

    def answer(self, ids):
        return "Ahoy " + "".join(chr(i) for i in ids)

    def _checked(self, ids):
        if len(ids) >= self.max_model_len:
            raise ValueError(f"the prompt has {len(ids)} tokens, but max_model_len is {self.max_model_len}")
        return ids

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        prompts = [p["prompt_token_ids"] if isinstance(p, dict) else p for p in prompts]
        ids = [p if isinstance(p, list) else [ord(c) for c in p] for p in prompts]
        return [self._output(n, i, p) for n, (i, p) in enumerate(zip(ids, params, strict=True))]

    def chat(self, conversations, sampling_params=None, *, use_tqdm=True, **_):
        return self.generate([Tokenizer().encode_chat(c) for c in conversations], sampling_params)

    def _output(self, number, ids, params):
        self.asked.append((ids, params))
        text = self.answer(self._checked(ids))
        out = [ord(c) for c in text]
        if params.ignore_eos:
            out = [1] * params.max_tokens
        out = out[: params.max_tokens]
        stats = self.engine.stats
        stats.num_steps += len(out)
        stats.num_prompt_tokens += len(ids)
        stats.num_output_tokens += len(out)
        for stage in ("schedule", "forward"):
            stats.seconds[stage] = stats.seconds.get(stage, 0.0) + 1e-6
        answer = CompletionOutput(
            0, text[: len(out)], out, finish_reason="error" if self.fault else "stop", error=self.fault
        )
        times = RequestTimes(1.0, 1.0, 1.25 if out else None, 1.25 + (len(out) - 1) * 0.5)
        return RequestOutput(str(number), None, ids, [answer], times, num_cached_tokens=3)

    def stream(self, prompt, sampling_params=None):
        ids = prompt if isinstance(prompt, list) else [ord(c) for c in prompt]
        self.asked.append((ids, sampling_params))
        self._checked(ids)
        try:
            text = self.answer(ids)[: sampling_params.max_tokens]
            for place, character in enumerate(text):
                time.sleep(self.delay_s)
                reason = None
                if place == len(text) - 1:
                    reason = "length" if len(text) == sampling_params.max_tokens else "stop"
                    reason = "error" if self.fault else reason
                yield StreamDelta("0", 0, character, [ord(character)], None, reason, None, self.fault)
        finally:
            self.closed_streams += 1

    def stream_chat(self, messages, sampling_params=None, **_):
        return self.stream(Tokenizer().encode_chat(messages), sampling_params)


@contextmanager
def installed(**attributes):
    """rorqual.llm is the fake inside the block; attributes are set on its LLM."""
    made = type("LLM", (LLM,), {"made": [], **attributes})
    before = sys.modules.get("rorqual.llm")
    sys.modules["rorqual.llm"] = types.SimpleNamespace(LLM=made)
    try:
        yield made
    finally:
        if before is None:
            del sys.modules["rorqual.llm"]
        else:
            sys.modules["rorqual.llm"] = before
