"""Linear layers: replicated, or split over the ranks of a mesh by output or input features.

A layer may merge several of the checkpoint's matrices into one product (q, k and v; gate and up). The out_features of a
split layer are the whole model's; each rank holds and computes its part. Weights are plain, or quantised in the format
that the layer is given; either way the product follows from the weight itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.stacked_weight import Part, StackedWeight
from rorqual.loader.layer import WantedTensor, sibling, weight_parameter
from rorqual.loader.quantization_config import LinearFormat
from rorqual.ops.decoder_blocks import Product
from rorqual.ops.linear import linear
from rorqual.quantization import QTensor


class _Linear(StackedWeight):
    """y = x W^T + b with a weight stacked from parts, each cut by rows, and all cut by columns."""

    def __init__(
        self,
        in_features: int,
        parts: Sequence[Part],
        *,
        columns: slice | None = None,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        quantization: LinearFormat | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            parts,
            columns=columns,
            format=quantization.weight if quantization else None,
            dtype=dtype,
            device=device,
        )
        self.bias = weight_parameter(self.num_rows, dtype=dtype, device=device) if bias else None
        self._options: dict[str, Any] = {}
        if quantization is not None and quantization.activation is not None:
            self._options["activation"] = quantization.activation
        if out_dtype is not None:
            self._options["out_dtype"] = out_dtype

    def forward(self, x: torch.Tensor | QTensor) -> torch.Tensor:
        """x [..., in_features of this rank] -> [..., out_features of this rank], rows 32-byte aligned."""
        return linear(x, self.operand, self.bias, **self._options)

    def product(self) -> Product:
        """This rank's product, for an op of several."""
        return Product(self.operand, self.bias, self._options)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """Weight with its scales, and bias if there is one, of every part."""
        names = [prefix if part.name is None else sibling(prefix, part.name) for part in self._parts]
        yield from self.wanted_parts(names)
        if self.bias is not None:
            for name, part, into in zip(names, self._parts, self._into, strict=True):
                copy = _copy_rows(self.bias[into], part.rows)
                yield WantedTensor(f"{name}.bias", (part.out_features,), copy, rows=part.some)


def _copy_rows(target: torch.Tensor, rows: slice) -> Callable[[torch.Tensor], None]:
    def copy(whole: torch.Tensor) -> None:
        target.copy_(whole[rows])

    return copy


class ReplicatedLinear(_Linear):
    """Every rank holds the whole weight.

    Args:
        in_features, out_features: the checkpoint's.
        bias: whether there is one; it works beside every kind of weight.
        dtype: of the bias and a plain weight.
        quantization: the formats of a quantised layer; None for a plain weight.
        out_dtype: the outputs' dtype, e.g. float32 for logits. Default: that of x, bfloat16 for an x that is a QTensor.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        quantization: LinearFormat | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            [Part(None, out_features, slice(0, out_features))],
            bias=bias,
            dtype=dtype,
            device=device,
            quantization=quantization,
            out_dtype=out_dtype,
        )

    def forward(self, x: torch.Tensor | QTensor, out_acc: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]; added to out_acc in place, if given, as the op `linear` says."""
        if out_acc is None:
            return linear(x, self.operand, self.bias, **self._options)
        return linear(x, self.operand, self.bias, out_acc=out_acc, **self._options)


class ColumnParallelLinear(_Linear):
    """Each rank computes its share of the output features of one or several matrices that read the same input.

    `parts` maps the checkpoint's module names to their whole out_features; the output is their shares, side by side.
    With a mesh of one rank they are whole. `out_dtype` as in `ReplicatedLinear`.
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
        quantization: LinearFormat | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        cut = [Part(name, size, mesh.shard(size, what=f"{name}'s out_features")) for name, size in parts.items()]
        super().__init__(
            in_features,
            cut,
            bias=bias,
            dtype=dtype,
            device=device,
            quantization=quantization,
            out_dtype=out_dtype,
        )


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
        quantization: LinearFormat | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads = heads_per_rank(num_heads, num_kv_heads, mesh)
        self.head_dim = head_dim
        heads = mesh.shard(num_heads, what="num_attention_heads")
        first_kv_head = mesh.tp_rank * num_kv_heads // mesh.tp_size
        q_rows = slice(heads.start * head_dim, heads.stop * head_dim)
        kv_rows = slice(first_kv_head * head_dim, (first_kv_head + self.num_kv_heads) * head_dim)
        parts = [
            Part("q_proj", num_heads * head_dim, q_rows),
            Part("k_proj", num_kv_heads * head_dim, kv_rows),
            Part("v_proj", num_kv_heads * head_dim, kv_rows),
        ]
        super().__init__(hidden_size, parts, bias=bias, dtype=dtype, device=device, quantization=quantization)

    def forward(self, x: torch.Tensor | QTensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> [num_tokens, num_heads + 2 * num_kv_heads, head_dim], q then k then v."""
        return super().forward(x).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)


class RowParallelLinear(_Linear):
    """Each rank multiplies its share of the input features; the ranks' results are summed.

    `name` is the checkpoint's module beside the layer, if it is not called as the layer is.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        mesh: Mesh,
        name: str | None = None,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
        quantization: LinearFormat | None = None,
    ) -> None:
        super().__init__(
            in_features,
            [Part(name, out_features, slice(0, out_features))],
            columns=mesh.shard(in_features, what="in_features"),
            bias=bias,
            dtype=dtype,
            device=device,
            quantization=quantization,
        )
        self.mesh = mesh

    def forward(self, x: torch.Tensor | QTensor) -> torch.Tensor:
        """x [num_tokens, in_features / ranks] -> [num_tokens, out_features]; the bias is added once."""
        return self.mesh.tp_all_reduce(self.product()(x))

    def product(self) -> Product:
        """This rank's product, for an op of several: to be summed over the ranks."""
        return Product(self.operand, self.bias if self.mesh.tp_rank == 0 else None, self._options)


def heads_per_rank(num_heads: int, num_kv_heads: int, mesh: Mesh) -> tuple[int, int]:
    """(query heads, KV heads) of one rank. Raises ValueError when the ranks cannot share them evenly."""
    heads = mesh.shard(num_heads, what="num_attention_heads")
    if num_kv_heads % mesh.tp_size and mesh.tp_size % num_kv_heads:
        raise ValueError(
            f"num_key_value_heads ({num_kv_heads}) and tensor_parallel_size ({mesh.tp_size}): one must divide the other"
        )
    return heads.stop - heads.start, max(1, num_kv_heads // mesh.tp_size)
