"""Cases of attention over rows: scattered blocks, ranges, lists and records, NaN wherever no token looks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rorqual.ops.row_attention import RowList, RowRange, RowSource
from rorqual.ops.row_cache import RowCache, allocate_rows, store_rows
from rorqual.quantization.formats import FP8_64
from rorqual.quantization.kv_record import V4, KVRecord
from tests.ops.paged_cases import make_batch
from tests.ops.values import Call

BF16 = torch.bfloat16
SMALL_RECORD = KVRecord("small", 64, FP8_64, plain_dims=16, padding=1)
"""82 bytes."""


class Rows:
    """A cache with the rows of some sequences, in blocks that lie scattered among others."""

    def __init__(
        self,
        counts: Sequence[int],
        width: int,
        *,
        rows_per_block: int = 4,
        dtype: torch.dtype = torch.float32,
        record: KVRecord | None = None,
        seed: int = 0,
        extra_columns: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed + sum(counts))
        blocks = [-(-count // rows_per_block) for count in counts]
        free = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
        self.cache: RowCache = allocate_rows(
            len(free), rows_per_block, width, group=0, dtype=dtype, record=record, device=torch.device("cpu")
        )
        if record is None:
            self.cache.data.fill_(float("nan"))
        else:
            self.cache.data.fill_(0xFF)  # NaN in every one of its parts
        self.block_tables = torch.zeros(len(counts), max(blocks, default=0) + extra_columns, dtype=torch.int32)
        for seq, (count, length) in enumerate(zip(counts, blocks, strict=True)):
            taken = torch.tensor([free.pop() for _ in range(length)], dtype=torch.int32)
            self.block_tables[seq, :length] = taken
            at = torch.arange(count)
            slots = taken[at // rows_per_block] * rows_per_block + at % rows_per_block
            store_rows.reference(torch.randn(count, width, generator=generator).to(BF16), self.cache, slots.long())

    def slots(self, seq: int, rows: torch.Tensor) -> torch.Tensor:
        """The slots of a sequence's rows."""
        size = self.cache.rows_per_block
        return self.block_tables[seq, rows // size] * size + (rows % size).int()

    def lists(self, owners: torch.Tensor, visible: torch.Tensor, length: int, *, seed: int = 0) -> RowList:
        """For each token some of its sequence's first `visible` rows, shuffled, with -1 behind them."""
        generator = torch.Generator().manual_seed(seed)
        slots = torch.full((len(owners), length), -1, dtype=torch.int32)
        for token, (seq, seen) in enumerate(zip(owners.tolist(), visible.tolist(), strict=True)):
            chosen = torch.randperm(seen, generator=generator)[:length]
            slots[token, : len(chosen)] = self.slots(seq, chosen)
        return RowList(slots)


def row_attention_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    heads: int = 4,
    width: int = 80,
    value_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    record: KVRecord | None = None,
    rows_per_block: int = 4,
    window: int | None = None,
    ratio: int | None = None,
    listed: int | None = None,
    holes: bool = False,
    sinks: bool = False,
    strided: bool = False,
    extra_columns: int = 0,
) -> Call:
    """Dense attention over one row per token; with a window over the last rows; with a ratio also over one row per
    `ratio` tokens; `listed` names rows by up to so many slots (of the second source where there are two)."""
    batch = make_batch(query_lens, context_lens)
    owners = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens, dtype=torch.int64))
    ends = (batch.positions + 1).int()
    generator = torch.Generator().manual_seed(sum(context_lens) + heads)
    num_tokens = len(ends)
    shape = {"rows_per_block": rows_per_block, "dtype": dtype, "record": record, "extra_columns": extra_columns}

    def seen(rows: Rows, stop: torch.Tensor, *, first: torch.Tensor | None = None, by_slot: bool) -> RowSource:
        if not by_slot or listed is None:
            most = None if first is None or window is None else window
            return RowSource(rows.cache, RowRange(rows.block_tables, first, stop, most))
        which = rows.lists(owners, stop, listed)
        if holes:
            which.slots[:, 1::3] = -1
        return RowSource(rows.cache, which)

    rows = Rows(context_lens, width, **shape)
    first = None if window is None else (ends - window).clamp(min=0)
    sources = [seen(rows, ends, first=first, by_slot=ratio is None)]
    if ratio is not None:
        entries = Rows([length // ratio for length in context_lens], width, seed=1, **shape)
        sources.append(seen(entries, ends // ratio, by_slot=True))
    query = torch.randn(num_tokens, heads + 2, width, generator=generator).to(dtype)
    query = query[:, 1:-1] if strided else query[:, :heads].contiguous()
    options: dict[str, Any] = {"scale": width**-0.5, "value_dim": value_dim}
    if sinks:
        options["sinks"] = torch.randn(heads, generator=generator) * 2
    return (query, sources, batch), options


_MIXED = ([1, 1, 1, 5, 2, 9], [1, 4, 13, 5, 11, 30])
_LONG = ([1, 1, 1, 2], [1400, 530, 3, 700])
_V4 = {"window": 8, "ratio": 4, "sinks": True, "width": 64, "value_dim": 64}

ROW_ATTENTION_CASES: dict[str, Callable[[], Call]] = {
    "none": lambda: row_attention_case([], []),
    "one_token_of_one": lambda: row_attention_case([1], [1]),
    "mixed": lambda: row_attention_case(*_MIXED),
    "mixed_bfloat16": lambda: row_attention_case(*_MIXED, dtype=BF16),
    "mixed_strided_bfloat16": lambda: row_attention_case(*_MIXED, dtype=BF16, strided=True, extra_columns=4),
    "mixed_twenty_heads": lambda: row_attention_case(*_MIXED, dtype=BF16, heads=20),
    "mixed_seventy_heads": lambda: row_attention_case(*_MIXED, dtype=BF16, heads=70),
    "mixed_odd_widths": lambda: row_attention_case(*_MIXED, heads=3, width=43, value_dim=37),
    "mixed_one_row_a_block": lambda: row_attention_case(*_MIXED, rows_per_block=1),
    "mixed_wide_bfloat16": lambda: row_attention_case([1, 3], [9, 40], dtype=BF16, width=576, value_dim=512),
    "long": lambda: row_attention_case(*_LONG, rows_per_block=16),
    "long_bfloat16": lambda: row_attention_case(*_LONG, rows_per_block=16, dtype=BF16, heads=17),
    "long_sinks_bfloat16": lambda: row_attention_case(*_LONG, rows_per_block=16, dtype=BF16, sinks=True),
    "list": lambda: row_attention_case(*_MIXED, listed=7),
    "list_of_holes_bfloat16": lambda: row_attention_case(*_MIXED, listed=7, holes=True, dtype=BF16),
    "list_long_bfloat16": lambda: row_attention_case(*_LONG, rows_per_block=16, listed=1300, dtype=BF16),
    "list_long_of_holes": lambda: row_attention_case(*_LONG, rows_per_block=16, listed=1300, holes=True),
    "window": lambda: row_attention_case(*_MIXED, window=5, sinks=True),
    "window_and_entries": lambda: row_attention_case(*_MIXED, **_V4),
    "window_and_entries_bfloat16": lambda: row_attention_case(*_MIXED, **_V4, dtype=BF16),
    "window_and_list": lambda: row_attention_case(*_MIXED, **_V4, listed=3),
    "window_and_list_bfloat16": lambda: row_attention_case(*_MIXED, **_V4, listed=3, holes=True, dtype=BF16),
    "window_and_long_list_bfloat16": lambda: row_attention_case(
        [1, 2], [3000, 700], **(_V4 | {"window": 128}), listed=740, rows_per_block=16, dtype=BF16
    ),
    "window_and_long_entries": lambda: row_attention_case(
        [1, 2], [4200, 700], **(_V4 | {"window": 100}), rows_per_block=16
    ),
    "nothing_for_the_first_tokens": lambda: row_attention_case(*_MIXED, window=0, ratio=4, width=64),
    "nothing_for_the_first_tokens_listed_bfloat16": lambda: row_attention_case(
        *_MIXED, window=0, ratio=4, width=64, listed=6, dtype=BF16
    ),
    "records": lambda: row_attention_case(
        *_MIXED, **(_V4 | {"width": 80, "value_dim": 80}), dtype=BF16, record=SMALL_RECORD
    ),
    "records_listed": lambda: row_attention_case(
        *_MIXED, **(_V4 | {"width": 80, "value_dim": 80}), dtype=BF16, record=SMALL_RECORD, listed=3, holes=True
    ),
    "records_v4": lambda: row_attention_case(
        [1, 2], [40, 30], **(_V4 | {"width": 512, "value_dim": 512}), dtype=BF16, record=V4, listed=5
    ),
}
