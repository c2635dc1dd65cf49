"""Quantised weights as the product kernels read them, and back; ops/triton/linear.py says when, and why.

- "blocks": e4m3 [N, K] and float32 scales, in rows that are a multiple of 16 bytes apart, as cuBLAS wants them.
  UE8M0 scales of blocks that are 64 or more columns wide become float32 too.
- "words": e4m3 [N, K] and UE8M0 scales, four of 32 columns each to an int32, in layout COLUMN_PACKED.
- "planes": e2m1, four codes to an int16: word j of a group of 128 columns holds the columns j, 32 + j, 64 + j and
  96 + j, so that a register of words gives four operands of the tensor cores, each with one scale per row. The bits are
  described in `_decode_kernels`. [N / 64, K / 128, 64, 32], so that what a program loads at once lies together: 64
  bytes of each row for themselves are too little for the memory's full speed. Scales as words, raised by 126.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rorqual.ops.triton import _decode_kernels as kernels
from rorqual.quantization import (
    MXFP8,
    QTensor,
    QuantFormat,
    ScaleLayout,
    encode_ue8m0,
    pack_e2m1,
    pack_scales,
    unpack_e2m1,
    unpack_scales,
)

GROUP: int = kernels.GROUP.value
"""Columns that share a UE8M0 scale."""
TILE_ROWS: int = kernels.TILE_ROWS.value
"""Rows of planes that lie together."""
WIDTH: int = kernels.WIDTH.value
"""Columns that a word of four scales is for."""
_RAISED: int = kernels.RAISED.value
LARGEST_E2M1_SCALE = 254 - _RAISED
"""The UE8M0 byte of 2^1: raised, it is a bfloat16's largest exponent."""
_AT_ONCE = 1 << 23
"""Codes that are laid out at once; on the way each takes several int32."""
_SIGNS, _MAGNITUDES = (15, 12, 14, 13), (6, 3, 0, 9)
"""Where in a word the codes of the four planes have their bits."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedWeight(QTensor):
    """A weight in one of the module's layouts."""

    kind: str = "words"
    original: QuantFormat = MXFP8
    """The format before; `format` says what values and scales are now."""
    in_features: int = 0

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]."""
        rows = self.scales if self.kind == "planes" else self.values
        return torch.Size((rows.shape[0], self.in_features))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As the weight before."""
        return self.unprepared().dequantize(dtype)

    def rows(self, start: int, stop: int) -> PreparedWeight:
        """Rows start..stop, of which start is a multiple of the blocks' rows and of 64. Views."""
        block = self.format.block[0]
        assert start % block == 0
        assert start % TILE_ROWS == 0
        scales = self.scales[start // block : -(-stop // block)]
        if self.kind == "planes":
            values = self.values[start // TILE_ROWS : -(-stop // TILE_ROWS)]
        else:
            values = self.values[start:stop]
        return PreparedWeight(values, scales, self.format, self.layout, self.kind, self.original, self.in_features)

    def unprepared(self) -> QTensor:
        """The weight that it was made of; values that were not moved are shared."""
        if self.kind == "blocks":
            return QTensor(self.values, encode_ue8m0(self.scales.contiguous()), self.original)
        groups = -(-self.in_features // GROUP)
        scales = unpack_scales(self.scales, 4 * self.scales.shape[1], self.layout)[:, :groups]
        if self.kind == "words":
            return QTensor(self.values, scales.contiguous(), self.original)
        return QTensor(_codes_of_planes(self.values, *self.shape), scales - _RAISED, self.original)


def refuse_weight(weight: QTensor) -> str | None:
    """Why there is no layout for a weight, or None."""
    format = weight.format
    if type(weight) is not QTensor or weight.ndim != 2 or weight.layout is not ScaleLayout.ROW:
        return f"needs a matrix with scales in layout ROW, got a {type(weight).__name__} of shape {tuple(weight.shape)}"
    if format.element == "e4m3" and format.scale in ("float32", "ue8m0") and format.block[1] in (32, 64, 128):
        return None
    if format.element == "e2m1" and format.scale == "ue8m0" and format.block == (1, GROUP):
        largest = int(weight.scales.max()) if weight.scales.numel() else 0
        return None if largest <= LARGEST_E2M1_SCALE else f"needs e2m1 scales up to 2, got 2^{largest - 127}"
    return (
        f"needs e4m3 in blocks of 32, 64 or 128 columns with float32 or UE8M0 scales, or e2m1 in blocks of 1 x {GROUP} "
        f"with UE8M0 scales, got {format.name}"
    )


def lay_out(weight: QTensor) -> QTensor:
    """The weight in one of the module's layouts; a plain QTensor where its format says all about it."""
    format, columns = weight.format, weight.shape[1]
    if format.element == "e2m1":
        words = _planes_of_codes(weight.values, columns)
        groups = words.shape[1] * (WIDTH // GROUP)
        raised = F.pad(weight.scales, (0, groups - weight.scales.shape[1])) + _RAISED
        scales = pack_scales(raised, ScaleLayout.COLUMN_PACKED)
        return PreparedWeight(words, scales, format, ScaleLayout.COLUMN_PACKED, "planes", format, columns)
    values = weight.values.contiguous()
    if format.scale == "ue8m0" and format.block[1] == GROUP:
        scales = pack_scales(weight.scales, ScaleLayout.COLUMN_PACKED)
        return PreparedWeight(values, scales, format, ScaleLayout.COLUMN_PACKED, "words", format, columns)
    scales = F.pad(weight.float_scales(), (0, -weight.scales.shape[1] % 4))[:, : weight.scales.shape[1]]
    if format.scale == "float32":
        return QTensor(values, scales, format)
    rows, width = format.block
    blocks = QuantFormat("e4m3_blocks", "e4m3", format.block, "float32").with_block(rows, width)
    return PreparedWeight(values, scales, blocks, ScaleLayout.ROW, "blocks", format, columns)


def _planes_of_codes(values: torch.Tensor, columns: int) -> torch.Tensor:
    """Two codes per byte [N, K / 2] to words in tiles, some rows at a time; codes beyond N and K are zero."""
    groups, tiles = -(-columns // WIDTH), -(-values.shape[0] // TILE_ROWS)
    words = torch.zeros((tiles, groups, TILE_ROWS, GROUP), dtype=torch.int16, device=values.device)
    step = max(1, _AT_ONCE // max(1, columns) // TILE_ROWS) * TILE_ROWS
    for start in range(0, values.shape[0], step):
        codes = F.pad(unpack_e2m1(values[start : start + step]).int(), (0, groups * WIDTH - columns))
        word = torch.zeros(codes.shape[0], groups, GROUP, dtype=torch.int32, device=values.device)
        for plane, sign, magnitude in zip(codes.view(-1, groups, 4, GROUP).unbind(2), _SIGNS, _MAGNITUDES, strict=True):
            word |= (plane >> 3) << sign | (plane & 7) << magnitude
        word = F.pad(word, (0, 0, 0, 0, 0, -word.shape[0] % TILE_ROWS)).view(-1, TILE_ROWS, groups, GROUP)
        words[start // TILE_ROWS :][: word.shape[0]] = word.transpose(1, 2).to(torch.int16)
    return words


def _codes_of_planes(words: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    word = words.transpose(1, 2).reshape(words.shape[0] * TILE_ROWS, -1, GROUP)[:rows].int()
    planes = [word >> s << 3 & 8 | word >> m & 7 for s, m in zip(_SIGNS, _MAGNITUDES, strict=True)]
    return pack_e2m1(torch.stack(planes, 2).flatten(1)[:, :columns])
