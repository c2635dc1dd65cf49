"""Integer weights: codes of 4 or 8 bits, with a scale, and perhaps a minimum, for every group of a row's columns.

    value = (code - offset) * scale            formats without minima
    value = code * scale + minimum             formats with minima

GGML's block formats are of this kind (Q4_0, Q4_1, Q8_0 and the K formats) and become these without loss; weights of
other checkpoints are rounded to them by `IntegerWeight.quantize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """How codes and scales are kept. Compared by value."""

    name: str
    bits: int
    """4 or 8."""
    group: int
    """Columns that share a scale: 32, or 16."""
    offset: int
    """What is subtracted from a code; 0 where there are minima."""
    has_minima: bool
    scale_dtype: torch.dtype
    """float16, or float32 where scales are products that float16 does not hold."""

    def num_bytes(self, num_values: int) -> int:
        """Memory of so many values, whole groups of them, with their scales and minima."""
        per_group = self.scale_dtype.itemsize * (2 if self.has_minima else 1)
        return num_values * self.bits // 8 + num_values // self.group * per_group


Q4_0 = IntegerFormat("q4_0", 4, 32, 8, has_minima=False, scale_dtype=torch.float16)
Q4_1 = IntegerFormat("q4_1", 4, 32, 0, has_minima=True, scale_dtype=torch.float16)
Q8_0 = IntegerFormat("q8_0", 8, 32, 128, has_minima=False, scale_dtype=torch.float16)
Q5_0 = IntegerFormat("q5_0", 8, 32, 16, has_minima=False, scale_dtype=torch.float16)
Q5_1 = IntegerFormat("q5_1", 8, 32, 0, has_minima=True, scale_dtype=torch.float16)
Q4_K = IntegerFormat("q4_k", 4, 32, 0, has_minima=True, scale_dtype=torch.float32)
Q5_K = IntegerFormat("q5_k", 8, 32, 0, has_minima=True, scale_dtype=torch.float32)
Q6_K = IntegerFormat("q6_k", 8, 16, 32, has_minima=False, scale_dtype=torch.float32)

_PANEL = 1 << 22
"""Values of a weight that are rounded at once, in float32."""

INTEGER_FORMATS = {known.name: known for known in (Q4_0, Q4_1, Q8_0, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K)}
"""Every format by GGML's name for it."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerWeight:
    """A matrix [rows, columns] of one format. The constructor takes what it is given."""

    codes: torch.Tensor
    """uint8 [rows, columns], or [rows, columns / 2] for 4 bits: a byte's lower half is the even column."""
    scales: torch.Tensor
    """[rows, columns / group] of the format's scale_dtype."""
    minima: torch.Tensor | None
    """Like scales; None for a format without."""
    format: IntegerFormat
    dynamic: bool = True
    """Whether a product's input is rounded to integers too, row by row in groups of 32 columns."""

    @property
    def shape(self) -> torch.Size:
        """[rows, columns]."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 8 // self.format.bits))

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def device(self) -> torch.device:
        """Where codes and scales are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and minima in bytes."""
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minima is None else self.minima.nbytes)

    def integers(self) -> torch.Tensor:
        """The codes, one per value: uint8 [rows, columns]."""
        if self.format.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, columns]: computed in float32 as above, product first, and rounded once to dtype."""
        (rows, columns), group = self.shape, self.format.group
        values = self.integers().float().sub_(self.format.offset).view(rows, columns // group, group)
        values.mul_(self.scales.float()[..., None])
        if self.minima is not None:
            values.add_(self.minima.float()[..., None])
        whole: torch.Tensor = values.flatten(1).to(dtype)
        return whole

    def slice_rows(self, rows: slice) -> IntegerWeight:
        """Some rows, as views."""
        minima = None if self.minima is None else self.minima[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], minima=minima)

    def slice_columns(self, columns: slice) -> IntegerWeight:
        """Columns start..stop, as views. Raises ValueError where they do not begin and end with a group."""
        start, stop, _ = columns.indices(self.shape[1])
        group = self.format.group
        if start % group or stop % group:
            raise ValueError(
                f"columns of format {self.format.name} are cut at multiples of {group}, got {start} to {stop}"
            )
        bits, groups = self.format.bits, slice(start // group, stop // group)
        minima = None if self.minima is None else self.minima[:, groups]
        codes = self.codes[:, start * bits // 8 : stop * bits // 8]
        return replace(self, codes=codes, scales=self.scales[:, groups], minima=minima)

    @staticmethod
    def cat_rows(parts: Sequence[IntegerWeight]) -> IntegerWeight:
        """One matrix of all rows. Raises ValueError unless all parts have one format and as many columns."""
        first = parts[0]
        if any(part.format != first.format or part.shape[1] != first.shape[1] for part in parts):
            kinds = ", ".join(f"{part.format.name} {tuple(part.shape)}" for part in parts)
            raise ValueError(f"rows of one matrix need one format and one number of columns, got {kinds}")
        minima = [part.minima for part in parts if part.minima is not None]
        return replace(
            first,
            codes=torch.cat([part.codes for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            minima=torch.cat(minima) if minima else None,
        )

    @classmethod
    def quantize(cls, weight: torch.Tensor, format: IntegerFormat, *, dynamic: bool = True) -> IntegerWeight:
        """Round a matrix to Q8_0 (largest magnitude to +-127), or to Q4_1 (smallest to largest in 15 steps).

        Scales and minima are rounded to float16 first, codes to nearest even of what is left. Raises ValueError for
        another format, a number of columns that is no multiple of 32, and values that are not finite or whose scale
        float16 does not hold.
        """
        if format not in (Q8_0, Q4_1):
            raise ValueError(f"weights are rounded to q8_0 or q4_1, not to {format.name}")
        if weight.dim() != 2 or weight.shape[1] % format.group:
            raise ValueError(
                f"format {format.name} has groups of {format.group} columns, got a weight of shape {list(weight.shape)}"
            )
        step = max(1, _PANEL // max(1, weight.shape[1]))
        starts = range(0, weight.shape[0], step) or (0,)
        panels = [_rounded(weight[start : start + step], format) for start in starts]
        codes, scales, minima = (torch.cat(kind) if len(kind) > 1 else kind[0] for kind in zip(*panels, strict=True))
        return cls(codes, scales, minima if format.has_minima else None, format, dynamic)


class IntegerStack(tuple[IntegerWeight, ...]):
    """Matrices of as many columns, in different formats, whose rows follow one another: one matrix to a product."""

    __slots__ = ()

    @property
    def shape(self) -> torch.Size:
        """[rows of all, columns]."""
        return torch.Size((sum(part.shape[0] for part in self), self[0].shape[1]))

    @property
    def ndim(self) -> int:
        """Two."""
        return 2

    @property
    def device(self) -> torch.device:
        """Where codes and scales are."""
        return self[0].device

    @property
    def nbytes(self) -> int:
        """Memory of all parts in bytes."""
        return sum(part.nbytes for part in self)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, columns], as every part dequantises its own."""
        return torch.cat([part.dequantize(dtype) for part in self])

    def slice_rows(self, rows: slice) -> IntegerStack:
        """Some rows, as views; parts without any of them are left out."""
        start, stop, _ = rows.indices(self.shape[0])
        found, first = [], 0
        for part in self:
            low, high = max(start - first, 0), min(stop - first, part.shape[0])
            if low < high:
                found.append(part.slice_rows(slice(low, high)))
            first += part.shape[0]
        return IntegerStack(found or [self[0].slice_rows(slice(0, 0))])


def _rounded(weight: torch.Tensor, format: IntegerFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and minima of some rows."""
    groups = weight.float().reshape(weight.shape[0], weight.shape[1] // format.group, format.group)
    if format == Q8_0:
        span = groups.abs().amax(-1) / 127
        low = torch.zeros_like(span)
    else:
        low = groups.amin(-1)
        span = (groups.amax(-1) - low) / 15
    scales, minima = span.half(), low.half()
    if not bool(torch.isfinite(scales).all() & torch.isfinite(minima).all()):
        raise ValueError(f"the weight has values that format {format.name} cannot hold (not finite, or too large)")
    steps = scales.float()
    inverse = torch.where(steps > 0, 1 / steps, torch.zeros_like(steps))
    codes = (groups - minima.float()[..., None]).mul_(inverse[..., None]).round_()
    codes = codes.clamp_(-127, 127).add_(format.offset) if format == Q8_0 else codes.clamp_(0, 15)
    packed = codes.flatten(1).to(torch.uint8)
    if format.bits == 4:
        packed = packed[:, ::2] | packed[:, 1::2] << 4
    return packed, scales, minima
