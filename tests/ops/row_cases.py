"""Cases of writing rows of caches: plain numbers and records, every stage; the compressor's state and entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rorqual.batch import CacheView
from rorqual.ops.compress_rows import Compression
from rorqual.ops.kv_transform import HadamardStage
from rorqual.ops.row_cache import RowCache, allocate_rows
from rorqual.quantization.kv_record import (
    INDEX_FP4,
    INDEX_FP8,
    V4,
    KVRecord,
    bf16_record,
    entry_record,
    index_record,
)
from tests.ops.kv_cases import heads_apart, norm_stage, rope_stage, whole_quarters
from tests.ops.paged_cases import make_batch
from tests.ops.values import Call, normal

BF16, F32 = torch.bfloat16, torch.float32
SLOTS = [7, 0, -1, 19, 3, -1, 11]
"""Of a cache of 5 blocks of 4."""


def _cache(width: int, dtype: torch.dtype, record: KVRecord | None, blocks: int = 5, group: int = 0) -> RowCache:
    """A cache in which every byte is the same, the gaps between blocks too."""
    made = allocate_rows(blocks, 4, width, group=group, dtype=dtype, record=record, device=torch.device("cpu"))
    whole = made.data.as_strided((made.data.untyped_storage().nbytes() // made.data.itemsize,), (1,), 0)
    whole.fill_(0xA5 if record is not None else 7)
    return made


def _store(
    width: int,
    *,
    normed: int = 0,
    dtype: torch.dtype = BF16,
    kept: torch.dtype | None = None,
    record: KVRecord | None = None,
    slots: Sequence[int] = SLOTS,
    slot_dtype: torch.dtype = torch.int64,
    **stages: Any,
) -> Callable[[], Call]:
    def make() -> Call:
        x = heads_apart(whole_quarters(len(slots), width, dtype=dtype, seed=width))
        norm = norm_stage(normed, dtype) if normed else None
        cache = _cache(width, kept or dtype, record)
        return (x, cache, torch.tensor(slots, dtype=slot_dtype)), {"norm": norm, **stages}

    return make


def _store_cases() -> dict[str, Callable[[], Call]]:
    rope, many = rope_stage(7, 64, interleaved=True), list(range(20)) * 3
    latent = rope_stage(len(many), 64, interleaved=True)
    once = [slot if i < 20 else -1 for i, slot in enumerate(many)]
    hadamard = HadamardStage(128**-0.5)
    return {
        "as_they_are": _store(48),
        "latent": _store(576, normed=512, rope=rope),
        "latent_many": _store(576, normed=512, rope=latent, slots=once),
        "latent_float32": _store(576, normed=512, rope=rope, dtype=F32),
        "entry": _store(512, normed=512, rope=rope),
        "another_dtype": _store(64, normed=64, kept=F32),
        "halves_first": _store(128, rope=rope_stage(7, 64, offset=0)),
        "halves_behind_a_norm": _store(96, normed=64, rope=rope_stage(7, 32)),
        "halves_within_a_norm": _store(96, normed=64, rope=rope_stage(7, 32, offset=32)),
        "hadamard": _store(128, normed=128, rope=rope, hadamard=hadamard),
        "record": _store(512, normed=512, rope=rope, record=V4),
        "record_alone": _store(512, record=V4, slot_dtype=torch.int32),
        "small_record": _store(80, normed=80, rope=rope_stage(7, 16, interleaved=True), record=entry_record(64, 16)),
        "index_fp8": _store(128, normed=128, rope=rope, hadamard=hadamard, record=INDEX_FP8),
        "index_fp4": _store(128, normed=128, rope=rope, hadamard=hadamard, record=INDEX_FP4),
        "index_fp8_small": _store(32, hadamard=HadamardStage(32**-0.5), record=index_record(32, "fp8")),
        "bfloat16_record": _store(64, record=bf16_record(64), dtype=F32),
        "nobody": _store(64, slots=[]),
        "only_padding": _store(512, slots=[-1, -1], record=V4),
        "rope_from_an_odd_channel": _store(96, rope=rope_stage(7, 64, interleaved=True, offset=3)),
    }


STORE_ROWS_CASES = _store_cases()
STORE_ROWS_REFUSED = {"rope_from_an_odd_channel"}
"""By Triton."""


def compress_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    ratio: int,
    overlap: bool,
    width: int = 32,
    dtype: torch.dtype = BF16,
    record: KVRecord | None = None,
    rope_dims: int = 16,
    hadamard: HadamardStage | None = None,
    exact: bool = False,
    state_rows: int = 4,
) -> Call:
    """Chunks of sequences whose earlier tokens' state is there; exact: gates that are equal, and sums without
    rounding, so that every byte of a record is the same for every kernel."""
    parts = 2 if overlap else 1
    wide = 2 * parts * width
    draw = torch.Generator().manual_seed(ratio + sum(query_lens))
    blocks = [-(-context // state_rows) for context in context_lens]
    free = torch.randperm(sum(blocks) + 2, generator=draw).int()
    states = RowCache(0, torch.full((len(free), state_rows, wide), float("nan")))
    tables = torch.zeros(len(query_lens), max(blocks, default=1), dtype=torch.int32)
    entries = _cache(width, dtype, record, sum(context_lens) // ratio // 4 + 2, group=1)

    def rows(count: int, seed: int) -> torch.Tensor:
        made = whole_quarters(count, wide, dtype=F32, seed=seed) if exact else normal(count, wide, seed=seed)
        if exact:
            made[:, wide // 2 :] = 0
        return made

    state_slots, entry_slots, taken, made = [], [], 0, 0
    for seq, (length, context, count) in enumerate(zip(query_lens, context_lens, blocks, strict=True)):
        tables[seq, :count] = free[taken : taken + count]
        taken += count
        at = torch.arange(context)
        slots = tables[seq, at // state_rows].long() * state_rows + at % state_rows
        states.data.view(-1, wide)[slots[: context - length]] = rows(context - length, 10 + seq)
        state_slots.append(slots[context - length :])
        for position in range(context - length, context):
            completes = position % ratio == ratio - 1
            entry_slots.append(made if completes else -1)
            made += completes
    num_tokens = sum(query_lens)
    views = (
        CacheView(torch.cat(state_slots) if state_slots else torch.empty(0, dtype=torch.int64), tables),
        CacheView(torch.tensor(entry_slots, dtype=torch.int64), torch.zeros_like(tables)),
    )
    bias = torch.zeros(ratio, wide // 2) if exact else normal(ratio, wide // 2, seed=3)
    table = rope_stage(1, rope_dims).cos_sin.repeat(8, 1)
    compression = Compression(ratio, overlap, bias, norm_stage(width), table, hadamard)
    batch = make_batch(query_lens, context_lens, views)
    return (rows(num_tokens, 1), states, entries, batch, compression), {"dtype": dtype}


def _compress(*args: Any, **options: Any) -> Callable[[], Call]:
    return lambda: compress_case(*args, **options)


_CHUNKS = [1, 1, 1, 6, 5, 1], [4, 5, 8, 6, 17, 1]
_INDEX = {"exact": True, "width": 128, "rope_dims": 64, "hadamard": HadamardStage(128**-0.5)}
COMPRESS_CASES: dict[str, Callable[[], Call]] = {
    "overlapped": _compress(*_CHUNKS, ratio=4, overlap=True),
    "overlapped_float32": _compress(*_CHUNKS, ratio=4, overlap=True, dtype=F32),
    "heavily": _compress([1, 1, 140], [128, 130, 270], ratio=128, overlap=False),
    "many": _compress([260, 1], [270, 8], ratio=4, overlap=True),
    "pairs": _compress([3, 4], [5, 4], ratio=2, overlap=False, state_rows=3),
    "three": _compress([7], [9], ratio=3, overlap=True, width=48),
    "record": _compress(*_CHUNKS, ratio=4, overlap=True, exact=True, width=512, rope_dims=64, record=V4),
    "index_fp8": _compress(*_CHUNKS, ratio=4, overlap=True, record=INDEX_FP8, **_INDEX),
    "index_fp4": _compress(*_CHUNKS, ratio=4, overlap=True, record=INDEX_FP4, **_INDEX),
    "completes_nothing": _compress([1, 2], [2, 2], ratio=4, overlap=True),
    "nobody": _compress([], [], ratio=4, overlap=True),
}
