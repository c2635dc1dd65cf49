"""Cache records: their sizes, and every byte's address by arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rorqual.quantization import FP8_BLOCK, MXFP8
from rorqual.quantization.kv_record import (
    INDEX_FP4,
    INDEX_FP8,
    INDEX_MXFP8,
    RECORDS,
    V4,
    V41,
    V41_FP4,
    KVRecord,
    bf16_record,
    entry_record,
    index_record,
    record_of,
)

SIZES = {
    # record -> values, their bytes, scales, their bytes, bytes in all, whole per token
    V41: (512, 512, 16, 16, 528, True),
    V41_FP4: (512, 256, 32, 32, 288, True),
    INDEX_FP4: (128, 64, 4, 4, 68, False),
    INDEX_FP8: (128, 128, 1, 4, 132, False),
    INDEX_MXFP8: (128, 128, 4, 4, 132, False),
    bf16_record(192): (192, 384, 0, 0, 384, True),
    V4: (448, 448, 7, 7, 584, True),
    entry_record(64, 16): (64, 64, 1, 1, 104, True),  # 97 bytes, padded to a multiple of 8
    entry_record(128, 128): (128, 128, 2, 2, 392, True),
    index_record(32, "fp8"): (32, 32, 1, 4, 36, False),
    index_record(256, "fp8"): (256, 256, 2, 8, 264, False),
    index_record(32, "fp4"): (32, 16, 1, 1, 17, False),
}


@pytest.mark.parametrize("record", SIZES, ids=lambda r: r.name)
def test_sizes_are_the_published_ones(record):
    got = (record.dims, record.value_bytes, record.num_scales, record.scale_bytes, record.bytes, record.interleaved)
    assert got == SIZES[record]


@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 134])
@pytest.mark.parametrize("record", SIZES, ids=lambda r: r.name)
def test_blocks_begin_at_aligned_bytes(record, block_size):
    cache = record.allocate(3, block_size)
    assert cache.shape == (3, block_size, 1, record.bytes)
    assert cache.dtype == torch.uint8
    step = math.lcm(32, record.bytes) if record.interleaved else 32
    stride = cache.stride(0)
    assert stride % step == 0
    assert stride - step < block_size * record.bytes <= stride
    record.check(cache)


def test_strides_of_the_main_cache():
    assert V41.allocate(2, 64).stride() == (64 * 528, 528, 528, 1)
    assert V41.allocate(2, 3).stride(0) == 2112  # two times 1056, the multiple of 528 and 32, hold 3 * 528 = 1584
    assert V41_FP4.allocate(2, 3).stride(0) == 864  # 288 is a multiple of 32
    assert INDEX_FP4.allocate(2, 3).stride(0) == 224  # 204 rounded up to 32


@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("record", SIZES, ids=lambda r: r.name)
def test_views_are_the_bytes_at_their_addresses(record, block_size):
    cache = record.allocate(4, block_size)
    memory = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0)
    memory.copy_(torch.randint(0, 256, memory.shape, generator=torch.Generator().manual_seed(1)))
    raw, stride = memory.numpy(), cache.stride(0)
    values, scales, plain = record.split(cache)
    assert values.shape == (4, block_size, record.value_bytes // record.value_dtype.itemsize)
    assert (plain is None) == (record.plain_dims == 0)
    for block in range(4):
        for offset in range(block_size):
            if record.interleaved:
                at = block * stride + offset * record.bytes
                scales_at = at + record.value_bytes + 2 * record.plain_dims
            else:
                at = block * stride + offset * record.value_bytes
                scales_at = block * stride + block_size * record.value_bytes + offset * record.scale_bytes
            got = values[block, offset].contiguous().view(torch.uint8).numpy()
            np.testing.assert_array_equal(got, raw[at : at + record.value_bytes])
            if plain is not None:
                got = plain[block, offset].contiguous().view(torch.uint8).numpy()
                np.testing.assert_array_equal(got, raw[at + record.value_bytes : scales_at])
            if scales is None:
                assert record.scale_bytes == 0
                continue
            got = scales[block, offset].contiguous().view(torch.uint8).numpy()
            np.testing.assert_array_equal(got, raw[scales_at : scales_at + record.scale_bytes])


def test_views_write_through():
    cache = INDEX_FP8.allocate(2, 16)
    values, scales, _ = INDEX_FP8.split(cache)
    values.fill_(1.0)
    scales.fill_(1.0)
    assert cache.flatten(1)[1, : 16 * 128].unique().tolist() == [0x38]
    assert cache.flatten(1)[1, 16 * 128 :].view(torch.float32).unique().tolist() == [1.0]


def test_the_bytes_of_an_entry_are_the_published_ones():
    """448 values, then 64 rotated numbers, then 7 scales and a byte that nobody reads."""
    cache = V4.allocate(2, 3)
    cache.fill_(0xEE)
    row = torch.zeros(1, 512)
    row[0, :64] = torch.tensor([448.0, 1.0] * 32)  # a scale of 1
    row[0, 64:128] = 449.0  # of 2: powers of two, rounded up
    row[0, 448:] = torch.linspace(-1, 1, 64)
    made = V4.encode(row)
    for view, numbers in zip(V4.split(cache), made, strict=True):
        seen, written = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (view, numbers))
        seen[1, 2] = written[0]
    token = cache[1, 2, 0]
    assert token[:4].tolist() == [0x7E, 0x38, 0x7E, 0x38]
    assert token[64:66].tolist() == [0x76, 0x76]  # 224, to which 224.5 rounds
    assert torch.equal(token[448:576].view(torch.bfloat16).float(), row[0, 448:].bfloat16().float())
    floor = 127 + math.ceil(math.log2(1e-4 / 448))
    assert token[576:583].tolist() == [127, 128, *[floor] * 5]
    assert token[583] == 0xEE
    assert bool((cache[0] == 0xEE).all())
    assert bool((cache[1, :2] == 0xEE).all())


@pytest.mark.parametrize(
    "record",
    [V4, entry_record(64, 16), V41, V41_FP4, INDEX_FP4, INDEX_FP8, index_record(32, "fp8"), index_record(64, "fp4")],
    ids=lambda r: r.name,
)
def test_what_is_decoded_is_what_was_encoded(record):
    """Each block rounded by its own scale, by a loop over blocks; the plain numbers to bfloat16."""
    rows = torch.randn(5, record.width, generator=torch.Generator().manual_seed(3)) * torch.tensor(
        [[1e-6], [1e-2], [1.0], [30.0], [1e4]]
    )
    cache = record.allocate(3, 4)
    cache.fill_(0xFF)
    where = torch.tensor([2, 0, 1, 1, 2]), torch.tensor([3, 0, 1, 2, 0])
    for view, made in zip(record.split(cache), record.encode(rows), strict=True):
        if view is not None:
            seen, written = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (view, made))
            seen[where] = written
    got = record.decode(cache, where)
    width = record.format.block[1]
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for i, row in enumerate(rows):
        for start in range(0, record.dims, width):
            block = row[start : start + width].double()
            amax, largest = max(float(block.abs().max()), record.format.amax_floor), record.format.largest
            scale = amax / largest
            if record.format.scale == "ue8m0":
                scale = 2.0 ** math.ceil(math.log2(scale))
            elif record.format.scale == "e4m3":
                scale = float(torch.tensor(scale).to(torch.float8_e4m3fn))
            if record.format.element == "e4m3":
                wanted = (block / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
                step = 2.0**-4
            else:
                nearest = (levels[:, None] - (block / scale).abs().float()).abs().argmin(0)
                wanted = levels[nearest].double() * block.sign() * scale
                step = 0.5
            # Numbers in the middle of two codes may go to either, and the reference's factors are float32.
            error = (got[i, start : start + width].double() - wanted).abs()
            assert float(error.max()) <= step * amax
            assert float((error > 1e-5 * amax).double().mean()) < 0.05
    assert torch.equal(got[:, record.dims :], rows[:, record.dims :].bfloat16().float())


def test_a_region_of_wider_blocks_is_a_cache_too():
    """Layers that share blocks: each sees its own bytes of every block."""
    pool = torch.zeros(3, 4096, dtype=torch.uint8)
    index = pool[:, : 8 * 68].view(3, 8, 1, 68)
    main = pool[:, 544 : 544 + 8 * 288].view(3, 8, 1, 288)
    INDEX_FP4.split(index).values.fill_(1)
    V41_FP4.split(main).scales.fill_(1.0)
    assert int(pool.count_nonzero()) == 3 * 8 * (64 + 32)
    assert pool[2, : 8 * 64].all()


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.name)
def test_a_record_is_found_by_its_bytes(record):
    assert record_of(record.bytes, record.format.scale) == record
    if record.bytes != 132:
        assert record_of(record.bytes) == record


def test_132_bytes_are_ambiguous():
    with pytest.raises(ValueError, match=r"132 bytes differ in their scales: say scale=float32 .* or ue8m0"):
        record_of(132)
    with pytest.raises(ValueError, match="no record has 132 bytes with e4m3 scales; known are 528"):
        record_of(132, "e4m3")
    with pytest.raises(ValueError, match=r"no record has 1024 bytes; .* bf16_record"):
        record_of(1024)


def test_records_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="multiple of 32 values"):
        KVRecord("odd", 40, MXFP8)
    with pytest.raises(ValueError, match="blocks of 128 x 128"):
        KVRecord("tile", 128, FP8_BLOCK)
    with pytest.raises(ValueError, match="got 0 values"):
        bf16_record(0)
    with pytest.raises(ValueError, match="multiple of 64 values and scales of its own per token, got 48 values"):
        entry_record(48, 16)
    with pytest.raises(ValueError, match="multiple of 32 values"):
        index_record(48, "fp4")
    with pytest.raises(ValueError, match="multiple of 128 values"):
        index_record(192, "fp8")
    with pytest.raises(ValueError, match="begin at even bytes, got 128 bytes of values in 187"):
        KVRecord("odd", 128, V4.format, plain_dims=28, padding=1)
    with pytest.raises(ValueError, match="only quantised records of whole tokens"):
        KVRecord("plain", 64, None, plain_dims=8)
    with pytest.raises(ValueError, match="only quantised records of whole tokens"):
        KVRecord("planar", 64, MXFP8, interleaved=False, padding=1)


@pytest.mark.parametrize(
    ("record", "cache", "message"),
    [
        (V41, torch.zeros(2, 8, 1, 528), "must be uint8"),
        (V41, torch.zeros(2, 8, 2, 528, dtype=torch.uint8), r"\[num_blocks, block_size, 1, 528\]"),
        (V41, torch.zeros(2, 8, 1, 288, dtype=torch.uint8), r"got torch.uint8 \[2, 8, 1, 288\]"),
        (V41, torch.zeros(2, 8, 528, dtype=torch.uint8), "528"),
        (V41, torch.zeros(2, 3, 1, 528, dtype=torch.uint8), "multiple of 32 between blocks"),
        (V41, torch.zeros(2, 8, 1, 1056, dtype=torch.uint8)[..., ::2], "of 1 within"),
        (V41, torch.zeros(2, 8, 1, 536, dtype=torch.uint8)[..., :528], "of 16 between tokens"),
        (INDEX_FP4, torch.zeros(2, 8, 1, 72, dtype=torch.uint8)[..., :68], "without gaps between tokens"),
    ],
)
def test_a_cache_that_does_not_fit_is_one_sentence(record, cache, message):
    with pytest.raises(ValueError, match=message):
        record.split(cache)
