"""The first half of a SwiGLU feed-forward block as one op: a product, and the gate over its two halves."""

from __future__ import annotations

from typing import Any

import torch

from rorqual.ops.linear import Weight, linear
from rorqual.ops.registry import op
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.quantization import QTensor


@op
def gated_linear(
    x: torch.Tensor | QTensor, weight: Weight, bias: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """silu(gate) * up, where [gate | up] = x W^T + bias is rounded to the output's dtype first.

    weight: [2 * n, in_features], gate rows then up rows. x, bias and options: as `linear` takes them.
    Returns [..., n]. Source: Shazeer 2020, arXiv:2002.05202.
    """
    return silu_and_mul(linear(x, weight, bias, **options))
