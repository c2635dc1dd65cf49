"""Work of ops over rows, against numbers counted by hand: what several tokens of a sequence see is read once."""

from __future__ import annotations

from array import array

import torch

from rorqual.batch import Batch
from rorqual.cache.paging import Paging
from rorqual.engine.batch_builder import build_batch
from rorqual.engine.op_work import op_work
from rorqual.ops.compress_rows import Compression, compress_rows
from rorqual.ops.kv_transform import NormStage
from rorqual.ops.row_attention import RowList, RowRange, RowSource, row_attention
from rorqual.ops.row_cache import RowCache, allocate_rows, store_rows
from rorqual.ops.select_rows import select_rows
from rorqual.sequence import Chunk, Sequence

CPU = torch.device("cpu")
WIDTH, ROW = 8, 8 * 4
"""Numbers and bytes of a row."""


def batch() -> Batch:
    """A token of an answer at position 11, and the tokens 2 to 8 of a prompt; a row per token, and one per 4."""
    answer, prompt = Sequence(0, [1] * 12, 5, 40), Sequence(1, [1] * 9, 9, 40)
    answer.block_tables = [array("i", [0, 1, 2]), array("i", [0, 1, 2])]
    prompt.block_tables = [array("i", [3, 4, 5]), array("i", [3, 4, 5])]
    chunks = [Chunk(answer, 11, 12), Chunk(prompt, 2, 9)]
    return build_batch(chunks, [False, False], paging=[Paging(4), Paging(4, 4)], device=CPU).batch


def cache(group: int, rows: int, width: int = WIDTH) -> RowCache:
    made = allocate_rows(6, rows, width, group=group, dtype=torch.float32, record=None, device=CPU)
    made.data.zero_()
    return made


def so_far(made: Batch, group: int, tokens_per_row: int = 1, window: int | None = None) -> RowRange:
    stop = (made.positions.int() + 1) // tokens_per_row
    first = None if window is None else (stop - window).clamp(min=0)
    return RowRange(made.caches[group].block_tables, first, stop)


def test_attention_reads_each_row_once_and_multiplies_it_with_each_query_that_sees_it():
    made, query = batch(), torch.zeros(8, 3, WIDTH)
    listed = torch.full((8, 2), -1, dtype=torch.int32)
    listed[0], listed[5, 0], listed[6, 0] = torch.tensor([0, 1]), 3, 3
    sources = [RowSource(cache(0, 4), so_far(made, 0, window=5)), RowSource(cache(1, 1), RowList(listed))]
    args, options = (query, sources, made), {"scale": 1.0, "value_dim": 6}
    result = row_attention.reference(*args, **options)
    work = op_work(row_attention, args, options, result)
    rows = 5 + 9 + 2 + 1  # of windows that end at 12, and at 3 to 9; of the list two and one
    pairs = 5 + (3 + 4 + 5 * 5) + 2 + 2
    assert work == (rows * ROW + query.nbytes + result.nbytes + listed.nbytes, 2 * 3 * (WIDTH + 6) * pairs)


def test_an_indexer_reads_every_key_and_multiplies_it_with_every_head():
    made, query, weights = batch(), torch.zeros(8, 2, WIDTH), torch.zeros(8, 2)
    args, options = (query, weights, cache(1, 1), so_far(made, 1, 4), made), {"top_k": 2}
    result = select_rows.reference(*args, **options)
    work = op_work(select_rows, args, options, result)
    keys, pairs = 3 + 2, 3 + (0 + 1 + 1 + 1 + 1 + 2 + 2)
    assert work == (keys * ROW + query.nbytes + weights.nbytes + result.nbytes, 2 * 2 * (WIDTH + 1) * pairs)


def test_rows_are_written_where_they_have_a_slot():
    made, x = batch(), torch.zeros(8, WIDTH)
    slots = made.caches[1].slot_mapping
    assert (slots >= 0).sum() == 3
    work = op_work(store_rows, (x, cache(1, 1), slots), {}, None)
    assert work == (x.nbytes + slots.nbytes + 3 * ROW, 0)


def test_entries_read_the_states_that_earlier_steps_left():
    """Of windows of 4 that overlap: the entry at 11 pools 4 to 11, all but one old; those at 3 and 7 pool 0 to 7, of
    which 0 and 1 are old."""
    made, projected = batch(), torch.zeros(8, 4 * WIDTH)
    states = cache(0, 4, width=4 * WIDTH)
    norm = NormStage(torch.ones(WIDTH), 1e-6)
    compression = Compression(4, True, torch.zeros(4, 2 * WIDTH), norm, torch.zeros(40, 4))
    args = (projected, states, cache(1, 1), made, compression)
    compress_rows.reference(*args, dtype=torch.float32)
    work = op_work(compress_rows, args, {"dtype": torch.float32}, None)
    assert work == (projected.nbytes + (8 + 7 + 2) * 4 * ROW + 3 * ROW, 4 * 3 * 8 * WIDTH)
