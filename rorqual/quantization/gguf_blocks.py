"""GGML's quantised blocks taken apart: codes in the order of the columns, scales and minima, without loss.

    value = (code - offset) * scale + minimum

GGML spreads a code over a block: half-bytes lie so that a byte's low half belongs to the first half of a run of values
and its high half to the second, and what a code has beyond four bits lies elsewhere. Codes are moved eight at a time,
as the bytes of a 64-bit word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rorqual.quantization.integer import (
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    IntegerFormat,
    IntegerWeight,
)

_CHUNK_VALUES = 1 << 18
"""Values per pass: few enough that a pass stays in the cache, enough that two threads seldom wait for the GIL."""

_LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
_LOW_BITS = np.uint64(0x0101010101010101)
_LOW_PAIRS = np.uint64(0x0303030303030303)


@dataclass(frozen=True, slots=True, eq=False)
class BlockMatrix:
    """A matrix [rows, columns] as GGML stores it. Its memory may be that of a mapped file."""

    data: torch.Tensor
    """uint8 [rows, bytes of a row], contiguous."""
    format: IntegerFormat

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        layout = _LAYOUTS[self.format.name]
        return torch.Size((self.data.shape[0], self.data.shape[1] // layout.block.itemsize * layout.size))

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.data.device

    @property
    def block_size(self) -> int:
        """Values of a block."""
        return _LAYOUTS[self.format.name].size

    @property
    def ggml_type(self) -> int:
        """GGML's number of the format."""
        return _LAYOUTS[self.format.name].number

    def slice_rows(self, rows: slice) -> BlockMatrix:
        """Some rows, as a view."""
        return BlockMatrix(self.data[rows], self.format)

    def slice_columns(self, columns: slice) -> BlockMatrix:
        """Columns start..stop, copied. Raises ValueError where they do not begin and end with a block."""
        start, stop, _ = columns.indices(self.shape[1])
        layout = _LAYOUTS[self.format.name]
        if start % layout.size or stop % layout.size:
            raise ValueError(
                f"stored columns of {self.format.name} are cut at multiples of {layout.size}, got {start} to {stop}"
            )
        first, last = (edge // layout.size * layout.block.itemsize for edge in (start, stop))
        return BlockMatrix(self.data[:, first:last].contiguous(), self.format)


class Split(NamedTuple):
    """What a run of blocks holds."""

    codes: np.ndarray
    """uint8 [num_blocks, values of a block], one code per byte."""
    scales: np.ndarray
    """[num_blocks, groups of a block], float16 as stored, or float32 products of a unit and a small integer."""
    minima: np.ndarray | None
    """Like scales; what is added. None for a format without."""


_Fill = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray | None]]
"""(blocks of the layout's dtype [n], the codes as uint64 [n, values / 8] to fill) -> (scales, minima)."""


class _Layout(NamedTuple):
    number: int
    """GGML's."""
    block: np.dtype
    size: int
    """Values of a block."""
    fill: _Fill


def split_chunks(data: np.ndarray, format: IntegerFormat) -> Iterator[tuple[slice, Split]]:
    """Take stored rows apart: (which of their blocks, counted through all rows, what they hold), in order.

    data: uint8 [rows..., row bytes], contiguous.
    """
    layout = _LAYOUTS[format.name]
    blocks = data.reshape(-1, layout.block.itemsize).view(layout.block)[:, 0]
    chunk = _CHUNK_VALUES // layout.size
    for start in range(0, len(blocks), chunk):
        part = blocks[start : start + chunk]
        codes = np.empty((len(part), layout.size), np.uint8)
        yield slice(start, start + len(part)), Split(codes, *layout.fill(part, codes.view(np.uint64)))


