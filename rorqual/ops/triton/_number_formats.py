"""Rounding and number formats inside Triton kernels, equal to the bit to `rorqual.quantization`.

A GPU with FP8 conversions from float32 (SM90 and later) uses them. Elsewhere, and in Triton's interpreter, whose own
conversions truncate bfloat16 and lose FP8's NaN and subnormals, the same results come from integer arithmetic.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.triton.launch import INTERPRETING

_INTERPRETING = tl.constexpr(INTERPRETING)
NATIVE_FP8 = tl.constexpr(
    not INTERPRETING and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 to bfloat16, float16 or float32: to nearest, ties to even, NaN kept."""
    if _INTERPRETING and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 rounded to dtype, as float32 again."""
    if not _INTERPRETING and dtype == tl.bfloat16:
        # Two at a time: Triton converts one by one, at a quarter of the speed.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; and.b32 $1, both, 0xFFFF0000; }",
            "=r,=r,r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return round_to(x, dtype).to(tl.float32)


@triton.jit
def largest_magnitude(x, axis: tl.constexpr):
    """max |x| along an axis of float32; NaN counts as absent, infinity as the largest number."""
    size = tl.abs(x)
    if _INTERPRETING:  # hardware's maximum leaves NaN out by itself
        size = tl.where(size != size, 0.0, size)
    # The other way round, nothing but NaN would become the largest number.
    return tl.minimum(tl.maximum(tl.max(size, axis=axis), 0.0), 3.4028234663852886e38)


@triton.jit
def e4m3_byte(x):
    """float32 to the byte of float8_e4m3fn: to nearest even, saturating at 448, NaN kept."""
    if NATIVE_FP8:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)  # the instruction saturates
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the steps are 2^-9: adding 2^23 leaves the number of steps in the lowest bits, rounded to even.
    steps = tl.abs(x) * 512.0 + 8388608.0
    subnormal = steps.to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < (121 << 23), subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(x != x, 0x7F, code).to(tl.uint8)  # NaN without a sign, as the conversion makes it


@triton.jit
def e4m3_value(byte):
    """The float32 value of a float8_e4m3fn byte."""
    if NATIVE_FP8:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    code = byte.to(tl.uint32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def e2m1_code(x):
    """float32 to the codes 0..15 of e2m1, as int32: to nearest even, saturating at 6, NaN becomes +6."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # 6.0; a third fewer instructions than seven comparisons
    normal = ((magnitude + 0x1FFFFF + ((magnitude >> 22) & 1)) >> 22) - (126 << 1)
    # Below 1 the steps are 0.5: adding 2^22 leaves the number of steps in the lowest bits, rounded to even.
    subnormal = (tl.abs(x) + 4194304.0).to(tl.uint32, bitcast=True) & 3
    code = tl.where(magnitude < 0x3F800000, subnormal, normal) | ((bits >> 28) & 8)
    return tl.where(x != x, 7, code).to(tl.int32)


@triton.jit
def e2m1_value(code):
    """The float32 value of an e2m1 code 0..15 (any integer type)."""
    code = code.to(tl.uint32)
    magnitude = code & 7
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude < 2, magnitude * (126 << 23), normal) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_byte(quotient):
    """ceil(log2(quotient)) + 127 of a positive normal float32, as int32."""
    bits = quotient.to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFFFF) >> 23).to(tl.int32)


@triton.jit
def ue8m0_value(byte):
    """2 ** (byte - 127) as float32, for any integer type; byte 255 is NaN."""
    code = byte.to(tl.uint32)
    bits = tl.where(code == 0, 0x400000, code << 23)  # 2^-127 is a subnormal
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def ue8m0_inverse(byte):
    """2 ** (127 - byte) as float32, for bytes up to 253."""
    return ((254 - byte.to(tl.int32)) << 23).to(tl.float32, bitcast=True)
