"""A tokenizer from the metadata of a GGUF file, with the ids that llama.cpp and the model's own tokenizer.json give."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models

from rorqual.tokenizer.parts import TokenizerParts, TokenType, add_whole_tokens, bos_eos_processor
from rorqual.tokenizer.pretokenizers import PRE_TOKENIZERS, PreTokenizerKind
from rorqual.tokenizer.spm import SentencePieceModel

_logger = logging.getLogger(__name__)

_MODELS = ("gpt2", "llama")
_WAY_OUT = "give the original model's folder or hub id as --tokenizer"
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the format
}
_TURN_ENDS = frozenset({"<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|eom_id|>"})
"""Control tokens that end a turn also in files older than the keys for them."""


def parts_from_gguf(metadata: Mapping[str, Any]) -> TokenizerParts:
    """Build a tokenizer from GGUF metadata.

    Args:
        metadata: plain Python values by GGUF key, as "tokenizer.ggml.tokens": list of str.

    Raises:
        ValueError: a needed key is missing, or the tokenizer is of a kind that is not known.
    """
    model = _need(metadata, "model")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(_need(metadata, "tokens"))]
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    _check_vocabulary(tokens, types)
    ids = {key: _token_id(metadata, key, len(tokens)) for key in (*_ROLES.values(), "eot_token_id", "eom_token_id")}
    if model == "gpt2":
        kind = _pre_tokenizer(metadata)
        backend, add_bos = _byte_level(metadata, tokens, types, kind), kind.add_bos
    elif model == "llama":
        for key, default in (("unknown_token_id", 0), ("bos_token_id", 1), ("eos_token_id", 2)):
            if ids[key] is None and default < len(tokens):
                ids[key] = default
        backend, add_bos = _sentencepiece(metadata, tokens, types, unknown_id=ids["unknown_token_id"] or 0), True
    else:
        raise ValueError(f"tokenizer.ggml.model must be one of {', '.join(_MODELS)}, got {model!r}: {_WAY_OUT}")
    ends = _turn_ends(tokens, types, ids)
    _make_special(backend, tokens, [ids["bos_token_id"], *ends])
    add_eos = _flag(metadata, "add_eos_token", default=False, token_id=ids["eos_token_id"])
    add_bos = _flag(metadata, "add_bos_token", default=add_bos, token_id=ids["bos_token_id"])
    backend.post_processor = bos_eos_processor(
        _named(tokens, ids["bos_token_id"]) if add_bos else None,
        _named(tokens, ids["eos_token_id"]) if add_eos else None,
    )
    return TokenizerParts(
        backend,
        named_tokens={role: tokens[i] for role, key in _ROLES.items() if (i := ids[key]) is not None},
        bos_token_id=ids["bos_token_id"],
        eos_token_ids=ends,
        chat_templates=_chat_templates(metadata),
    )


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not value:
        raise ValueError(f"this GGUF file must have tokenizer.ggml.{key}, got none: {_WAY_OUT}")
    return value


def _check_vocabulary(tokens: Sequence[str], types: Sequence[int]) -> None:
    if len(types) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.token_type must have one entry per token ({len(tokens)}), got {len(types)}: "
            "this GGUF file is broken, convert it again"
        )
    if len(set(tokens)) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise ValueError(
            f"tokenizer.ggml.tokens must not repeat, got {twice!r} twice: this GGUF file is broken, convert it again"
        )


def _token_id(metadata: Mapping[str, Any], key: str, count: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not 0 <= value < count:
        raise ValueError(
            f"tokenizer.ggml.{key} must be an id below {count}, got {value}: this GGUF file is broken, convert it again"
        )
    return int(value)


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizerKind:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        _logger.warning(
            "this GGUF file does not say how its tokenizer cuts text into words (tokenizer.ggml.pre), so its ids may "
            "be poor; convert the model again to put that right"
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}, got {name!r}: {_WAY_OUT}")
    return PRE_TOKENIZERS[name]


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], kind: PreTokenizerKind
) -> tokenizers.Tokenizer:
    vocab = {text: i for i, text in enumerate(tokens)}
    merges = []
    for merge in _need(metadata, "merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(
                f"tokenizer.ggml.merges must join two tokens to a third of the vocabulary, got {merge!r}: "
                "this GGUF file is broken, convert it again"
            )
        merges.append((left, right))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges))
    if (normalizer := kind.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    add_whole_tokens(backend, tokens, types)
    return backend


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], *, unknown_id: int
) -> tokenizers.Tokenizer:
    scores = _need(metadata, "scores")
    if len(scores) != len(tokens):
        raise ValueError(
            f"tokenizer.ggml.scores must have one entry per token ({len(tokens)}), got {len(scores)}: "
            "this GGUF file is broken, convert it again"
        )
    model = SentencePieceModel(
        tokens,
        scores,
        types,
        unknown_id=unknown_id,
        add_dummy_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
    )
    return model.build()


def _turn_ends(tokens: Sequence[str], types: Sequence[int], ids: Mapping[str, int | None]) -> tuple[int, ...]:
    """Ids that end a turn: those that the file names, then those known by their text. In this order, each once."""
    ends = [i for key in ("eos_token_id", "eot_token_id", "eom_token_id") if (i := ids[key]) is not None]
    ends += [i for i, text in enumerate(tokens) if text in _TURN_ENDS and types[i] == TokenType.CONTROL]
    return tuple(dict.fromkeys(ends))


def _make_special(backend: tokenizers.Tokenizer, tokens: Sequence[str], ids: Sequence[int | None]) -> None:
    """Some converters leave the type of the token that ends a turn at NORMAL; it must never come out as text."""
    backend.add_special_tokens(
        [tokenizers.AddedToken(tokens[i], special=True, normalized=False) for i in ids if i is not None]
    )


def _flag(metadata: Mapping[str, Any], key: str, *, default: bool, token_id: int | None) -> bool:
    given = metadata.get(f"tokenizer.ggml.{key}")
    if given and token_id is None:
        raise ValueError(
            f"tokenizer.ggml.{key} needs tokenizer.ggml.{key.removeprefix('add_')}_id, got none: "
            "this GGUF file is broken, convert it again"
        )
    return (default if given is None else bool(given)) and token_id is not None


def _named(tokens: Sequence[str], token_id: int | None) -> tuple[str, int]:
    assert token_id is not None  # _flag said so
    return tokens[token_id], token_id


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {key[len(prefix) + 1 :]: text for key, text in metadata.items() if key.startswith(f"{prefix}.")}
    if (default := metadata.get(prefix)) is not None:
        templates["default"] = default
    return templates
