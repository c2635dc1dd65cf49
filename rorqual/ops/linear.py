"""Matrix products with weights that are laid out once, at load time, for the implementation that will read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rorqual.ops.registry import op


@op
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ weight.T + bias. x [num_tokens, in_features], weight [out_features, in_features]; returns x's dtype.

    weight may also be what `prepare_weight` made of such a matrix.
    """
    return F.linear(x, weight, bias)


@op
def prepare_weight(weight: torch.Tensor) -> torch.Tensor:
    """Lay a weight out for `linear` on this device; once, at load time. The original is not needed afterwards."""
    return weight
