"""The GPU instructions that decode weights, followed one by one here: every code and scale comes out as its number.

Triton's interpreter does not run them, so this stands in for it where there is no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

kernels = pytest.importorskip("rorqual.ops.triton._decode_kernels", reason="Triton is not installed")
U32 = np.uint32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def follow(text: str, inputs: Sequence[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Run a block of PTX on arrays of 32-bit registers: $0 to $(outputs - 1) come out, the others are the inputs."""
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(inputs[0], int(name, 0), dtype=U32)

    for line in re.findall(r"^(\w+)(?:\.\w+)* (.+);$", text, re.MULTILINE):
        name, target, *operands = line[0], *line[1].split(", ")
        a, *rest = [value(operand) for operand in operands]
        registers[target] = OPERATIONS[name](a, *rest)
    return [registers[f"${i}"] for i in range(outputs)]


def permute(a: np.ndarray, b: np.ndarray, selectors: np.ndarray) -> np.ndarray:
    """prmt: bytes 0-3 are a's, 4-7 b's; byte i of the result is the one that four bits of the selectors name."""
    pool = np.stack([*(a >> U32(8 * i) & U32(255) for i in range(4)), *(b >> U32(8 * i) & U32(255) for i in range(4))])
    chosen = [np.take_along_axis(pool, (selectors >> U32(4 * i) & U32(7))[None].astype(int), 0)[0] for i in range(4)]
    return sum((byte << U32(8 * i) for i, byte in enumerate(chosen)), np.zeros_like(a)).astype(U32)


def bfloat16(lanes: np.ndarray) -> np.ndarray:
    """float64 [..., 2]: the two bfloat16 in a register, the lower first."""
    return np.stack([(lanes << U32(16)).view(np.float32), (lanes & U32(0xFFFF0000)).view(np.float32)], -1).astype(float)


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """mul.bf16x2 of numbers whose products bfloat16 holds."""
    product = (bfloat16(a) * bfloat16(b)).astype(np.float32)
    bits = product.view(U32)
    assert not (bits & U32(0xFFFF)).any(), "a product would be rounded"
    return bits[..., 0] >> U32(16) | bits[..., 1]


OPERATIONS = {
    "mov": lambda a: a,
    "and": lambda a, b: a & b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "lop3": lambda a, b, c, table: (a & b) | c if (table == 0xEA).all() else None,
    "prmt": permute,
    "mul": multiply,
}


def pairs(values: np.ndarray) -> np.ndarray:
    """16-bit values in both halves of registers, the upper ones in another order."""
    return (values.astype(U32) | np.roll(values, 12345).astype(U32) << U32(16)).astype(U32)


@pytest.mark.parametrize("scale", [0, 1, 60, 127, 128])
def test_every_word_of_four_e2m1_codes(scale):
    words = np.arange(1 << 16)
    raised = np.full(1 << 16, (scale + 126) << 7)
    factors = pairs(raised)
    got = follow(kernels._DECODE_E2M1.value, [pairs(words), factors, factors, factors, factors], 4)
    lanes = np.stack([words, np.roll(words, 12345)], -1)
    for result, sign, magnitude in zip(got, (15, 12, 14, 13), (6, 3, 0, 9), strict=True):
        codes = (lanes >> sign & 1) << 3 | (lanes >> magnitude & 7)
        want = E2M1[codes] * 2.0 ** (scale - 127)
        np.testing.assert_array_equal(bfloat16(result), want)
        np.testing.assert_array_equal(np.signbit(bfloat16(result)), codes > 7)


def test_scales_of_the_planes_differ():
    factors = [pairs(np.full(16, (127 + 126 - i) << 7)) for i in range(4)]
    ones = 2 << 6 | 2 << 3 | 2 | 2 << 9
    got = follow(kernels._DECODE_E2M1.value, [pairs(np.full(16, ones)), *factors], 4)
    assert [bfloat16(result)[0, 0] for result in got] == [1.0, 0.5, 0.25, 0.125]


def test_every_e4m3_code_in_every_place():
    """NaN codes are the next number, 480."""
    codes = np.arange(256)
    bytes_ = [np.roll(codes, 7 * i).astype(U32) for i in range(4)]
    packed = sum((byte << U32(8 * i) for i, byte in enumerate(bytes_)), np.zeros(256, U32)).astype(U32)
    got = follow(kernels._DECODE_E4M3.value, [packed], 2)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent > 0, 2.0 ** (exponent - 7.0) * (1 + mantissa / 8), 2.0**-6 * mantissa / 8)
    want = np.where(codes > 127, -size, size)
    for i, lane in enumerate(np.moveaxis(np.concatenate([bfloat16(got[0]), bfloat16(got[1])], -1), -1, 0)):
        np.testing.assert_array_equal(lane, np.roll(want, 7 * i))
