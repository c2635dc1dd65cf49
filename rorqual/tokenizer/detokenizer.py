"""Ids to text, one at a time and exactly: what is streamed, joined, is what decoding all ids at once gives.

There is no window that is decoded again. Each token is mapped to its bytes or its piece of text once, and only what is
not yet certain is held back: an unfinished UTF-8 character, or a run of byte-fallback tokens.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tokenizers

_REPLACEMENT = "\ufffd"
_Value = TypeVar("_Value")


class Detokenizer(ABC):
    """Streams the text of one sequence of ids that follows other text (a prompt).

    For every sequence of ids, the joined results of `push` and one `finish` equal `Tokenizer.decode` of these ids, byte
    for byte, except that a SentencePiece tokenizer's dropped space at the very start of a text is kept, because this
    text does not start there. The cost of a push does not grow with the text.
    """

    @abstractmethod
    def push(self, token_id: int) -> str:
        """The text that is certain now, after one more id. May be empty. An id without a token adds nothing."""

    @abstractmethod
    def finish(self) -> str:
        """What was held back, as the end of the text: bytes that never became a character are U+FFFD."""


class TokenText:
    """What each id of a tokenizer means in text; filled on demand and shared by all detokenizers of that tokenizer.

    Raises:
        ValueError: the tokenizer's decoder cannot be streamed.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_token_ids: frozenset[int]) -> None:
        self._special = special_token_ids
        decoder = _read_decoder(backend)
        self._bytes = _Lazy(lambda i: _byte_level_bytes(backend.id_to_token(i))) if decoder.byte_level else None
        self._pieces = _Lazy(lambda i: _piece(backend.id_to_token(i), decoder))

    def detokenizer(self, *, skip_special_tokens: bool) -> Detokenizer:
        """A new stream."""
        skip = self._special if skip_special_tokens else frozenset()
        if self._bytes is not None:
            return _ByteLevelDetokenizer(self._bytes, skip)
        return _PieceDetokenizer(self._pieces, skip)

    def text(self, token_id: int) -> str:
        """One token on its own; a byte that is no character by itself is U+FFFD, an id without a token is ""."""
        if self._bytes is not None:
            return self._bytes[token_id].decode("utf-8", "replace")
        piece = self._pieces[token_id]
        if isinstance(piece, int):
            return chr(piece) if piece < 0x80 else _REPLACEMENT
        return piece or ""

    def bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, in UTF-8; it may be part of a character."""
        if self._bytes is not None:
            return self._bytes[token_id]
        piece = self._pieces[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()


class _Lazy(dict[int, _Value]):
    def __init__(self, compute: Callable[[int], _Value]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> _Value:
        value = self[token_id] = self._compute(token_id)
        return value


class _ByteLevelDetokenizer(Detokenizer):
    def __init__(self, table: dict[int, bytes], skip: frozenset[int]) -> None:
        self._table = table
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return "" if token_id in self._skip else self._decode(self._table[token_id])

    def finish(self) -> str:
        return self._decode(b"", True)


class _PieceDetokenizer(Detokenizer):
    """For SentencePiece. A run of byte tokens is text if the whole run is valid UTF-8, else one U+FFFD per byte."""

    def __init__(self, table: dict[int, str | int | None], skip: frozenset[int]) -> None:
        self._table = table
        self._skip = skip
        self._new_run()

    def _new_run(self) -> None:
        self._run_text = ""
        self._run_length = 0
        self._run_valid = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    def push(self, token_id: int) -> str:
        piece = None if token_id in self._skip else self._table[token_id]
        if piece is None:  # as if it were not there: it does not end a run of bytes either
            return ""
        if isinstance(piece, int):
            return self._push_byte(piece)
        return self._end_run() + piece if self._run_length else piece

    def finish(self) -> str:
        return self._end_run()

    def _push_byte(self, byte: int) -> str:
        self._run_length += 1
        if not self._run_valid:
            return _REPLACEMENT
        try:
            self._run_text += self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:  # no later byte can mend the run, so its bytes need not be held back any longer
            self._run_valid = False
            return _REPLACEMENT * self._run_length
        return ""

    def _end_run(self) -> str:
        text = ""
        if self._run_valid:
            unfinished, _ = self._decoder.getstate()
            text = _REPLACEMENT * self._run_length if unfinished else self._run_text
        self._new_run()
        return text


class _Decoder(NamedTuple):
    byte_level: bool
    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool


def _read_decoder(backend: tokenizers.Tokenizer) -> _Decoder:
    """Reduce the tokenizer's decoder to what matters in the middle of a text, or refuse it."""
    steps = [] if backend.decoder is None else _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Decoder(byte_level=True, replacements=(), byte_fallback=False)
    replacements: list[tuple[str, str]] = []
    done: set[str] = set()
    for step in steps:
        kind = step["type"]
        if kind == "Metaspace" and not done:
            replacements.append((step["replacement"], " "))
        elif kind == "Replace" and "String" in step["pattern"] and not done:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and "Fuse" in done and step["stop"] == 0:
            pass  # only the very start of a text is stripped, and a stream never is that
        elif kind in {"ByteFallback", "Fuse"} and "Fuse" not in done:
            done.add(kind)
        else:
            raise _unsupported(kinds)
    if not replacements:
        raise _unsupported(kinds)
    return _Decoder(byte_level=False, replacements=tuple(replacements), byte_fallback="ByteFallback" in done)


def _unsupported(kinds: list[str]) -> ValueError:
    return ValueError(
        "the tokenizer's decoder must be ByteLevel, Metaspace or Replace, ByteFallback, Fuse, Strip in this order, "
        f"got {', '.join(kinds) or 'none'}: its text cannot be streamed; set detokenize=False to get ids only"
    )


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable bytes stand for themselves, the others for U+0100 and onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level_bytes(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # an added token written as plain text
        return token.encode()


def _piece(token: str | None, decoder: _Decoder) -> str | int | None:
    """A token's text, or the byte that it stands for, or None if there is no such token."""
    if token is None:
        return None
    for old, new in decoder.replacements:
        token = token.replace(old, new)
    if decoder.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:  # "<0xZZ>" is ordinary text
            return token
    return token
