"""Chunks -> slots and positions: worked examples of DeepInfer's index arithmetic, for caches that keep every token."""

from __future__ import annotations

from array import array

import pytest
import torch

from rorqual.engine.batch_builder import build_batch
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
    batch = build_batch(chunks, [False] * len(chunks), block_size=block_size, device=torch.device("cpu")).batch
    assert batch.positions.tolist() == positions
    assert batch.caches[0].slot_mapping.tolist() == slots
    lengths = [query_len for query_len, _, _ in sequences]
    assert batch.cu_seqlens_q.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert batch.context_lens.tolist() == [context_len for _, context_len, _ in sequences]
    # The last token of each sequence yields the next one.
    assert batch.logits_indices.tolist() == [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]
