"""The rows of steps that only decode, as arrays that an addition moves on to the next step. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rorqual.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRows:
    """Sequences that compute one token each, and what a step needs of them.

    The sequences are the truth. While nothing but decoding happens, the arrays follow them without reading them again:
    `next` adds one, `take` drops rows, `copy_block` is told of each new block.
    """

    seqs: list[Sequence]
    stops: NDArray[np.int64]
    """[num_rows]: tokens of each up to and with the one that the step computes, which may be still unknown."""
    max_lens: NDArray[np.int64]
    """[num_rows]"""
    sampler_slots: NDArray[np.int64]
    """[num_rows]"""
    block_tables: list[NDArray[np.int32]]
    """Per cache group [num_rows, blocks]. The list is the same object from step to step as long as the rows are."""

    @classmethod
    def of(cls, chunks: SequenceOf[Chunk]) -> DecodeRows | None:
        """The rows of these chunks, in their order; None unless each is the last token of a begun answer."""
        if not chunks or num_leading_rows(chunks) < len(chunks):
            return None
        seqs = [seq for seq, _, _ in chunks]
        return cls(
            seqs,
            np.array([stop for _, _, stop in chunks], np.int64),
            np.array([seq.max_len for seq in seqs], np.int64),
            np.array([seq.sampler_slot for seq in seqs], np.int64),
            [padded_block_tables(seqs, group) for group in range(len(seqs[0].block_tables))],
        )

    def next(self) -> DecodeRows:
        """The rows of the step after this one; blocks for it are told by `copy_block`."""
        return replace(self, stops=self.stops + 1)

    def take(self, rows: NDArray[np.int64]) -> DecodeRows:
        """Only these rows, int64 and ascending."""
        return DecodeRows(
            [self.seqs[row] for row in rows.tolist()],
            self.stops[rows],
            self.max_lens[rows],
            self.sampler_slots[rows],
            [table[rows] for table in self.block_tables],
        )

    def copy_block(self, row: int, group: int, column: int) -> None:
        """Follow a sequence that holds a new block, the column-th of its table in one cache group."""
        table = self.block_tables[group]
        if column >= table.shape[1]:
            self.block_tables[group] = table = np.pad(table, ((0, 0), (0, column)))
        table[row, column] = self.seqs[row].block_tables[group][column]


def num_leading_rows(chunks: SequenceOf[Chunk]) -> int:
    """How many chunks, from the front, are the last token of a begun answer each."""
    for i, (seq, start, stop) in enumerate(chunks):
        if stop != start + 1 or stop != seq.num_tokens or stop <= seq.num_prompt_tokens:
            return i
    return len(chunks)


def padded_block_tables(seqs: SequenceOf[Sequence], group: int) -> NDArray[np.int32]:
    """[num_seqs, longest table]; blocks that a window has passed and the space behind a table read as block 0."""
    tables = [seq.block_tables[group] for seq in seqs]
    lengths = np.array([len(table) for table in tables])
    out = np.zeros((len(tables), lengths.max()), np.int32)
    out[np.arange(out.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(tables), np.int32)
    return np.maximum(out, 0, out=out)
