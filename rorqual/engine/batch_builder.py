"""Scheduled chunks -> the flat tensors of a step."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.batch import Batch, CacheView
from rorqual.cache.paging import Paging
from rorqual.engine.decode_rows import padded_block_tables
from rorqual.engine.transfer import upload
from rorqual.sequence import Chunk, Sequence


class Unread(NamedTuple):
    """Tokens that the step before has drawn and nobody has read."""

    token_ids: torch.Tensor
    """[num_rows] int64, on the device"""
    row_of: Mapping[Sequence, int]
    """Where the token of a sequence is."""

    def put(self, input_ids: torch.Tensor, where: SequenceOf[torch.Tensor]) -> torch.Tensor:
        """input_ids with the unread ones in their places; `where` is what `_input_ids` said of them, if anything."""
        if where:
            input_ids.index_copy_(0, where[0], self.token_ids[where[1]])
        return input_ids


class BuiltBatch(NamedTuple):
    """A batch and the meaning of its logits rows."""

    batch: Batch
    rows: list[range]
    """Per chunk, the positions of its tokens whose logits are wanted, in the order of the logits rows."""


def build_batch(
    chunks: SequenceOf[Chunk],
    wants_all_logits: SequenceOf[bool],
    *,
    paging: SequenceOf[Paging],
    device: torch.device,
    unread: Unread | None = None,
) -> BuiltBatch:
    """Lay chunks end to end. Waits for nothing on the device.

    Tokens of an answer come first, each a sequence of its own in the batch, whether they are decoded, verified or
    computed again after a preemption: so they are computed as they were the first time.

    Args:
        chunks: their sequences hold blocks for them.
        wants_all_logits: per chunk, whether every token's logits are wanted (prompt_logprobs) or only those from the
            sequence's last known token on, which yield new ones.
        paging: of each cache group.
        unread: where the tokens are that are not known yet, if there are any.
    """
    starts, stops, prompt_lens = (
        np.fromiter(numbers, np.int64, len(chunks))
        for numbers in (
            (start for _, start, _ in chunks),
            (stop for _, _, stop in chunks),
            (seq.num_prompt_tokens for seq, _, _ in chunks),
        )
    )
    middles = np.clip(prompt_lens, starts, stops)  # where a chunk's tokens of an answer begin
    answers, prompts = stops - middles, middles - starts
    num_answers, longer = int(answers.sum()), np.flatnonzero(prompts)
    owner = np.repeat(np.tile(np.arange(len(chunks)), 2), np.concatenate((answers, prompts)))
    answers_at = np.cumsum(answers) - answers - middles  # what to add to a position to have its place in the batch
    prompts_at = num_answers + np.cumsum(prompts) - prompts - starts
    index = np.arange(len(owner))
    positions = index - np.where(index < num_answers, answers_at[owner], prompts_at[owner])
    piece_owner = np.concatenate((owner[:num_answers], longer))
    lengths = np.concatenate((np.ones(num_answers, np.int64), prompts[longer]))
    context_lens = np.concatenate((positions[:num_answers] + 1, middles[longer]))
    cu_seqlens = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])

    rows = [
        range(start if all_rows else max(start, seq.num_tokens - 1), stop)
        for (seq, start, stop), all_rows in zip(chunks, wants_all_logits, strict=True)
    ]
    counts = np.fromiter(map(len, rows), np.int64, len(rows))
    of = np.repeat(np.arange(len(chunks)), counts)
    wanted = np.arange(len(of)) + (stops - np.cumsum(counts))[of]  # rows of a chunk are its last tokens'
    wanted += np.where(wanted < middles[of], prompts_at[of], answers_at[of])

    known_ids, *unread_at = _input_ids(chunks, unread)
    in_chunks = (np.cumsum(stops - starts) - stops)[owner] + positions  # where the chunks' tokens end to end have each
    known_ids = known_ids[in_chunks]
    if unread_at:
        unread_at[0] = np.argsort(in_chunks)[unread_at[0]]
    host: list[NDArray[np.int64] | NDArray[np.int32]] = [
        *unread_at,
        known_ids,
        positions,
        wanted,
        cu_seqlens,
        context_lens.astype(np.int32),
    ]
    seqs = [seq for seq, _, _ in chunks]
    for group, lie in enumerate(paging):
        tables = padded_block_tables(seqs, group)
        slots = lie.slots(tables[owner, positions // lie.block_tokens], positions)
        host += [slots, tables[piece_owner]]
    there = upload(host, device)
    ids, at, logits_indices, offsets, contexts, *caches = there[len(unread_at) :]
    batch = Batch(
        input_ids=unread.put(ids, there[: len(unread_at)]) if unread is not None else ids,
        positions=at,
        cu_seqlens_q=offsets,
        context_lens=contexts,
        caches=tuple(CacheView(*pair) for pair in zip(caches[::2], caches[1::2], strict=True)),
        logits_indices=logits_indices,
        query_lens=tuple(lengths.tolist()),
        context_lens_host=tuple(context_lens.tolist()),
        num_answer_tokens=num_answers,
        splits_sequences=len(lengths) > len(chunks),
    )
    return BuiltBatch(batch, rows)


def input_ids_of(chunks: SequenceOf[Chunk], unread: Unread, device: torch.device) -> torch.Tensor:
    """The chunks' tokens end to end, int64, where some of them are known only there."""
    known_ids, *where = upload(_input_ids(chunks, unread), device)
    return unread.put(known_ids, where)


def _input_ids(chunks: SequenceOf[Chunk], unread: Unread | None) -> list[NDArray[np.int64]]:
    """The chunks' tokens end to end, with 0 where one is unread; then, if any is, the places and their unread rows."""
    found: list[int] = []
    places: list[int] = []
    rows: list[int] = []
    for seq, start, stop in chunks:
        found += seq.token_ids[start:stop]
        if stop > len(seq.token_ids):
            if seq.num_unknown_tokens:
                assert unread is not None
                places.append(len(found))
                rows.append(unread.row_of[seq])
                found.append(0)
            else:
                found += seq.draft_token_ids[: stop - len(seq.token_ids)]
    return [np.array(part, np.int64) for part in ((found, places, rows) if places else (found,))]
