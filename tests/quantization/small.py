"""Formats and tensors so small that few values have many edges, for tests that draw them at random."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from rorqual.quantization import QTensor, QuantFormat

SMALL = [
    QuantFormat(f"{element}_{scale}", element, block, scale)
    for element, block, scale in (
        ("e4m3", (4, 6), "float32"),
        ("e4m3", (1, 8), "float32"),
        ("e4m3", (3, 4), "ue8m0"),
        ("e4m3", (1, 4), "ue8m0"),
        ("e2m1", (1, 4), "ue8m0"),
        ("e2m1", (2, 6), "float32"),
        ("e2m1", (1, 8), "e4m3"),
        ("e4m3", (1, 4), "e4m3"),
    )
]
"""Blocks so small that few values have many edges."""


def assert_same(got: QTensor, want: torch.Tensor) -> None:
    """Dequantises to exactly these values, of this logical shape."""
    assert got.shape == want.shape
    torch.testing.assert_close(got.dequantize(), want, rtol=0, atol=0, equal_nan=True)


@st.composite
def tensors(draw: st.DrawFn, dims: int = 2, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)):
    """Values of very different sizes; an even number of columns."""
    shape = [draw(st.integers(0, 11)) for _ in range(dims)]
    shape[-1] *= 2
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 1.0, 10.0, 30.0]))
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * spread)
    return (x * 10.0 ** draw(st.integers(-12, 12))).to(draw(st.sampled_from(dtypes)))
