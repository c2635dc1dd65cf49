"""Where scales lie in memory: what TMA, packed loads and the tensor cores' own scale copies want to find.

For values of M rows and S groups per row, Mp = M rounded up to a multiple of 4 (16 bytes), in bytes from the start:

    ROW            [.., M, S] as it is                               4 * (m * S + j) for float32
    ROW_PACKED     [.., M, S/4] int32, four UE8M0 bytes each          m * S + j
    COLUMN         [.., M, S] float32, strides (1, Mp)                4 * (j * Mp + m)
    COLUMN_PACKED  [.., M, ceil(S/4)] int32, strides (1, Mp)          (j // 4) * 4 * Mp + 4 * m + j % 4

Rows beyond M are not initialised; bytes beyond S in the last pack are zero. Source: DeepInfer, DeepGEMM.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, overload

import torch
import torch.nn.functional as F

from rorqual.quantization.codes import decode_scales

PACK = 4
"""UE8M0 bytes in an int32, and rows that a column of scales is padded to."""
_UTCCP_ROWS = 128


class ScaleLayout(Enum):
    """How scales lie in memory; see this module's docstring."""

    ROW = "row"
    ROW_PACKED = "row_packed"
    COLUMN = "column"
    COLUMN_PACKED = "column_packed"

    @property
    def packed(self) -> bool:
        """Four UE8M0 bytes in each int32."""
        return self in (ScaleLayout.ROW_PACKED, ScaleLayout.COLUMN_PACKED)

    @property
    def by_column(self) -> bool:
        """Neighbouring rows are neighbours in memory."""
        return self in (ScaleLayout.COLUMN, ScaleLayout.COLUMN_PACKED)


