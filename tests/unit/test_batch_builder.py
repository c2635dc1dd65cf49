"""Chunks -> slots and positions: worked examples of DeepInfer's index arithmetic, for caches that keep every token."""

from __future__ import annotations

from array import array

import pytest
import torch

from rorqual.cache.paging import Paging
from rorqual.engine.batch_builder import Unread, build_batch, input_ids_of
from rorqual.engine.decode_rows import num_leading_rows
from rorqual.sequence import Chunk, Sequence

PROMPTS = (  # (query length, keys with those of this step, block table) per sequence; of a prompt's chunks
    8,
    [(5, 5, [3]), (12, 20, [4, 6, 9])],
    [0, 1, 2, 3, 4, *range(8, 20)],
    [*range(24, 29), *range(48, 56), *range(72, 76)],
)
DECODES = (
    128,
    [(3, 300, [7, 3, 9]), (1, 5, [4]), (2, 129, [2, 8])],
    [297, 298, 299, 4, 127, 128],
    [1193, 1194, 1195, 516, 383, 1024],
)


@pytest.mark.parametrize(("block_size", "sequences", "positions", "slots"), [PROMPTS, DECODES])
def test_slots_of_the_worked_examples(block_size, sequences, positions, slots):
    chunks = []
    for number, (query_len, context_len, table) in enumerate(sequences):
        seq = Sequence(number, [1] * context_len, context_len, 1000)
        seq.block_tables = [array("i", table)]
        chunks.append(Chunk(seq, context_len - query_len, context_len))
    batch = build_batch(chunks, [False] * len(chunks), paging=[Paging(block_size)], device=torch.device("cpu")).batch
    assert batch.positions.tolist() == positions
    assert batch.caches[0].slot_mapping.tolist() == slots
    lengths = [query_len for query_len, _, _ in sequences]
    assert batch.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.context_lens.tolist() == [context_len for _, context_len, _ in sequences]
    # The last token of each sequence yields the next one.
    assert batch.logits_indices.tolist() == [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]


def test_unread_tokens_are_put_in_where_they_belong() -> None:
    """A prompt, an answer whose newest token is known, and two whose newest is on the device alone."""
    known, first, prompt, second = (Sequence(i, [10 + i] * 6, 5, 20) for i in range(4))
    first.num_unknown_tokens = second.num_unknown_tokens = 1
    for seq in (known, first, prompt, second):
        seq.block_tables = [array("i", [2 * seq.seq_id, 2 * seq.seq_id + 1])]
    chunks = [Chunk(known, 5, 6), Chunk(first, 6, 7), Chunk(second, 6, 7), Chunk(prompt, 2, 5)]
    unread = Unread(torch.tensor([91, 92, 93]), {second: 0, first: 2, prompt: 1})
    assert num_leading_rows(chunks) == 3
    assert [chunk.samples for chunk in chunks] == [True, True, True, False]
    cpu = torch.device("cpu")
    batch, rows = build_batch(chunks, [False] * 4, paging=[Paging(4)], device=cpu, unread=unread)
    assert batch.input_ids.tolist() == [10, 93, 91, 12, 12, 12]
    assert batch.positions.tolist() == [5, 6, 6, 2, 3, 4]
    assert rows == [range(5, 6), range(6, 7), range(6, 7), range(5, 5)]
    assert input_ids_of(chunks[:3], unread, cpu).tolist() == [10, 93, 91]
    assert input_ids_of(chunks[:1], unread, cpu).tolist() == [10]


