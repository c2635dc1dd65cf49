"""GGML's blocks to codes, scales and minima, as products and layouts take them."""

from __future__ import annotations

from rorqual.ops.registry import op
from rorqual.quantization.gguf_blocks import BlockMatrix, integer_weight
from rorqual.quantization.integer import IntegerWeight


@op
def split_blocks(blocks: BlockMatrix) -> IntegerWeight:
    """The same matrix, with the same values to the last bit, as an IntegerWeight of its own memory."""
    return integer_weight(blocks.data.cpu().numpy(), blocks.format)
