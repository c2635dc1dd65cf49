"""The mixture of experts of DeepSeek-V3 and V4: experts by their own scores, or by the token, beside shared ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from rorqual.batch import ExchangeSize
from rorqual.distributed.mesh import Mesh
from rorqual.layers.linear import ReplicatedLinear
from rorqual.layers.mlp import GATE_UP_DOWN, GatedMLP
from rorqual.layers.moe import Experts, format_of_experts
from rorqual.loader.layer import WantedTensor, copy_into, sibling, weight_parameter
from rorqual.loader.quantization_config import Quantization
from rorqual.ops.moe import Routing, Scoring, TokenTable, route_scores


class MoENames(NamedTuple):
    """The checkpoint's names below the block's own."""

    bias: str = "gate.e_score_correction_bias"
    """What is added to the scores to choose experts."""
    projections: tuple[str, str, str] = GATE_UP_DOWN
    """Gate, up and down of an expert, and of the shared ones."""
    table: str = "gate.tid2eid"
    """Token -> experts."""


class Router(ReplicatedLinear):
    """A row of logits for each token, float32, and the experts that follow. Its weight is never quantised."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        top_k: int,
        scoring: Scoring,
        renormalize: bool,
        scale: float,
        num_groups: int,
        top_groups: int,
        has_bias: bool,
        hash_vocab_size: int | None,
        names: MoENames,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(hidden_size, num_experts, dtype=dtype, device=device, out_dtype=torch.float32)
        _check_groups(num_experts, top_k, num_groups, top_groups)
        self.num_experts, self.top_k, self.scoring = num_experts, top_k, scoring
        self.renormalize, self.scale = renormalize, scale
        self.num_groups, self.top_groups, self.names = num_groups, top_groups, names
        self.correction_bias: nn.Parameter | None = None
        self.table: torch.Tensor | None
        if hash_vocab_size is None:
            self.register_buffer("table", None)
        else:  # one that a made-up model can use, until it is loaded
            every = torch.arange(hash_vocab_size * top_k, dtype=torch.int32, device=device)
            self.register_buffer("table", every.view(hash_vocab_size, top_k) % num_experts)
        if has_bias and hash_vocab_size is None:
            self.correction_bias = weight_parameter(num_experts, dtype=torch.float32, device=device)

    def route(self, x: torch.Tensor, input_ids: torch.Tensor) -> Routing:
        """x [num_tokens, hidden_size], input_ids [num_tokens] -> the experts of each token, with float32 weights."""
        return route_scores(
            self(x),
            scoring=self.scoring,
            top_k=self.top_k,
            renormalize=self.renormalize,
            scale=self.scale,
            bias=None if self.correction_bias is None else self.correction_bias.data,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            table=None if self.table is None else TokenTable(self.table, input_ids),
        )

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The weight, and the bias or the table if there is one."""
        yield from super().wanted(prefix)
        if self.correction_bias is not None:
            bias = self.correction_bias
            yield WantedTensor(sibling(prefix, self.names.bias), tuple(bias.shape), lambda it: copy_into(bias, it))
        if self.table is not None:
            yield WantedTensor(sibling(prefix, self.names.table), tuple(self.table.shape), self._copy_table)

    def _copy_table(self, loaded: torch.Tensor) -> None:
        assert self.table is not None
        if loaded.is_floating_point():
            raise TypeError(f"a table of experts has whole numbers, got {loaded.dtype}")
        if loaded.numel() and not 0 <= int(loaded.min()) <= int(loaded.max()) < self.num_experts:
            last = self.num_experts - 1
            raise ValueError(f"experts are numbered from 0 to {last}, got {int(loaded.min())} to {int(loaded.max())}")
        copy_into(self.table, loaded)


class DeepseekMoE(nn.Module):
    """Routed experts plus shared experts, which every token uses.

    Args:
        hidden_size: of the tokens' vectors.
        intermediate_size: of one expert; the shared experts are one of `num_shared_experts` times that width.
        num_experts, top_k: routed experts, and how many of them a token uses.
        num_shared_experts: 0 for none.
        scoring, renormalize, routed_scaling_factor, num_groups, top_groups: as `route_scores` takes them.
        has_bias: whether the checkpoint has a correction bias.
        hash_vocab_size: the token's number decides which experts, by a table of so many tokens; there is no bias then.
        swiglu_limit: of routed and shared experts; see `silu_and_mul`.
        names: the checkpoint's, below `prefix`, the block's own name there.
        mesh: experts are split over its ranks as `Experts` says, shared ones by their intermediate size.
        quantization: the formats of experts and shared experts.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        num_shared_experts: int,
        scoring: Scoring,
        renormalize: bool,
        routed_scaling_factor: float,
        num_groups: int = 1,
        top_groups: int = 1,
        has_bias: bool = True,
        hash_vocab_size: int | None = None,
        swiglu_limit: float | None = None,
        names: MoENames = MoENames(),  # noqa: B008 - never changed
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        quantization: Quantization | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.mesh = mesh
        self.gate = Router(
            hidden_size,
            num_experts,
            top_k=top_k,
            scoring=scoring,
            renormalize=renormalize,
            scale=routed_scaling_factor,
            num_groups=num_groups,
            top_groups=top_groups,
            has_bias=has_bias,
            hash_vocab_size=hash_vocab_size,
            names=names,
            dtype=dtype,
            device=device,
        )
        self.experts = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            mesh=mesh,
            dtype=dtype,
            device=device,
            quantization=format_of_experts(quantization, f"{prefix}.experts", num_experts, names.projections),
            names=names.projections,
            swiglu_limit=swiglu_limit,
        )
        self.shared_experts: GatedMLP | None = None
        if num_shared_experts:
            self.shared_experts = GatedMLP(
                hidden_size,
                num_shared_experts * intermediate_size,
                mesh=mesh,
                dtype=dtype,
                device=device,
                quantization=quantization,
                prefix=f"{prefix}.shared_experts",
                names=names.projections,
                limit=swiglu_limit,
            )

    def forward(self, x: torch.Tensor, input_ids: torch.Tensor, size: ExchangeSize | None = None) -> torch.Tensor:
        """x [num_tokens, hidden_size] and the tokens' numbers [num_tokens] -> [num_tokens, hidden_size].

        size: see `Experts.forward`.
        """
        routing = self.gate.route(x, input_ids)
        if self.experts.exchange is not None:  # whose results are whole
            exchanged: torch.Tensor = self.experts(x, routing, size)
            return exchanged if self.shared_experts is None else exchanged + self.shared_experts(x)
        out = self.experts.share(x, routing)
        if self.shared_experts is not None:
            out += self.shared_experts.share(x)
        return self.mesh.tp_all_reduce(out)


def _check_groups(num_experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    """Raise ValueError for a routing that cannot be."""
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"n_group must divide the {num_experts} experts, and topk_group be from 1 to n_group, "
            f"got n_group {num_groups} and topk_group {top_groups}"
        )
    size = num_experts // num_groups
    if not 1 <= top_k <= top_groups * size or (top_groups < num_groups and size < 2):
        raise ValueError(
            f"num_experts_per_tok ({top_k}) must be from 1 to the {top_groups * size} experts of topk_group "
            f"({top_groups}) groups, which have two experts or more; got groups of {size}"
        )