def test_tokens_of_answers_are_sequences_of_their_own() -> None:
    """A decoded token, a preempted sequence that comes back, one with a draft, and the last token of a prompt."""
    decoded, back, drafted, last = (Sequence(i, [10 * i + j for j in range(7)], 4, 20) for i in range(4))
    for seq in (decoded, back, drafted, last):
        seq.block_tables = [array("i", [2 * seq.seq_id, 2 * seq.seq_id + 1])]
    last.num_prompt_tokens = 7
    drafted.draft_token_ids = [99]
    chunks = [Chunk(decoded, 6, 7), Chunk(drafted, 6, 8), Chunk(last, 6, 7), Chunk(back, 2, 7)]
    built = build_batch(chunks, [False, False, False, True], paging=[Paging(4)], device=torch.device("cpu"))
    batch = built.batch
    assert batch.query_lens == (1, 1, 1, 1, 1, 1, 1, 2)
    assert batch.context_lens_host == (7, 7, 8, 5, 6, 7, 7, 4)
    assert batch.num_single_token_seqs == 6  # not the last token of a prompt
    assert batch.splits_sequences
    assert batch.input_ids.tolist() == [6, 26, 99, 14, 15, 16, 36, 12, 13]
    assert batch.positions.tolist() == [6, 6, 7, 4, 5, 6, 6, 2, 3]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert batch.caches[0].slot_mapping.tolist() == [6, 22, 23, 12, 13, 14, 30, 10, 11]
    assert batch.caches[0].block_tables.tolist() == [[0, 1], [4, 5], [4, 5], *[[2, 3]] * 3, [6, 7], [2, 3]]
    assert built.rows == [range(6, 7), range(6, 8), range(6, 7), range(2, 7)]
    assert batch.logits_indices.tolist() == [0, 1, 2, 6, 7, 8, 3, 4, 5]


def test_an_unread_token_behind_a_prompt_stays_at_its_place() -> None:
    fresh, ahead = (Sequence(i, [10 + i] * 6, 6, 20) for i in range(2))
    ahead.num_unknown_tokens = 1
    for seq in (fresh, ahead):
        seq.block_tables = [array("i", [2 * seq.seq_id, 2 * seq.seq_id + 1])]
    chunks = [Chunk(fresh, 0, 3), Chunk(ahead, 6, 7)]
    batch, _ = build_batch(
        chunks,
        [False] * 2,
        paging=[Paging(4)],
        device=torch.device("cpu"),
        unread=Unread(torch.tensor([91]), {ahead: 0}),
    )
    assert batch.input_ids.tolist() == [91, 10, 10, 10]
    assert batch.logits_indices.tolist() == [0]


def test_a_row_of_several_tokens_is_written_by_its_last() -> None:
    """Groups of a row per token, of 4 tokens to a row with whole blocks of 4 tokens, and of 6 to a row."""
    answer, prompt = Sequence(0, [1] * 24, 10, 40), Sequence(1, [1] * 9, 9, 40)
    paging = [Paging(4), Paging(4, 4), Paging(12, 6)]
    answer.block_tables = [array("i", [5, 6, 7, 8, 9, 10]), array("i", [2, 3, 4, 5, 6, 7]), array("i", [4, 1])]
    prompt.block_tables = [array("i", [11, 12, 13]), array("i", [0, 1, 8]), array("i", [3])]
    chunks = [Chunk(answer, 23, 24), Chunk(prompt, 2, 9)]
    batch, _ = build_batch(chunks, [False] * 2, paging=paging, device=torch.device("cpu"))
    assert batch.positions.tolist() == [23, 2, 3, 4, 5, 6, 7, 8]
    assert not batch.splits_sequences
    assert [view.slot_mapping.tolist() for view in batch.caches] == [
        [43, 46, 47, 48, 49, 50, 51, 52],
        [7, -1, 0, -1, -1, -1, 1, -1],
        [3, -1, -1, -1, 6, -1, -1, -1],
    ]
    assert [view.block_tables.tolist() for view in batch.caches] == [
        [[5, 6, 7, 8, 9, 10], [11, 12, 13, 0, 0, 0]],
        [[2, 3, 4, 5, 6, 7], [0, 1, 8, 0, 0, 0]],
        [[4, 1], [3, 0]],
    ]
