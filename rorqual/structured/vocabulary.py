"""A model's vocabulary as llguidance reads it: the bytes that each id adds to an answer's text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from rorqual.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_BEFORE = "\x02"
"""Put before a text where a tokenizer would add a space to its start; no token merges with it."""
_LONGEST = 64
"""Bytes of the longest token that the greedy way looks for."""


class Vocabulary:
    """What `LLTokenizer` asks of a tokenizer. The bytes are the detokenizer's, so that a mask speaks of the very text
    that the answer gets; a special token has none, and no text makes one come.
    """

    bos_token_id = None
    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the model's logits; ids that the tokenizer lacks are never allowed."""
        ends = [i for i in eos_token_ids if i < vocab_size]
        self.eos_token_ids = ends or [vocab_size]  # one behind the logits where the model has none
        self.eos_token_id = self.eos_token_ids[0]
        size = max(vocab_size, self.eos_token_id + 1)
        known = min(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(i) if i < known else b"" for i in range(size)]
        special = {i for i in tokenizer.special_token_ids if i < vocab_size} | set(self.eos_token_ids)
        self.special_token_ids = sorted(special)
        for i in special:
            self.tokens[i] = self.tokens[i] or b"<%d>" % i
        self._special = special
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text that an answer has to go on with, as the model itself would write it where that can be said."""
        wanted = text if isinstance(text, bytes) else text.encode()
        if not wanted:
            return []
        try:
            plain = wanted.decode()
        except UnicodeDecodeError:
            return self._greedy(wanted)
        ids = self._tokenizer.encode(plain, add_special_tokens=False)
        if self._bytes(ids) == wanted:
            return ids
        ids = self._tokenizer.encode(_BEFORE + plain, add_special_tokens=False)
        for i in range(1, len(ids)):
            if self._bytes(ids[:i]).lstrip(b" ") == _BEFORE.encode() and self._bytes(ids[i:]) == wanted:
                return ids[i:]
        return self._greedy(wanted)  # the tokenizer writes it otherwise, or as special tokens

    def _bytes(self, ids: Sequence[int]) -> bytes:
        """The text of ids; nothing where one is special."""
        if not self._special.isdisjoint(ids):
            return b""
        return b"".join(self.tokens[i] if i < len(self.tokens) else b"" for i in ids)

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        return {token: i for i, token in reversed(list(enumerate(self.tokens))) if token and i not in self._special}

    def _greedy(self, wanted: bytes) -> list[int]:
        """The longest token again and again."""
        ids: list[int] = []
        at = 0
        while at < len(wanted):
            lengths = range(min(_LONGEST, len(wanted) - at), 0, -1)
            length = next((n for n in lengths if wanted[at : at + n] in self._id_of), 0)
            if not length:
                return ids  # a byte that no token has: what leads up to it
            ids.append(self._id_of[wanted[at : at + length]])
            at += length
        return ids

    def to_llguidance(self) -> LLTokenizer:
        """The trie of these tokens. Takes a second for a vocabulary of 150,000."""
        from llguidance import LLTokenizer

        return LLTokenizer(self, n_vocab=len(self.tokens), eos_token=self.eos_token_ids)  # type: ignore[arg-type]
