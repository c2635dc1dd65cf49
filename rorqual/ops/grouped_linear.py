"""A product in groups: each group of input features has a weight of its own."""

from __future__ import annotations

from typing import Any

import torch

from rorqual.ops.linear import Weight, linear
from rorqual.ops.registry import op


@op
def grouped_linear(x: torch.Tensor, weights: tuple[Weight, ...] | torch.Tensor, **options: Any) -> torch.Tensor:
    """y[:, g] = x[:, g] W_g^T.

    x [num_tokens, num_groups, in_features]; weights [out_features, in_features] of each group, as `prepare_weight` made
    them, or all of them plain in one tensor [num_groups, out_features, in_features]; options as `linear` takes them.
    Returns [num_tokens, num_groups, out_features].
    """
    return torch.stack([linear(x[:, i], weight, **options) for i, weight in enumerate(weights)], dim=1)
