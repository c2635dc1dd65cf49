"""The gated feed-forward block."""

from __future__ import annotations

import torch
from torch import nn

from rorqual.distributed.mesh import Mesh
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import ColumnParallelLinear, RowParallelLinear
from rorqual.loader.quantization_config import Quantization
from rorqual.ops.decoder_blocks import GatedMLPBlock
from rorqual.ops.silu_and_mul import silu_and_mul


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product. `prefix` is the block's name in the checkpoint."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        mesh: Mesh,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = ColumnParallelLinear(
            hidden_size,
            parts,
            mesh=mesh,
            bias=bias,
            dtype=dtype,
            device=device,
            quantization=quantization.of(prefix, *parts) if quantization else None,
        )
        self.down_proj = RowParallelLinear(
            intermediate_size,
            hidden_size,
            mesh=mesh,
            bias=bias,
            dtype=dtype,
            device=device,
            quantization=quantization.of(prefix, "down_proj") if quantization else None,
        )

    def block(self, norm: RMSNorm) -> GatedMLPBlock:
        """All of it, behind a norm, as one op takes it."""
        return GatedMLPBlock(norm.norm(), self.gate_up_proj.product(), self.down_proj.product())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out
