"""What quantised tensors stand for, in float64: the tests' own tables and block arithmetic."""

from __future__ import annotations

import numpy as np
import torch

from rorqual.quantization import QTensor, ScaleLayout
from tests.quantization.numbers import E2M1, E4M3

_E4M3 = np.append(E4M3, np.nan)


def e4m3(codes: np.ndarray) -> np.ndarray:
    """uint8 codes -> float64."""
    return np.where(codes & 0x80, -1.0, 1.0) * _E4M3[codes & 0x7F]


def e2m1(packed: np.ndarray) -> np.ndarray:
    """Bytes of two codes each, the first one low -> float64, twice as many."""
    codes = packed.view(np.uint8)
    codes = np.stack((codes & 15, codes >> 4), -1).reshape(*codes.shape[:-1], -1)
    return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]


def scales(weight: QTensor) -> np.ndarray:
    """float64, one per block, of a tensor whose scales lie by rows."""
    assert weight.layout is ScaleLayout.ROW
    if weight.format.scale == "ue8m0":
        return 2.0 ** (weight.scales.view(torch.uint8).numpy().astype(np.float64) - 127)
    assert weight.format.scale == "float32"
    return weight.scales.double().numpy()


def numbers(weight: QTensor) -> np.ndarray:
    """float64 [rows, columns]: element times the scale of its block."""
    codes = weight.values.contiguous().view(torch.uint8).numpy()
    values = e4m3(codes) if weight.format.element == "e4m3" else e2m1(codes)
    of_block, (height, width) = scales(weight), weight.format.block
    rows, columns = (np.arange(size) for size in values.shape)
    return values * of_block[np.ix_(rows // height, columns // width)]
