"""Quantised weights for the compiled kernels: FP8 and FP4 stay packed in memory and become bfloat16 in the cache.

Power-of-two scales keep every weight exact; with float32 scales each weight is rounded to bfloat16.
"""

from __future__ import annotations

import torch

from rorqual.ops._decodable import refuse_decoding
from rorqual.ops.linear import flatten_rows
from rorqual.ops.native.library import Kernels, missing, threads_for
from rorqual.quantization import QTensor, QuantFormat

_BF16 = torch.bfloat16
_LANES = 16


class PairedWeight(QTensor):
    """A weight as the kernel reads it; only `linear` and `unpack_weight` know what it holds.

    values: uint8 [out_features / 16, in_features / 2, 16, 2], or without the last dimension for e2m1, whose byte is a
    pair. scales: [out_features / 16, groups, 16], one for every output feature whatever the block's rows.
    """

    __slots__ = ()

    @property
    def shape(self) -> torch.Size:
        """[out_features, in_features]."""
        return torch.Size((self.values.shape[0] * _LANES, self.values.shape[1] * 2))


def refuse_pairs(weight: QTensor) -> str | None:
    """Why a weight cannot become a PairedWeight, or None."""
    rows, columns = weight.shape[-2:]
    width = weight.format.block[1]
    if rows % _LANES or columns % 32:
        return f"needs multiples of 16 output and 32 input features, got {list(weight.shape)}"
    if width % _LANES or weight.format.scale == "e4m3":
        return f"has no kernel for scales in {weight.format.scale} of {width} input features each"
    return missing() or refuse_decoding(weight)


def pair(weight: QTensor) -> PairedWeight:
    """Lay a weight out; a copy of the same size, but for the scales, which are repeated for each row."""
    rows, columns = weight.shape
    values = weight.values.view(torch.uint8).view(rows // _LANES, _LANES, columns // 2, -1).transpose(1, 2)
    scales = weight.row_scales().repeat_interleave(weight.format.block[0], 0)[:rows]
    return PairedWeight(
        (values.squeeze(-1) if weight.format.element == "e2m1" else values).contiguous(),
        scales.view(rows // _LANES, _LANES, -1).transpose(1, 2).contiguous(),
        weight.format,
    )


def unpair(weight: PairedWeight) -> QTensor:
    """The weight before `pair`, as a copy."""
    rows, columns = weight.shape
    values = weight.values.view(rows // _LANES, columns // 2, _LANES, -1).transpose(1, 2).reshape(rows, -1)
    scales = weight.scales.transpose(1, 2).reshape(rows, -1)[:: weight.format.block[0]]
    dtype = torch.float8_e4m3fn if weight.format.element == "e4m3" else torch.int8
    return QTensor(values.view(dtype), scales.contiguous(), weight.format)


def multiply_quantized(
    found: Kernels,
    x: torch.Tensor | QTensor,
    weight: PairedWeight,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
) -> torch.Tensor:
    """x [..., in_features] -> bfloat16 [..., out_features]."""
    outer = x.shape[:-1]
    if isinstance(x, QTensor):
        rows = flatten_rows(x.dequantize(_BF16))
    else:
        rows = flatten_rows(x)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if activation is not None:
            rows = _rounded(found, rows, activation)
    out_features, in_features = weight.shape
    out = torch.empty(rows.shape[0], out_features, dtype=_BF16)
    found.linear_quantized(
        rows.data_ptr(),
        rows.stride(0),
        weight.values.data_ptr(),
        weight.scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out_features,
        rows.shape[0],
        out_features,
        in_features,
        weight.format.block[1],
        weight.format.element == "e2m1",
        weight.format.scale == "ue8m0",
        torch.get_num_threads(),
    )
    return out if len(outer) == 1 else out.view(*outer, out_features)


def _rounded(found: Kernels, x: torch.Tensor, activation: QuantFormat) -> torch.Tensor:
    """What x is after quantisation, in bfloat16."""
    height, width = activation.block
    if (
        activation.element != "e4m3"
        or activation.scale == "e4m3"
        or height != 1
        or width % _LANES
        or x.shape[1] % width
    ):
        return QTensor.quantize(x, activation).dequantize(_BF16)
    out = torch.empty(x.shape, dtype=_BF16)
    found.round_to_e4m3(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        width,
        activation.scale == "ue8m0",
        threads_for(x.numel()),
    )
    return out
