"""Matrix products by cuBLAS: plain weights, and FP8 weights in blocks of 128 x 128 for more than a few rows.

cuBLAS picks its kernel by all three sizes. It is told not to split K, so that the products of 16-bit operands add up K
in order whatever kernel it picks, and a row's result does not depend on the number of rows. Where it has no good kernel
of that sort, or a slower one, those of ops/triton multiply, which add up in the same order.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from rorqual.ops._hopper_tiles import hopper_tile
from rorqual.ops.linear import (
    ALIGNMENT,
    Weight,
    allocate_output,
    check_operands,
    check_out_acc,
    flatten_output,
    flatten_rows,
    linear,
    output_dtype,
)
from rorqual.ops.quantize import quantize
from rorqual.quantization import FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_ROW, FP8_ROW_UE8M0, QTensor, QuantFormat, ScaleLayout

FP8_ROWS = 65
"""Rows from which cuBLAS multiplies FP8; fewer are bound by reading the weight, which other kernels split better."""
_BLOCK = 128
_ROW_MULTIPLE = 4
"""cuBLASLt wants columns of scales that are a multiple of 16 bytes apart: x gets up to three rows more."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FEW_ROWS = 16
_FEW_TILES_ROWS, _FEW_TILES, _TALL = 128, 2048, 2
"""Fewer rows than the first, outputs up to the second, and the third's multiple of them in K."""
_NARROW_ROWS, _NARROW = 512, 512
"""Up to so many rows and outputs: routers, whose whole product would be a few of cuBLAS's programs."""

