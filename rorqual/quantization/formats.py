"""Number formats with few bits per value and one scale per block of values.

A value is `element * scale of its block`. Elements are e4m3 (8 bits, up to 448) or e2m1 (4 bits, up to 6); scales are
float32, UE8M0 (8 bits of exponent: powers of two) or e4m3. Sources: OCP Microscaling formats 1.0, DeepSeek-V3
(arXiv:2412.19437) section 3.3, and DeepInfer for the smallest scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Element = Literal["e4m3", "e2m1"]
Scale = Literal["float32", "ue8m0", "e4m3"]

_LARGEST: dict[Element, float] = {"e4m3": 448.0, "e2m1": 6.0}
_SMALLEST_SCALE = 2.0**-9
"""The smallest positive e4m3."""


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """What the elements are, which of them share a scale, and what the scales are. Compared by value."""

    name: str
    element: Element
    block: tuple[int, int]
    """(rows, columns) that share one scale."""
    scale: Scale

    def __post_init__(self) -> None:
        if self.element not in get_args(Element):
            raise ValueError(f"unknown element format {self.element!r}; allowed: {', '.join(get_args(Element))}")
        if self.scale not in get_args(Scale):
            raise ValueError(f"unknown scale format {self.scale!r}; allowed: {', '.join(get_args(Scale))}")
        if min(self.block) < 1:
            raise ValueError(f"a block has at least one row and one column, got {self.block}")

    @property
    def largest(self) -> float:
        """The largest element: 448 (e4m3) or 6 (e2m1)."""
        return _LARGEST[self.element]

    @property
    def amax_floor(self) -> float:
        """What a block's largest magnitude is raised to before its scale is taken, so that no scale is zero.

        6 * 2^-126 and not less for e2m1, since a smaller scale would be no normal float32.
        """
        if self.scale == "e4m3":
            return self.largest * _SMALLEST_SCALE
        return 1e-4 if self.element == "e4m3" else self.largest * 2.0**-126

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of values [..., rows, n]: [..., ceil(rows / block rows), ceil(n / block columns)].

        Raises ValueError if values of this shape have no rows to share a scale, or do not fill their bytes.
        """
        rows, columns = self.block
        if not shape or (rows > 1 and len(shape) < 2):
            raise ValueError(
                f"format {self.name} has blocks of {rows} x {columns} and needs at least {1 + (rows > 1)} dimensions, "
                f"got shape {tuple(shape)}"
            )
        if self.element == "e2m1" and shape[-1] % 2:
            raise ValueError(f"format {self.name} keeps two values per byte and needs an even size, got {shape[-1]}")
        groups = -(-shape[-1] // columns)
        return (groups,) if len(shape) == 1 else (*shape[:-2], -(-shape[-2] // rows), groups)

    def with_block(self, rows: int, columns: int) -> QuantFormat:
        """The same elements and scales in blocks of another size; a named format if there is one."""
        for known in FORMATS.values():
            if (known.element, known.block, known.scale) == (self.element, (rows, columns), self.scale):
                return known
        return QuantFormat(f"{self.element}_{rows}x{columns}_{self.scale}", self.element, (rows, columns), self.scale)


FP8_BLOCK = QuantFormat("fp8_block", "e4m3", (128, 128), "float32")
"""Weights of DeepSeek-V3 and Qwen3-FP8."""
FP8_BLOCK_UE8M0 = QuantFormat("fp8_block_ue8m0", "e4m3", (128, 128), "ue8m0")
"""Weights of DeepSeek-V3.1 and V4."""
FP8_ROW = QuantFormat("fp8_row", "e4m3", (1, 128), "float32")
"""Activations beside FP8_BLOCK."""
FP8_ROW_UE8M0 = QuantFormat("fp8_row_ue8m0", "e4m3", (1, 128), "ue8m0")
"""Activations beside FP8_BLOCK_UE8M0."""
FP8_64 = QuantFormat("fp8_64", "e4m3", (1, 64), "ue8m0")
"""Cached entries of DeepSeek-V4."""
MXFP8 = QuantFormat("mxfp8", "e4m3", (1, 32), "ue8m0")
"""OCP MXFP8."""
MXFP8_TILE = QuantFormat("mxfp8_tile", "e4m3", (32, 32), "ue8m0")
"""Weights with a scale per 32 x 32 tile, for MXFP8 activations."""
MXFP4 = QuantFormat("mxfp4", "e2m1", (1, 32), "ue8m0")
"""OCP MXFP4."""
FP4_E4M3 = QuantFormat("fp4_e4m3", "e2m1", (1, 16), "e4m3")
"""Compressed KV: NVFP4's elements and scales, without its second scale per tensor."""

FORMATS: dict[str, QuantFormat] = {
    known.name: known
    for known in (FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_ROW, FP8_ROW_UE8M0, MXFP8, MXFP8_TILE, MXFP4, FP4_E4M3)
}
"""Every named format."""
