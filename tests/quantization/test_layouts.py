"""Every byte of every layout at its address."""

from __future__ import annotations

import itertools

import pytest
import torch

from rorqual.quantization import (
    ScaleLayout,
    allocate_scales,
    pack_scales,
    transpose_weight_scales,
    unpack_scales,
    utccp_row,
    write_utccp,
)

ROW, ROW_PACKED, COLUMN, COLUMN_PACKED = ScaleLayout
SIZES = [(batch, m, s) for batch in (None, 1, 3) for m, s in itertools.product((0, 1, 3, 4, 5, 9), (1, 3, 4, 7, 8))]


def memory(view: torch.Tensor) -> torch.Tensor:
    """All bytes behind a view."""
    return torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage())


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(1, 255, shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.uint8)


def lead(batch: int | None) -> tuple[int, ...]:
    return () if batch is None else (batch,)


def test_worked_example():
    """Five rows of 256 columns in groups of 32."""
    wanted = {
        ROW: ((1, 5, 8), (40, 8, 1)),
        ROW_PACKED: ((1, 5, 2), (10, 2, 1)),
        COLUMN: ((1, 5, 8), (64, 1, 8)),
        COLUMN_PACKED: ((1, 5, 2), (16, 1, 8)),
    }
    for layout, (shape, stride) in wanted.items():
        view = allocate_scales(5, 8, layout, batch=1)
        assert (view.shape, view.stride()) == (shape, stride)
        assert view.dtype == (torch.int32 if layout.packed else torch.float32)
        flat = allocate_scales(5, 8, layout)
        assert (flat.shape, flat.stride()) == (shape[1:], stride[1:])


@pytest.mark.parametrize(("batch", "m", "s"), SIZES)
def test_bytes_lie_where_the_layout_says(batch, m, s):
    exponents = random_bytes(*lead(batch), m, s)
    floats = exponents.float() + 0.5
    padded, packs = -(-m // 4) * 4, -(-s // 4)
    address = {
        ROW: lambda b, i, j: 4 * ((b * m + i) * s + j),
        ROW_PACKED: lambda b, i, j: (b * m + i) * s + j,
        COLUMN: lambda b, i, j: 4 * (b * s * padded + j * padded + i),
        COLUMN_PACKED: lambda b, i, j: b * packs * padded * 4 + j // 4 * padded * 4 + i * 4 + j % 4,
    }
    for layout in ScaleLayout:
        if layout is ROW_PACKED and s % 4:
            continue
        scales = exponents if layout.packed else floats
        view = pack_scales(scales, layout)
        fresh = allocate_scales(m, s, layout, batch=batch)
        assert (view.shape, view.dtype) == (fresh.shape, fresh.dtype)
        if m:
            assert view.stride() == fresh.stride()
        assert torch.equal(unpack_scales(view, s, layout), scales)
        stored = memory(view)
        for b, i, j in itertools.product(range(batch or 1), range(m), range(s)):
            at = address[layout](b, i, j)
            one = (scales if batch is None else scales[b])[i, j]
            assert torch.equal(stored[at : at + one.element_size()], one.reshape(1).view(torch.uint8)), (
                layout,
                b,
                i,
                j,
            )
        if layout is COLUMN_PACKED:
            for b, i, j in itertools.product(range(batch or 1), range(m), range(s, packs * 4)):
                assert stored[address[layout](b, i, j)] == 0


@pytest.mark.parametrize("layout", ScaleLayout)
def test_scales_may_come_with_any_strides(layout):
    wide = random_bytes(6, 16)
    for given in (wide[::2, :8], wide[1:2, 3:11], wide[:, ::2], wide.t()[:8, :4]):
        scales = given if layout.packed else given.float()
        dense = scales.clone(memory_format=torch.contiguous_format)
        assert torch.equal(pack_scales(scales, layout), pack_scales(dense, layout))
        assert torch.equal(unpack_scales(pack_scales(scales, layout), given.shape[-1], layout), scales)


def test_exponents_in_columns_become_powers_of_two():
    view = pack_scales(torch.tensor([[127, 130], [120, 0]], dtype=torch.uint8), COLUMN)
    assert view.tolist() == [[1.0, 8.0], [2.0**-7, 2.0**-127]]
    assert view.stride() == (1, 4)


def test_more_than_three_dimensions_fit_rows_only():
    scales = random_bytes(2, 3, 5, 8)
    assert torch.equal(unpack_scales(pack_scales(scales, ROW_PACKED), 8, ROW_PACKED), scales)
    with pytest.raises(ValueError, match=r"COLUMN_PACKED takes 2 or 3 dimensions, got shape \(2, 3, 5, 8\)"):
        pack_scales(scales, COLUMN_PACKED)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="multiple of 4 scales per row, got 6"):
        pack_scales(random_bytes(2, 6), ROW_PACKED)
    with pytest.raises(ValueError, match="multiple of 4 scales per row, got 6"):
        allocate_scales(2, 6, ROW_PACKED)
    with pytest.raises(TypeError, match=r"packs UE8M0 scales \(uint8\), got torch.float32"):
        pack_scales(torch.ones(2, 8), COLUMN_PACKED)
    with pytest.raises(TypeError, match=r"got torch.float8_e4m3fn"):
        pack_scales(torch.ones(2, 8).to(torch.float8_e4m3fn), COLUMN)
    with pytest.raises(ValueError, match=r"2 entries per row for 5 groups, got shape \(3, 5\)"):
        unpack_scales(torch.zeros(3, 5, dtype=torch.int32), 5, COLUMN_PACKED)