if torch.cuda.is_available():  # (sums in 16 bits, split K), the second of which cuBLASLt alone can leave
    if torch.backends.cuda.preferred_blas_library() != torch._C._BlasBackend.Cublaslt:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def _refuse(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: QuantFormat | None = None,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
) -> str | None:
    if isinstance(weight, QTensor):
        return _refuse_quantized(x, weight, bias, activation, out_dtype, out_acc)
    if not isinstance(weight, torch.Tensor):
        return "has no products of integers"
    if isinstance(x, QTensor):
        return f"multiplies plain inputs with plain weights, got x in {x.format.name}"
    if reason := _elsewhere(x, weight, bias, out_acc):
        return reason
    if x.dtype != weight.dtype or x.dtype not in _DTYPES:
        return f"needs operands of one dtype, bfloat16, float16 or float32, got {x.dtype} and {weight.dtype}"
    if activation is not None or weight.dim() != 2:
        return "multiplies plain matrices"
    if out_dtype not in (None, x.dtype, torch.float32):
        return f"writes {x.dtype} or float32, got {out_dtype}"
    slow = x.dtype != torch.float32 and _is_slow_unsplit(x.numel() // max(1, x.shape[-1]), *weight.shape)
    if slow or hopper_tile(x, weight, bias, out_dtype=out_dtype, out_acc=out_acc) is not None:
        return f"would have to split K, or is slower than other kernels, for {list(x.shape)} by {list(weight.shape)}"
    if x.requires_grad or weight.requires_grad:
        return "writes into an output, of which torch keeps no gradient"
    return None


def _is_slow_unsplit(rows: int, features: int, columns: int) -> bool:
    """Whether the kernels of few rows are ahead, as measured on an H200."""
    few = rows < _FEW_TILES_ROWS and features <= _FEW_TILES and columns >= _TALL * features
    narrow = rows <= _NARROW_ROWS and features <= _NARROW and columns >= _TALL * features
    return rows <= _FEW_ROWS or few or narrow


def _elsewhere(*tensors: torch.Tensor | None) -> str | None:
    for tensor in tensors:
        if tensor is not None and tensor.device.type != "cuda":
            return f"needs tensors on cuda, got one on {tensor.device.type}"
    return None


def _refuse_quantized(
    x: torch.Tensor | QTensor,
    weight: QTensor,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
    out_dtype: torch.dtype | None,
    out_acc: torch.Tensor | None,
) -> str | None:
    inputs = (x.values,) if isinstance(x, QTensor) else (x,)
    if reason := _elsewhere(*inputs, weight.values, bias):
        return reason
    if weight.format not in (FP8_BLOCK, FP8_BLOCK_UE8M0) or weight.layout is not ScaleLayout.ROW:
        return f"multiplies weights in {FP8_BLOCK.name} or {FP8_BLOCK_UE8M0.name}, got {weight.format.name}"
    given = x.format if isinstance(x, QTensor) else activation
    if given not in (FP8_ROW, FP8_ROW_UE8M0):
        return f"needs x in {FP8_ROW.name} or {FP8_ROW_UE8M0.name}, got {'none' if given is None else given.name}"
    if weight.shape[0] % _BLOCK or weight.shape[1] % _BLOCK or x.shape[-1] != weight.shape[1]:
        return f"needs whole blocks of {_BLOCK} x {_BLOCK}, got a weight of {list(weight.shape)}"
    if out_acc is not None:
        return "cannot add to out_acc before the one rounding"
    if output_dtype(x, out_dtype) not in _DTYPES:
        return f"writes bfloat16, float16 and float32, got {output_dtype(x, out_dtype)}"
    if x.shape.numel() < FP8_ROWS * weight.shape[1]:
        return f"is for {FP8_ROWS} rows or more"
    return _refuse_gpu()


@functools.cache
def _refuse_gpu() -> str | None:
    """Blocks of scales came with cuBLASLt 12.9, for SM90 only."""
    if torch.cuda.get_device_capability() < (9, 0) or torch.cuda.get_device_capability() >= (10, 0):
        return "cuBLASLt scales by blocks of 128 on SM90 only"
    return None


@linear.impl("vendor", refuse=_refuse)
def linear_vendor(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: QuantFormat | None = None,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums in float32. A bias of the output's dtype is added in the same launch; others, and to out_acc, after it."""
    check_operands(x, weight, bias, activation)
    dtype = output_dtype(x, out_dtype)
    if isinstance(weight, QTensor):
        return _multiply_blocks(x, weight, bias, activation, dtype)
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    same = dtype == x.dtype and (bias is None or bias.dtype == dtype)
    if same and out_acc is None and weight.shape[0] * dtype.itemsize % ALIGNMENT == 0:
        return F.linear(x, weight, bias)
    shape = (*x.shape[:-1], weight.shape[0])
    if out_acc is not None:
        check_out_acc(out_acc, shape, dtype, x.device)
    out = allocate_output(shape, dtype, x.device) if out_acc is None else out_acc
    if out.numel() == 0:
        return out
    rows, flat, columns = flatten_output(out), flatten_rows(x), weight.t()
    if same and out_acc is None and bias is not None:
        torch.addmm(bias, flat, columns, out=rows)
        return out
    if out_acc is None and dtype == x.dtype:
        torch.mm(flat, columns, out=rows)
    elif out_acc is None:
        torch.mm(flat, columns, out_dtype=dtype, out=rows)
    elif dtype == x.dtype:
        torch.addmm(rows, flat, columns, out=rows)
    else:
        torch.addmm(rows, flat, columns, out_dtype=dtype, out=rows)
    if bias is not None:
        rows.add_(bias)
    return out


def _multiply_blocks(
    x: torch.Tensor | QTensor,
    weight: QTensor,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """FP8 by FP8, scaled by rows of 128 columns and blocks of 128 x 128."""
    outer, quantized = x.shape[:-1], _flat_quantized(x, activation)
    values, scales, num_rows = quantized.values, quantized.scales, quantized.values.shape[0]
    padded = -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    if padded != num_rows:
        # The scales of the rows that are added lie between the columns and may be anything, as what they scale may.
        more = torch.zeros((padded, values.shape[1]), dtype=torch.uint8, device=values.device)
        more[:num_rows] = values.view(torch.uint8)
        values = more.view(values.dtype)
        scales = scales.as_strided((padded, scales.shape[1]), scales.stride())
    out = F.scaled_mm(
        values,
        weight.values.t(),
        scale_a=scales,
        scale_recipe_a=F.ScalingType.BlockWise1x128,
        scale_b=_block_scales(weight.float_scales()),
        scale_recipe_b=F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    if padded != num_rows:
        out = out[:num_rows]
    if bias is not None:
        out += bias
    return out if len(outer) == 1 else out.view(*outer, out.shape[1])


def _flat_quantized(x: torch.Tensor | QTensor, activation: QuantFormat | None) -> QTensor:
    """x as [num_rows, in_features] in FP8, with a column of float32 scales for each 128 of them."""
    if not isinstance(x, QTensor):
        assert activation is not None
        flat = flatten_rows(x)
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        return quantize(flat, format=activation, layout=ScaleLayout.COLUMN)
    if x.ndim != 2:
        scales = x.row_scales()
        x = QTensor(flatten_rows(x.values), scales.reshape(-1, scales.shape[-1]), x.format)
    return QTensor(x.values.contiguous(), x.scales, x.format, x.layout).to_layout(ScaleLayout.COLUMN)


def _block_scales(scales: torch.Tensor) -> torch.Tensor:
    """[N / 128, K / 128] as cuBLASLt reads them: columns of K / 128 scales, a multiple of 16 bytes apart."""
    blocks = scales.shape[1]
    apart = -(-blocks // 4) * 4
    if scales.stride() != (apart, 1):  # as a prepared weight's are
        scales = F.pad(scales, (0, apart - blocks))
    return scales.as_strided((apart, scales.shape[0]), (1, apart))
