"""Scheduled chunks -> the flat tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.batch import Batch, CacheView
from rorqual.engine.decode_rows import padded_block_tables
from rorqual.engine.transfer import upload
from rorqual.sequence import Chunk


class BuiltBatch(NamedTuple):
    """A batch and the meaning of its logits rows."""

    batch: Batch
    rows: list[range]
    """Per chunk, the positions of its tokens whose logits are wanted, in the order of the logits rows."""


def build_batch(
    chunks: SequenceOf[Chunk],
    wants_all_logits: SequenceOf[bool],
    *,
    block_size: int,
    device: torch.device,
) -> BuiltBatch:
    """Lay chunks end to end.

    Args:
        chunks: single-token ones first, as the scheduler returns them; their sequences hold blocks for them.
        wants_all_logits: per chunk, whether every token's logits are wanted (prompt_logprobs) or only those from the
            last known token on, which yield new ones.
    """
    stops = np.fromiter((stop for _, _, stop in chunks), np.int64, len(chunks))
    lengths = stops - np.fromiter((start for _, start, _ in chunks), np.int64, len(chunks))
    cu_seqlens = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    owner = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(cu_seqlens[-1]) + (stops - cu_seqlens[1:])[owner]

    rows = [
        range(start if all_rows else max(start, len(seq.token_ids) - 1), stop)
        for (seq, start, stop), all_rows in zip(chunks, wants_all_logits, strict=True)
    ]
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    # Rows of a chunk are its last ones.
    row_ends = np.cumsum(counts)
    wanted = np.arange(row_ends[-1]) + np.repeat(cu_seqlens[1:] - row_ends, counts)

    host: list[NDArray[np.int64] | NDArray[np.int32]] = [
        np.array(_known_ids(chunks), np.int64),
        positions,
        wanted,
        cu_seqlens.astype(np.int32),
        stops.astype(np.int32),
    ]
    seqs = [seq for seq, _, _ in chunks]
    for group in range(len(seqs[0].block_tables)):
        tables = padded_block_tables(seqs, group)
        host += [tables[owner, positions // block_size] * np.int64(block_size) + positions % block_size, tables]
    ids, at, logits_indices, offsets, context_lens, *caches = upload(host, device)
    batch = Batch(
        input_ids=ids,
        positions=at,
        cu_seqlens_q=offsets,
        context_lens=context_lens,
        caches=tuple(CacheView(*pair) for pair in zip(caches[::2], caches[1::2], strict=True)),
        logits_indices=logits_indices,
        query_lens=tuple(lengths.tolist()),
        context_lens_host=tuple(stops.tolist()),
    )
    return BuiltBatch(batch, rows)


def _known_ids(chunks: SequenceOf[Chunk]) -> list[int]:
    found: list[int] = []
    for seq, start, stop in chunks:
        found += seq.token_ids[start:stop]
        if stop > len(seq.token_ids):
            found += seq.draft_token_ids[: stop - len(seq.token_ids)]
    return found
