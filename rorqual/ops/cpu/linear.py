"""bfloat16 matrix products on CPU with weights in oneDNN's blocked layout: about half of F.linear's time at one row."""

from __future__ import annotations

import torch

from rorqual.ops.linear import linear, prepare_weight
from rorqual.platform import native_bfloat16

# oneDNN lays a weight out for a number of rows; the layout for a few hundred was as fast for a single row as its own.
_ROWS = 512


def _refuse_prepare(weight: torch.Tensor) -> str | None:
    if weight.device.type != "cpu":
        return f"needs a CPU tensor, got one on {weight.device.type}"
    if weight.dtype != torch.bfloat16:
        return f"packs bfloat16 weights, got {weight.dtype}"
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not native_bfloat16(weight.device):
        return "this processor or torch build has no bfloat16 matrix instructions"
    return None


@prepare_weight.impl("cpu", refuse=_refuse_prepare)
def prepare_weight_cpu(weight: torch.Tensor) -> torch.Tensor:
    """An opaque oneDNN tensor of the same shape."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    return packed


def _refuse(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    return None if weight.is_mkldnn else "the weight is not packed"


@linear.impl("cpu", refuse=_refuse)
def linear_cpu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """One oneDNN call."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
