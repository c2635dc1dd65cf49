"""A product in groups of input features, each with rows of one checkpoint matrix as its weight."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rorqual.distributed.mesh import Mesh
from rorqual.layers.stacked_weight import Part, StackedWeight
from rorqual.loader.layer import WantedTensor
from rorqual.loader.quantization_config import LinearFormat
from rorqual.ops.grouped_linear import grouped_linear
from rorqual.ops.linear import Weight, prepare_weight


class GroupedLinear(StackedWeight):
    """y[:, g] = x[:, g] W_g^T, where W_g is rows [g * out_features, (g + 1) * out_features) of the weight.

    Each rank has some of the groups. `in_features` and `out_features` are those of one group.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        quantization: LinearFormat | None = None,
    ) -> None:
        groups = mesh.shard(num_groups, what="the number of groups")
        self.num_groups, self.out_features = groups.stop - groups.start, out_features
        rows = slice(groups.start * out_features, groups.stop * out_features)
        super().__init__(
            in_features,
            [Part(None, num_groups * out_features, rows)],
            format=quantization.weight if quantization else None,
            dtype=dtype,
            device=device,
        )
        self._options: dict[str, Any] = {}
        if quantization is not None and quantization.activation is not None:
            self._options["activation"] = quantization.activation
        self._groups: tuple[Weight, ...] | torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, groups of this rank, in_features] -> [num_tokens, groups of this rank, out_features]."""
        return grouped_linear(x, self._cut() if self._groups is None else self._groups, **self._options)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The weight with its scales."""
        return self.wanted_parts([prefix])

    def _cut(self) -> tuple[Weight, ...]:
        """The weight of each group, as it was loaded."""
        whole = self._loaded()
        rows = [slice(start, start + self.out_features) for start in range(0, self.num_rows, self.out_features)]
        if isinstance(whole, torch.Tensor):
            return tuple(whole[some] for some in rows)
        return tuple(whole.slice_rows(some) for some in rows)

    def prepare(self) -> None:
        """Lay each group's weight out for the kernel, and let the whole one go where they are others."""
        loaded = self._cut()
        prepared = tuple(prepare_weight(weight) for weight in loaded)
        if self.integers:
            self._kept = [None]
        elif self.format is None and all(map(operator.is_, prepared, loaded)):
            self._groups = self.weight.data.view(self.num_groups, self.out_features, self.in_features)
            return
        else:
            nothing = torch.empty(0, device=self.weight.device)
            self.weight = nn.Parameter(nothing.to(self.weight.dtype), requires_grad=False)
            if self.format is not None:
                self.weight_scale_inv = nn.Parameter(nothing.to(self.weight_scale_inv.dtype), requires_grad=False)
        self._groups = prepared
