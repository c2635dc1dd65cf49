"""A mixture-of-experts feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from rorqual.batch import ExchangeSize
from rorqual.distributed.expert_exchange import Choices, ExpertExchange, ExpertPlacement
from rorqual.distributed.mesh import Mesh
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import ReplicatedLinear
from rorqual.layers.mlp import GATE_UP_DOWN
from rorqual.layers.stacked_weight import Part, StackedWeight, kept_format
from rorqual.loader.layer import Layer, WantedTensor
from rorqual.loader.quantization_config import IntegerParts, LinearFormat, Quantization
from rorqual.ops.linear import Weight
from rorqual.ops.moe import (
    ExpertWeights,
    Routing,
    SparseMoEBlock,
    allocate_experts,
    fused_experts,
    prepare_experts,
    route_softmax,
)
from rorqual.ops.sum_in_order import sum_in_order
from rorqual.quantization import QTensor, QuantFormat


class Experts(Layer):
    """Gated feed-forward weights of every expert, each split over the ranks by its intermediate size; or, with expert
    parallelism, of the whole experts that this rank holds.

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
        self.num_experts, self.placement = num_experts, ExpertPlacement(num_experts, mesh)
        held = self.placement.held
        self.exchange: ExpertExchange | None = None
        """How tokens get to experts of ranks that have other tokens."""
        self.on_choices: Callable[[torch.Tensor], None] | None = None
        """Told which experts the tokens choose: [num_tokens, top_k]."""
        if mesh.expert_parallel and mesh.dp_size > 1:
            self.exchange = ExpertExchange(mesh, self.placement, add_up=sum_in_order)
        rows = slice(0, intermediate_size)
        if mesh.ep_size == 1:
            rows = mesh.shard(intermediate_size, what="moe_intermediate_size")
        formats = quantization.weight if quantization else None
        half, whole = Part(None, intermediate_size, rows), Part(None, hidden_size, slice(0, hidden_size))

        def memory(parts: Sequence[Part], columns: slice) -> Sequence[Weight | None]:
            if isinstance(formats, IntegerParts):
                return [None] * len(held)
            return allocate_experts(
                len(held),
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
            for e, kept in zip(held, memory([half, half], slice(0, hidden_size)), strict=True)
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
            for e, kept in zip(held, memory([whole], rows), strict=True)
        ]
        self.gate_up, self.down = (
            nn.ModuleDict({str(e): weight for e, weight in zip(held, weights, strict=True)})
            for weights in (self._gate_up, self._down)
        )
        self.activation = quantization.activation if quantization else None
        self._made: ExpertWeights | None = None

    def weights(self) -> ExpertWeights:
        """This rank's weights, for an op: its results are to be summed over the ranks. Experts are numbered from 0 on,
        as `ExpertPlacement.here` has it.

        The same each time, with what kernels made of them, until they are laid out anew.
        """
        if self._made is None:
            gate_up, down = (tuple(each.operand for each in weights) for weights in (self._gate_up, self._down))
            everywhere = self.num_experts if self.mesh.ep_size > 1 else None
            self._made = ExpertWeights(gate_up, down, self.activation, self.swiglu_limit, everywhere)
        return self._made

    def prepare(self) -> None:
        """Lay quantised experts out together; the modules below lay out what is left."""
        self._made = None
        for weights in (self._gate_up, self._down):
            if weights[0].format is not None:
                laid_out = prepare_experts(tuple(each.operand for each in weights))
                for each, made in zip(weights, laid_out, strict=True):
                    each.keep(made)

    def by_place(self) -> list[list[torch.Tensor]]:
        """All tensors that make up the experts here, each by place: what is written there the experts are.

        Raises ValueError for weights that are laid out otherwise.
        """
        found: list[list[torch.Tensor]] = []
        for weights in (self.weights().gate_up, self.weights().down):
            parts: list[tuple[torch.Tensor, ...]] = []
            for weight in weights:
                if isinstance(weight, QTensor):
                    parts.append((weight.values, weight.scales))
                elif isinstance(weight, torch.Tensor) and not weight.is_mkldnn:
                    parts.append((weight,))
                else:
                    kind = "oneDNN's layout" if isinstance(weight, torch.Tensor) else "integers"
                    raise ValueError(f"enable_eplb cannot move experts whose weights are {kind}: leave it out")
            found += [list(part) for part in zip(*parts, strict=True)]
        return found

    def share(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """This rank's part of the weighted sums, to be summed over the ranks that have these tokens; without exchange
        of tokens, which makes whole ones."""
        assert self.exchange is None
        self._tell_choices(routing)
        if self.mesh.ep_size > 1:
            places = self.placement.places(routing.expert_ids)
            routing = Routing(self.placement.here(places), routing.weights)
        return fused_experts(x, self.weights(), routing)

    def forward(self, x: torch.Tensor, routing: Routing, size: ExchangeSize | None = None) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the weighted sum of each token's experts, over all ranks. Several replicas
        that share experts need the size that they agreed on."""
        if self.exchange is None:
            return self.mesh.tp_all_reduce(self.share(x, routing))
        if size is None:
            raise ValueError("replicas that share experts must agree on a number of tokens: Batch.exchange has none")
        self._tell_choices(routing)

        def compute(rows: torch.Tensor, choices: Choices) -> torch.Tensor:
            return fused_experts(rows, self.weights(), Routing(*choices))

        return self.exchange.run(x, *routing, size, compute)

    def _tell_choices(self, routing: Routing) -> None:
        if self.on_choices is not None:
            self.on_choices(routing.expert_ids)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """gate, up and down of every expert that is here."""
        for expert, gate_up, down in zip(self.gate_up, self._gate_up, self._down, strict=True):
            gate_name, up_name, down_name = (f"{prefix}.{expert}.{name}" for name in self.names)
            yield from gate_up.wanted_parts([gate_name, up_name])
            yield from down.wanted_parts([down_name])

    def elsewhere(self, prefix: str) -> Iterator[str]:
        """The experts of other ranks."""
        yield from (f"{prefix}.{e}" for e in range(self.num_experts) if str(e) not in self.gate_up)


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
        """All of it, behind a norm, as one op takes it, which computes all experts here."""
        assert self.experts.mesh.ep_size == 1
        return SparseMoEBlock(norm.norm(), self.gate.product(), self.top_k, self.renormalize, self.experts.weights())

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, norm: RMSNorm, size: ExchangeSize | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the block's op computes, step by step and over all ranks, some of whose experts are elsewhere."""
        normed, total = norm.add(hidden, residual)
        routing = route_softmax(self.gate(normed), top_k=self.top_k, renormalize=self.renormalize)
        out: torch.Tensor = self.experts(normed, routing, size)
        return out, total


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