def _packs(groups: int, layout: ScaleLayout) -> int:
    """Entries per row."""
    if layout is ScaleLayout.ROW_PACKED and groups % PACK:
        raise ValueError(
            f"layout ROW_PACKED needs a multiple of {PACK} scales per row, got {groups}; COLUMN_PACKED takes any number"
        )
    return -(-groups // PACK) if layout.packed else groups


def allocate_scales(
    rows: int,
    groups: int,
    layout: ScaleLayout,
    *,
    batch: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Scales without values yet: [rows, groups] or [batch, rows, groups], with the layout's shape, dtype and strides.

    dtype is that of layout ROW (uint8 for UE8M0, float8_e4m3fn for e4m3); COLUMN is float32 and packed layouts int32.
    Raises ValueError for ROW_PACKED if groups is no multiple of 4.
    """
    packs = _packs(groups, layout)
    if layout is not ScaleLayout.ROW:
        dtype = torch.int32 if layout.packed else torch.float32
    lead = () if batch is None else (batch,)
    if not layout.by_column:
        return torch.empty((*lead, rows, packs), dtype=dtype, device=device)
    padded = -(-rows // PACK) * PACK
    return torch.empty((*lead, packs, padded), dtype=dtype, device=device).transpose(-1, -2)[..., :rows, :]


def pack_scales(scales: torch.Tensor, layout: ScaleLayout) -> torch.Tensor:
    """Scales [..., rows, groups] laid out anew.

    ROW keeps the dtype. COLUMN gives float32 and takes float32, or UE8M0 bytes, which it decodes. Packed layouts take
    UE8M0 bytes (uint8). Column layouts take two or three dimensions. Raises ValueError or TypeError for anything else.
    """
    if layout is ScaleLayout.ROW:
        return scales.contiguous()
    if layout.packed and scales.dtype != torch.uint8:
        raise TypeError(f"layout {layout.name} packs UE8M0 scales (uint8), got {scales.dtype}; take ROW or COLUMN")
    if layout is ScaleLayout.COLUMN and scales.dtype not in (torch.float32, torch.uint8):
        raise TypeError(f"layout COLUMN keeps float32 or UE8M0 (uint8) scales, got {scales.dtype}; take ROW")
    packs = _packs(scales.shape[-1], layout)
    if layout.packed:
        padded = F.pad(scales, (0, packs * PACK - scales.shape[-1]))
        entries = _dense(padded.reshape(*scales.shape[:-1], packs, PACK)).view(torch.int32)[..., 0]
    else:
        entries = decode_scales(scales)
    if layout is ScaleLayout.ROW_PACKED:
        return entries
    if scales.dim() not in (2, 3):
        raise ValueError(f"layout {layout.name} takes 2 or 3 dimensions, got shape {tuple(scales.shape)}; take ROW")
    batch = scales.shape[0] if scales.dim() == 3 else None
    out = allocate_scales(scales.shape[-2], scales.shape[-1], layout, batch=batch, device=scales.device)
    return out.copy_(entries)


def unpack_scales(view: torch.Tensor, groups: int, layout: ScaleLayout) -> torch.Tensor:
    """Scales [..., rows, groups] from a layout: float32 from COLUMN, uint8 from packed layouts, ROW as they are."""
    packs = _packs(groups, layout)
    if view.shape[-1] != packs:
        raise ValueError(
            f"layout {layout.name} has {packs} entries per row for {groups} groups, got shape {tuple(view.shape)}"
        )
    if layout.packed:
        return _dense(view).view(torch.uint8)[..., :groups].contiguous()
    return view.contiguous()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape. `contiguous` leaves strides of dimensions of size 1, which views mind."""
    return x.clone(memory_format=torch.contiguous_format)


class WeightScales(NamedTuple):
    """A weight's block scales, once for each way a product may run over it."""

    along_columns: torch.Tensor
    """[..., rows, ceil(blocks per row / 4)]: packed along the columns, the same for every row of a block."""
    along_rows: torch.Tensor
    """[..., columns, ceil(blocks per column / 4)]: packed along the rows, the same for every column of a block."""


def transpose_weight_scales(
    exponents: torch.Tensor, shape: tuple[int, int], block: tuple[int, int] = (128, 128)
) -> WeightScales:
    """UE8M0 scales [(batch,) ceil(rows/bm), ceil(columns/bn)] of a weight of `shape`, repeated and COLUMN_PACKED.

    For a product that contracts the columns (x @ weight.T) and for one that contracts the rows (x @ weight).
    """
    (rows, columns), (per_row, per_column) = shape, block
    wanted = (-(-rows // per_row), -(-columns // per_column))
    if exponents.shape[-2:] != wanted:
        raise ValueError(
            f"a weight of {rows} x {columns} in blocks of {per_row} x {per_column} has scales {wanted}, "
            f"got shape {tuple(exponents.shape)}"
        )
    by_row = exponents.repeat_interleave(per_row, -2)[..., :rows, :]
    by_column = exponents.transpose(-1, -2).repeat_interleave(per_column, -2)[..., :columns, :]
    return WeightScales(*(pack_scales(each, ScaleLayout.COLUMN_PACKED) for each in (by_row, by_column)))


@overload
def utccp_row(m: int, block_m: int) -> int: ...
@overload
def utccp_row(m: torch.Tensor, block_m: int) -> torch.Tensor: ...


def utccp_row(m: int | torch.Tensor, block_m: int) -> int | torch.Tensor:
    """Where token m's scales lie in the order in which the tensor cores copy them (tcgen05.cp, 128 rows by 4 bytes).

    Tokens come in blocks of block_m, each padded to a multiple of 128 rows; of 128 rows seen as 4 x 32, the copy wants
    32 x 4. Takes a number or an integer tensor.
    """
    block, i = m // block_m, m % block_m
    padded = -(-block_m // _UTCCP_ROWS) * _UTCCP_ROWS
    return block * padded + i // _UTCCP_ROWS * _UTCCP_ROWS + i % 32 * 4 + i % _UTCCP_ROWS // 32


def utccp_buffer(out: torch.Tensor, rows: int, groups: int, block_m: int) -> torch.Tensor:
    """The bytes behind `out` as uint8 [groups / 4, capacity, 4], once it is known to hold the scales of `rows` tokens.

    out: int32 [at least rows, groups / 4] with strides (1, capacity); the capacity holds every block of block_m tokens
    padded to a multiple of 128 rows. Raises ValueError or TypeError with what is wanted otherwise.
    """
    if out.dtype != torch.int32:
        raise TypeError(f"UTCCP scales are int32, four UE8M0 bytes each, got {out.dtype}")
    if block_m < 1:
        raise ValueError(f"block_m is the number of tokens per block, at least 1, got {block_m}")
    if groups % PACK:
        raise ValueError(f"UTCCP scales come in packs of {PACK} groups (128 columns), got {groups} groups per row")
    packs = groups // PACK
    if out.dim() != 2 or out.shape[1] != packs or out.shape[0] < rows:
        raise ValueError(f"UTCCP scales of {rows} tokens need shape ({rows}, {packs}), got {tuple(out.shape)}")
    capacity = out.stride(1)
    needed = -(-rows // block_m) * (-(-block_m // _UTCCP_ROWS) * _UTCCP_ROWS)
    if out.stride(0) != 1 or capacity < max(needed, out.shape[0]):
        raise ValueError(
            f"UTCCP scales of {rows} tokens in blocks of {block_m} need strides (1, {needed} or more), "
            f"got {out.stride()}"
        )
    left = out.untyped_storage().nbytes() // out.element_size() - out.storage_offset()
    if left < capacity * packs:
        raise ValueError(f"UTCCP scales need memory for {packs} columns of {capacity} int32, got {left}")
    words = out.as_strided((packs, capacity, 1), (capacity, 1, 1))
    return words.view(torch.uint8)


def write_utccp(exponents: torch.Tensor, out: torch.Tensor, block_m: int) -> None:
    """Write UE8M0 scales (uint8 [tokens, groups of 32 columns]) into `out` as the tensor cores copy them.

    The byte of token m and group j goes to (j // 4) * 4 * capacity + 4 * utccp_row(m) + j % 4. For `out` see
    `utccp_buffer`; only the tokens' own bytes are written, also behind out's shape, up to its capacity.
    """
    if exponents.dtype != torch.uint8 or exponents.dim() != 2:
        raise TypeError(f"wanted UE8M0 bytes, uint8 [tokens, groups], got {exponents.dtype} {tuple(exponents.shape)}")
    tokens, groups = exponents.shape
    buffer = utccp_buffer(out, tokens, groups, block_m)
    rows = utccp_row(torch.arange(tokens, device=out.device), block_m)
    buffer[:, rows] = exponents.reshape(tokens, groups // PACK, PACK).transpose(0, 1)