def integer_weight(data: np.ndarray, format: IntegerFormat) -> IntegerWeight:
    """Stored rows, uint8 [rows, row bytes], as an IntegerWeight: the same values to the last bit."""
    layout, (rows, row_bytes) = _LAYOUTS[format.name], data.shape
    per_row = row_bytes // layout.block.itemsize
    num_blocks, groups = rows * per_row, layout.size // format.group
    codes = np.empty((num_blocks, layout.size * format.bits // 8), np.uint8)
    kind = np.float16 if format.scale_dtype is torch.float16 else np.float32
    scales = np.empty((num_blocks, groups), kind)
    minima = np.empty_like(scales) if format.has_minima else None
    for where, found in split_chunks(np.ascontiguousarray(data), format):
        codes[where] = found.codes if format.bits == 8 else _paired(found.codes)
        scales[where] = found.scales
        if minima is not None:
            minima[where] = found.minima

    def tensor(blocks: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(blocks.reshape(rows, per_row * blocks.shape[1]))

    return IntegerWeight(tensor(codes), tensor(scales), None if minima is None else tensor(minima), format)


def _paired(codes: np.ndarray) -> np.ndarray:
    """Codes below 16 [n, k], two to a byte [n, k / 2], the even column in the low half."""
    pairs = codes.view("<u2")
    both: np.ndarray = (pairs | pairs >> np.uint16(4)).astype(np.uint8)  # the upper byte is cut off
    return both


def _halves(words: np.ndarray, codes: np.ndarray) -> None:
    """Words of half-bytes [runs, k] into codes [runs, 2 * k]: first every low half, then every high half."""
    count = words.shape[1]
    for j in range(count):  # by columns: long loops over few strided values are much faster than the reverse
        np.bitwise_and(words[:, j], _LOW_HALVES, out=codes[:, j])
        np.bitwise_and(words[:, j] >> np.uint64(4), _LOW_HALVES, out=codes[:, count + j])


def _add_fifth_bits(bits: np.ndarray, codes: np.ndarray) -> None:
    """Bytes [n, 4], a bit for every value of the block."""
    codes |= (np.unpackbits(bits, axis=1, bitorder="little") << np.uint8(4)).view(np.uint64)


def _column(values: np.ndarray) -> np.ndarray:
    """Values [n], perhaps of a packed struct, as [n, 1]."""
    column: np.ndarray = np.ascontiguousarray(values).reshape(-1, 1)
    return column


def _q8_0(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    """Codes are signed there: their top bit is turned to make them unsigned with offset 128."""
    np.bitwise_xor(blocks["codes"], np.uint64(0x8080808080808080), out=codes)
    return _column(blocks["scale"]), None


def _q4_0(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    _halves(blocks["codes"], codes)
    return _column(blocks["scale"]), None


def _q4_1(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _halves(blocks["codes"], codes)
    return _column(blocks["scale"]), _column(blocks["minimum"])


def _q5_0(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    _halves(blocks["codes"], codes)
    _add_fifth_bits(blocks["fifth"], codes)
    return _column(blocks["scale"]), None


def _q5_1(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _halves(blocks["codes"], codes)
    _add_fifth_bits(blocks["fifth"], codes)
    return _column(blocks["scale"]), _column(blocks["minimum"])


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the 8 runs of 32 values of a Q4_K or Q5_K block, each float32 [n, 8].

    Twelve bytes: four with the low 6 bits of scales 0-3, four of minima 0-3, and four with the low 4 bits of scales and
    minima 4-7, whose upper 2 bits are the top bits of the first eight. GGML subtracts its minima.
    """
    scales, minima, rest = (np.ascontiguousarray(blocks["scales"][:, i]) for i in range(3))
    low, top = np.uint8(0x3F), np.uint8(0x30)
    scale = np.concatenate([scales & low, (rest & np.uint8(15)) | ((scales >> np.uint8(2)) & top)], axis=1)
    minimum = np.concatenate([minima & low, (rest >> np.uint8(4)) | ((minima >> np.uint8(2)) & top)], axis=1)
    unit, minimum_unit = (_column(blocks[name]).astype(np.float32) for name in ("scale", "minimum"))
    return unit * scale, -(minimum_unit * minimum)


def _q4_k(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Four times 32 bytes that each hold two runs."""
    _halves(np.ascontiguousarray(blocks["codes"]).reshape(-1, 4), codes.reshape(-1, 8))
    return _k_scales(blocks)


def _q5_k(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As Q4_K; bit i of fifth byte j is of run i, value j."""
    _halves(np.ascontiguousarray(blocks["codes"]).reshape(-1, 4), codes.reshape(-1, 8))
    fifth, runs = np.ascontiguousarray(blocks["fifth"]), codes.reshape(-1, 8, 4)
    for i in range(8):
        runs[:, i] |= (fifth >> np.uint64(i) & _LOW_BITS) << np.uint64(4)
    return _k_scales(blocks)


def _q6_k(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    """Each half of the block is 4 runs of 32 values, whose upper bits are bits 2i and 2i + 1 of the half's 32 bytes."""
    _halves(np.ascontiguousarray(blocks["codes"]).reshape(-1, 8), codes.reshape(-1, 16))
    upper, runs = np.ascontiguousarray(blocks["upper"]).reshape(-1, 4), codes.reshape(-1, 4, 4)
    for i in range(4):
        runs[:, i] |= (upper >> np.uint64(2 * i) & _LOW_PAIRS) << np.uint64(4)
    return _column(blocks["scale"]).astype(np.float32) * blocks["scales"], None


_HALF, _WORD = "<f2", "<u8"
_LAYOUTS = {
    Q4_0.name: _Layout(2, np.dtype([("scale", _HALF), ("codes", _WORD, 2)]), 32, _q4_0),
    Q4_1.name: _Layout(3, np.dtype([("scale", _HALF), ("minimum", _HALF), ("codes", _WORD, 2)]), 32, _q4_1),
    Q5_0.name: _Layout(6, np.dtype([("scale", _HALF), ("fifth", "u1", 4), ("codes", _WORD, 2)]), 32, _q5_0),
    Q5_1.name: _Layout(
        7, np.dtype([("scale", _HALF), ("minimum", _HALF), ("fifth", "u1", 4), ("codes", _WORD, 2)]), 32, _q5_1
    ),
    Q8_0.name: _Layout(8, np.dtype([("scale", _HALF), ("codes", _WORD, 4)]), 32, _q8_0),
    Q4_K.name: _Layout(
        12, np.dtype([("scale", _HALF), ("minimum", _HALF), ("scales", "u1", (3, 4)), ("codes", _WORD, 16)]), 256, _q4_k
    ),
    Q5_K.name: _Layout(
        13,
        np.dtype(
            [("scale", _HALF), ("minimum", _HALF), ("scales", "u1", (3, 4)), ("fifth", _WORD, 4), ("codes", _WORD, 16)]
        ),
        256,
        _q5_k,
    ),
    Q6_K.name: _Layout(
        14, np.dtype([("codes", _WORD, 16), ("upper", _WORD, 8), ("scales", "i1", 16), ("scale", _HALF)]), 256, _q6_k
    ),
}
