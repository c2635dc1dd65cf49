"""Matrix products with plain or quantised weights, into outputs whose rows start on 32-byte boundaries.

Which product runs is decided by the weight itself: a Tensor, a QTensor, or integers (an IntegerWeight, or several of
them as an IntegerStack). Weights are laid out once, at load time, for the implementation that will read them
(`prepare_weight`); `unpack_weight` takes that back.

Source of the output contract: DeepInfer 0.1.0's ReplicatedLinear.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from rorqual.ops._integer_product import INPUT_GROUP, multiply_integers
from rorqual.ops.registry import op
from rorqual.quantization import QTensor, QuantFormat
from rorqual.quantization.integer import IntegerStack, IntegerWeight

Weight = torch.Tensor | QTensor | IntegerWeight | IntegerStack
"""What `linear` multiplies with: [out_features, in_features]."""

ALIGNMENT = 32
"""Bytes of which the distance between two output rows is a multiple: bulk copies and vector stores need it."""

_PANEL = 1 << 22
"""Values of a quantised weight that the reference holds in float32 at once: 16 MiB."""


@op
def linear(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    activation: QuantFormat | None = None,
    out_dtype: torch.dtype | None = None,
    out_acc: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias, or x W^T + bias + out_acc: sums in float32, one rounding to the output's dtype.

    y[m, n] = sum over blocks b of scale_x[m, b] * scale_w[n, b] * (sum over k in b of x[m, k] * w[n, k])

    Integers that are `dynamic` round x to integers as well; `_integer_product` says how, and in which order the sums
    are. Others are dequantised to x's dtype, each number rounded once.

    Args:
        x: [..., in_features], one dimension or more, any strides: a Tensor, of the weight's dtype if that is a Tensor
            too; or, beside a Tensor or a QTensor, a QTensor, as `rms_norm` makes it.
        weight: [out_features, in_features], or what `prepare_weight` made of it.
        bias: [out_features], floating; added after the product, beside quantised weights and out_acc too.
        activation: beside a quantised weight, the format that x is quantised to first, row by row; an x that is a
            QTensor must have it already. None: x is multiplied as it is with the dequantised weight.
        out_dtype: the output's dtype. Default: x's; bfloat16 if x is a QTensor.
        out_acc: [..., out_features] to add to and to write the result into; of the output's dtype, on x's device, rows
            a multiple of 32 bytes apart, unit stride within a row, no gaps between outer dimensions. `allocate_output`
            makes such a tensor, `aligned_copy` makes one of any other.

    Returns: [..., out_features], whose rows are a multiple of 32 bytes apart; with out_acc, out_acc itself.

    Raises: ValueError for shapes that do not fit together and an out_acc that is not as above; TypeError for dtypes
    that do not.
    """
    if not (isinstance(weight, torch.Tensor) and _is_plain(weight)):
        weight = unpack_weight(weight)
    check_operands(x, weight, bias, activation)
    dtype, shape = output_dtype(x, out_dtype), (*x.shape[:-1], weight.shape[0])
    if out_acc is not None:
        check_out_acc(out_acc, shape, dtype, x.device)
    out = allocate_output(shape, dtype, x.device) if out_acc is None else out_acc
    if isinstance(weight, IntegerWeight | IntegerStack):
        assert isinstance(x, torch.Tensor)
        _multiply_integers(flatten_rows(x), weight, bias, flatten_output(out), accumulate=out_acc is not None)
    elif isinstance(weight, QTensor) or isinstance(x, QTensor):
        _multiply_dequantised(x, weight, bias, activation, flatten_output(out), accumulate=out_acc is not None)
    else:
        _multiply(flatten_rows(x), weight, bias, flatten_output(out), accumulate=out_acc is not None)
    return out


@op
def prepare_weight(weight: Weight) -> Weight:
    """Lay a weight [out_features, in_features] out for `linear` on its device; once, at load time.

    The original is not needed afterwards. A Tensor becomes a Tensor, a QTensor a QTensor and integers an IntegerStack
    (perhaps a subclass that carries more); only `linear` and `unpack_weight` know what it holds.
    """
    return weight


@op
def unpack_weight(weight: Weight) -> Weight:
    """The weight that `prepare_weight` was given, equal to the last bit; a weight that is not prepared, as it is.

    The reference `linear` calls it, so that a prepared weight may meet any call: one that its own implementation
    refuses is slow, and not wrong. Raises TypeError for a layout whose implementation is not loaded.
    """
    if type(weight) in (QTensor, IntegerWeight, IntegerStack) or (
        isinstance(weight, torch.Tensor) and _is_plain(weight)
    ):
        return weight
    raise TypeError(
        f"this weight ({type(weight).__name__}) was laid out by an implementation of prepare_weight that is not loaded "
        "here: load its backend, or pass the weight as it was before"
    )


