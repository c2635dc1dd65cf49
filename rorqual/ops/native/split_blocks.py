"""GGML's blocks taken apart on CPU in one pass."""

from __future__ import annotations

import torch

from rorqual.ops.native.library import kernels, missing, threads_for
from rorqual.ops.split_blocks import split_blocks
from rorqual.quantization.gguf_blocks import BlockMatrix
from rorqual.quantization.integer import IntegerWeight


def _refuse(blocks: BlockMatrix) -> str | None:
    if blocks.device.type != "cpu":
        return f"needs a CPU tensor, got one on {blocks.device.type}"
    return missing() if blocks.data.is_contiguous() else "needs rows without gaps"


@split_blocks.impl("native", refuse=_refuse)
def split_blocks_native(blocks: BlockMatrix) -> IntegerWeight:
    """See the reference."""
    found, format, (rows, columns) = kernels(), blocks.format, blocks.shape
    assert found is not None
    codes = torch.empty(rows, columns * format.bits // 8, dtype=torch.uint8)
    scales = torch.empty(rows, columns // format.group, dtype=format.scale_dtype)
    minima = torch.empty_like(scales) if format.has_minima else None
    found.split_blocks(
        blocks.ggml_type,
        blocks.data.data_ptr(),
        rows * columns // blocks.block_size,
        codes.data_ptr(),
        scales.data_ptr(),
        None if minima is None else minima.data_ptr(),
        threads_for(rows * columns),
    )
    return IntegerWeight(codes, scales, minima, format)
