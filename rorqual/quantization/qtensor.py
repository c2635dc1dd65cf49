"""QTensor: a tensor of few bits per value together with the scales of its blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from rorqual.quantization import codes
from rorqual.quantization.formats import QuantFormat
from rorqual.quantization.layouts import ScaleLayout, pack_scales, unpack_scales

_SCALE_DTYPES = {"float32": torch.float32, "ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A logical tensor [..., rows, n] kept as elements and block scales.

    The constructor takes what it is given; `quantize` and `from_checkpoint` check.
    """

    values: torch.Tensor
    """float8_e4m3fn [..., rows, n], or int8 [..., rows, n / 2] with two e2m1 codes per byte, the first one low."""
    scales: torch.Tensor
    """Laid out as `layout` says. In layout ROW: [..., ceil(rows / block rows), ceil(n / block columns)] of float32, of
    uint8 for UE8M0 or of float8_e4m3fn for e4m3; COLUMN keeps UE8M0 as float32 powers of two."""
    format: QuantFormat
    layout: ScaleLayout = ScaleLayout.ROW

    @property
    def shape(self) -> torch.Size:
        """The logical shape: one entry per value."""
        if self.format.element == "e4m3":
            return self.values.shape
        return torch.Size((*self.values.shape[:-1], 2 * self.values.shape[-1]))

    @property
    def ndim(self) -> int:
        """The number of logical dimensions."""
        return self.values.dim()

    @property
    def device(self) -> torch.device:
        """Where values and scales are."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Memory of values and scales in bytes, without the padding of column layouts."""
        return self.values.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> QTensor:
        """The same on another device; the scales keep their layout's strides."""
        if self.layout.by_column:
            moved = replace(self, values=self.values.to(device), scales=self.row_scales().to(device))
            return replace(moved, layout=ScaleLayout.ROW).to_layout(self.layout)
        return replace(self, values=self.values.to(device), scales=self.scales.to(device))

    @classmethod
    def empty(cls, shape: tuple[int, int], format: QuantFormat, device: torch.device | str | None = None) -> QTensor:
        """An uninitialised matrix [rows, columns], its scales in layout ROW.

        Raises ValueError for an odd number of columns with e2m1.
        """
        scale_shape, (rows, columns) = format.scale_shape(shape), shape
        if format.element == "e4m3":
            values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
        else:
            values = torch.empty((rows, columns // 2), dtype=torch.int8, device=device)
        return cls(values, torch.empty(scale_shape, dtype=_SCALE_DTYPES[format.scale], device=device), format)

    @classmethod
    def quantize(cls, x: torch.Tensor, format: QuantFormat, layout: ScaleLayout = ScaleLayout.ROW) -> QTensor:
        """Round x [..., rows, n] (bfloat16, float16 or float32) to `format`. The definition for all kernels.

        Per block: amax = the largest magnitude, at least `format.amax_floor`; the scale from amax (`codes.scale_of`:
        amax / largest, for UE8M0 rounded up to a power of two); values are multiplied by the scale's inverse in float32
        and rounded once. Blocks at the edges may be partial. Not a number: other values of the block are rounded as if
        it were absent, itself it becomes NaN (e4m3) or 6 (e2m1). Infinity counts as the largest float32 in amax, and
        becomes 448 or 6. A block of zeros has the floor's scale.

        Raises TypeError for other dtypes, ValueError for an odd n with e2m1 and where the layout does not take the
        format or the number of groups.
        """
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise TypeError(f"can quantise bfloat16, float16 and float32, got {x.dtype}")
        shape = format.scale_shape(x.shape)
        rows, columns = format.block
        count = shape[-1]
        groups = F.pad(x.float(), (0, count * columns - x.shape[-1])).reshape(*x.shape[:-1], count, columns)
        amax = codes.block_amax(groups)
        if rows > 1:
            amax = F.pad(amax, (0, 0, 0, shape[-2] * rows - x.shape[-2]))
            amax = amax.reshape(*shape[:-1], rows, count).amax(-2)
        scales, factors = codes.scale_of(amax, format)
        if rows > 1:
            factors = factors.repeat_interleave(rows, -2)[..., : x.shape[-2], :]
        scaled = (groups * factors[..., None]).flatten(-2)[..., : x.shape[-1]]
        if format.element == "e4m3":
            values = codes.encode_e4m3(scaled).contiguous()
        else:
            values = codes.pack_e2m1(codes.encode_e2m1(scaled))
        return cls(values, scales, format).to_layout(layout)

    @classmethod
    def from_checkpoint(cls, values: torch.Tensor, scales: torch.Tensor, format: QuantFormat) -> QTensor:
        """Values and scales as files have them, without copying values.

        values: float8_e4m3fn, or two e2m1 codes per byte as int8, uint8 or float4_e2m1fn_x2. scales, in layout ROW:
        numbers (float32, bfloat16 or float16), UE8M0 bytes (float8_e8m0fnu or uint8), or e4m3 for formats with such
        scales. Numbers become UE8M0 bytes where the format has those, and the other way round.

        Raises TypeError for other dtypes, ValueError for a shape that does not fit the values', and for numbers that
        are no power of two where the format's scales are.
        """
        if format.element == "e4m3":
            elements: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
        else:
            elements = (torch.int8, torch.uint8, torch.float4_e2m1fn_x2)
        if values.dtype not in elements:
            raise TypeError(f"format {format.name} has values of {_listed(elements)}, got {values.dtype}")
        if format.element == "e2m1":
            values = values.view(torch.int8)
        kept = cls(values, _checkpoint_scales(scales, format), format)
        wanted = format.scale_shape(kept.shape)
        if tuple(scales.shape) != wanted:
            raise ValueError(
                f"scales of values {tuple(kept.shape)} in format {format.name} have shape {wanted}, "
                f"got {tuple(scales.shape)}"
            )
        return kept

    def elements(self) -> torch.Tensor:
        """The values without their scales, float32 of the logical shape."""
        if self.format.element == "e4m3":
            return self.values.float()
        return codes.decode_e2m1(codes.unpack_e2m1(self.values))

    def row_scales(self) -> torch.Tensor:
        """The scales in layout ROW, as the format stores them."""
        if self.layout is ScaleLayout.ROW:
            return self.scales
        scales = unpack_scales(self.scales, -(-self.shape[-1] // self.format.block[1]), self.layout)
        if self.format.scale == "ue8m0" and not self.layout.packed:
            return codes.encode_ue8m0(scales)
        return scales

    def float_scales(self) -> torch.Tensor:
        """The scales as float32 numbers, one per block."""
        return codes.decode_scales(self.row_scales())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Element times scale in float32, rounded once to dtype."""
        scales = _repeated(self.float_scales(), self.format.block, self.shape)
        return self.elements().mul_(scales).to(dtype)

    def to_layout(self, layout: ScaleLayout) -> QTensor:
        """The same values with the scales laid out anew.

        Raises ValueError where the layout does not exist: packed layouts are for UE8M0, column layouts for float32 and
        UE8M0 and two or three dimensions, ROW_PACKED for a multiple of four groups.
        """
        if layout is self.layout:
            return self
        if layout.packed and self.format.scale != "ue8m0":
            raise ValueError(
                f"layout {layout.name} packs UE8M0 scales, format {self.format.name} has {self.format.scale}; "
                f"take ROW or COLUMN"
            )
        if layout.by_column and self.format.scale == "e4m3":
            raise ValueError(f"format {self.format.name} has e4m3 scales, which exist in layout ROW only")
        return replace(self, scales=pack_scales(self.row_scales(), layout), layout=layout)

    def reblock(self, rows: int, columns: int) -> QTensor:
        """The same values in smaller blocks: every scale is repeated, nothing is rounded.

        Raises ValueError unless rows and columns divide the present block.
        """
        old_rows, old_columns = self.format.block
        if (rows, columns) == (old_rows, old_columns):
            return self
        if rows < 1 or columns < 1 or old_rows % rows or old_columns % columns:
            raise ValueError(
                f"blocks of {old_rows} x {old_columns} split into blocks that divide them, got {rows} x {columns}"
            )
        format = self.format.with_block(rows, columns)
        scales = _repeated(
            self.row_scales(), (old_rows // rows, old_columns // columns), torch.Size(format.scale_shape(self.shape))
        )
        return replace(self, scales=scales, format=format, layout=ScaleLayout.ROW).to_layout(self.layout)

    def slice_rows(self, rows: slice) -> QTensor:
        """Rows start..stop (of the second to last dimension); the values are a view, in layout ROW the scales too.

        A start that is no multiple of the block re-blocks the rows to their greatest common divisor.
        """
        if self.ndim < 2:
            raise ValueError(f"a tensor of shape {tuple(self.shape)} has no rows to slice")
        start, stop = _edges(rows, self.shape[-2])
        cut = self.reblock(math.gcd(self.format.block[0], start), self.format.block[1])
        block = cut.format.block[0]
        scales = cut.row_scales()[..., start // block : -(-stop // block), :]
        return replace(cut, values=self.values[..., start:stop, :], scales=scales, layout=ScaleLayout.ROW).to_layout(
            self.layout
        )

    def slice_columns(self, columns: slice) -> QTensor:
        """Columns start..stop (of the last dimension); as `slice_rows`. Edges must be even for e2m1 (ValueError)."""
        start, stop = _edges(columns, self.shape[-1])
        per_byte = 1 if self.format.element == "e4m3" else 2
        if start % per_byte or stop % per_byte:
            raise ValueError(f"format {self.format.name} keeps two columns per byte, cannot cut at {start} and {stop}")
        cut = self.reblock(self.format.block[0], math.gcd(self.format.block[1], start))
        block = cut.format.block[1]
        scales = cut.row_scales()[..., start // block : -(-stop // block)]
        return replace(
            cut,
            values=self.values[..., start // per_byte : stop // per_byte],
            scales=scales,
            layout=ScaleLayout.ROW,
        ).to_layout(self.layout)

    @staticmethod
    def cat_rows(parts: list[QTensor]) -> QTensor:
        """One tensor of all rows, in the order of the parts and in layout ROW.

        Parts whose blocks differ, or end within one, are re-blocked to what they have in common; nothing is rounded.
        Raises ValueError for no parts, and for parts that differ in elements, kind of scale or other dimensions.
        """
        if not parts:
            raise ValueError("there is nothing to concatenate: the list of parts is empty")
        first = parts[0]
        for part in parts:
            mine, theirs = (
                (p.format.element, p.format.scale, p.shape[:-2], p.shape[-1:] if p.ndim > 1 else None)
                for p in (first, part)
            )
            if mine != theirs or part.ndim < 2:
                raise ValueError(
                    f"rows of {first.format.name} {tuple(first.shape)} and {part.format.name} {tuple(part.shape)} "
                    f"do not go into one tensor: elements, scales, leading dimensions and columns must be equal"
                )
        rows = math.gcd(*(part.format.block[0] for part in parts), *(part.shape[-2] for part in parts[:-1]))
        columns = math.gcd(*(part.format.block[1] for part in parts))
        fitting = [part.to_layout(ScaleLayout.ROW).reblock(rows, columns) for part in parts]
        return QTensor(
            _cat([part.values for part in fitting]), _cat([part.scales for part in fitting]), fitting[0].format
        )


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _edges(part: slice, size: int) -> tuple[int, int]:
    """(start, stop) of a slice, checked and with stop >= start."""
    start, stop, step = part.indices(size)
    if step != 1:
        raise ValueError(f"rows and columns are sliced in steps of 1, got {step}")
    return start, max(start, stop)


def _repeated(scales: torch.Tensor, times: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Every scale `times` in each direction, cut to shape."""
    if times[1] > 1:
        scales = scales.repeat_interleave(times[1], -1)
    scales = scales[..., : shape[-1]]
    if times[0] > 1:
        scales = scales.repeat_interleave(times[0], -2)[..., : shape[-2], :]
    return scales


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    """Along the rows, as bytes: not every device concatenates float8."""
    dtype = parts[0].dtype
    if dtype.itemsize == 1:
        return torch.cat([part.view(torch.uint8) for part in parts], -2).view(dtype)
    return torch.cat(parts, -2)


def _checkpoint_scales(scales: torch.Tensor, format: QuantFormat) -> torch.Tensor:
    """A file's scales as the format stores them."""
    wanted = _SCALE_DTYPES[format.scale]
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.view(torch.uint8)  # the bytes; converting would make numbers of them
    if scales.dtype == wanted:
        return scales
    if format.scale == "float32" and scales.dtype in (torch.bfloat16, torch.float16, torch.uint8):
        return codes.decode_scales(scales)
    if format.scale == "ue8m0" and scales.dtype in (torch.float32, torch.bfloat16, torch.float16):
        numbers = scales.float()
        exponents = codes.encode_ue8m0(numbers)
        if not scales.is_meta and not torch.equal(codes.decode_ue8m0(exponents), numbers):
            wrong = numbers[codes.decode_ue8m0(exponents) != numbers][0].item()
            raise ValueError(f"scales of format {format.name} are powers of two, got {wrong}")
        return exponents
    raise TypeError(f"format {format.name} has {format.scale} scales, got {scales.dtype}")
