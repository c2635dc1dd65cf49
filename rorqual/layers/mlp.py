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

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
"""What most checkpoints call the three matrices."""


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product, perhaps with a limit as `silu_and_mul` has it.

    `prefix` is the block's name in the checkpoint, `names` are those of gate, up and down below it.
    """

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
        names: tuple[str, str, str] = GATE_UP_DOWN,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        gate, up, down = names
        self.limit = limit
        parts = {gate: intermediate_size, up: intermediate_size}
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
            name=down,
            bias=bias,
            dtype=dtype,
            device=device,
            quantization=quantization.of(prefix, down) if quantization else None,
        )

    def block(self, norm: RMSNorm) -> GatedMLPBlock:
        """All of it, behind a norm, as one op takes it, which knows no limit."""
        assert self.limit is None
        return GatedMLPBlock(norm.norm(), self.gate_up_proj.product(), self.down_proj.product())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        return self.down_proj.mesh.tp_all_reduce(self.share(x))

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of the result, to be summed over the ranks."""
        return self.down_proj.product()(silu_and_mul(self.gate_up_proj(x), limit=self.limit))
