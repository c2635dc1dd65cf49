"""What a model takes and gives on several GPUs: the memory of a rank, room for keys and values, the time of a step.

Everything is counted, nothing runs: a rank's share of the model is built without memory, and a decode step is the work
of `roofline.py` by what a GPU reaches, and the exchanges between ranks by what a link carries, one after the other as
the engine makes them. docs/plan.md says what is counted how, and what was held against measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from rorqual.cache.sizing import blocks_for_tokens, bytes_per_sequence, bytes_per_token, plan_blocks
from rorqual.cache.spec import CacheGroup, group_caches
from rorqual.config import EngineConfig
from rorqual.distributed.expert_balance import num_physical_experts
from rorqual.distributed.expert_exchange import ROWS_TOGETHER
from rorqual.distributed.mesh import Mesh
from rorqual.engine.gpu_facts import GpuFacts
from rorqual.engine.memory import SLACK
from rorqual.engine.resolved_config import ResolvedConfig, resolve
from rorqual.engine.roofline import ExpertsCost, ModelCost, cost_of
from rorqual.engine.topology import (
    CacheRoom,
    DecodeStep,
    Exchange,
    Hosts,
    RankMemory,
    Resource,
    Topology,
    TopologyPlan,
)
from rorqual.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from rorqual.layers.stacked_weight import StackedWeight
from rorqual.loader.integer_quantization import choose_integers
from rorqual.loader.quantization_config import WeightQuantization, read_weight_quantization
from rorqual.models.registry import build_model
from rorqual.quantization.integer import IntegerFormat

PRODUCT_S = 8e-6
"""What a product with weights takes besides its bytes, and with it the small ops around it. Measured on an H200: steps
take 6 to 10 us for each product longer than their bytes, 10 to 13 where streams are mixed."""
_WORKSPACE_BYTES = 350 << 20
_GRAPH_BYTES_PER_LAYER = 30 << 20
_GROUP_BYTES = 512 << 20
"""Buffers for the exchange with other ranks: an allowance, not measured."""
_LOGIT_COPIES = 12.5
"""Float32 rows of logits that sampling holds at its peak. This and the first two sizes were measured."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank of a topology holds and computes."""

    topology: Topology
    cost: ModelCost
    """Of its replica's tokens; of experts that all ranks share, each whole one."""
    groups: tuple[CacheGroup, ...]
    hidden_size: int
    vocab_size: int
    widest: int
    """Outputs of its widest product, the head aside."""
    itemsize: int
    """Bytes of an activation."""
    num_redundant_experts: int

    def places(self, kind: ExpertsCost) -> int:
        """Of a layer's experts on all ranks that share them. Raises ValueError where these cannot share them."""
        ranks = self.topology.ep_size
        if self.num_redundant_experts:
            return num_physical_experts(kind.num_experts, self.num_redundant_experts, ranks)
        if kind.num_experts % ranks:
            raise ValueError(
                f"{kind.num_experts} experts cannot be shared by {ranks} ranks: plan with --num-redundant-experts "
                f"{-kind.num_experts % ranks}, or use a number of ranks that divides them"
            )
        return kind.num_experts

    def held_experts(self, kind: ExpertsCost) -> float:
        """Experts of a layer that this rank holds. Raises as `places`."""
        return self.places(kind) / self.topology.ep_size

    @property
    def experts_bytes(self) -> float:
        """Routed experts, with their replicas."""
        return sum(k.num_layers * self.held_experts(k) * k.bytes_per_expert for k in self.cost.experts)


def resolve_for_gpu(
    config: EngineConfig, hf_config: Mapping[str, Any], stored: Mapping[str, IntegerFormat] | None = None
) -> ResolvedConfig:
    """What an engine on one GPU makes of the options, on a machine that need not have one. Raises as `resolve`."""
    choose_integers(config.quantization, hf_config, stored or {}, dtype=config.dtype, device="cuda")  # or says why not
    answers = {
        "device": "cpu",
        "dtype": "float32" if config.dtype == "float32" else "bfloat16",  # float16 is as long
        "quantization": "auto",
        "max_num_batched_tokens": config.max_num_batched_tokens or max(8192, config.max_num_seqs or 0),
    }
    return resolve(config.model_copy(update=answers), hf_config)


