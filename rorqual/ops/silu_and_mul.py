"""The gate of a SwiGLU feed-forward block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rorqual.ops.registry import op


@op
def silu_and_mul(gate_up: torch.Tensor, *, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up, where gate_up [..., 2 n] holds gate then up. Returns [..., n] in the same dtype.

    With a limit, gate is at most that, and up within plus and minus that, before anything else. Sources: Shazeer 2020,
    arXiv:2002.05202; DeepSeek-V4 for the limit.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
