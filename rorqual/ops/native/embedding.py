"""Rows of a table of integers on CPU, dequantised as they are read: from rows, from a product's layout, from a file."""

from __future__ import annotations

import torch

from rorqual.ops.embedding import Table, embedding
from rorqual.ops.native._integer_linear import PackedIntegers
from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.quantization.gguf_blocks import BlockMatrix
from rorqual.quantization.integer import IntegerWeight


def _refuse(ids: torch.Tensor, weight: Table, *, dtype: torch.dtype) -> str | None:
    packed = isinstance(weight, PackedIntegers) and len(weight) == 1
    if not packed and type(weight) is not IntegerWeight and type(weight) is not BlockMatrix:
        return "looks rows of one matrix of integers up"
    if ids.device.type != "cpu" or weight.device.type != "cpu":
        return f"needs CPU tensors, got them on {ids.device.type} and {weight.device.type}"
    if ids.dtype != torch.int64 or ids.dim() != 1 or dtype != torch.bfloat16:
        return f"takes rows of int64 ids and writes bfloat16, got {ids.dim()} dimensions of {ids.dtype} and {dtype}"
    if isinstance(weight, IntegerWeight):
        return _refuse_rows(weight) or missing()
    if isinstance(weight, BlockMatrix) and not weight.data.is_contiguous():
        return "needs rows without gaps"
    return missing()


def _refuse_rows(weight: IntegerWeight) -> str | None:
    if weight.format.bits not in (4, 8) or weight.format.group % 16:
        return f"has no kernel for {weight.format.bits} bits in groups of {weight.format.group}"
    parts = (weight.codes, weight.scales, weight.minima)
    return None if all(part is None or part.is_contiguous() for part in parts) else "needs rows without gaps"


@embedding.impl("native", refuse=_refuse)
def embedding_native(ids: torch.Tensor, weight: Table, *, dtype: torch.dtype) -> torch.Tensor:
    """See the reference."""
    found = kernels()
    assert found is not None
    assert isinstance(weight, IntegerWeight | PackedIntegers | BlockMatrix)
    ids, (rows, columns) = ids.contiguous(), weight.shape
    out = torch.empty(len(ids), columns, dtype=dtype)
    given, to = (ids.data_ptr(), len(ids)), (out.data_ptr(), threads_for(out.numel()))
    if isinstance(weight, PackedIntegers):
        outside = found.embedding_packed(*given, weight.operands[0].address, *to)
    elif isinstance(weight, BlockMatrix):
        outside = found.embedding_blocks(*given, weight.ggml_type, weight.data.data_ptr(), rows, columns, *to)
    else:
        outside = found.embedding(
            *given,
            weight.codes.data_ptr(),
            weight.scales.data_ptr(),
            None if weight.minima is None else weight.minima.data_ptr(),
            rows,
            columns,
            weight.format.bits,
            weight.format.group,
            weight.format.offset,
            weight.format.scale_dtype == torch.float32,
            *to,
        )
    if outside:
        raise IndexError(f"ids must be from 0 to {rows - 1}, got {int(ids.min())} to {int(ids.max())}")
    return out
