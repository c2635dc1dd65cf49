"""Which quantised weights the CPU's implementations can turn into bfloat16, by moving the bits of their elements."""

from __future__ import annotations

import torch

from rorqual.quantization import QTensor

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
