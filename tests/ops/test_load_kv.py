"""Reading cache records back: what the bytes stand for, in the rows that the plan names."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.ops.kv_transform import CastStage, transform_and_store_kv, transform_kv
from rorqual.ops.load_kv import load_kv
from rorqual.ops.load_plan import paged_range, ring_range, segment_tensor, zero_fill
from rorqual.ops.registry import load_backends
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization import MXFP8, QTensor
from rorqual.quantization.kv_record import INDEX_FP4, V41
from tests.ops.kv_cases import PLAN, PLAN_ROWS, RECORDS, filled, numbers_of, random_records
from tests.ops.number_values import e2m1, e4m3
from tests.ops.values import normal

if available():
    load_backends("triton")

BF16 = torch.bfloat16
LOADS = [load_kv.reference] + [i.fn for i in load_kv.impls if INTERPRETING]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_load_reads_what_the_bytes_stand_for(record, load):
    cache = random_records(record)
    got = load(cache, segment_tensor(PLAN), PLAN_ROWS, record=record)
    rows = {s.row + i: (s.block, s.begin + i) for s in PLAN for i in range(s.end - s.begin)}
    assert sorted(rows) == list(range(PLAN_ROWS))
    values, scales, _ = record.split(cache)
    for row, (block, slot) in rows.items():
        if not record.interleaved:
            assert isinstance(got, QTensor)
            parts = (got.values, values), (got.scales, scales)
            for ours, view in parts:
                want = torch.zeros_like(view[0, 0]) if block < 0 else view[block, slot]
                assert ours[row].contiguous().view(torch.uint8).equal(want.contiguous().view(torch.uint8))
            continue
        if block < 0:
            want = np.zeros(record.dims)
        elif record.format is None:
            want = values[block, slot].double().numpy()
        else:
            raw = values[block, slot].contiguous().view(torch.uint8).numpy()
            elements = e4m3(raw) if record.format.element == "e4m3" else e2m1(raw)
            want = elements * np.repeat(numbers_of(scales[block, slot], record.format), record.format.block[1])
        assert torch.equal(got[row], torch.from_numpy(want).float().to(BF16))


def test_index_records_are_loaded_with_scales_that_pack():
    """Four UE8M0 scales of a key are one int32, as the indexer's product takes them."""
    got = load_kv.reference(random_records(INDEX_FP4), segment_tensor(PLAN), PLAN_ROWS, record=INDEX_FP4)
    assert got.shape == (PLAN_ROWS, 128)
    assert got.values.dtype == torch.int8
    assert got.scales.view(torch.int32).shape == (PLAN_ROWS, 1)


@pytest.mark.parametrize("load", LOADS)
def test_rows_that_no_segment_names_are_left_alone(load):
    out = torch.full((30, 512), 7.0, dtype=BF16)
    cache = random_records(V41)
    got = load(cache, segment_tensor(paged_range([3, 1], 10, 20, block_size=16, first_row=4)), 30, record=V41, out=out)
    assert got is out
    untouched = [r for r in range(30) if not 4 <= r < 14]
    assert (out[untouched] == 7.0).all()
    whole = load(cache, segment_tensor(paged_range([3, 1], 0, 32, block_size=16)), 32, record=V41)
    assert torch.equal(out[4:14], whole[10:20])


def test_a_ring_remembers_the_last_positions():
    """Positions are stored at p % ring, then the last of them are read in order: what went in, rounded."""
    ring, cache = 16, filled(V41, 3)
    x = normal(40, 512, dtype=BF16)
    back = transform_kv.reference(x, cast=CastStage(MXFP8, cast_back=True))
    for start in range(0, 40, 8):
        positions = torch.arange(start, start + 8)
        transform_and_store_kv.reference(x[start : start + 8], cache, 2 * ring + positions % ring, record=V41)
    plan = zero_fill(2, block_size=ring) + ring_range(2, 25, 40, ring_size=ring, first_row=2)
    got = load_kv.reference(cache, segment_tensor(plan), 17, record=V41)
    assert torch.equal(got, torch.cat((torch.zeros(2, 512, dtype=BF16), back[25:])))


@pytest.mark.parametrize(
    "segment", [[5, 0, 1, 0], [0, 0, 17, 0], [0, -1, 1, 0], [-2, 0, 1, 0], [0, 0, 4, 17], [0, 0, 1, -1], [0, 3, 2, 0]]
)
def test_segments_beyond_the_cache_or_the_result_are_refused(segment):
    with pytest.raises(ValueError, match="reaches beyond the cache of 5 blocks of 16 slots or the 20 rows"):
        load_kv.reference(filled(V41), torch.tensor([segment], dtype=torch.int32), 20, record=V41)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load_kv(filled(V41), torch.zeros(1, 4), 4, record=V41), r"segments must be int32 \[n, 4\]"),
        (
            lambda: load_kv(filled(INDEX_FP4), segment_tensor([]), 4, record=INDEX_FP4, out=torch.zeros(4, 128)),
            "leave out= away",
        ),
        (
            lambda: load_kv(filled(V41), segment_tensor([]), 4, record=V41, out=torch.zeros(4, 128)),
            r"out must be .* shape \[4, 512\]",
        ),
    ],
)
def test_mistakes_are_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
