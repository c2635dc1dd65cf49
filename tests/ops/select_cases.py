"""Cases of the lightning indexer: small whole numbers, whose scores are the same in every order, so that ties are many
and the choice is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rorqual.batch import CacheView
from rorqual.ops.row_attention import RowRange
from rorqual.ops.row_cache import RowCache, allocate_rows, write_rows
from rorqual.quantization.kv_record import INDEX_FP4, INDEX_FP8, KVRecord
from tests.ops.paged_cases import make_batch
from tests.ops.values import Call

BF16 = torch.bfloat16


def whole_numbers(*shape: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """Whole numbers from -most to most."""
    return torch.randint(-most, most + 1, shape, generator=generator).float()


def select_case(
    query_lens: Sequence[int],
    num_rows: Sequence[int],
    *,
    top_k: int,
    heads: int = 4,
    dim: int = 16,
    rows_per_block: int = 4,
    tokens_per_row: int = 1,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype | None = None,
    record: KVRecord | None = None,
    extra_columns: int = 0,
    seldom: int = 0,
    exact: bool = True,
    strided: bool = False,
) -> Call:
    """Sequences that have so many rows behind their last token, in scattered blocks; memory is NaN elsewhere.

    seldom: with so many, all keys but one in so many are opposite to all queries: their scores are exactly zero.
    exact: whole numbers, also behind a record's scales; else any numbers.
    """
    generator = torch.Generator().manual_seed(sum(num_rows) + 1000 * len(num_rows))
    num_tokens = sum(query_lens)
    if exact:
        query = whole_numbers(num_tokens, heads, dim, most=2, generator=generator)
        weights = whole_numbers(num_tokens, heads, most=3, generator=generator)
    else:
        query = torch.randn(num_tokens, heads, dim, generator=generator)
        weights = torch.randn(num_tokens, heads, generator=generator)
    if seldom:
        query, weights = query.abs() + 1, weights.abs() + 1
    blocks = [-(-rows // rows_per_block) for rows in num_rows]
    free = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    cache = allocate_rows(
        len(free), rows_per_block, dim, group=0, dtype=cache_dtype or dtype, record=record, device=torch.device("cpu")
    )
    cache.data.fill_(0xFF if record is not None else float("nan"))
    tables = torch.zeros(len(blocks), max(blocks, default=0) + extra_columns, dtype=torch.int32)
    group = 128 if record is None or record.format is None else record.format.block[1]
    for seq, (rows, count) in enumerate(zip(num_rows, blocks, strict=True)):
        own = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        tables[seq, :count] = own.int()
        keys = torch.randn(rows, dim, generator=generator)
        if exact:
            keys = torch.tensor([0.0, 1.0, 2.0, 3.0])[torch.randint(0, 4, (rows, dim), generator=generator)]
            keys *= torch.randint(0, 2, (rows, dim), generator=generator) * 2 - 1
        if seldom:
            keys = torch.where(torch.arange(rows)[:, None] % seldom == seldom - 1, keys.abs(), -keys.abs())
        if exact and record is not None:
            # The largest of a group makes its scale a power of two, another for each row.
            assert record.format is not None
            keys[:, ::group] = record.format.largest * 2.0 ** (torch.arange(rows) % 2)[:, None]
            query[:, :, ::group] = 0
        at = torch.arange(rows)
        write_rows(cache, own[at // rows_per_block] * rows_per_block + at % rows_per_block, keys)
    # A token has the rows that it and those before it completed.
    stops = [
        max(0, rows - (length - 1 - i) // tokens_per_row)
        for length, rows in zip(query_lens, num_rows, strict=True)
        for i in range(length)
    ]
    contexts = [max(rows * tokens_per_row, length) for length, rows in zip(query_lens, num_rows, strict=True)]
    batch = make_batch(query_lens, contexts, (CacheView(torch.empty(0, dtype=torch.int64), tables),))
    query = query.to(dtype)
    if strided:
        wide = torch.full((num_tokens, heads + 3, dim), float("nan"), dtype=dtype)
        wide[:, 1:-2] = query
        query = wide[:, 1:-2]
    rows_of = RowRange(tables, None, torch.tensor(stops, dtype=torch.int32))
    return (query, weights, RowCache(*cache), rows_of, batch), {"top_k": top_k}


_MIXED = ([1, 1, 1, 5, 2], [1, 0, 150, 40, 6])
_RECORDS = {"fp8": INDEX_FP8, "fp4": INDEX_FP4}

SELECT_CASES: dict[str, Callable[[], Call]] = {
    "none": lambda: select_case([], [], top_k=4),
    "one_token_without_rows": lambda: select_case([1], [0], top_k=4),
    "one_token_of_fewer_rows": lambda: select_case([1], [7], top_k=64),
    "one_token_of_as_many_rows": lambda: select_case([1], [64], top_k=64),
    "one_token_of_one_row_more": lambda: select_case([1], [65], top_k=64),
    "mixed": lambda: select_case(*_MIXED, top_k=16),
    "mixed_with_a_long_prompt": lambda: select_case([1, 20, 3], [90, 150, 300], top_k=16),
    "mixed_best_one": lambda: select_case(*_MIXED, top_k=1),
    "mixed_rows_of_four_tokens": lambda: select_case(*_MIXED, top_k=16, tokens_per_row=4),
    "mixed_strided_wide_tables": lambda: select_case(*_MIXED, top_k=16, strided=True, extra_columns=30),
    "mixed_odd_sizes": lambda: select_case(*_MIXED, top_k=13, heads=5, dim=20, rows_per_block=3),
    "mixed_float32": lambda: select_case(*_MIXED, top_k=16, dtype=torch.float32),
    "mixed_bfloat16_beside_float32": lambda: select_case(*_MIXED, top_k=16, cache_dtype=torch.float32),
    "mixed_blocks_of_one": lambda: select_case(*_MIXED, top_k=16, rows_per_block=1),
    "mixed_blocks_of_64": lambda: select_case(*_MIXED, top_k=16, rows_per_block=64),
    "many_zeros": lambda: select_case([1, 4], [300, 200], top_k=32, seldom=20, rows_per_block=16),
    "hardly_anything_but_zeros": lambda: select_case([1, 4], [300, 200], top_k=32, seldom=128, rows_per_block=16),
    "as_released": lambda: select_case([1, 3], [1500, 700], top_k=512, heads=64, dim=128, rows_per_block=16),
    **{
        f"{name}_{case}": lambda record=record, make=make: make(record)
        for name, record in _RECORDS.items()
        for case, make in {
            "mixed": lambda record: select_case(*_MIXED, top_k=16, dim=128, record=record),
            "mixed_float32": lambda record: select_case(*_MIXED, top_k=16, dim=128, dtype=torch.float32, record=record),
            "blocks_of_one": lambda record: select_case([3, 1], [50, 40], top_k=8, dim=128, rows_per_block=1,
                                                        record=record),
            "zeros_in_blocks_of_64": lambda record: select_case([1, 4], [300, 200], top_k=32, dim=128, record=record,
                                                                seldom=20, rows_per_block=64),
        }.items()
    },
}  # fmt: skip
