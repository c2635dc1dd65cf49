"""The engine's log-probabilities in the two shapes that clients know, and in vLLM's of prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rorqual.sampling_params import SamplingParams
from rorqual.server.messages import Delta, TokenLogprob
from rorqual.server.schemas import chat as chat_schemas
from rorqual.server.schemas.answer import PromptLogprob, PromptLogprobs
from rorqual.server.schemas.completions import CompletionLogprobs
from rorqual.tokenizer.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenNames:
    """How tokens are named, and which ones are not in the text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, as_ids: bool) -> None:
        self._tokenizer, self.by_id = tokenizer, as_ids
        self._hidden = tokenizer.special_token_ids if params.skip_special_tokens else frozenset[int]()
        self._ends_show = params.include_stop_str_in_output

    def name(self, candidate: TokenLogprob) -> str:
        """Its text, or its id."""
        return f"token_id:{candidate.token_id}" if self.by_id else candidate.text

    def bytes(self, token_id: int) -> list[int] | None:
        """Its bytes in the text; None if it is left out there."""
        return None if token_id in self._hidden else list(self._tokenizer.token_bytes(token_id))

    def has_hidden_end(self, delta: Delta) -> bool:
        """Whether the delta's last token only ended the answer."""
        return delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str) and not self._ends_show


def chosen(candidates: Sequence[TokenLogprob], token_id: int) -> TokenLogprob:
    """The token itself among its candidates."""
    return next(c for c in candidates if c.token_id == token_id)


def best(candidates: Iterable[TokenLogprob], count: int) -> list[TokenLogprob]:
    """The most likely ones, in their order."""
    return sorted(candidates, key=lambda c: (-c.logprob, c.token_id))[:count]


def chat_logprobs(delta: Delta, count: int, names: TokenNames) -> chat_schemas.ChatLogprobs | None:
    """Of a delta's tokens, with `count` candidates each; None if they were not asked for."""
    if delta.logprobs is None:
        return None
    content = []
    last = len(delta.token_ids) - 1 if names.has_hidden_end(delta) else -1
    for place, (token_id, candidates) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
        token = chosen(candidates, token_id)
        top = [
            chat_schemas.TopLogprob(token=names.name(c), logprob=max(c.logprob, LEAST), bytes=names.bytes(c.token_id))
            for c in best(candidates, count)
        ]
        content.append(
            chat_schemas.ChatTokenLogprob(
                token=names.name(token),
                logprob=max(token.logprob, LEAST),
                bytes=None if place == last else names.bytes(token_id),
                top_logprobs=top,
            )
        )
    return chat_schemas.ChatLogprobs(content=content, refusal=None)


def prompt_logprobs(scored: Sequence[Sequence[TokenLogprob] | None]) -> PromptLogprobs:
    """Of a prompt, by the candidates' ids."""
    return [
        None
        if candidates is None
        else {
            str(c.token_id): PromptLogprob(logprob=max(c.logprob, LEAST), rank=c.rank, decoded_token=c.text)
            for c in candidates
        }
        for candidates in scored
    ]


class CompletionLogprobsWriter:
    """Writes one choice's logprobs for /v1/completions; knows how long its text has become."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, count: int, names: TokenNames) -> None:
        self._tokenizer, self._count, self._names = tokenizer, count, names
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._offset = 0

    def prompt(
        self, token_ids: Sequence[int], text: str, scored: Sequence[Sequence[TokenLogprob] | None]
    ) -> CompletionLogprobs:
        """Of an echoed prompt, whose first token nothing predicts."""
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=False)
        starts, length = [], 0
        for token_id in token_ids:
            starts.append(length)
            length += len(detokenizer.push(token_id))
        # A BOS that the tokenizer put in front is not in the text.
        surplus = max(0, length + len(detokenizer.finish()) - len(text))
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, candidates, start in zip(token_ids, scored, starts, strict=True):
            self._write(written, token_id, candidates, min(max(0, start - surplus), len(text)))
        self._offset = len(text)
        return written

    def answer(self, delta: Delta) -> CompletionLogprobs:
        """Of a delta's tokens."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, candidates in zip(delta.token_ids, delta.logprobs or (), strict=True):
            self._write(written, token_id, candidates, self._offset)
            self._offset += len(self._detokenizer.push(token_id))
        return written

    def _write(
        self, to: CompletionLogprobs, token_id: int, candidates: Sequence[TokenLogprob] | None, offset: int
    ) -> None:
        to.text_offset.append(offset)
        if candidates is None:
            to.tokens.append(f"token_id:{token_id}" if self._names.by_id else self._tokenizer.token_text(token_id))
            to.token_logprobs.append(None)
            to.top_logprobs.append(None)
            return
        token = chosen(candidates, token_id)
        top: dict[str, float] = {}
        # Different tokens may have one text; the most likely one's value stands.
        for c in [*best(candidates, self._count), token]:
            top.setdefault(self._names.name(c), max(c.logprob, LEAST))
        to.tokens.append(self._names.name(token))
        to.token_logprobs.append(max(token.logprob, LEAST))
        to.top_logprobs.append(top)
