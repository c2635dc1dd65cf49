"""bfloat16 matrix products on CPU: plain weights in oneDNN's blocked layout, quantised ones decoded panel by panel.

oneDNN's layout takes about half of F.linear's time at one row.
"""

from __future__ import annotations

import torch

from rorqual.ops._decodable import refuse_call, refuse_decoding
from rorqual.ops.cpu._quantized_panels import PanelWeight, panel_linear
from rorqual.ops.linear import (
    Weight,
    aligned_copy,
    allocate_output,
    flatten_output,
    flatten_rows,
    linear,
    prepare_weight,
    unpack_weight,
)
from rorqual.platform import native_bfloat16
from rorqual.quantization import QTensor, QuantFormat

# oneDNN lays a weight out for a number of rows; the layout for a few hundred was as fast for a single row as its own.
_ROWS = 512
_BF16 = torch.bfloat16
_PER_GRANULE = 16
"""bfloat16 values in 32 bytes."""


def _refuse_prepare(weight: Weight) -> str | None:
    if not isinstance(weight, torch.Tensor | QTensor):
        return "has no products of integers"
    if weight.device.type != "cpu":
        return f"needs a CPU tensor, got one on {weight.device.type}"
    if isinstance(weight, torch.Tensor) and weight.dtype != _BF16:
        return f"packs bfloat16 weights, got {weight.dtype}"
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not native_bfloat16(weight.device):
        return "this processor or torch build has no bfloat16 matrix instructions"
    return refuse_decoding(weight) if isinstance(weight, QTensor) else None


@prepare_weight.impl("cpu", refuse=_refuse_prepare)
def prepare_weight_cpu(weight: Weight) -> Weight:
    """An opaque oneDNN tensor of the same shape; a quantised weight over the same memory, found fit for panels."""
    if isinstance(weight, QTensor):
        return PanelWeight(weight.values, weight.row_scales(), weight.format)
    assert isinstance(weight, torch.Tensor)
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return packed


def _refuse_unpack(weight: Weight) -> str | None:
    if isinstance(weight, PanelWeight) or (isinstance(weight, torch.Tensor) and weight.is_mkldnn):
        return None
    return "the weight is not packed by it"


@unpack_weight.impl("cpu", refuse=_refuse_unpack)
def unpack_weight_cpu(weight: Weight) -> Weight:
    """The matrix again, as a copy; a quantised weight without one."""
    if isinstance(weight, QTensor):
        return QTensor(weight.values, weight.scales, weight.format)
    assert isinstance(weight, torch.Tensor)
    return weight.to_dense()


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
        if not isinstance(weight, PanelWeight):
            return "the weight is not packed"
        return refuse_call(x, weight, bias, activation, out_dtype, out_acc)
    if not isinstance(weight, torch.Tensor) or not weight.is_mkldnn:
        return "the weight is not packed"
    if isinstance(x, QTensor) or x.dtype is not _BF16:
        return f"needs bfloat16 activations, got {x.format.name if isinstance(x, QTensor) else x.dtype}"
    if out_acc is not None or activation is not None or (out_dtype is not None and out_dtype is not _BF16):
        return "makes new bfloat16 outputs of unquantised operands only"
    return None


@linear.impl("cpu", refuse=_refuse)
def linear_cpu(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: QuantFormat | None = None,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
) -> torch.Tensor:
    """One oneDNN call, whose own output is copied where its rows are not a multiple of 32 bytes apart.

    With a quantised weight a product per panel; float32 scales, of the weight or of x, round it to bfloat16.
    """
    if isinstance(weight, PanelWeight):
        made = allocate_output((*x.shape[:-1], weight.shape[0]), _BF16, x.device)
        rows = flatten_rows(x) if isinstance(x, torch.Tensor) else flatten_rows(x.dequantize(_BF16))
        panel_linear(rows, weight, bias, activation if isinstance(x, torch.Tensor) else None, flatten_output(made))
        return made
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return aligned_copy(out) if out.shape[-1] % _PER_GRANULE else out
