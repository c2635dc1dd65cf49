"""Which tokens may come next: one matcher per answer."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rorqual.platform import usable_cores

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_MOST_THREADS = 8
"""A mask takes some tens of microseconds: more threads cost more than they bring."""


def reason_of(error: str) -> str:
    """llguidance's message in one line, without the state that it shows for its own authors."""
    return " ".join(re.split("<state>|<non-verbose/>", error, maxsplit=1)[0].split())


class Grammar:
    """A compiled grammar, for the answers to one request.

    Its matchers share what they find out about it, up to a limit. So other requests get a grammar of their own, even an
    equal one: what one answer may be must not depend on which were there before.
    """

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """matcher: one that has not moved. vocab_size: bits of a mask. eos_token_ids: below that."""
        self._matcher = matcher
        self.num_words = -(-vocab_size // 32)
        """int32 numbers of a mask."""
        self._keeps = np.full(self.num_words, -1, np.int32)
        for token_id in eos_token_ids:
            self._keeps[token_id // 32] &= np.int32(~(1 << token_id % 32) if token_id % 32 < 31 else 0x7FFF_FFFF)

    def matcher(self, *, ignore_eos: bool = False) -> Matcher:
        """One for an answer. ignore_eos: an end-of-text token is allowed only where nothing else is."""
        return Matcher(self._matcher.deep_copy(), self.num_words, self._keeps if ignore_eos else None)


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, inner: LLMatcher, num_words: int, keeps: NDArray[np.int32] | None) -> None:
        self._inner, self.num_words = inner, num_words
        self._keeps = keeps
        """The mask without end-of-text tokens, if they are to be ignored."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, and no text may follow."""
        return self._inner.is_stopped() and not self._inner.is_error()

    @property
    def can_end(self) -> bool:
        """Whether the answer is complete as it is, whether or not more may follow."""
        return self._inner.is_accepting() and not self._inner.is_error()

    @property
    def fault(self) -> str | None:
        """What went wrong, after which nothing is allowed any more: the grammar is too complex, or a token is wrong."""
        return reason_of(self._inner.get_error()) if self._inner.is_error() else None

    def accept(self, token_id: int) -> None:
        """Move on by a token of the answer, one that the mask allows; another one is a `fault`."""
        self._inner.consume_token(token_id)

    def mask(self, out: NDArray[np.int32]) -> None:
        """Write what may come next to out, int32 [num_words]: bit i % 32 of number i // 32 stands for token i."""
        assert out.shape == (self.num_words,)
        assert out.flags.c_contiguous
        self._inner.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        self._correct(out)

    def _correct(self, out: NDArray[np.int32]) -> None:
        if self._inner.is_error():
            out.fill(0)
        elif self._keeps is not None and not self._inner.is_stopped():
            out &= self._keeps


@functools.cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor(num_threads=min(usable_cores(), _MOST_THREADS))


def fill_masks(matchers: Sequence[Matcher]) -> NDArray[np.int32]:
    """The masks of several answers, int32 [num_matchers, num_words], computed side by side; no matcher comes twice."""
    out = np.empty((len(matchers), matchers[0].num_words), np.int32)
    if len(matchers) == 1:
        matchers[0].mask(out[0])
        return out
    rows = [(matcher._inner, row) for row, matcher in enumerate(matchers)]
    _executor().unsafe_compute_mask_ptr(rows, out.ctypes.data, out.strides[0], len(rows))
    for matcher, row in zip(matchers, out, strict=True):
        matcher._correct(row)
    return out
