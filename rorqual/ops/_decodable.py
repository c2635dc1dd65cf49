"""What the CPU's implementations of `linear` ask of quantised weights, and of calls with them.

They turn weights into bfloat16 by moving the bits of their elements.
"""

from __future__ import annotations

import torch

from rorqual.quantization import QTensor, QuantFormat

_BF16 = torch.bfloat16
_NAN = 0x7F
LARGEST_SCALE = 2.0
"""Moved bits lack a power of two, up to 2^126, with which the scale is multiplied. Weights have scales far below 1."""


def refuse_decoding(weight: QTensor) -> str | None:
    """Why a weight cannot be decoded so, or None. Reads all of it, so for load time."""
    if weight.device.type != "cpu":
        return f"needs a CPU tensor, got one on {weight.device.type}"
    width = weight.format.block[1]
    if weight.ndim != 2 or weight.shape[1] % width or weight.values.numel() == 0:
        return f"needs whole blocks of {width} input features, got {list(weight.shape)}"
    scales = weight.float_scales()
    if not bool(((scales >= 0) & (scales <= LARGEST_SCALE)).all()):
        return f"needs scales from 0 to {LARGEST_SCALE:g}, got {scales.min().item():g} to {scales.max().item():g}"
    if weight.format.element == "e4m3" and bool(((weight.values.view(torch.uint8) & _NAN) == _NAN).any()):
        return "needs a weight without NaN"
    return None


def refuse_call(
    x: torch.Tensor | QTensor,
    weight: QTensor,
    bias: torch.Tensor | None,
    activation: QuantFormat | None,
    out_dtype: torch.dtype | None,
    out_acc: torch.Tensor | None,
) -> str | None:
    """Why a call with a weight that is laid out cannot be taken, or None: operands and outputs are bfloat16."""
    if isinstance(x, torch.Tensor) and x.dtype is not _BF16:
        return f"needs bfloat16 or quantised activations, got {x.dtype}"
    if x.shape[-1] != weight.shape[1] or (isinstance(x, QTensor) and activation not in (None, x.format)):
        return "x does not fit the weight or the activation format"
    if out_acc is not None or (out_dtype is not None and out_dtype is not _BF16):
        return "makes new bfloat16 outputs only"
    if bias is not None and (bias.dtype is not _BF16 or bias.shape[0] != weight.shape[0]):
        return f"needs a bfloat16 bias for {weight.shape[0]} features, got {bias.dtype} {list(bias.shape)}"
    return None
