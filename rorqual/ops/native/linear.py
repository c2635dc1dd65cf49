"""bfloat16 matrix products on CPU: for few rows at the speed of memory, for many with what the processor has."""

from __future__ import annotations

import torch

from rorqual.ops.linear import linear, prepare_weight
from rorqual.ops.native.library import kernels, missing


def _refuse_prepare(weight: torch.Tensor) -> str | None:
    if weight.device.type != "cpu":
        return f"needs a CPU tensor, got one on {weight.device.type}"
    if weight.dtype != torch.bfloat16:
        return f"packs bfloat16 weights, got {weight.dtype}"
    if weight.shape[0] % 16 or weight.shape[1] % 32 or weight.numel() == 0:
        return f"needs multiples of 16 output and 32 input features, got {list(weight.shape)}"
    return missing()


@prepare_weight.impl("native", refuse=_refuse_prepare)
def prepare_weight_native(weight: torch.Tensor) -> torch.Tensor:
    """[out_features / 16, in_features / 2, 16, 2]: pairs of input features of sixteen output features side by side."""
    out_features, in_features = weight.shape
    return weight.view(out_features // 16, 16, in_features // 2, 2).transpose(1, 2).contiguous()


def _refuse(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    if weight.is_mkldnn or weight.dim() != 4:
        return "the weight is not laid out for it"
    if x.dtype != torch.bfloat16:
        return f"needs bfloat16 activations, got {x.dtype}"
    return missing()


@linear.impl("native", refuse=_refuse)
def linear_native(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Accumulates in float32, for every row in the same order however many rows there are."""
    found = kernels()
    assert found is not None
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, in_features = x.shape
    out_features = weight.shape[0] * 16
    out = torch.empty(rows, out_features, dtype=torch.bfloat16)
    found.linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        out_features,
        rows,
        out_features,
        in_features,
        torch.get_num_threads(),
    )
    return out
