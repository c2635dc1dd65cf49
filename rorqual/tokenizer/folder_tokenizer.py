"""A tokenizer from a checkpoint's folder, with the ids that transformers gives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from rorqual.tokenizer.parts import TokenizerParts, bos_eos_processor
from rorqual.tokenizer.spm import SentencePieceModel, read_sentencepiece_model


def parts_from_folder(folder: Path) -> TokenizerParts:
    """Read tokenizer.json (or tokenizer.model) and the files beside it.

    tokenizer.json alone decides whether BOS and EOS are added to a text; add_bos_token and add_eos_token count
    only for a tokenizer.model, as in transformers.

    Raises:
        ValueError: there is no tokenizer, or a file is broken.
    """
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # newer folders say all of it in tokenizer_config.json
        config |= _read_json(folder / "special_tokens_map.json")
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    named = {key: token for key, token in config.items() if key.endswith("_token")}
    if isinstance(extra, Mapping):
        named, extra = named | dict(extra), []
    named = {role: text for role, token in named.items() if (text := _content(token)) is not None}
    if (file := folder / "tokenizer.json").is_file():
        backend = _load_backend(file)
    elif (file := folder / "tokenizer.model").is_file():
        model = read_sentencepiece_model(file)
        backend = _from_sentencepiece(model, config, named)
        config["added_tokens_decoder"] = _added_tokens_json(folder) | config.get("added_tokens_decoder", {})
    else:
        raise ValueError(
            f"{folder} must have a tokenizer.json or a tokenizer.model, got neither: "
            "give a folder, .gguf file or hub id that has one as --tokenizer"
        )
    _add_missing_tokens(backend, config, file)
    _make_special(backend, named.values(), override=True)
    _make_special(backend, filter(None, map(_content, extra)), override=False)
    bos, eos = (backend.token_to_id(named[r]) if r in named else None for r in ("bos_token", "eos_token"))
    return TokenizerParts(
        backend,
        named_tokens=named,
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        chat_templates=_chat_templates(folder, config),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} must be JSON, got a file that is not ({error}): check that it is whole") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} must be a JSON object, got {type(value).__name__}: check that it is whole")
    return value


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception for every fault of a file
        raise ValueError(
            f"{file} must be a tokenizer of the tokenizers library {tokenizers.__version__}, got one that it cannot "
            f"read ({error}): check that the file is whole, or update tokenizers"
        ) from None
    backend.no_truncation()  # a prompt that is too long is refused later, never cut
    backend.no_padding()
    return backend


def _from_sentencepiece(
    model: SentencePieceModel, config: Mapping[str, Any], named: dict[str, str]
) -> tokenizers.Tokenizer:
    backend = model.build()
    ends: list[tuple[str, int] | None] = []
    for role, piece_id, flag, default in (
        ("bos_token", model.bos_id, "add_bos_token", True),
        ("eos_token", model.eos_id, "add_eos_token", False),
    ):
        if piece_id >= 0:
            named.setdefault(role, model.pieces[piece_id])
        token_id = backend.token_to_id(named[role]) if role in named else None
        wanted = config.get(flag, default) and token_id is not None
        ends.append((named[role], token_id) if wanted and token_id is not None else None)
    backend.post_processor = bos_eos_processor(*ends)
    return backend


def _added_tokens_json(folder: Path) -> dict[str, dict[str, Any]]:
    """added_tokens.json in the form of added_tokens_decoder."""
    added = _read_json(folder / "added_tokens.json")
    return {str(token_id): {"content": text, "normalized": False} for text, token_id in added.items()}


def _content(token: Any) -> str | None:
    """The text of a token written as a string or as an AddedToken object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add tokens that only tokenizer_config.json knows, under the ids that it says."""
    listed: Mapping[str, Any] = config.get("added_tokens_decoder", {})
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in sorted(((int(i), token) for i, token in listed.items()), key=lambda item: item[0]):
        text = _content(token)
        if text is None or text in known:
            continue
        options = {name: bool(token.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "special")}
        normalized = bool(token.get("normalized", not options["special"]))
        backend.add_tokens([tokenizers.AddedToken(text, normalized=normalized, **options)])
        if (got := backend.token_to_id(text)) != token_id:
            raise ValueError(
                f"added_tokens_decoder in tokenizer_config.json must agree with {file.name}: it says {text!r} is "
                f"{token_id}, got {got}: one of the files in {file.parent} is from another model"
            )


def _make_special(backend: tokenizers.Tokenizer, texts: Iterable[str], *, override: bool) -> None:
    """Make tokens special. `override`: also those that tokenizer.json calls plain; their other properties stay."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(texts):
        token = added.get(text) or tokenizers.AddedToken(text, normalized=False)
        if text not in added or (override and not token.special):
            token.special = True
            backend.add_special_tokens([token])


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: chat_template.jinja, else tokenizer_config.json, else chat_template.json."""
    templates = {
        file.stem: file.read_text(encoding="utf-8")
        for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))
    }
    if (file := folder / "chat_template.jinja").is_file():
        return templates | {"default": file.read_text(encoding="utf-8")}
    if templates:
        return templates
    found = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, Mapping):
        return dict(found)
    return {entry["name"]: entry["template"] for entry in found or []}
