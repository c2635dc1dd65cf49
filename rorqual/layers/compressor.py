"""The pooling of several tokens into one cached entry; the maths is in ops/compress_rows.py."""

from __future__ import annotations

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.distributed.mesh import Mesh
from rorqual.layers.float32_tensor import Float32Tensor
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import ColumnParallelLinear
from rorqual.ops.compress_rows import Compression, compress_rows
from rorqual.ops.kv_transform import HadamardStage, NormStage
from rorqual.ops.row_cache import RowCache


def state_width(width: int, *, overlap: bool) -> int:
    """Numbers that a token leaves for the entries of this width: values and gates, with overlap two of each."""
    return (4 if overlap else 2) * width


class Compressor(nn.Module):
    """Makes an entry of every `ratio` tokens. Its products give float32, and its weights are never quantised.

    Args:
        hidden_size: of the tokens' vectors.
        width: of an entry.
        ratio, overlap, cos_sin: see `Compression`.
        eps: the norm's.
        hadamard: whether entries are turned by a Hadamard matrix that keeps their length.
        dtype: of weights and activations.
        device: of the weights.
    """

    def __init__(
        self,
        hidden_size: int,
        width: int,
        *,
        ratio: int,
        overlap: bool,
        eps: float,
        cos_sin: torch.Tensor,
        hadamard: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        half = state_width(width, overlap=overlap) // 2
        self.value_and_gate = ColumnParallelLinear(
            hidden_size,
            {"wkv": half, "wgate": half},
            mesh=Mesh.single(),  # every rank needs whole entries
            dtype=dtype,
            device=device,
            out_dtype=torch.float32,
        )
        self.ape = Float32Tensor(ratio, half, device=device)
        self.norm = RMSNorm(width, eps=eps, dtype=dtype, device=device)
        self.ratio, self.overlap, self.cos_sin, self.dtype = ratio, overlap, cos_sin, dtype
        self.hadamard = HadamardStage(width**-0.5) if hadamard else None

    def forward(self, x: torch.Tensor, states: RowCache, entries: RowCache, batch: Batch) -> None:
        """x [num_tokens, hidden_size]; writes the tokens' states, and the entries that they complete."""
        compression = Compression(
            self.ratio,
            self.overlap,
            self.ape.tensor,
            NormStage(self.norm.weight.data, self.norm.eps),
            self.cos_sin,
            self.hadamard,
        )
        compress_rows(self.value_and_gate(x), states, entries, batch, compression, dtype=self.dtype)
