"""What every source of a tokenizer (a folder, a GGUF file, a SentencePiece model) is read into."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers


@dataclass
class TokenizerParts:
    """A tokenizer and what its files say about it."""

    backend: tokenizers.Tokenizer
    named_tokens: dict[str, str] = field(default_factory=dict)
    """Texts by role, as chat templates know them: {"bos_token": "<s>", ...}."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)
    """Jinja sources by name; the usual one is called "default"."""


class TokenType(enum.IntEnum):
    """Kinds of vocabulary entry; GGUF and SentencePiece number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def add_whole_tokens(backend: tokenizers.Tokenizer, texts: Sequence[str], types: Sequence[int]) -> None:
    """Make control and unknown entries special, and user-defined ones whole: none of them is ever cut into pieces."""
    special = {TokenType.CONTROL, TokenType.UNKNOWN}
    whole = special | {TokenType.USER_DEFINED}
    backend.add_tokens(
        [
            tokenizers.AddedToken(text, special=kind in special, normalized=False)
            for text, kind in zip(texts, types, strict=True)
            if kind in whole
        ]
    )


def bos_eos_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> Any:
    """A post-processor that puts `bos` before and `eos` after a text; each is (text, id) or None."""
    # Aliases, because the template language gives a ':' in a token's own text a meaning.
    named = [(alias, token) for alias, token in (("bos", bos), ("eos", eos)) if token is not None]
    pieces = [*(["bos:0"] if bos else []), "$A:0", *(["eos:0"] if eos else [])]
    return tokenizers.processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, "$B:1"],
        special_tokens=[{"id": alias, "ids": [token[1]], "tokens": [token[0]]} for alias, token in named],
    )
