"""Products with quantised weights in bfloat16 on the CPU: a panel of the weight at a time is decoded into the cache.

An e4m3 becomes a bfloat16 by moving its bits to where a bfloat16 has them, which leaves it 2^120 times too small; that
and the scale are one multiplication. A byte of two e2m1 is looked up. Power-of-two scales keep every weight exact.
Others are rounded to bfloat16, and so is each weight: a relative error of 2^-8, where the elements themselves have up
to 2^-4. `ops/native` does the same without the detour through memory; this is for sizes and machines it is not for.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from rorqual.quantization import QTensor, QuantFormat, decode_e2m1, unpack_e2m1

_BF16 = torch.bfloat16
_PANEL = 1 << 18
"""Values decoded at once: 512 KiB. Larger panels were no faster, smaller ones spend their time on calls."""
_E4M3_BITS = -0x7810  # 0x87F0: sign, and exponent and mantissa four bits up
_LACKING = {"e4m3": 2.0**120, "e2m1": 1.0}
"""Element -> the factor that decoded values lack: moved bits have the bias of another exponent."""


class PanelWeight(QTensor):
    """A quantised weight that was checked for `panel_linear` (see `_decodable`); in layout ROW."""

    __slots__ = ()


def panel_linear(
    x: torch.Tensor,
    weight: PanelWeight,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
    out: torch.Tensor,
) -> None:
    """x [num_rows, in_features] bfloat16, quantised first if asked, times the weight's rows, plus bias, into out."""
    if activation is not None:
        x = QTensor.quantize(x, activation).dequantize(_BF16)
    num_rows, num_columns = weight.shape
    height, width = weight.format.block
    step = max(1, _PANEL // num_columns // height) * height
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        panel = _elements(weight, start, stop)
        scales = weight.scales[start // height : -(-stop // height)]
        panel.view(stop - start, -1, width).mul_(_factors(scales, weight.format, stop - start)[:, :, None])
        out[:, start:stop] = F.linear(x, panel, None if bias is None else bias[start:stop])


def _elements(weight: PanelWeight, start: int, stop: int) -> torch.Tensor:
    """The elements of some rows in bfloat16, times a constant."""
    values = weight.values[start:stop]
    if weight.format.element == "e4m3":
        bits = values.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
        return bits.bitwise_left_shift_(4).bitwise_and_(_E4M3_BITS).view(_BF16)
    pairs = _pairs().index_select(0, values.reshape(-1).view(torch.uint8).int())
    return pairs.view(_BF16).view(stop - start, -1)


@functools.cache
def _pairs() -> torch.Tensor:
    """Byte -> the two e2m1 in it, as bfloat16 in an int32."""
    both = unpack_e2m1(torch.arange(256, dtype=torch.uint8)[:, None])
    return decode_e2m1(both).to(_BF16).view(torch.int32)[:, 0].contiguous()


def _factors(scales: torch.Tensor, format: QuantFormat, num_rows: int) -> torch.Tensor:
    """Scale times what the elements lack, bfloat16 [num_rows, groups]."""
    # A UE8M0 byte is the exponent of a bfloat16; the byte 0 is 2^-127, which becomes 0.
    numbers = (scales.to(torch.int16) << 7).view(_BF16) if format.scale == "ue8m0" else scales.to(_BF16)
    factors = numbers * _LACKING[format.element]
    return factors if format.block[0] == 1 else factors.repeat_interleave(format.block[0], 0)[:num_rows]
