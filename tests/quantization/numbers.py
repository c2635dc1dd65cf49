"""The number formats once more, in NumPy and from their definitions: tables of all values, nearest by comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rorqual.quantization import QuantFormat

FLOAT32_LARGEST = np.finfo(np.float32).max


def e4m3_table() -> list[float]:
    """Values of the codes 0..126: exponent bias 7, three bits of mantissa, subnormal below 2^-6; 127 is NaN."""
    return [(code % 8) * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7) for code in range(127)]


E4M3 = np.array(e4m3_table())
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TABLES = {"e4m3": E4M3, "e2m1": E2M1}
SIGN = {"e4m3": 0x80, "e2m1": 8}
NOT_A_NUMBER = {"e4m3": 0x7F, "e2m1": 7}


def nearest(x: np.ndarray, element: str) -> np.ndarray:
    """Codes of the nearest table entries, ties to the even code, in float64; the sign bit of zeros kept."""
    table = TABLES[element]
    with np.errstate(invalid="ignore"):  # signalling NaN
        size = np.minimum(np.abs(x.astype(np.float64)), table[-1])
    above = np.searchsorted(table, size).clip(1, len(table) - 1)
    to_above, to_below = table[above] - size, size - table[above - 1]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    codes = np.where(up, above, above - 1) | np.where(np.signbit(x), SIGN[element], 0)
    return np.where(np.isnan(x), NOT_A_NUMBER[element], codes).astype(np.uint8)


def smallest_power(amax: float, largest: float) -> int:
    """The smallest e with amax <= largest * 2^e, by exact comparison."""
    e = math.frexp(amax)[1] - math.frexp(largest)[1] - 1
    while amax > math.ldexp(largest, e):
        e += 1
    return e


@dataclass
class Quantised:
    """Codes [rows, n], scales as stored and as numbers [rows of blocks, groups]."""

    codes: np.ndarray
    stored: np.ndarray
    scales: np.ndarray


FLOORS = {
    ("e4m3", "float32"): 1e-4,
    ("e4m3", "ue8m0"): 1e-4,
    ("e4m3", "e4m3"): 448 * 2**-9,
    ("e2m1", "float32"): 6 * 2**-126,
    ("e2m1", "ue8m0"): 6 * 2**-126,
    ("e2m1", "e4m3"): 6 * 2**-9,
}


def quantised(x: np.ndarray, format: QuantFormat) -> Quantised:
    """What x [rows, n] (float32) becomes, block by block."""
    (rows, n), (block_rows, block_columns) = x.shape, format.block
    largest = np.float32(TABLES[format.element][-1])
    shape = (-(-rows // block_rows), -(-n // block_columns))
    out = Quantised(np.zeros(x.shape, np.uint8), np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    for i in range(shape[0]):
        for j in range(shape[1]):
            here = (
                slice(i * block_rows, (i + 1) * block_rows),
                slice(j * block_columns, (j + 1) * block_columns),
            )
            block = x[here]
            sizes = np.abs(block[~np.isnan(block)])
            amax = np.float32(max(sizes, default=0.0))
            amax = min(max(amax, np.float32(FLOORS[format.element, format.scale])), FLOAT32_LARGEST)
            if format.scale == "ue8m0":
                exponent = smallest_power(float(amax), float(largest))
                stored, scale, factor = exponent + 127, 2.0**exponent, np.float32(2.0**-exponent)
            elif format.scale == "e4m3":
                stored = nearest(np.array(amax * np.float32(1 / float(largest))), "e4m3")
                scale = np.float32(E4M3[stored])
                factor = np.float32(1) / scale
            else:
                stored = scale = amax / largest
                factor = largest / amax
            out.stored[i, j], out.scales[i, j] = stored, scale
            with np.errstate(over="ignore", invalid="ignore"):
                out.codes[here] = nearest(block * factor, format.element)
    return out
