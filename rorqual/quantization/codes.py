"""Numbers to codes and back: e4m3, e2m1, UE8M0. Plain torch, the same bits on every device.

All take any shape. Source: OCP 8-bit floating point 1.0 (e4m3fn), OCP Microscaling formats 1.0 (e2m1, UE8M0).
"""

from __future__ import annotations

import torch

from rorqual.quantization.formats import QuantFormat

E4M3_LARGEST = 448.0
E2M1_LARGEST = 6.0
_FLOAT32_LARGEST = torch.finfo(torch.float32).max
_E4M3_NAN = 0x7F
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MANTISSA_BITS = 23
_LARGEST_EXPONENT_BYTE = 254
_HALF_OF_SMALLEST_NORMAL = 0x00400000  # 2^-127, which as a float32 has no exponent of its own
_QUIET_NAN = 0x7FC00000


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest float8_e4m3fn, ties to even. Beyond 448 is 448; NaN is the byte 0x7F; the sign of zero is kept.

    x of any floating dtype; float64 is rounded to float32 first.
    """
    wide = x.float()
    # torch's own cast turns what is beyond 448 into NaN in some versions and on some devices; clamping keeps NaN.
    codes = wide.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn)
    codes.view(torch.uint8).masked_fill_(wide.isnan(), _E4M3_NAN)
    return codes


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) of the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code; 8 is the sign.

    Beyond 6 is 6; NaN is +6 (code 7); the sign of zero is kept.
    """
    wide = x.float()
    size = wide.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for halfway in (0.25, 1.25, 2.5, 5.0):  # a tie goes down, to the even code
        code += size > halfway
    for halfway in (0.75, 1.75, 3.5):  # a tie goes up, to the even code
        code += size >= halfway
    code += wide.signbit().to(torch.uint8) << 3
    return code.masked_fill_(wide.isnan(), 7)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (any integer dtype) to float32."""
    values = torch.tensor([*_E2M1_VALUES, *(-value for value in _E2M1_VALUES)], device=codes.device)
    return values[codes.int()]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., n] to int8 [..., n / 2]: code 2i in the low half of byte i, 2i + 1 in the high. ValueError: odd n."""
    if codes.shape[-1] % 2:
        raise ValueError(f"two codes fill a byte, so their number must be even, got {codes.shape[-1]}")
    wide = codes.to(torch.uint8)
    return (wide[..., ::2] | wide[..., 1::2] << 4).view(torch.int8)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """int8 or uint8 [..., n / 2] to codes uint8 [..., n]."""
    two = packed.view(torch.uint8)
    return torch.stack((two & 15, two >> 4), -1).flatten(-2)


def divide(x: torch.Tensor | float, by: torch.Tensor | float) -> torch.Tensor:
    """x / by with one rounding, one of them a float32 tensor and the other a number.

    torch multiplies by the rounded reciprocal instead where the divisor is a number (on CUDA) or the dividend is one.
    """
    if not isinstance(x, torch.Tensor):
        assert isinstance(by, torch.Tensor)
        return by.new_full((), x) / by
    assert not isinstance(by, torch.Tensor)
    return x / x.new_full((), by)


def ue8m0_of(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """UE8M0 bytes (uint8) of the smallest power of two 2^e, e = byte - 127, with amax / 2^e <= largest.

    e = ceil(log2(amax / largest)) from the bits of the float32 quotient, which is exact where a logarithm is not: amax
    may lie on a boundary. amax float32, not negative. No more than 254: 255 is UE8M0's NaN. Zero gives byte 0, infinity
    and NaN 254; `QuantFormat.amax_floor` keeps zero away.
    """
    bits = divide(amax.float(), largest).view(torch.int32)
    return (((bits - 1) >> _MANTISSA_BITS) + 1).clamp(0, _LARGEST_EXPONENT_BYTE).to(torch.uint8)


def decode_ue8m0(exponents: torch.Tensor) -> torch.Tensor:
    """UE8M0 bytes (uint8) to float32: 2^(byte - 127), and 255 to NaN."""
    wide = exponents.to(torch.int32)
    bits = torch.where(wide == 0, _HALF_OF_SMALLEST_NORMAL, wide << _MANTISSA_BITS)
    return torch.where(wide == _LARGEST_EXPONENT_BYTE + 1, _QUIET_NAN, bits).to(torch.int32).view(torch.float32)


def encode_ue8m0(powers: torch.Tensor) -> torch.Tensor:
    """float32 powers of two from 2^-127 to 2^127 to their UE8M0 bytes (uint8). Anything else gives a wrong byte."""
    return (powers.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)


def block_amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude over the last dimension (float32): NaN counts as absent, infinity as the largest number."""
    return x.float().abs().nan_to_num(nan=0.0, posinf=_FLOAT32_LARGEST).amax(-1)


def scale_of(amax: torch.Tensor, format: QuantFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """(the scales of blocks as the format stores them, the float32 factors that their values are multiplied by).

    amax float32 of any shape, finite. The factor is largest / amax (float32 scales), 2^-e (UE8M0: exact) or one over
    the rounded scale (e4m3).
    """
    amax = amax.clamp(min=format.amax_floor)
    if format.scale == "ue8m0":
        exponents = ue8m0_of(amax, format.largest)
        return exponents, decode_ue8m0(2 * 127 - exponents)
    if format.scale == "e4m3":
        scales = encode_e4m3(amax * (1 / format.largest))
        return scales, divide(1.0, scales.float())
    return divide(amax, format.largest), divide(format.largest, amax)


def decode_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales as a format stores them (float32, e4m3, or UE8M0 bytes in uint8) to float32."""
    return decode_ue8m0(scales) if scales.dtype == torch.uint8 else scales.float()
