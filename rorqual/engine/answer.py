"""Answer: one sequence's way from token ids to text, logprobs and an end. No tensors."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from rorqual.outputs import CompletionOutput, FinishReason, Logprob
from rorqual.sampling_params import SamplingParams
from rorqual.sequence import Sequence
from rorqual.tokenizer.stop_strings import StopStrings
from rorqual.tokenizer.tokenizer import Tokenizer


class Answer:
    """Consumes the tokens of one sequence and decides when it ends.

    Text that nobody reads as it comes, and in which no stop string is looked for, is made at the end.
    """

    def __init__(
        self,
        seq: Sequence,
        index: int,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: SequenceOf[int],
    ) -> None:
        self.seq, self.params = seq, params
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._stop_token_ids = frozenset(params.stop_token_ids or ())
        self.end_token_ids = self._stop_token_ids | frozenset(() if params.ignore_eos else eos_token_ids)
        """The tokens that end it."""
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        self._stop = StopStrings(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self._text_at_end = not (seq.is_streamed or params.stop)
        makes_text = self._detokenizer is not None and not self._text_at_end
        matched = params.structured_outputs is not None
        self.only_collects = not (seq.is_streamed or makes_text or matched or params.logprobs is not None)
        """Whether a token that does not end it is only added to its ids: no text and no logprobs come of it."""
        self.counts = bool(params.bad_words) or params.penalised
        """Whether later draws depend on which tokens were kept."""

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.output.finish_reason is not None

    def push(self, token_id: int, logprobs: dict[int, Logprob] | None, *, completes: bool = False) -> str:
        """Take one generated token; returns the text that became certain. Must not be called when finished.

        completes: nothing may follow it, so that the answer ends with "stop" as if it had said so itself.
        """
        output = self.output
        output.token_ids.append(token_id)
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(logprobs)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs[token_id].logprob
        is_stop_token = token_id in self._stop_token_ids
        ends = token_id in self.end_token_ids
        text = ""
        shown = not ends or self.params.include_stop_str_in_output
        if self._detokenizer is not None and not self._text_at_end and shown:
            text = self._match(self._detokenizer.push(token_id))
        if self.finished:  # by a stop string
            return text
        if ends:
            return text + self.end("stop", stop_reason=token_id if is_stop_token else None)
        if completes:
            return text + self.end("stop")
        if self.seq.num_prompt_tokens + len(output.token_ids) >= self.seq.max_len:
            return text + self.end("length")
        return text

    def end(self, reason: FinishReason, *, stop_reason: int | None = None, error: str | None = None) -> str:
        """End the answer; returns its text that was not emitted yet."""
        text = ""
        if self._detokenizer is not None:
            if self._text_at_end:
                shown = self.output.token_ids
                if reason == "stop" and shown[-1] in self.end_token_ids and not self.params.include_stop_str_in_output:
                    shown = shown[:-1]
                text = self._emit("".join(map(self._detokenizer.push, shown)))
            text += self._match(self._detokenizer.finish())
        if not self.finished:
            text += self._emit(self._stop.finish())
            self.output.finish_reason, self.output.stop_reason, self.output.error = reason, stop_reason, error
        return text

    def _match(self, text: str) -> str:
        """Pass text through the stop strings; those that min_tokens forbids to end the answer are let through."""
        if len(self.output.token_ids) <= self.params.min_tokens:
            return self._emit(text)
        emitted, hit = self._stop.push(text)
        if hit is not None:
            self.output.finish_reason, self.output.stop_reason = "stop", hit
        return self._emit(emitted)

    def _emit(self, text: str) -> str:
        self.output.text += text
        return text


class AnswerRows:
    """The answers behind the rows of decode steps, and which of them a step's tokens are more than numbers for."""

    def __init__(self, answers: list[Answer]) -> None:
        self._answers = answers
        self._token_ids = [answer.output.token_ids for answer in answers]
        self._looked_at = np.array([not answer.only_collects for answer in answers])
        self.counts = np.array([answer.counts for answer in answers])
        """bool [num_rows], of each answer."""
        self.push_all = bool(self._looked_at.all())
        """Whether every row's answer has to `push` whatever token."""
        self._end_token_ids = np.array(sorted(frozenset().union(*(a.end_token_ids for a in answers))), np.int64)

    def take(self, rows: SequenceOf[int]) -> AnswerRows:
        """Only these rows."""
        return AnswerRows([self._answers[row] for row in rows])

    def to_push(self, token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[num_rows]: whether a row's answer has to `push` its token; the others may `collect` theirs."""
        ends: NDArray[np.bool_] = (token_ids[:, None] == self._end_token_ids).any(1)
        return self._looked_at | ends

    def collect(self, rows: SequenceOf[int], token_ids: SequenceOf[int]) -> None:
        """Add a token each to these rows' answers."""
        for row, token_id in zip(rows, token_ids, strict=True):
            self._token_ids[row].append(token_id)
