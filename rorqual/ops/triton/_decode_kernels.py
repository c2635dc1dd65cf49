"""Codes of few bits to bfloat16, in registers.

Exact, since bfloat16 holds every e4m3 and e2m1 value times a power of two (down to 2^-133, and up to 2^127).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._number_formats import e2m1_value, e4m3_value, round_to, ue8m0_value
from rorqual.ops.triton.launch import INTERPRETING

_INTERPRETING = tl.constexpr(INTERPRETING)

WIDTH = tl.constexpr(128)
"""Columns of K that four UE8M0 scales in a word are for."""
GROUP = tl.constexpr(32)
"""Columns that share a UE8M0 scale."""
TILE_ROWS = tl.constexpr(64)
"""Rows of an e2m1 weight whose words of one group of 128 columns lie together in memory."""
RAISED = tl.constexpr(126)
"""What the scales of a prepared e2m1 weight have been raised by; see `planes_of_e2m1`."""

# A word of 16 bits holds four e2m1 codes: signs in bits 15, 12, 14 and 13, magnitudes (exponent, exponent, mantissa) in
# bits 8-6, 5-3, 2-0 and 11-9. Moved to bits 8-6 of a bfloat16, below its sign in bit 15, a magnitude is the code's
# value times 2^-126, zero and the subnormal 0.5 included, so that one exact multiplication makes up for that and
# applies the scale. Two words lie in a register, and each line below works on both.
_DECODE_E2M1 = tl.constexpr("""{
.reg .b32 t;
and.b32 $0, $4, 0x81C081C0;
shl.b32 t, $4, 3;
and.b32 $1, t, 0x81C081C0;
shl.b32 t, $4, 6;
and.b32 $2, t, 0x01C001C0;
shl.b32 t, $4, 1;
lop3.b32 $2, t, 0x80008000, $2, 0xEA;
shr.b32 t, $4, 3;
and.b32 $3, t, 0x01C001C0;
shl.b32 t, $4, 2;
lop3.b32 $3, t, 0x80008000, $3, 0xEA;
mul.rn.bf16x2 $0, $0, $5;
mul.rn.bf16x2 $1, $1, $6;
mul.rn.bf16x2 $2, $2, $7;
mul.rn.bf16x2 $3, $3, $8;
}""")

# The same for e4m3, four bytes to a register: the seven bits below the sign, moved to bits 10-4, are the value times
# 2^-120. The hardware's conversions to bfloat16 go through float16 and are several times slower.
_DECODE_E4M3 = tl.constexpr("""{
.reg .b32 t, u, c;
mov.b32 c, 0x7B807B80;
prmt.b32 t, $2, 0, 0x1404;
prmt.b32 u, $2, 0, 0x3424;
and.b32 $0, t, 0x80008000;
shr.u32 t, t, 4;
lop3.b32 $0, t, 0x07F007F0, $0, 0xEA;
and.b32 $1, u, 0x80008000;
shr.u32 u, u, 4;
lop3.b32 $1, u, 0x07F007F0, $1, 0xEA;
mul.rn.bf16x2 $0, $0, c;
mul.rn.bf16x2 $1, $1, c;
}""")


@triton.jit
def _exponent(word, P: tl.constexpr, BIT: tl.constexpr):
    """Byte P of a word, moved to the bits from BIT on."""
    shifted = (word << (BIT - 8 * P)) if BIT >= 8 * P else (word >> (8 * P - BIT))
    return shifted & (0xFF << BIT)


@triton.jit
def power_of_two(word, P: tl.constexpr, dtype: tl.constexpr):
    """2 ** (byte P of a word - 127) as float32 or bfloat16; infinity for byte 255."""
    if dtype == tl.float32:
        power = tl.maximum(_exponent(word, P, 23), 1 << 22).to(tl.float32, bitcast=True)  # 2^-127 is a subnormal
    else:
        power = tl.maximum(_exponent(word, P, 7), 1 << 6).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return power


@triton.jit
def bfloat16_of_e4m3(codes):
    """e4m3 codes (uint8) as bfloat16: exact, but NaN codes are +-480."""
    if _INTERPRETING:
        code = codes.to(tl.int32)
        value = tl.where((code & 0x7F) == 0x7F, 480.0, e4m3_value((code & 0x7F).to(tl.uint8)))
        return tl.where(code >= 0x80, -value, value).to(tl.bfloat16)
    return tl.inline_asm_elementwise(_DECODE_E4M3, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def planes_of_e2m1(words, scales, ROWS: tl.constexpr):
    """Four tiles [ROWS, 32] of a weight in bfloat16: columns 0-31, 32-63, 64-95 and 96-127 of a group of 128.

    words int16 [ROWS, 32], as above, word j holding columns j, 32 + j, 64 + j and 96 + j. scales int32 [ROWS], byte p
    for columns 32 p onwards: 126 + 127 + log2(scale), which as a bfloat16's exponent is scale * 2^126.
    """
    if _INTERPRETING:
        word = words.to(tl.int32) & 0xFFFF
        first = e2m1_value(((word >> 6) & 7) | ((word >> 12) & 8)) * _lowered_power(scales, 0)
        second = e2m1_value(((word >> 3) & 7) | ((word >> 9) & 8)) * _lowered_power(scales, 1)
        third = e2m1_value((word & 7) | ((word >> 11) & 8)) * _lowered_power(scales, 2)
        fourth = e2m1_value(((word >> 9) & 7) | ((word >> 10) & 8)) * _lowered_power(scales, 3)
        return first.to(tl.bfloat16), second.to(tl.bfloat16), third.to(tl.bfloat16), fourth.to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        _DECODE_E2M1,
        "=r,=r,=r,=r,r,r,r,r,r",
        [
            words,
            tl.broadcast_to(_raised_power(scales, 0)[:, None], (ROWS, GROUP)),
            tl.broadcast_to(_raised_power(scales, 1)[:, None], (ROWS, GROUP)),
            tl.broadcast_to(_raised_power(scales, 2)[:, None], (ROWS, GROUP)),
            tl.broadcast_to(_raised_power(scales, 3)[:, None], (ROWS, GROUP)),
        ],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _raised_power(word, P: tl.constexpr):
    return _exponent(word, P, 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _lowered_power(word, P: tl.constexpr):
    return ue8m0_value(((word >> (8 * P)) & 0xFF) - RAISED)[:, None]


@triton.jit
def scaled(tile, powers):
    """bfloat16 values times a power of two per row."""
    if _INTERPRETING:
        return (tile.to(tl.float32) * powers.to(tl.float32)[:, None]).to(tl.bfloat16)
    return tile * powers[:, None]


@triton.jit(do_not_specialize=["rows", "scale_row", "scale_group"])
def expand_kernel(
    values,
    scales,
    out,
    rows,
    columns,
    row,
    scale_row,
    scale_group,
    out_row,
    block_rows,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode e4m3 codes (uint8) or prepared e2m1 words, both with words of UE8M0 scales, to bfloat16 [rows, columns].

    Exact, and e4m3's NaN are kept. `row` is the step from row to row of codes, or from tile to tile of words.
    """
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = tl.program_id(1)
    column = tl.arange(0, GROUP)
    here = r < rows
    word = tl.load(
        scales + (r // block_rows).to(tl.int64) * scale_row + group.to(tl.int64) * scale_group, mask=here, other=0
    )
    out_at = out + r.to(tl.int64)[:, None] * out_row + group * WIDTH + column[None, :]
    if ELEMENT == "e2m1":
        at = values + (r // TILE_ROWS).to(tl.int64)[:, None] * row + (r % TILE_ROWS)[:, None] * GROUP + column[None, :]
        planes = planes_of_e2m1(tl.load(at + group * (TILE_ROWS * GROUP), mask=here[:, None], other=0), word, BLOCK)
    else:
        at = values + r.to(tl.int64)[:, None] * row + column[None, :]
    for part in tl.static_range(4):
        k = group * WIDTH + part * GROUP
        inside = here[:, None] & (column < columns - k)[None, :]
        if ELEMENT == "e2m1":
            tile = planes[part]
        else:
            codes = tl.load(at + k, mask=inside, other=0)
            tile = round_to(e4m3_value(codes) * power_of_two(word, part, tl.float32)[:, None], tl.bfloat16)
        tl.store(out_at + part * GROUP, tile, mask=inside)
