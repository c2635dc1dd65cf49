"""Rows of a table of token embeddings: plain, of integers, or as a GGUF file stores them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rorqual.ops.linear import unpack_weight
from rorqual.ops.registry import op
from rorqual.quantization.gguf_blocks import BlockMatrix, integer_weight
from rorqual.quantization.integer import IntegerStack, IntegerWeight

Table = torch.Tensor | IntegerWeight | IntegerStack | BlockMatrix
"""[vocabulary, hidden size]."""


@op
def embedding(ids: torch.Tensor, weight: Table, *, dtype: torch.dtype) -> torch.Tensor:
    """The rows `ids` of a table, in dtype; of integers, only these rows are dequantised, and rounded once.

    Args:
        ids: [num_tokens], int64 or int32.
        weight: [vocabulary, hidden], as it was loaded. One that `prepare_weight` has laid out is taken back as a whole
            first, which is slow.
        dtype: of the result.

    Returns: [num_tokens, hidden]. Raises IndexError for ids outside the vocabulary, and ValueError for ids of another
    shape or dtype.
    """
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"ids must be [num_tokens] of int64 or int32, got {list(ids.shape)} of {ids.dtype}")
    if isinstance(weight, torch.Tensor):
        return F.embedding(ids, weight).to(dtype)
    if isinstance(weight, BlockMatrix):
        found = integer_weight(weight.data.index_select(0, ids).numpy(), weight.format)
        return found.dequantize(dtype)
    table = unpack_weight(weight)
    if isinstance(table, IntegerWeight):
        return _rows(table, ids, dtype)
    assert isinstance(table, IntegerStack)
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= table.shape[0]):
        raise IndexError(f"ids must be from 0 to {table.shape[0] - 1}, got {int(ids.min())} to {int(ids.max())}")
    out = torch.empty(len(ids), table.shape[1], dtype=dtype, device=ids.device)
    start = 0
    for part in table:
        here = ((ids >= start) & (ids < start + part.shape[0])).nonzero().flatten()
        out[here] = _rows(part, ids[here] - start, dtype)
        start += part.shape[0]
    return out


def _rows(table: IntegerWeight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    minima = None if table.minima is None else table.minima.index_select(0, ids)
    codes, scales = table.codes.index_select(0, ids), table.scales.index_select(0, ids)
    return IntegerWeight(codes, scales, minima, table.format, table.dynamic).dequantize(dtype)