def test_utccp_rows_worked_examples():
    assert [utccp_row(m, 16) for m in range(17)] == [*range(0, 64, 4), 128]
    wanted = {0: 0, 31: 124, 32: 1, 33: 5, 63: 125, 64: 2, 96: 3, 127: 127, 128: 128, 129: 132, 160: 129, 191: 253}
    assert {m: utccp_row(m, 192) for m in wanted} == wanted
    assert {192 + m: utccp_row(192 + m, 192) for m in wanted} == {192 + m: 256 + row for m, row in wanted.items()}


@pytest.mark.parametrize("block_m", [1, 16, 64, 100, 128, 192, 256])
def test_utccp_rows_are_all_different_and_fit(block_m):
    rows = utccp_row(torch.arange(700), block_m)
    assert rows.tolist() == [utccp_row(m, block_m) for m in range(700)]
    assert len(set(rows.tolist())) == 700
    assert rows.max() < -(-700 // block_m) * -(-block_m // 128) * 128


def buffer(rows: int, capacity: int, packs: int, offset: int = 0) -> torch.Tensor:
    """A UTCCP buffer full of 0xEE."""
    flat = torch.full((offset + capacity * packs,), -0x11111112, dtype=torch.int32)
    return flat.as_strided((rows, packs), (1, capacity), offset)


@pytest.mark.parametrize(
    ("tokens", "groups", "block_m", "spare"), [(200, 8, 16, 0), (191, 4, 192, 128), (5, 12, 16, 0), (0, 4, 16, 4)]
)
def test_utccp_bytes_lie_where_the_tensor_cores_look(tokens, groups, block_m, spare):
    capacity = -(-tokens // block_m) * -(-block_m // 128) * 128 + spare
    if tokens == 200:
        assert capacity == 1664
    exponents = random_bytes(tokens, groups)
    for rows, offset in ((tokens, 0), (capacity, 3)):
        out = buffer(rows, capacity, groups // 4, offset)
        write_utccp(exponents, out, block_m)
        wanted = torch.full((4 * (offset + capacity * groups // 4),), 0xEE, dtype=torch.uint8)
        for m, j in itertools.product(range(tokens), range(groups)):
            wanted[4 * offset + j // 4 * capacity * 4 + 4 * utccp_row(m, block_m) + j % 4] = exponents[m, j]
        assert torch.equal(memory(out), wanted)


def test_utccp_buffers_that_do_not_fit_are_refused():
    exponents = random_bytes(20, 8)
    with pytest.raises(ValueError, match=r"20 tokens in blocks of 16 need strides \(1, 256 or more\), got \(1, 128\)"):
        write_utccp(exponents, buffer(20, 128, 2), 16)
    with pytest.raises(ValueError, match=r"strides \(1, 256 or more\), got \(2, 1\)"):
        write_utccp(exponents, torch.zeros(256, 2, dtype=torch.int32), 16)
    with pytest.raises(ValueError, match=r"need shape \(20, 2\), got \(20, 3\)"):
        write_utccp(exponents, buffer(20, 256, 3), 16)
    with pytest.raises(ValueError, match=r"need shape \(20, 2\), got \(19, 2\)"):
        write_utccp(exponents, buffer(19, 256, 2), 16)
    with pytest.raises(ValueError, match="memory for 2 columns of 256 int32, got 277"):
        write_utccp(exponents, torch.zeros(256 + 21, dtype=torch.int32).as_strided((20, 2), (1, 256)), 16)
    with pytest.raises(TypeError, match=r"int32, four UE8M0 bytes each, got torch.int64"):
        write_utccp(exponents, torch.zeros(20, 2, dtype=torch.int64), 16)
    with pytest.raises(ValueError, match="packs of 4 groups"):
        write_utccp(random_bytes(20, 6), buffer(20, 256, 2), 16)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        write_utccp(exponents, buffer(20, 256, 2), 0)
    with pytest.raises(TypeError, match=r"uint8 \[tokens, groups\], got torch.float32"):
        write_utccp(exponents.float(), buffer(20, 256, 2), 16)


@pytest.mark.parametrize(("batch", "rows", "columns", "block"), [(None, 300, 700, (128, 128)), (2, 5, 9, (2, 4))])
def test_weight_scales_are_repeated_for_every_row_and_column(batch, rows, columns, block):
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    exponents = random_bytes(*lead(batch), *blocks)
    along_columns, along_rows = transpose_weight_scales(exponents, (rows, columns), block)
    for scales, size, packed, index in (
        (along_columns, rows, blocks[1], lambda n, k: (n // block[0], k)),
        (along_rows, columns, blocks[0], lambda n, k: (k, n // block[1])),
    ):
        padded = -(-size // 4) * 4
        packs = -(-packed // 4)
        assert scales.shape == (*lead(batch), size, packs)
        assert scales.stride()[-2:] == (1, padded)
        stored = memory(scales)
        for b, n, k in itertools.product(range(batch or 1), range(size), range(packed)):
            source = exponents if batch is None else exponents[b]
            assert stored[b * packs * padded * 4 + k // 4 * padded * 4 + n * 4 + k % 4] == source[index(n, k)]


def test_weight_scales_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"300 x 700 in blocks of 128 x 128 has scales \(3, 6\), got shape \(3, 5\)"):
        transpose_weight_scales(random_bytes(3, 5), (300, 700))
