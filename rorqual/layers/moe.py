"""A mixture-of-experts feed-forward block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from rorqual.distributed.mesh import Mesh
from rorqual.layers.linear import ReplicatedLinear
from rorqual.loader.layer import Layer, WantedTensor, weight_parameter
from rorqual.ops.linear import prepare_weight
from rorqual.ops.moe import Routing, fused_experts, route_softmax


class Experts(Layer):
    """Gated feed-forward weights of every expert, each split over the ranks by its intermediate size."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.mesh, self.hidden_size, self.intermediate_size = mesh, hidden_size, intermediate_size
        self._rows = mesh.shard(intermediate_size, what="moe_intermediate_size")
        inter = self._rows.stop - self._rows.start
        self.gate_up = nn.ParameterList(
            weight_parameter(2 * inter, hidden_size, dtype=dtype, device=device) for _ in range(num_experts)
        )
        self.down = nn.ParameterList(
            weight_parameter(hidden_size, inter, dtype=dtype, device=device) for _ in range(num_experts)
        )
        self._gate_up_list: list[torch.Tensor] = list(self.gate_up)
        self._down_list: list[torch.Tensor] = list(self.down)

    def forward(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the weighted sum of each token's experts, over all ranks."""
        return self.mesh.tp_all_reduce(fused_experts(x, self._gate_up_list, self._down_list, routing))

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """gate_proj, up_proj and down_proj of every expert."""
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            for name, target in (("gate_proj", gate), ("up_proj", up)):
                yield self._wanted_rows(f"{prefix}.{expert}.{name}.weight", target)
            yield self._wanted_columns(f"{prefix}.{expert}.down_proj.weight", down)

    def _wanted_rows(self, name: str, target: torch.Tensor) -> WantedTensor:
        def copy(whole: torch.Tensor) -> None:
            target.copy_(whole[self._rows])

        return WantedTensor(name, (self.intermediate_size, self.hidden_size), copy)

    def _wanted_columns(self, name: str, target: torch.Tensor) -> WantedTensor:
        def copy(whole: torch.Tensor) -> None:
            target.copy_(whole[:, self._rows])

        return WantedTensor(name, (self.hidden_size, self.intermediate_size), copy)

    def prepare(self) -> None:
        """Lay every expert's weights out for the linear kernel."""
        for params, plain in ((self.gate_up, self._gate_up_list), (self.down, self._down_list)):
            for i, weight in enumerate(params):
                params[i] = nn.Parameter(prepare_weight(weight.data), requires_grad=False)
            plain[:] = list(params)


class SparseMoE(nn.Module):
    """Softmax-routed experts, as in Qwen3-MoE."""

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
    ) -> None:
        super().__init__()
        self.top_k, self.renormalize = top_k, renormalize
        self.gate = ReplicatedLinear(hidden_size, num_experts, dtype=dtype, device=device)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, mesh=mesh, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        routing = route_softmax(self.gate(x), top_k=self.top_k, renormalize=self.renormalize)
        out: torch.Tensor = self.experts(x, routing)
        return out
