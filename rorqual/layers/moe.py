"""A mixture-of-experts feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from rorqual.distributed.mesh import Mesh
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import ReplicatedLinear
from rorqual.layers.mlp import GATE_UP_DOWN
from rorqual.layers.stacked_weight import Part, StackedWeight, kept_format
from rorqual.loader.layer import Layer, WantedTensor
from rorqual.loader.quantization_config import IntegerParts, LinearFormat, Quantization
from rorqual.ops.linear import Weight
from rorqual.ops.moe import ExpertWeights, Routing, SparseMoEBlock, allocate_experts, fused_experts, prepare_experts
from rorqual.quantization import QuantFormat


class Experts(Layer):
    """Gated feed-forward weights of every expert, each split over the ranks by its intermediate size.

    `quantization` is the formats of all experts, integer ones of gate, up and down of the first, then of the second and
    so on; None for plain weights. `names` are the checkpoint's for gate, up and down of an expert.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        quantization: LinearFormat | None = None,
        names: tuple[str, str, str] = GATE_UP_DOWN,
        swiglu_limit: float | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.names, self.swiglu_limit = mesh, names, swiglu_limit
        rows = mesh.shard(intermediate_size, what="moe_intermediate_size")
        formats = quantization.weight if quantization else None
        half, whole = Part(None, intermediate_size, rows), Part(None, hidden_size, slice(0, hidden_size))

        def memory(parts: Sequence[Part], columns: slice) -> Sequence[Weight | None]:
            if isinstance(formats, IntegerParts):
                return [None] * num_experts
            return allocate_experts(
                num_experts,
                sum(part.rows.stop - part.rows.start for part in parts),
                columns.stop - columns.start,
                dtype=dtype,
                device=device,
                format=None if formats is None else kept_format(formats, parts, columns),
            )

        self._gate_up = [
            StackedWeight(
                hidden_size,
                [half, half],
                format=_some(formats, 3 * e, 2),
                dtype=dtype,
                device=device,
                memory=kept,
            )
            for e, kept in enumerate(memory([half, half], slice(0, hidden_size)))
        ]
        self._down = [
            StackedWeight(
                intermediate_size,
                [whole],
                columns=rows,
                format=_some(formats, 3 * e + 2, 1),
                dtype=dtype,
                device=device,
                memory=kept,
            )
            for e, kept in enumerate(memory([whole], rows))
        ]
        self.gate_up, self.down = nn.ModuleList(self._gate_up), nn.ModuleList(self._down)
        self.activation = quantization.activation if quantization else None
        self._made: ExpertWeights | None = None

    def weights(self) -> ExpertWeights:
        """This rank's weights, for an op: its results are to be summed over the ranks.

        The same each time, with what kernels made of them, until they are laid out anew.
        """
        if self._made is None:
            gate_up, down = (tuple(each.operand for each in weights) for weights in (self._gate_up, self._down))
            self._made = ExpertWeights(gate_up, down, self.activation, self.swiglu_limit)
        return self._made

    def prepare(self) -> None:
        """Lay quantised experts out together; the modules below lay out what is left."""
        self._made = None
        for weights in (self._gate_up, self._down):
            if weights[0].format is not None:
                laid_out = prepare_experts(tuple(each.operand for each in weights))
                for each, made in zip(weights, laid_out, strict=True):
                    each.keep(made)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the weighted sum of each token's experts, over all ranks."""
        return self.mesh.tp_all_reduce(fused_experts(x, self.weights(), routing))

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """gate, up and down of every expert."""
        for expert, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate_name, up_name, down_name = (f"{prefix}.{expert}.{name}" for name in self.names)
            yield from gate_up.wanted_parts([gate_name, up_name])
            yield from down.wanted_parts([down_name])


class SparseMoE(nn.Module):
    """Softmax-routed experts, as in Qwen3-MoE. The router is never quantised; `prefix` is the block's name there."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalize: bool,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.gate = ReplicatedLinear(hidden_size, num_experts, dtype=dtype, device=device)
        self.experts = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            mesh=mesh,
            dtype=dtype,
            device=device,
            quantization=format_of_experts(quantization, f"{prefix}.experts", num_experts),
        )

    def block(self, norm: RMSNorm) -> SparseMoEBlock:
        """All of it, behind a norm, as one op takes it."""
        return SparseMoEBlock(norm.norm(), self.gate.product(), self.top_k, self.renormalize, self.experts.weights())


def _some(formats: QuantFormat | IntegerParts | None, start: int, count: int) -> QuantFormat | IntegerParts | None:
    """The integer formats of `count` matrices from the one at `start` on; another format is that of all."""
    if isinstance(formats, IntegerParts):
        return formats._replace(formats=formats.formats[start : start + count])
    return formats


def format_of_experts(
    quantization: Quantization | None,
    prefix: str,
    num_experts: int,
    names: tuple[str, str, str] = GATE_UP_DOWN,
) -> LinearFormat | None:
    """The formats of experts whose module is called `prefix`, as `Experts` takes them."""
    if quantization is None:
        return None
    return quantization.of(prefix, *(f"{expert}.{name}" for expert in range(num_experts) for name in names))
