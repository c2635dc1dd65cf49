"""The op `quantize`: activations, one row per block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.ops.quantize import quantize
from rorqual.quantization import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, QTensor, ScaleLayout, unpack_e2m1
from tests.quantization import numbers


@pytest.mark.parametrize("format", [FP8_ROW, MXFP8, MXFP4], ids=lambda format: format.name)
def test_activations_are_quantised_as_defined(format):
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = quantize(x, format=format, layout=ScaleLayout.COLUMN)
    wanted = numbers.quantised(x.float().numpy(), format)
    values = q.values.view(torch.uint8) if format.element == "e4m3" else unpack_e2m1(q.values)
    np.testing.assert_array_equal(values.numpy(), wanted.codes)
    np.testing.assert_array_equal(q.scales.numpy(), wanted.scales)
    assert q.scales.stride() == (1, 8)
    assert isinstance(q, QTensor)


def test_arguments_that_are_no_activations_are_refused():
    with pytest.raises(ValueError, match=r"\[rows, columns\], got shape \(2, 3, 32\)"):
        quantize(torch.ones(2, 3, 32), format=MXFP8)
    with pytest.raises(ValueError, match="blocks have one row, fp8_block has 128"):
        quantize(torch.ones(2, 128), format=FP8_BLOCK)
