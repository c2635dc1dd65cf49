"""Scheduled chunks -> the flat tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.batch import Batch, CacheView
from rorqual.sequence import Chunk


class BuiltBatch(NamedTuple):
    """A batch and the meaning of its logits rows."""

    batch: Batch
    rows: list[range]
    """Per chunk, the positions of its tokens whose logits are wanted, in the order of the logits rows."""


def build_batch(
    chunks: SequenceOf[Chunk], wants_all_logits: SequenceOf[bool], *, block_size: int, device: torch.device
) -> BuiltBatch:
    """Lay chunks end to end.

    Args:
        chunks: single-token ones first, as the scheduler returns them; their sequences hold blocks for them.
        wants_all_logits: per chunk, whether every token's logits are wanted (prompt_logprobs) or only those from the
            last known token on, which yield new ones.
    """
    lengths = np.fromiter((c.num_tokens for c in chunks), np.int64, len(chunks))
    stops = np.fromiter((c.stop for c in chunks), np.int64, len(chunks))
    cu_seqlens = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])
    owner = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(cu_seqlens[-1]) + (stops - cu_seqlens[1:])[owner]

    input_ids: list[int] = []
    rows: list[range] = []
    for chunk, all_rows in zip(chunks, wants_all_logits, strict=True):
        known = chunk.seq.token_ids
        input_ids += known[chunk.start : chunk.stop]
        if chunk.stop > len(known):
            input_ids += chunk.seq.draft_token_ids[: chunk.stop - len(known)]
        rows.append(range(chunk.start if all_rows else max(chunk.start, len(known) - 1), chunk.stop))
    wanted = [
        np.arange(r.start, r.stop) + offset for r, offset in zip(rows, cu_seqlens[1:] - stops, strict=True) if len(r)
    ]

    def to_device(values: NDArray[np.int64], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    caches = []
    for group in range(len(chunks[0].seq.block_tables)):
        tables = _block_tables(chunks, group)
        slots = tables[owner, positions // block_size] * block_size + positions % block_size
        caches.append(CacheView(to_device(slots), to_device(tables, torch.int32)))
    batch = Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        positions=to_device(positions),
        cu_seqlens_q=to_device(cu_seqlens, torch.int32),
        context_lens=to_device(stops, torch.int32),
        caches=tuple(caches),
        logits_indices=to_device(np.concatenate(wanted) if wanted else np.empty(0, np.int64)),
        query_lens=tuple(lengths.tolist()),
        context_lens_host=tuple(stops.tolist()),
    )
    return BuiltBatch(batch, rows)


def _block_tables(chunks: SequenceOf[Chunk], group: int) -> NDArray[np.int64]:
    """[num_seqs, longest table]; blocks that a window has passed and the space behind a table read as block 0."""
    tables = [chunk.seq.block_tables[group] for chunk in chunks]
    out = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = np.frombuffer(table, np.int32)
    return np.maximum(out, 0, out=out)
