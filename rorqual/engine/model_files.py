"""A model's files, opened and checked, with the tokenizer made of them, before any weight is read. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rorqual.config import EngineConfig
from rorqual.loader.checkpoint import Checkpoint, open_checkpoint
from rorqual.loader.gguf import GGUFCheckpoint
from rorqual.loader.source import resolve_model
from rorqual.platform import load_torch_library
from rorqual.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies, its checkpoint and its tokenizer."""

    path: Path
    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    """None if unwanted, or for dummy weights without any."""
    seconds: dict[str, float]
    """What it took, by stage."""


def open_model(config: EngineConfig) -> ModelFiles:
    """Find the model, open its checkpoint and make its tokenizer, while a thread loads torch's library.

    Raises: ValueError for a model that is not there, and for a checkpoint or tokenizer that is damaged or unknown.
    """
    seconds: dict[str, float] = {}
    with timed(seconds, "resolve"):
        path = resolve_model(config.model, revision=config.revision)
    load_torch_library()
    with timed(seconds, "open"):
        checkpoint = open_checkpoint(path, load_format=config.load_format)
    with timed(seconds, "tokenizer"):
        tokenizer = _load_tokenizer(config, checkpoint)
    return ModelFiles(path, checkpoint, tokenizer, seconds)


def open_tokenizer(config: EngineConfig) -> tuple[Tokenizer | None, dict[str, Any]]:
    """A model's tokenizer, None if it has none, and its config.json, for a process that does not run the model.

    Raises: ValueError as `open_model`.
    """
    checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision), load_format=config.load_format)
    return _load_tokenizer(config, checkpoint), checkpoint.config


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note how long the block takes under the stage's name."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start


def _load_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The model's tokenizer, or another one's if asked for."""
    if config.skip_tokenizer_init:
        return None
    template = None
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot read the chat template {config.chat_template}: {error.strerror}") from None
    if config.tokenizer is not None:
        path = resolve_model(config.tokenizer)
    else:
        path = checkpoint.path
        if isinstance(checkpoint, GGUFCheckpoint):
            return Tokenizer.from_gguf(checkpoint.metadata, chat_template=template)
    if path.is_dir():
        if config.load_format == "dummy" and not (path / "tokenizer.json").exists():
            return None
        return Tokenizer.from_folder(path, chat_template=template)
    return Tokenizer.from_gguf(GGUFCheckpoint(path).metadata, chat_template=template)
