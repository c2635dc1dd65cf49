"""Answers whose text is made at the end, and rows of answers of which only some are looked at."""

from __future__ import annotations

import numpy as np
import pytest

from rorqual.engine.answer import Answer, AnswerRows
from rorqual.sampling_params import SamplingParams
from rorqual.sequence import Sequence
from rorqual.tokenizer.detokenizer import TokenText
from tests.engine.engines import byte_tokenizer

END, STOP = 20, 21


class _Tokenizer:
    """What an answer asks of a tokenizer."""

    def __init__(self) -> None:
        self._text = TokenText(byte_tokenizer(), frozenset({END}))

    def detokenizer(self, *, skip_special_tokens: bool):
        return self._text.detokenizer(skip_special_tokens=skip_special_tokens)


def answer(*, streamed: bool = False, tokenizer: object = None, max_len: int = 100, **params: object) -> Answer:
    seq = Sequence(0, [1, 2], 2, max_len, is_streamed=streamed)
    return Answer(seq, 0, SamplingParams(**params), tokenizer=tokenizer, eos_token_ids=[END])


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("last", [END, STOP, "length", "abort", "error"])
def test_text_made_at_the_end_is_the_streamed_one(last: int | str, include: bool) -> None:
    texts = []
    for streamed in (True, False):
        made = answer(
            streamed=streamed,
            tokenizer=_Tokenizer(),
            max_len=2 + 6 if last == "length" else 100,
            stop_token_ids=[STOP],
            include_stop_str_in_output=include,
            skip_special_tokens=False,
        )
        pieces = [made.push(token_id, None) for token_id in (30, 31, 32, 33, 34)]
        assert any(pieces) == streamed
        if isinstance(last, int):
            pieces.append(made.push(last, None))
        elif last == "length":
            pieces.append(made.push(35, None))
        else:
            pieces.append(made.end(last, error="why" if last == "error" else None))
        assert "".join(pieces) == made.output.text
        assert made.output.finish_reason == ("stop" if isinstance(last, int) else last)
        texts.append(made.output.text)
    assert texts[0] == texts[1]
    assert len(texts[0]) >= 5


def test_only_some_tokens_are_pushed() -> None:
    plain, reading = answer(), answer(ignore_eos=True, stop_token_ids=[STOP])
    streamed, texts, stops, scored, counted = (
        answer(streamed=True),
        answer(tokenizer=_Tokenizer()),
        answer(tokenizer=_Tokenizer(), stop=["x"]),
        answer(logprobs=1),
        answer(presence_penalty=0.5),
    )
    rows = AnswerRows([plain, reading, streamed, texts, stops, scored, counted])
    assert rows.to_push(np.full(7, 3)).tolist() == [False, False, True, False, True, True, False]
    assert rows.to_push(np.array([END, STOP, 3, 3, 3, 3, 3])).tolist() == [True, True, True, False, True, True, False]
    assert rows.counts.tolist() == [False] * 6 + [True]
    rows.collect([0, 3], [7, 8])
    assert (plain.output.token_ids, texts.output.token_ids, reading.output.token_ids) == ([7], [8], [])
    assert rows.take([1, 3]).to_push(np.full(2, 3)).tolist() == [False, False]
    assert AnswerRows([answer(ignore_eos=True)]).to_push(np.array([END])).tolist() == [False]