class Planner:
    """Plans one model on GPUs of one kind. Shares that were built are kept."""

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        resolved: ResolvedConfig,
        gpu: GpuFacts,
        hosts: Hosts,
        *,
        utilization: float = 0.9,
        max_num_seqs: int | None = None,
        num_redundant_experts: int = 0,
        exchange: Literal["buffers", "rows"] | None = None,
    ) -> None:
        """`resolved` is one rank's; max_num_seqs None is 256 a replica, or what the largest batch needs.

        exchange: of decode steps between replicas that share experts. "buffers" go to every rank whole; "rows" go only
        to the ranks that hold one of their experts, which is the least. By default what the engine does: buffers within
        a host, rows beyond.
        """
        hosts.check()
        self.gpu, self.hosts = gpu, hosts
        self._hf_config, self._resolved = hf_config, resolved
        self._utilization, self._max_num_seqs = utilization, max_num_seqs
        self._num_redundant_experts, self._exchange = num_redundant_experts, exchange
        self._built: dict[tuple[int, bool], RankShare] = {}
        held = resolved.quantization or read_weight_quantization(hf_config)
        low = isinstance(held, WeightQuantization) and held.experts.activation is not None
        self._weight_flops_per_s = gpu.fp8_flops_per_s if low else gpu.bf16_flops_per_s

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture."""
        return bool(self._build(1, False).cost.experts)

    def share(self, topology: Topology) -> RankShare:
        """What a rank holds. Raises ValueError for sizes that the ranks cannot share."""
        if topology.expert_parallel and not self.has_experts:
            raise ValueError("the model has no routed experts to share: leave --enable-expert-parallel out")
        built = self._build(topology.tp_size, topology.expert_parallel and topology.tp_size > 1)
        redundant = self._num_redundant_experts if topology.expert_parallel else 0
        return dataclasses.replace(built, topology=topology, num_redundant_experts=redundant)

    def plan(self, topology: Topology, batches: Sequence[int], context: int) -> TopologyPlan:
        """Count a topology. Raises ValueError where its ranks cannot share the model, or it does not fit."""
        share = self.share(topology)
        most = -(-max(batches) // topology.dp_size)
        max_num_seqs = self._max_num_seqs or max(256, most)
        memory = self._memory(share, max_num_seqs)
        if memory.kv_cache <= 0:
            held = memory.dense + memory.tables + memory.experts
            raise ValueError(
                f"a rank's weights take {_gib(held)} and a step {_gib(memory.activations + memory.workspaces)} of the "
                f"{_gib(memory.total - memory.unused)} that --gpu-memory-utilization grants: more or larger "
                "GPUs must share them"
            )
        cache = self._cache(share, memory.kv_cache, max_num_seqs, context)
        if not cache.sequences:
            raise ValueError(
                f"weights leave {_gib(memory.kv_cache)} for keys and values, {cache.tokens:,} tokens: less than one "
                f"sequence of {context:,}: share the model among more ranks, or plan a shorter context"
            )
        runs = topology.dp_size * min(cache.sequences, max_num_seqs)
        steps = [self._step(share, batch, min(batch, runs), context) for batch in batches]
        return TopologyPlan(topology, memory, cache, tuple(steps))

    def _build(self, tp_size: int, expert_parallel: bool) -> RankShare:
        key = tp_size, expert_parallel
        if key not in self._built:
            mesh = Mesh.of_rank(0, tp_size=tp_size, expert_parallel=expert_parallel)
            place = dataclasses.replace(self._resolved.placement(torch.device("meta"), 1), mesh=mesh)
            model = build_model(self._hf_config, place)
            assert isinstance(model, torch.nn.Module)
            tables = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding | ParallelLMHead)]
            products = [m.num_rows for m in model.modules() if isinstance(m, StackedWeight) and m not in tables]
            self._built[key] = RankShare(
                topology=Topology(tp_size, 1),
                cost=cost_of(model, place),
                groups=group_caches(model.kv_specs),
                hidden_size=tables[0].in_features,
                vocab_size=model.vocab_size,
                widest=max(products),
                itemsize=place.dtype.itemsize,
                num_redundant_experts=0,
            )
        return self._built[key]

    def _memory(self, share: RankShare, max_num_seqs: int) -> RankMemory:
        cost, total = share.cost, self.gpu.memory_bytes
        tokens = self._resolved.max_num_batched_tokens
        hidden = tokens * share.hidden_size * share.itemsize
        sampling = 3 * hidden + _LOGIT_COPIES * max_num_seqs * share.vocab_size * 4
        widest = 3 * tokens * share.widest * share.itemsize
        split = share.topology.tp_size if share.topology.expert_parallel else 1
        for kind in cost.experts:  # gate, up, their product, and what goes down, of every choice of a token
            each = kind.values_per_expert / share.hidden_size + share.hidden_size
            widest = max(widest, int(tokens / split * kind.top_k * each * share.itemsize))
        connected = share.topology.tp_size > 1 or share.topology.expert_parallel
        workspaces = _WORKSPACE_BYTES + _GRAPH_BYTES_PER_LAYER * cost.num_layers + _GROUP_BYTES * connected
        parts = {
            "dense": cost.dense_bytes,
            "tables": cost.head_bytes + cost.embedding_bytes,
            "experts": int(share.experts_bytes),
            "activations": int(max(sampling, 6 * hidden + widest)),
            "workspaces": workspaces,
            "unused": total - int(total * self._utilization) + SLACK,
        }
        return RankMemory(total, **parts, kv_cache=total - sum(parts.values()))

    def _cache(self, share: RankShare, num_bytes: int, max_num_seqs: int, context: int) -> CacheRoom:
        resolved, groups = self._resolved, share.groups
        size, chunk = resolved.block_size, resolved.max_num_batched_tokens
        blocks = plan_blocks(groups, num_bytes, block_size=size, max_num_seqs=max_num_seqs, max_chunk=chunk)
        needed = blocks_for_tokens(groups, context, block_size=size, max_chunk=1)
        sized = dataclasses.replace(resolved, groups=groups, num_blocks=tuple(blocks))
        return CacheRoom(
            bytes_per_token=bytes_per_token(groups),
            bytes_per_sequence=bytes_per_sequence(groups, block_size=size),
            tokens=sized.num_kv_tokens,
            sequences=min(have // need for have, need in zip(blocks, needed, strict=True) if need),
        )

    def _step(self, share: RankShare, batch: int, running: int, context: int) -> DecodeStep:
        gpu, cost, topology = self.gpu, share.cost, share.topology
        sequences = -(-running // topology.dp_size)
        contexts = np.full(sequences, context, np.int64)
        attended = [kind.decode(contexts) for kind in cost.attention]
        attention_flops = sum(work.flops for work in attended)
        dense = dataclasses.replace(cost, experts=()).weights(sequences, sequences)
        expert_bytes = expert_flops = 0.0
        tokens = running if topology.expert_parallel else sequences
        for kind in cost.experts:
            hit = kind._replace(num_experts=share.places(kind)).expected_experts(tokens)
            expert_bytes += kind.num_layers * hit * kind.bytes_per_expert / topology.ep_size
            choices = tokens * kind.top_k / topology.ep_size
            expert_flops += 2.0 * choices * kind.num_layers * kind.values_per_expert
        memory_bytes = dense.num_bytes + expert_bytes + sum(work.num_bytes for work in attended)
        weight_flops = dense.flops + expert_flops
        return DecodeStep(
            batch=batch,
            running=running,
            context=context,
            memory_bytes=memory_bytes,
            memory_s=memory_bytes / gpu.bytes_per_s,
            flops=weight_flops + attention_flops,
            compute_s=weight_flops / self._weight_flops_per_s + attention_flops / gpu.bf16_flops_per_s,
            starting_s=cost.num_products * PRODUCT_S,
            all_reduce=self._all_reduce(share, sequences),
            all_to_all=self._all_to_all(share, sequences),
        )

    def _all_reduce(self, share: RankShare, sequences: int) -> Exchange:
        """One sum for the embedding and two in each layer; then the parts of the logits.

        Of more than two ranks each receives the others' rows and adds them up itself; two swap theirs.
        """
        size = share.topology.tp_size
        if size == 1:
            return Exchange()
        near, far = self.hosts.peers(size)
        calls = 2 + 2 * share.cost.num_layers
        values = (calls - 1) * share.hidden_size + share.vocab_size / size
        num_bytes = sequences * values * share.itemsize
        return self._exchange_of(calls, (near + far) * num_bytes, _gathered(num_bytes, near, far))

    def _all_to_all(self, share: RankShare, sequences: int) -> Exchange:
        """Tokens of replicas to the ranks that hold their experts, and back, in every layer with experts.

        Each rank of a replica sends its part of the tokens' rows with their choices, and gets sums back.
        """
        topology = share.topology
        if not topology.expert_parallel or topology.dp_size == 1:  # a replica alone has the same tokens on all ranks
            return Exchange()
        near, far = self.hosts.peers(topology.ep_size)
        tokens = -(-sequences // topology.tp_size)
        buffers = not far if self._exchange is None else self._exchange == "buffers"
        calls, sent, returned = 0, 0.0, 0.0
        for kind in share.cost.experts:
            held, calls_each, hit = share.held_experts(kind), 2, 1.0
            if buffers:  # rows, choices and sums, as many rows at once as there is room for
                calls_each = 3 * -(-tokens // max(1, ROWS_TOGETHER // topology.ep_size))
            else:
                hit = chance_of_a_choice(held, held * topology.ep_size, kind.top_k)
            row_bytes = share.hidden_size * share.itemsize
            calls += kind.num_layers * calls_each
            returned += kind.num_layers * hit * tokens * row_bytes
            sent += kind.num_layers * hit * tokens * (row_bytes + 8 * kind.top_k)
        there = _gathered(sent, near, far) if buffers else (near * sent, far * sent)
        over = there[0] + near * returned, there[1] + far * returned
        return self._exchange_of(calls, (near + far) * (sent + returned), over)

    def _exchange_of(self, calls: int, num_bytes: float, over: tuple[float, float]) -> Exchange:
        """`over` is the bytes of the link and of the network, which work side by side."""
        link_s, network_s = over[0] / self.gpu.link_bytes_per_s, over[1] / self.gpu.network_bytes_per_s
        start_s = self.gpu.network_latency_s if over[1] else self.gpu.link_latency_s
        slower: Resource = "network" if network_s > link_s else "link"
        return Exchange(calls, num_bytes, max(link_s, network_s), calls * start_s, slower)


def _gathered(num_bytes: float, near: int, far: int) -> tuple[float, float]:
    """What a GPU moves over link and network where every rank gets so many bytes of every other: what other hosts have
    comes to a host once, a part to each of its GPUs, and is handed on there."""
    return (near + far) * num_bytes, far / (near + 1) * num_bytes


def chance_of_a_choice(held: float, num_experts: float, top_k: int) -> float:
    """How likely one of a token's top_k different experts is among `held` ones, if all are equally likely."""
    missed = 1.0
    for chosen in range(top_k):
        missed *= max(0.0, 1 - held / (num_experts - chosen))
    return 1 - missed


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
