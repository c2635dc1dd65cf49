"""GGML blocks to float32: bit for bit what the gguf package computes, several times as fast.

Each format's function gets blocks, uint8 [n, block bytes], and fills out, float32 [n, block size], in passes over
`out`. Half-byte values lie as GGML packs them: a byte's low half belongs to the first half of a run, its high half to
the second.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rorqual.loader.gguf_file import StoredType

_CHUNK_VALUES = 1 << 18
"""Values per pass: few enough that a pass stays in the cache, enough that two threads seldom wait for the GIL."""


def dequantize(data: np.ndarray, kind: StoredType) -> np.ndarray:
    """The values of stored rows, as float32 [rows..., columns].

    Args:
        data: uint8 [rows..., row bytes] of a quantised format (not F32, F16 or BF16).
        kind: the format.
    """
    fill = _FORMATS[kind.name]
    blocks = data.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_size), np.float32)
    chunk = _CHUNK_VALUES // kind.block_size
    for start in range(0, len(blocks), chunk):
        fill(blocks[start : start + chunk], out[start : start + chunk])
    return out.reshape(*data.shape[:-1], data.shape[-1] // kind.block_bytes * kind.block_size)


def _half(data: np.ndarray) -> np.ndarray:
    """Bytes [n, 2 * k] of float16 as float32 [n, k]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Bytes [..., k] into out [..., 2 * k]: first every low half, then every high half."""
    size = packed.shape[-1]
    out[..., :size] = packed & np.uint8(15)
    out[..., size:] = packed >> np.uint8(4)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Bytes [n, 4] as uint8 [n, 32] of 0 and 16: what each bit adds to its half-byte."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Float16 scale, 32 int8: value = q * scale."""
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]), out=out, dtype=np.float32)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Float16 scale, 32 half-bytes: value = (q - 8) * scale."""
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks[:, :2])


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Float16 scale and minimum, 32 half-bytes: value = q * scale + minimum."""
    scale_min = _half(blocks[:, :4])
    _nibbles(blocks[:, 4:], out)
    out *= scale_min[:, :1]
    out += scale_min[:, 1:]


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Float16 scale, 32 fifth bits, 32 half-bytes: value = (q - 16) * scale."""
    _nibbles(blocks[:, 6:], out)
    out += _fifth_bits(blocks[:, 2:6])
    out -= 16
    out *= _half(blocks[:, :2])


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """Float16 scale and minimum, 32 fifth bits, 32 half-bytes: value = q * scale + minimum."""
    scale_min = _half(blocks[:, :4])
    _nibbles(blocks[:, 8:], out)
    out += _fifth_bits(blocks[:, 4:8])
    out *= scale_min[:, :1]
    out += scale_min[:, 1:]


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the 8 runs of 32 values of a Q4_K or Q5_K block, each float32 [n, 8, 1].

    After their two float16 units come twelve bytes: four with the low 6 bits of scales 0-3, four of minima 0-3, and
    four with the low 4 bits of scales and minima 4-7, whose upper 2 bits are the top bits of the first eight.
    """
    units = _half(blocks[:, :4])
    scales, minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    low, top = np.uint8(0x3F), np.uint8(0x30)
    scale = np.concatenate([scales & low, (rest & np.uint8(15)) | ((scales >> np.uint8(2)) & top)], axis=1)
    minimum = np.concatenate([minima & low, (rest >> np.uint8(4)) | ((minima >> np.uint8(2)) & top)], axis=1)
    return (units[:, :1] * scale)[:, :, None], (units[:, 1:] * minimum)[:, :, None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Scales, 4 x 32 bytes that each hold two runs: value = q * scale - minimum."""
    scale, minimum = _k_scales(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    runs = out.reshape(-1, 8, 32)
    runs *= scale
    runs -= minimum


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the half-bytes: bit i of byte j is of run i, value j."""
    scale, minimum = _k_scales(blocks)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.reshape(-1, 4, 64))
    runs = out.reshape(-1, 8, 32)
    for i in range(8):
        runs[:, i] += ((blocks[:, 16:48] >> np.uint8(i)) & np.uint8(1)) << np.uint8(4)
    runs *= scale
    runs -= minimum


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """2 x 64 bytes of half-bytes, 2 x 32 of two upper bits, 16 int8 scales, float16 unit: value = (q - 32) * scale.

    Each half of the block is 4 runs of 32 values, whose upper bits are bits 2i and 2i + 1 of the 32 bytes.
    """
    scale = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8)  # [n, 16]: one for every 16 values
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), out.reshape(-1, 2, 128))
    runs, upper = out.reshape(-1, 2, 4, 32), blocks[:, 128:192].reshape(-1, 2, 32)
    for i in range(4):
        runs[:, :, i] += ((upper >> np.uint8(2 * i)) & np.uint8(3)) << np.uint8(4)
    out -= 32
    groups = out.reshape(-1, 16, 16)
    groups *= scale[:, :, None]


_FORMATS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
