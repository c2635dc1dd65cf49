"""Products on NVIDIA GPUs: with FP8 and FP4 weights, and of some rows with plain ones.

Plain ones are multiplied by `_plain_product`, and by `_hopper_product` where `_hopper_tiles` says so.

Which kernel a product takes follows from how the weight is laid out (`_prepared_weight`) and what x is:

- x and weight in FP8: a product of FP8 operands, scaled block by block.
- x in bfloat16: the weight is decoded to bfloat16 in registers, which is exact.
- x in MXFP8 beside e2m1, and beside e4m3 for more than `SKINNY` rows: x is decoded to bfloat16 first, which is exact
  too, and costs less than scaling a product of 32 columns of K after the other.
- From `EXPAND_ROWS` rows on, weights with UE8M0 scales: decoded to bfloat16 as a whole, for cuBLAS's product.

Up to `SKINNY` rows a row's result does not depend on how many there are. It may differ in the last bit on the other
side of SKINNY, and of EXPAND_ROWS. The tiles are in `TILES`.
"""

from __future__ import annotations

import math

import torch

from rorqual.ops._hopper_tiles import hopper_tile
from rorqual.ops.linear import (
    Weight,
    allocate_output,
    check_operands,
    check_out_acc,
    flatten_output,
    flatten_rows,
    linear,
    output_dtype,
    prepare_weight,
    unpack_weight,
)
from rorqual.ops.quantize import quantize
from rorqual.ops.triton._hopper_product import multiply_by_tiles
from rorqual.ops.triton._linear_launch import (
    SKINNY,
    TILES,
    Tile,
    arrivals,
    expand,
    multiply_scaled,
    multiply_weight_only,
)
from rorqual.ops.triton._plain_product import MOST_ROWS, MOST_ROWS_OF_NARROW, NARROW, multiply_plain, refuse_plain
from rorqual.ops.triton._prepared_weight import WIDTH, PreparedWeight, lay_out, refuse_weight
from rorqual.ops.triton.launch import INTERPRETING, refuses
from rorqual.quantization import FP8_ROW, FP8_ROW_UE8M0, MXFP8, QTensor, QuantFormat, ScaleLayout

__all__ = ["EXPAND_ROWS", "SKINNY", "TILES", "Tile"]

EXPAND_ROWS = 512
"""Rows from which on it pays to decode a whole weight first: the product then runs at bfloat16's full rate."""
_PANEL = 1 << 26
"""Values that are decoded at once: 128 MiB in bfloat16."""


def _refuse_prepare(weight: Weight) -> str | None:
    if not isinstance(weight, QTensor):
        return "plain weights and integers are used as they are"
    return refuses(weight.values, weight.scales) or refuse_weight(weight)


@prepare_weight.impl("triton", refuse=_refuse_prepare)
def prepare_weight_triton(weight: Weight) -> QTensor:
    """In one of the layouts of `_prepared_weight`."""
    assert isinstance(weight, QTensor)
    arrivals(weight.device)  # so that none are made while a graph is captured
    return lay_out(weight)


def _refuse_unpack(weight: Weight) -> str | None:
    return None if isinstance(weight, PreparedWeight) else "the weight is not laid out by it"


@unpack_weight.impl("triton", refuse=_refuse_unpack)
def unpack_weight_triton(weight: Weight) -> QTensor:
    """The weight before; values that were not moved are shared."""
    assert isinstance(weight, PreparedWeight)
    return weight.unprepared()


def _kind(weight: QTensor) -> str | None:
    """A weight's layout; None for one that is not laid out for the kernels."""
    if isinstance(weight, PreparedWeight):
        return weight.kind
    plain = type(weight) is QTensor and weight.format.element == "e4m3" and weight.format.scale == "float32"
    return "blocks" if plain and weight.layout is ScaleLayout.ROW and weight.format.block[1] in (32, 64, 128) else None


def _refuse(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: QuantFormat | None = None,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
) -> str | None:
    if isinstance(weight, torch.Tensor):
        return _refuse_plain(x, weight, bias, activation, out_dtype, out_acc)
    if not isinstance(weight, QTensor):
        return "has no products of integers"
    inputs = (x.values, x.scales) if isinstance(x, QTensor) else (x,)
    if reason := refuses(*inputs, weight.values, bias, out_acc):
        return reason
    if (kind := _kind(weight)) is None:
        return f"the weight in {weight.format.name} is not laid out for it"
    given = x.format if isinstance(x, QTensor) else activation
    wanted = (FP8_ROW, FP8_ROW_UE8M0) if kind == "blocks" else (MXFP8,)
    if given is not None and given not in wanted:
        return f"needs x in {' or '.join(f.name for f in wanted)} beside {weight.format.name}, got {given.name}"
    if given is None and isinstance(x, torch.Tensor) and x.dtype != torch.bfloat16:
        return f"decodes weights to bfloat16 and needs x in it, got {x.dtype}"
    dtype = output_dtype(x, out_dtype)
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"writes bfloat16, float16 and float32, got {dtype}"
    return None


