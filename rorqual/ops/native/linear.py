"""bfloat16 matrix products on CPU: for few rows at the speed of memory, for many with what the processor has.

Weights are bfloat16, or quantised and kept so: see `_quantized_linear` and `_integer_linear`.
"""

from __future__ import annotations

import torch

from rorqual.ops._decodable import refuse_call
from rorqual.ops.linear import Weight, flatten_rows, linear, prepare_weight, unpack_weight
from rorqual.ops.native._integer_linear import PackedIntegers, pack, refuse_blocks, unpack
from rorqual.ops.native._quantized_linear import (
    PairedWeight,
    multiply_quantized,
    pair,
    refuse_pairs,
    unpair,
)
from rorqual.ops.native.library import Operand, kernels, missing
from rorqual.quantization import QTensor, QuantFormat
from rorqual.quantization.integer import IntegerStack, IntegerWeight

_BF16 = torch.bfloat16


def _refuse_prepare(weight: Weight) -> str | None:
    if isinstance(weight, QTensor):
        return refuse_pairs(weight)
    if isinstance(weight, IntegerWeight | IntegerStack):
        return refuse_blocks(weight)
    if weight.device.type != "cpu":
        return f"needs a CPU tensor, got one on {weight.device.type}"
    if weight.dtype != _BF16:
        return f"packs bfloat16 weights, got {weight.dtype}"
    if weight.shape[0] % 16 or weight.shape[1] % 32 or weight.numel() == 0:
        return f"needs multiples of 16 output and 32 input features, got {list(weight.shape)}"
    return missing()


@prepare_weight.impl("native", refuse=_refuse_prepare)
def prepare_weight_native(weight: Weight) -> Weight:
    """[out_features / 16, in_features / 2, 16, 2]: pairs of input features of sixteen output features side by side."""
    if isinstance(weight, QTensor):
        return pair(weight)
    if isinstance(weight, IntegerWeight | IntegerStack):
        return pack(weight)
    out_features, in_features = weight.shape
    packed = weight.view(out_features // 16, 16, in_features // 2, 2).transpose(1, 2).contiguous()
    operand_of(packed)
    return packed


def operand_of(packed: torch.Tensor, bias: torch.Tensor | None = None) -> Operand:
    """The operand of a plain weight that is laid out, with this bias; made once and kept with the tensor.

    It is one for all calls: two threads must not multiply by the same weight with different biases at once.
    """
    data, found = packed.data_ptr(), packed.__dict__.get("operand")
    if found is None or found.data != data:  # or it is of the tensor that this one was copied from
        found = Operand(out_features=16 * packed.shape[0], in_features=2 * packed.shape[1], data=data)
        packed.__dict__["operand"] = found
    address = None if bias is None else bias.data_ptr()
    if found.bias != address:
        found.bias = address
    return found


def laid_out(weight: object, bias: torch.Tensor | None = None) -> Operand | None:
    """The operand of a weight, with this bias, of the kinds that product.h multiplies with; None of any other."""
    if isinstance(weight, PackedIntegers):
        return weight.bind(bias)
    if isinstance(weight, torch.Tensor) and weight.dim() == 4 and not weight.is_mkldnn:
        return operand_of(weight, bias)
    return None


def _refuse_unpack(weight: Weight) -> str | None:
    if not isinstance(weight, torch.Tensor):
        return None if isinstance(weight, PairedWeight | PackedIntegers) else "the weight is not laid out by it"
    return "the weight is not laid out by it" if weight.is_mkldnn or weight.dim() != 4 else None


@unpack_weight.impl("native", refuse=_refuse_unpack)
def unpack_weight_native(weight: Weight) -> Weight:
    """The matrix again, as a copy."""
    if isinstance(weight, PairedWeight):
        return unpair(weight)
    if isinstance(weight, PackedIntegers):
        return unpack(weight)
    assert isinstance(weight, torch.Tensor)
    return weight.transpose(1, 2).reshape(weight.shape[0] * 16, weight.shape[1] * 2)


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
        if not isinstance(weight, PairedWeight):
            return "the weight is not laid out for it"
        return refuse_call(x, weight, bias, activation, out_dtype, out_acc) or missing()
    if isinstance(weight, PackedIntegers):
        out_features, in_features = weight.out_features, weight.in_features
    elif not isinstance(weight, torch.Tensor) or weight.is_mkldnn or weight.dim() != 4:
        return "the weight is not laid out for it"
    else:
        out_features, in_features = 16 * weight.shape[0], 2 * weight.shape[1]
    if isinstance(x, QTensor) or x.dtype is not _BF16:
        return f"needs bfloat16 activations, got {x.format.name if isinstance(x, QTensor) else x.dtype}"
    if x.shape[-1] != in_features:
        return f"the weight takes {in_features} features, got {x.shape[-1]}"
    if out_acc is not None or activation is not None:
        return "makes new outputs of unquantised operands only"
    if out_dtype not in (None, _BF16) and (out_dtype is not torch.float32 or isinstance(weight, PackedIntegers)):
        return f"makes outputs in bfloat16, and with plain weights in float32, got {out_dtype}"
    if bias is not None and (bias.dtype is not _BF16 or bias.shape[0] != out_features):
        return f"needs a bfloat16 bias for {out_features} features, got {bias.dtype} {list(bias.shape)}"
    return missing()


@linear.impl("native", refuse=_refuse)
def linear_native(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: QuantFormat | None = None,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
) -> torch.Tensor:
    """Accumulates in float32, for every row in the same order however many rows there are."""
    found = kernels()
    assert found is not None
    if isinstance(weight, PairedWeight):
        return multiply_quantized(found, x, weight, bias, activation)
    assert isinstance(x, torch.Tensor)
    if isinstance(weight, PackedIntegers):
        operand = weight.bind(bias).address
        out_features = weight.out_features
    else:
        assert isinstance(weight, torch.Tensor)
        operand = operand_of(weight, bias).address
        out_features = weight.shape[0] * 16  # so that rows are a multiple of 32 bytes apart
    outer = x.shape[:-1]
    if len(outer) != 1:
        x = flatten_rows(x)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows = x.shape[0]
    out = torch.empty(rows, out_features, dtype=out_dtype or _BF16)
    kernel = found.linear_float32 if out_dtype is torch.float32 else found.linear
    kernel(operand, x.data_ptr(), x.stride(0), rows, out.data_ptr(), torch.get_num_threads())
    return out if len(outer) == 1 else out.view(*outer, out_features)