_UNPREPARED = (QTensor, IntegerWeight, IntegerStack)


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and not weight.is_mkldnn


# --- outputs


def output_dtype(x: torch.Tensor | QTensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of linear's output: what was asked for, or x's, or bfloat16 if x is quantised."""
    if out_dtype is not None:
        return out_dtype
    return torch.bfloat16 if isinstance(x, QTensor) else x.dtype


def allocate_output(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised tensor of exactly this shape whose rows (last dimension) are a multiple of 32 bytes apart.

    It is a view of a tensor whose last dimension is rounded up: N = 20 in bfloat16 lies in rows of 32, N = 1 in
    float32 in rows of 8. Raises ValueError for a shape without dimensions.
    """
    if not shape:
        raise ValueError("an output needs at least one dimension, got the shape []")
    *outer, features = shape
    granule = ALIGNMENT // dtype.itemsize
    physical = -(-features // granule) * granule
    out = torch.empty((*outer, physical), dtype=dtype, device=device)
    return out if physical == features else out[..., :features]


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """x's values in a tensor as `allocate_output` makes it: an accumulator made from a tensor that is not aligned."""
    return allocate_output(x.shape, x.dtype, x.device).copy_(x)


def check_out_acc(out_acc: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError, with the way out, for an out_acc that `linear` cannot add to in place."""
    fault = None
    if tuple(out_acc.shape) != tuple(shape):
        fault = f"must have the output's shape {list(shape)}, got {list(out_acc.shape)}"
    elif out_acc.dtype != dtype:
        fault = f"must be of the output's dtype {dtype} (see out_dtype), got {out_acc.dtype}"
    elif out_acc.device != device:
        fault = f"must be on x's device {device}, got {out_acc.device}"
    elif out_acc.stride(-1) != 1 and out_acc.shape[-1] > 1:
        fault = f"must have unit stride in its last dimension, got strides {list(out_acc.stride())}"
    elif not _has_aligned_rows(out_acc):
        fault = (
            f"must have rows that are a multiple of {ALIGNMENT} bytes apart and do not overlap, "
            f"got strides {list(out_acc.stride())} of {out_acc.element_size()}-byte values"
        )
    elif not _outer_dimensions_join(out_acc):
        fault = f"must have no gaps between its outer dimensions, got strides {list(out_acc.stride())}"
    if fault is not None:
        raise ValueError(f"out_acc {fault}: make it with allocate_output, or pass aligned_copy(out_acc)")


def flatten_output(out: torch.Tensor) -> torch.Tensor:
    """The [num_rows, out_features] view of an output, with its row stride kept.

    Raises ValueError if the outer dimensions do not follow each other without gaps, or a row has gaps in it.
    """
    if out.dim() == 2 and out.stride(1) == 1:
        return out
    if out.dim() == 1:
        return out.unsqueeze(0)
    if (out.stride(-1) != 1 and out.shape[-1] > 1) or not _outer_dimensions_join(out):
        raise ValueError(
            f"an output of shape {list(out.shape)} and strides {list(out.stride())} has no rows at equal distances: "
            "make it with allocate_output"
        )
    return out.as_strided((math.prod(out.shape[:-1]), out.shape[-1]), (out.stride(-2), 1))


def flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., in_features] as [num_rows, in_features]: a view where the strides allow it, else a copy."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _has_aligned_rows(out: torch.Tensor) -> bool:
    if out.dim() < 2:
        return True
    apart, rows = out.stride(-2), math.prod(out.shape[:-1])
    return apart * out.element_size() % ALIGNMENT == 0 and (apart >= out.shape[-1] or rows <= 1)


def _outer_dimensions_join(out: torch.Tensor) -> bool:
    """Whether stepping past the end of each outer dimension leads to the next row; single ones do not step."""
    shape, stride = out.shape, out.stride()
    return out.numel() == 0 or all(
        shape[i] == 1 or stride[i] == stride[-2] * math.prod(shape[i + 1 : -1]) for i in range(out.dim() - 2)
    )


# --- the products that define the op


def check_operands(
    x: torch.Tensor | QTensor,
    weight: Weight,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
) -> None:
    """Raise ValueError or TypeError for operands of `linear` that do not fit; weight as before `prepare_weight`."""
    if len(weight.shape) != 2 or len(x.shape) < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear needs x [..., in_features] and a weight [out_features, in_features], "
            f"got {list(x.shape)} and {list(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must have the shape [{weight.shape[0]}] of the out_features, got {list(bias.shape)}")
    if isinstance(weight, IntegerWeight | IntegerStack):
        _check_beside_integers(x, weight, activation)
    elif isinstance(x, QTensor):
        if activation is not None and x.format != activation:
            raise ValueError(
                f"x is quantised as {x.format.name} and activation asks for {activation.name}: leave activation out"
            )
    elif isinstance(weight, QTensor):
        if not x.is_floating_point():
            raise TypeError(f"x must be floating beside a quantised weight, got {x.dtype}")
    elif activation is not None:
        raise ValueError(f"activation {activation.name} needs a quantised weight, got one in {weight.dtype}")
    elif x.dtype != weight.dtype:
        raise TypeError(f"x is {x.dtype} and the weight {weight.dtype}: convert one of them")


def _check_beside_integers(
    x: torch.Tensor | QTensor, weight: IntegerWeight | IntegerStack, activation: QuantFormat | None
) -> None:
    if isinstance(x, QTensor) or not x.is_floating_point():
        got = x.format.name if isinstance(x, QTensor) else x.dtype
        raise TypeError(f"x must be a floating tensor beside a weight of integers, got {got}")
    if activation is not None:
        raise ValueError(f"activation {activation.name} is for FP8 and FP4 weights; integers say themselves (dynamic)")
    dynamic = any(part.dynamic for part in _integer_parts(weight))
    if dynamic and weight.shape[1] % INPUT_GROUP:
        raise ValueError(
            f"x is rounded to integers in groups of {INPUT_GROUP} columns, got {weight.shape[1]}: make the weight with "
            "dynamic=False"
        )


def _integer_parts(weight: IntegerWeight | IntegerStack) -> Sequence[IntegerWeight]:
    return (weight,) if isinstance(weight, IntegerWeight) else weight


def _multiply_integers(
    x: torch.Tensor,
    weight: IntegerWeight | IntegerStack,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """A product with integers into out, one panel of output features after the other."""
    step, start = max(1, _PANEL // max(1, weight.shape[1])), 0
    for part in _integer_parts(weight):
        for first in range(0, part.shape[0], step):
            panel = part.slice_rows(slice(first, first + step))
            rows = slice(start + first, start + first + panel.shape[0])
            added = None if bias is None else bias[rows]
            if part.dynamic:
                _finish(multiply_integers(x, panel), added, out[:, rows], accumulate=accumulate)
            else:
                _multiply(x, panel.dequantize(x.dtype), added, out[:, rows], accumulate=accumulate)
        start += part.shape[0]


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, accumulate: bool
) -> None:
    """A plain product into out; in x's dtype, whose sums torch keeps in float32, if that rounds once only."""
    if accumulate or out.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        wide = torch.promote_types(x.dtype, torch.float32)
        _finish(torch.mm(x.to(wide), weight.to(wide).t()), bias, out, accumulate=accumulate)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _multiply_dequantised(
    x: torch.Tensor | QTensor,
    weight: torch.Tensor | QTensor,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
    out: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """A float32 product of dequantised operands into out, one panel of output features after the other."""
    if out.shape[0] == 0:
        return
    if not isinstance(x, QTensor) and activation is not None:
        x = QTensor.quantize(flatten_rows(x), activation)
    left = flatten_rows(x.dequantize(torch.float32) if isinstance(x, QTensor) else x.to(torch.float32))
    for rows, panel in _panels(weight):
        part = None if bias is None else bias[rows]
        _finish(torch.mm(left, panel.t()), part, out[:, rows], accumulate=accumulate)


def _panels(weight: torch.Tensor | QTensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of a weight after each other in float32: (which, [rows, in_features])."""
    num_rows, num_columns = weight.shape
    height = weight.format.block[0] if isinstance(weight, QTensor) else 1
    step = max(1, _PANEL // max(1, num_columns) // height) * height
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        if isinstance(weight, QTensor):
            yield rows, weight.slice_rows(rows).dequantize(torch.float32)
        else:
            yield rows, weight[rows].to(torch.float32)


def _finish(product: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, *, accumulate: bool) -> None:
    """Add bias and accumulator to a float32 product, and round it into out."""
    if bias is not None:
        product += bias
    if accumulate:
        product += out
    out.copy_(product)
