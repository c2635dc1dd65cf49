"""The gate of a SwiGLU feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rorqual.ops.registry import op


@op
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate_up [..., 2 n] holds gate then up. Returns [..., n] in the same dtype.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
