"""Batches of decode steps, made by moving arrays on, are those that are built from the sequences themselves."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import CacheManager, GroupPool
from rorqual.cache.paging import Paging, Retention
from rorqual.engine.batch_builder import build_batch
from rorqual.engine.decode_buffer import DecodeBuffer
from rorqual.engine.decode_rows import DecodeRows
from rorqual.engine.sampler import Draws
from rorqual.engine.scheduler import Scheduler
from rorqual.engine.transfer import StagedArrays
from rorqual.sequence import Chunk, Sequence

CPU = torch.device("cpu")
BLOCK, MOST = 4, 6
GROUPS = [
    (Paging(BLOCK), None),
    (Paging(BLOCK), Retention(4)),
    (Paging(8, 8), None),
    (Paging(12, 6), None),
    (Paging(BLOCK), Retention(6, 6)),
]
PAGING = [paging for paging, _ in GROUPS]


def assert_same_batch(batch, chunks: list[Chunk]) -> None:
    wanted = build_batch(chunks, [False] * len(chunks), paging=PAGING, device=CPU).batch
    for name in ("input_ids", "positions", "cu_seqlens_q", "context_lens", "logits_indices"):
        found, want = getattr(batch, name), getattr(wanted, name)
        assert found.dtype == want.dtype, name
        assert found.tolist() == want.tolist(), name
    assert batch.query_lens == wanted.query_lens
    assert batch.context_lens_host == wanted.context_lens_host
    for found, want, (paging, retention) in zip(batch.caches, wanted.caches, GROUPS, strict=True):
        assert found.slot_mapping.tolist() == want.slot_mapping.tolist()
        for row, (seq, _, stop) in enumerate(chunks):
            # What a group with a window may have passed is any block.
            first = retention.first_kept(stop - 1) if retention else 0
            held = slice(first // paging.block_tokens, paging.blocks_for(stop))
            assert found.block_tables[row, held].tolist() == want.block_tables[row, held].tolist(), seq.seq_id


@pytest.mark.parametrize("seed", range(8))
def test_batches_of_steps_ahead_are_those_of_the_sequences(seed: int) -> None:
    draw = random.Random(seed)
    cache = CacheManager([GroupPool(BlockPool(64), *each) for each in GROUPS], block_size=BLOCK)
    scheduler = Scheduler(cache, max_num_batched_tokens=200, max_num_seqs=MOST)
    buffer = DecodeBuffer(max_num_seqs=MOST, max_model_len=48, paging=PAGING, device=CPU)
    for i in range(MOST):
        prompt = [draw.randrange(50) for _ in range(draw.randint(2, 9))]
        scheduler.add(Sequence(i, prompt, len(prompt), len(prompt) + draw.randint(2, 30), sampler_slot=10 + i))
    while any(seq.num_output_tokens == 0 for seq in [*scheduler.running, *scheduler.waiting]):
        for chunk in scheduler.schedule():
            scheduler.advance(chunk, [draw.randrange(50)] if chunk.samples else [])
    chunks = scheduler.schedule()
    rows = DecodeRows.of(chunks)
    assert rows is not None
    assert_same_batch(buffer.fill(rows), chunks)
    num_steps = 0
    while True:
        tokens = [draw.randrange(50) for _ in rows.seqs]
        gone = [row for row, seq in enumerate(rows.seqs) if seq not in scheduler.running]
        ahead = scheduler.look_ahead(rows, gone)
        if ahead is not None:
            kept = [tokens[rows.seqs.index(seq)] for seq in ahead.seqs]
            count = len(kept)
            draws = Draws(np.arange(count) + 0.5, np.arange(2 * count).reshape(-1, 2))
            batch = buffer.fill(ahead, torch.tensor(kept), draws)
            assert buffer.temperature.tolist() == [*draws.temperature, *[0.0] * (MOST - count)]
            assert buffer.keys[:count].tolist() == draws.keys.tolist()
            assert (buffer._input_ids[count:] == 0).all()
            assert (buffer._slots[0][len(kept) :] == -1).all(), "the rows behind write nowhere"
            assert (buffer._context_lens[len(kept) :] == 0).all()
        left = [row for row in range(len(rows.seqs)) if row not in gone]
        scheduler.advance_decodes([rows.seqs[i] for i in left], rows.stops[left], [tokens[i] for i in left])
        if ahead is None:
            break
        # The step that was filled in advance is the one that the sequences ask for now.
        chunks = [Chunk(seq, len(seq.token_ids) - 1, len(seq.token_ids)) for seq in ahead.seqs]
        assert_same_batch(batch, chunks)
        for seq in list(scheduler.running):
            if len(seq.token_ids) == seq.max_len or draw.random() < 0.02:
                scheduler.finish(seq)
        scheduler.check()
        rows, num_steps = ahead, num_steps + 1
    assert num_steps > 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_behind_a_step_do_nothing_however_many_there_were(device: str) -> None:
    seqs = [Sequence(i, [3, 4, 5 + i], 2, 20, sampler_slot=i) for i in range(MOST)]
    for i, seq in enumerate(seqs):
        seq.block_tables = [array("i", [3 * i + 1]) for _ in PAGING]
    whole = DecodeRows.of([Chunk(seq, 2, 3) for seq in seqs])
    assert whole is not None
    buffer = DecodeBuffer(max_num_seqs=MOST, max_model_len=48, paging=PAGING, device=torch.device(device))
    for count in (2, 1, MOST, 1, 1, 3, 3, 2, MOST, MOST, 1):
        rows = whole.take(np.arange(count))
        batch = buffer.fill(rows, None, Draws(np.ones(count), np.ones((count, 2), np.int64)))
        assert batch.input_ids.tolist() == [5 + i for i in range(count)]
        assert buffer._positions.tolist() == [2] * count + [0] * (MOST - count)
        assert buffer._context_lens.tolist() == [3] * count + [0] * (MOST - count)
        assert buffer.temperature.tolist() == [1.0] * count + [0.0] * (MOST - count)
        assert (buffer._slots[0][:count] >= 0).all()
        for slots in buffer._slots:
            assert (slots[count:] == -1).all()


def test_only_single_last_tokens_of_begun_answers_are_rows() -> None:
    def chunk(num_tokens: int, num_prompt: int, start: int, stop: int) -> Chunk:
        seq = Sequence(0, [1] * num_tokens, num_prompt, 20)
        seq.block_tables = [array("i", [3, 4])]
        return Chunk(seq, start, stop)

    begun = chunk(5, 4, 4, 5)
    assert DecodeRows.of([begun]) is not None
    assert DecodeRows.of([]) is None
    for other in (chunk(4, 4, 3, 4), chunk(5, 4, 3, 4), chunk(5, 4, 3, 5), chunk(5, 4, 4, 6)):
        assert DecodeRows.of([begun, other]) is None


def test_staging_shows_what_was_written() -> None:
    staging = StagedArrays([((3,), np.int64), ((2, 2), np.int32), ((5,), np.bool_)], CPU)
    assert [t.dtype for t in staging.tensors] == [torch.int64, torch.int32, torch.bool]
    assert not any(t.any() for t in staging.tensors)
    for value, array_ in enumerate(staging.arrays()):
        array_.fill(value + 1)
    staging.send()
    assert [t.tolist() for t in staging.tensors] == [[1] * 3, [[2, 2], [2, 2]], [True] * 5]


@pytest.mark.gpu
def test_staging_sends_from_a_field_on_and_takes_turns() -> None:
    staging = StagedArrays([((3,), np.int64), ((70,), np.int32)], torch.device("cuda"))
    for step in range(1, 6):
        first, second = staging.arrays()
        first.fill(-step)
        second.fill(step)
        staging.send(first=step % 2)
        if step % 2 == 0:
            sent = -step
            assert staging.tensors[0].tolist() == [sent] * 3
        else:
            assert staging.tensors[0].tolist() == [0 if step == 1 else sent] * 3, "left as it was"
        assert staging.tensors[1].tolist() == [step] * 70
