"""Rows of a table of integers on CPU, dequantised as they are read."""

from __future__ import annotations

import torch

from rorqual.ops.embedding import Table, embedding
from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.quantization.integer import IntegerWeight


def _refuse(ids: torch.Tensor, weight: Table, *, dtype: torch.dtype) -> str | None:
    if type(weight) is not IntegerWeight:
        return "looks rows of one matrix of integers up"
    if ids.device.type != "cpu" or weight.device.type != "cpu":
        return f"needs CPU tensors, got them on {ids.device.type} and {weight.device.type}"
    if ids.dtype != torch.int64 or ids.dim() != 1 or dtype != torch.bfloat16:
        return f"takes rows of int64 ids and writes bfloat16, got {ids.dim()} dimensions of {ids.dtype} and {dtype}"
    if weight.format.bits not in (4, 8) or weight.format.group % 16:
        return f"has no kernel for {weight.format.bits} bits in groups of {weight.format.group}"
    parts = (weight.codes, weight.scales, weight.minima)
    if not all(part is None or part.is_contiguous() for part in parts):
        return "needs rows without gaps"
    return missing()


@embedding.impl("native", refuse=_refuse)
def embedding_native(ids: torch.Tensor, weight: Table, *, dtype: torch.dtype) -> torch.Tensor:
    """See the reference."""
    found = kernels()
    assert found is not None
    assert isinstance(weight, IntegerWeight)
    ids, format, (rows, columns) = ids.contiguous(), weight.format, weight.shape
    out = torch.empty(len(ids), columns, dtype=dtype)
    outside = found.embedding(
        ids.data_ptr(),
        len(ids),
        weight.codes.data_ptr(),
        weight.scales.data_ptr(),
        None if weight.minima is None else weight.minima.data_ptr(),
        rows,
        columns,
        format.bits,
        format.group,
        format.offset,
        format.scale_dtype == torch.float32,
        out.data_ptr(),
        threads_for(out.numel()),
    )
    if outside:
        raise IndexError(f"ids must be from 0 to {rows - 1}, got {int(ids.min())} to {int(ids.max())}")
    return out