def _refuse_plain(
    x: torch.Tensor | QTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
    out_dtype: torch.dtype | None,
    out_acc: torch.Tensor | None,
) -> str | None:
    if isinstance(x, QTensor) or activation is not None:
        return "multiplies plain inputs with plain weights"
    if reason := refuses(x, weight, bias, out_acc):
        return reason
    if output_dtype(x, out_dtype) not in (x.dtype, torch.float32):
        return f"writes {x.dtype} or float32, got {out_dtype}"
    if hopper_tile(x, weight, bias, out_dtype=out_dtype, out_acc=out_acc) is not None:
        return None
    narrow = weight.dim() == 2 and weight.shape[0] <= NARROW
    return refuse_plain(x, weight, most_rows=MOST_ROWS_OF_NARROW if narrow else MOST_ROWS)


@linear.impl("triton", refuse=_refuse)
def linear_triton(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: QuantFormat | None = None,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
) -> torch.Tensor:
    """One launch, and one before for an x that is to be quantised. Where x is not, a weight's e4m3 NaN count as 480."""
    assert isinstance(weight, torch.Tensor | QTensor)
    check_operands(x, weight, bias, activation)
    shape, dtype = (*x.shape[:-1], weight.shape[0]), output_dtype(x, out_dtype)
    if out_acc is not None:
        check_out_acc(out_acc, shape, dtype, x.device)
    out = allocate_output(shape, dtype, x.device) if out_acc is None else out_acc
    if out.numel() == 0:
        return out
    rows, accumulate = flatten_output(out), out_acc is not None
    if isinstance(weight, torch.Tensor):
        assert isinstance(x, torch.Tensor)
        tile = hopper_tile(x, weight, bias, out_dtype=out_dtype, out_acc=out_acc)
        if tile is not None:
            multiply_by_tiles(flatten_rows(x), weight, rows, tile)
        else:
            multiply_plain(_rows_of_values(x), weight, bias, rows, accumulate=accumulate)
        return out
    kind, wide = _kind(weight), rows.shape[0] >= EXPAND_ROWS
    if isinstance(x, QTensor) or activation is not None:
        quantized = _flat_quantized(x, activation, packed=kind != "blocks")
        if kind == "blocks" or (kind == "words" and rows.shape[0] <= SKINNY):
            multiply_scaled(quantized, weight, bias, rows, accumulate=accumulate)
            return out
        flat = expand(quantized)
    else:
        flat = _rows_of_values(x)
    if kind != "blocks" and wide:
        assert isinstance(weight, PreparedWeight)
        _multiply_expanded(flat, weight, bias, rows, accumulate=accumulate)
    else:
        multiply_weight_only(flat, weight, bias, rows, accumulate=accumulate)
    return out


def _rows_of_values(x: torch.Tensor) -> torch.Tensor:
    """x as [num_rows, in_features], the values of a row next to each other; a view where x allows it."""
    flat = flatten_rows(x)
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _flat_quantized(x: torch.Tensor | QTensor, activation: QuantFormat | None, *, packed: bool) -> QTensor:
    """x as [num_rows, in_features] in FP8, its scales in the layout that the kernels read."""
    layout = ScaleLayout.COLUMN_PACKED if packed else ScaleLayout.COLUMN
    if not isinstance(x, QTensor):
        assert activation is not None
        return quantize(_rows_of_values(x), format=activation, layout=layout)
    if x.ndim != 2:
        scales = x.row_scales()
        x = QTensor(flatten_rows(x.values), scales.reshape(-1, scales.shape[-1]), x.format)
    if x.values.stride(1) != 1:
        x = QTensor(x.values.contiguous(), x.scales, x.format, x.layout)
    if x.format.scale == "float32" and x.layout is ScaleLayout.ROW:
        return x  # read by its strides
    return x.to_layout(layout)


def _multiply_expanded(
    x: torch.Tensor, weight: PreparedWeight, bias: torch.Tensor | None, out: torch.Tensor, *, accumulate: bool
) -> None:
    """A bfloat16 product with a weight in words or planes, decoded panel by panel."""
    features, columns = weight.shape
    multiple = math.lcm(weight.format.block[0], WIDTH)
    step = max(1, _PANEL // columns // multiple) * multiple
    for start in range(0, features, step):
        stop = min(start + step, features)
        panel, part = expand(weight.rows(start, stop)), out[:, start:stop]
        if bias is None and not accumulate and out.dtype == x.dtype:
            torch.mm(x, panel.t(), out=part)
            continue
        product = _float32_product(x, panel)
        if bias is not None:
            product += bias[start:stop]
        if accumulate:
            product += part
        part.copy_(product)


def _float32_product(x: torch.Tensor, panel: torch.Tensor) -> torch.Tensor:
    if INTERPRETING:  # the CPU knows no product of another dtype than its operands'
        return torch.mm(x.float(), panel.float().t())
    return torch.mm(x, panel.t(), out_dtype=torch.float32)
