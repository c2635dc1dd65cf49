"""The sum of what several ranks made of the same rows."""

from __future__ import annotations

import torch

from rorqual.ops.registry import op


@op
def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """parts [num_parts, rows, size] -> their sum [rows, size], in the same dtype.

    Added up from the first to the last in float32, or in the parts' dtype if that is wider, and rounded once: so that a
    row's sum hangs on nothing else.
    """
    total = torch.zeros(parts.shape[1:], dtype=torch.promote_types(parts.dtype, torch.float32), device=parts.device)
    for part in parts:
        total += part
    return total.to(parts.dtype)
