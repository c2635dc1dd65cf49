"""SentencePiece BPE models: pieces with scores to a `tokenizers` tokenizer, and the reader of tokenizer.model files."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, normalizers

from rorqual.tokenizer.parts import TokenType, add_whole_tokens

SPACE = "\u2581"


@dataclass
class SentencePieceModel:
    """A SentencePiece BPE vocabulary; the id of a piece is its place."""

    pieces: list[str]
    scores: Sequence[float]
    types: Sequence[int]
    """`TokenType`s."""
    unknown_id: int = 0
    add_dummy_prefix: bool = True
    """Whether each stretch of text between special tokens begins with a space that is not there."""
    remove_extra_whitespaces: bool = False
    precompiled_charsmap: bytes = b""
    bos_id: int = -1
    eos_id: int = -1

    def build(self) -> tokenizers.Tokenizer:
        """A tokenizer that gives the ids that SentencePiece gives."""
        taken = set(self.pieces)
        texts = list(self.pieces)
        for i, (piece, kind) in enumerate(zip(self.pieces, self.types, strict=True)):
            # User-defined pieces are looked for in the text as people write it.
            if kind == TokenType.USER_DEFINED and (written := piece.replace(SPACE, " ")) not in taken:
                texts[i] = written
        backend = tokenizers.Tokenizer(
            models.BPE(
                vocab={text: i for i, text in enumerate(texts)},
                merges=self._merges(),
                unk_token=texts[self.unknown_id],
                fuse_unk=True,
                byte_fallback=TokenType.BYTE in self.types,
            )
        )
        backend.normalizer = self._normalizer()
        strip = [decoders.Strip(" ", 1, 0)] if self.add_dummy_prefix else []
        backend.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
        )
        add_whole_tokens(backend, texts, self.types)
        return backend

    def _merges(self) -> list[tuple[str, str]]:
        """Every way of making a piece out of two others, best piece first."""
        rank = {
            piece: (-score, i)
            for i, (piece, score, kind) in enumerate(zip(self.pieces, self.scores, self.types, strict=True))
            if kind == TokenType.NORMAL
        }
        ranked = [
            (order, piece[:cut], piece[cut:])
            for piece, order in rank.items()
            for cut in range(1, len(piece))
            if piece[:cut] in rank and piece[cut:] in rank
        ]
        return [(left, right) for _, left, right in sorted(ranked)]

    def _normalizer(self) -> normalizers.Normalizer:
        steps: list[normalizers.Normalizer] = []
        if self.precompiled_charsmap:
            steps.append(normalizers.Precompiled(self.precompiled_charsmap))
        if self.remove_extra_whitespaces:
            steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
        if self.add_dummy_prefix:
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
        return normalizers.Sequence(steps)


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Read a tokenizer.model file (SentencePiece's ModelProto).

    Raises:
        ValueError: it is no such file, or its algorithm is not BPE.
    """
    try:
        model = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in model if number == 1 and isinstance(value, bytes)]
        trainer = dict(_fields(_message(model, 2)))
        normalizer = dict(_fields(_message(model, 3)))
        texts = [_bytes(piece[1]).decode() for piece in pieces]
        scores = [struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0] for piece in pieces]
    except (KeyError, TypeError, IndexError, ValueError, struct.error):
        texts = []
    if not texts:
        raise ValueError(f"{path} must be a SentencePiece model, got something else: check that its download is whole")
    algorithm = trainer.get(3, 1)
    if algorithm != 2:
        raise ValueError(
            f"{path} must be a SentencePiece model of type BPE (2), got type {algorithm!r}: "
            "convert it to a tokenizer.json first"
        )
    return SentencePieceModel(
        pieces=texts,
        scores=scores,
        types=[_int(piece.get(3, 1)) for piece in pieces],
        unknown_id=_int(trainer.get(40, 0)),
        bos_id=_signed(trainer.get(41, 1)),
        eos_id=_signed(trainer.get(42, 2)),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        precompiled_charsmap=_bytes(normalizer.get(2, b"")),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of one protobuf message: varints as int, all else as bytes."""
    # These few lines spare every user the protobuf package and its version conflicts.
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire_type)
        if wire_type == 2:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError("not a protobuf message")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _message(fields: list[tuple[int, int | bytes]], number: int) -> bytes:
    return b"".join(_bytes(value) for found, value in fields if found == number)


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("bytes expected")
    return value


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("int expected")
    return value


def _signed(value: int | bytes) -> int:
    value = _int(value)
    return value - (1 << 64) if value >> 63 else value
