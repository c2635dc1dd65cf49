"""Linear layers: replicated, or split over the ranks of a mesh by output or input features.

A layer may merge several of the checkpoint's matrices into one product (q, k and v; gate and up). The out_features of a
split layer are the whole model's; each rank holds and computes its part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from rorqual.distributed.mesh import Mesh
from rorqual.loader.layer import Layer, WantedTensor, sibling, weight_parameter
from rorqual.ops.linear import linear, prepare_weight


class _Part(NamedTuple):
    """One checkpoint matrix inside a merged weight."""

    name: str | None
    """Name of the checkpoint's module beside this layer; None if the layer stands for it alone."""
    out_features: int
    """Rows in the checkpoint."""
    rows: slice
    """The rows of the checkpoint's matrix that this rank keeps."""


class _Linear(Layer):
    """y = x W^T + b with a weight stacked from parts, each cut by rows, and all cut by columns."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[_Part],
        *,
        columns: slice | None = None,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self._parts = tuple(parts)
        self._columns = columns or slice(0, in_features)
        num_rows = sum(part.rows.stop - part.rows.start for part in parts)
        self.weight = weight_parameter(num_rows, self._columns.stop - self._columns.start, dtype=dtype, device=device)
        self.bias = weight_parameter(num_rows, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features of this rank] -> [num_tokens, out_features of this rank]."""
        return linear(x, self.weight, self.bias)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """Weight, and bias if there is one, of every part."""
        start = 0
        for part in self._parts:
            name = prefix if part.name is None else sibling(prefix, part.name)
            stop = start + part.rows.stop - part.rows.start
            yield self._wanted_weight(f"{name}.weight", part, slice(start, stop))
            if self.bias is not None:
                yield self._wanted_bias(f"{name}.bias", part, self.bias, slice(start, stop))
            start = stop

    def _wanted_weight(self, name: str, part: _Part, into: slice) -> WantedTensor:
        def copy(whole: torch.Tensor) -> None:
            self.weight[into].copy_(whole[part.rows, self._columns])

        return WantedTensor(name, (part.out_features, self.in_features), copy)

    def _wanted_bias(self, name: str, part: _Part, bias: nn.Parameter, into: slice) -> WantedTensor:
        def copy(whole: torch.Tensor) -> None:
            bias[into].copy_(whole[part.rows])

        return WantedTensor(name, (part.out_features,), copy)

    def prepare(self) -> None:
        """Lay the weight out for the linear kernel."""
        self.weight = nn.Parameter(prepare_weight(self.weight.data), requires_grad=False)


class ReplicatedLinear(_Linear):
    """Every rank holds the whole weight."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(
            in_features, [_Part(None, out_features, slice(0, out_features))], bias=bias, dtype=dtype, device=device
        )


class ColumnParallelLinear(_Linear):
    """Each rank computes its share of the output features of one or several matrices that read the same input.

    `parts` maps the checkpoint's module names to their whole out_features; the output is their shares, side by side.
    """

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        mesh: Mesh,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        cut = [_Part(name, size, mesh.shard(size, what=f"{name}'s out_features")) for name, size in parts.items()]
        super().__init__(in_features, cut, bias=bias, dtype=dtype, device=device)


class QKVParallelLinear(_Linear):
    """q_proj, k_proj and v_proj in one product, split by heads. Ranks beyond the number of KV heads share them."""

    def __init__(
        self,
        hidden_size: int,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        mesh: Mesh,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads, self.num_kv_heads = heads_per_rank(num_heads, num_kv_heads, mesh)
        self.head_dim = head_dim
        heads = mesh.shard(num_heads, what="num_attention_heads")
        first_kv_head = mesh.tp_rank * num_kv_heads // mesh.tp_size
        q_rows = slice(heads.start * head_dim, heads.stop * head_dim)
        kv_rows = slice(first_kv_head * head_dim, (first_kv_head + self.num_kv_heads) * head_dim)
        parts = [
            _Part("q_proj", num_heads * head_dim, q_rows),
            _Part("k_proj", num_kv_heads * head_dim, kv_rows),
            _Part("v_proj", num_kv_heads * head_dim, kv_rows),
        ]
        super().__init__(hidden_size, parts, bias=bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, num_heads + 2 * num_kv_heads, head_dim], q then k then v."""
        return super().forward(x).view(x.shape[0], -1, self.head_dim)


class RowParallelLinear(_Linear):
    """Each rank multiplies its share of the input features; the ranks' results are summed."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: Mesh,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.mesh = mesh
        super().__init__(
            in_features,
            [_Part(None, out_features, slice(0, out_features))],
            columns=mesh.shard(in_features, what="in_features"),
            bias=bias,
            dtype=dtype,
            device=device,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features / ranks] -> [num_tokens, out_features]; the bias is added once."""
        bias = self.bias if self.mesh.tp_rank == 0 else None
        return self.mesh.tp_all_reduce(linear(x, self.weight, bias))


def heads_per_rank(num_heads: int, num_kv_heads: int, mesh: Mesh) -> tuple[int, int]:
    """(query heads, KV heads) of one rank. Raises ValueError when the ranks cannot share them evenly."""
    heads = mesh.shard(num_heads, what="num_attention_heads")
    if num_kv_heads % mesh.tp_size and mesh.tp_size % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads ({num_kv_heads}) and tensor_parallel_size ({mesh.tp_size}): one must divide the other"
        )
    return heads.stop - heads.start, max(1, num_kv_heads // mesh.tp_size)
