"""What a model must read and multiply for a piece of work, and how long that takes at least on a machine.

Counted from the model's layers, without running any: each step reads every weight once (of a mixture of experts, those
that its tokens choose), each token multiplies with every weight that it meets, and attention reads the keys and values
that a query sees. Activations are not counted: they fit the caches of a chip. So nothing that computes the same can be
faster, except where weights stay in a cache between steps, or one step's reading hides behind another's products.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.engine.resolved_config import ResolvedConfig
from rorqual.layers.compressed_attention import CompressedAttention, cache_specs
from rorqual.layers.decoder import Placement, SelfAttention
from rorqual.layers.deepseek_moe import DeepseekMoE
from rorqual.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from rorqual.layers.hyper_connection import HyperConnection
from rorqual.layers.mla import LatentUpProjection, MLAttention
from rorqual.layers.moe import SparseMoE
from rorqual.layers.stacked_weight import StackedWeight
from rorqual.loader.layer import Layer
from rorqual.models.registry import Model, build_model

if TYPE_CHECKING:
    from rorqual.engine.resolved_config import ResolvedConfig


class Work(NamedTuple):
    """Bytes that must move and operations that must be done; a multiplication and an addition are two."""

    num_bytes: float
    flops: float


class Limits(NamedTuple):
    """What a device reaches at most."""

    bytes_per_s: float
    flops_per_s: float

    def seconds(self, work: Work) -> float:
        """The least time for work whose reading and computing overlap."""
        return max(work.num_bytes / self.bytes_per_s, work.flops / self.flops_per_s)


class Seen(NamedTuple):
    """Rows of one kind of cache that a query meets."""

    bytes_per_row: float
    flops_per_row: float
    """Of one query."""
    tokens_per_row: int = 1
    window: int | None = None
    """Tokens, the query's own included; None is all."""
    most: int | None = None
    """Rows, where some are chosen."""
    prompt_flops_per_row: float | None = None
    """Where prompts need fewer."""

    def rows(self, contexts: NDArray[np.int64]) -> int:
        """Rows that queries see together, each at the end of so many tokens."""
        seen = contexts if self.window is None else np.minimum(contexts, self.window)
        seen = seen // self.tokens_per_row
        return int((seen if self.most is None else np.minimum(seen, self.most)).sum())


class AttentionCost(NamedTuple):
    """Layers of one kind of attention."""

    num_layers: int
    seen: tuple[Seen, ...]
    bytes_per_token: float = 0.0
    """What each token writes and reads besides."""

    def decode(self, contexts: NDArray[np.int64]) -> Work:
        """One token for each sequence, which reads the rows that it sees."""
        rows = [(part, part.rows(contexts)) for part in self.seen]
        num_bytes = sum(part.bytes_per_row * count for part, count in rows) + self.bytes_per_token * len(contexts)
        flops = sum(part.flops_per_row * count for part, count in rows)
        return Work(self.num_layers * num_bytes, self.num_layers * flops)

    def prefill(self, prompt_lens: Sequence[int]) -> Work:
        """Whole prompts, whose rows move once."""
        num_tokens = sum(prompt_lens)
        num_bytes = num_tokens * (
            self.bytes_per_token + sum(part.bytes_per_row / part.tokens_per_row for part in self.seen)
        )
        flops = 0.0
        for length in prompt_lens:
            contexts = np.arange(1, length + 1)
            for part in self.seen:
                each = part.flops_per_row if part.prompt_flops_per_row is None else part.prompt_flops_per_row
                flops += each * part.rows(contexts)
        return Work(self.num_layers * num_bytes, self.num_layers * flops)


class ExpertsCost(NamedTuple):
    """Layers of one kind of mixture of experts."""

    num_layers: int
    num_experts: int
    top_k: int
    bytes_per_expert: float
    values_per_expert: float

    def expected_experts(self, num_tokens: float) -> float:
        """How many experts of a layer so many tokens choose, if each is as likely as any other for every token."""
        return float(self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_tokens))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model's sizes, as far as its speed depends on them."""

    dense_bytes: int
    """Weights that every step reads: projections, dense feed-forward blocks, routers, norms."""
    dense_values: int
    """Of them, those that every token is multiplied with."""
    head_bytes: int
    """The language-model head, the embedding's table if they are tied."""
    head_values: int
    attention: tuple[AttentionCost, ...]
    experts: tuple[ExpertsCost, ...]
    embedding_bytes: int = 0
    """The embedding's table where it is not the head's; a step reads few rows of it."""
    num_products: int = 0
    """Products with weights that a step makes one after the other; those of a layer's experts are two. A
    mix of streams is one."""

    @property
    def experts_bytes(self) -> float:
        """All routed experts."""
        return sum(kind.num_layers * kind.num_experts * kind.bytes_per_expert for kind in self.experts)

    @property
    def num_layers(self) -> int:
        """Layers with attention."""
        return sum(kind.num_layers for kind in self.attention)

    def weights(self, num_tokens: float, num_logits: float, *, num_steps: int = 1) -> Work:
        """The products of tokens and logits that are shared out evenly over steps."""
        num_bytes = float(num_steps * self.dense_bytes) + (self.head_bytes if num_logits else 0)
        flops = 2.0 * num_tokens * self.dense_values + 2.0 * num_logits * self.head_values
        for kind in self.experts:
            hit = num_steps * kind.expected_experts(num_tokens / num_steps)
            num_bytes += kind.num_layers * hit * kind.bytes_per_expert
            flops += 2.0 * num_tokens * kind.num_layers * kind.top_k * kind.values_per_expert
        return Work(num_bytes, flops)

    def decode_step(self, contexts: Sequence[int] | NDArray[np.int64]) -> Work:
        """One token for each sequence; `contexts` are the keys that each query sees, itself included."""
        work = self.weights(len(contexts), len(contexts))
        for kind in self.attention:
            work = _sum(work, kind.decode(np.asarray(contexts, np.int64)))
        return work

    def prefill(self, prompt_lens: Sequence[int], *, num_steps: int = 1) -> Work:
        """Whole prompts in so many steps, with the logits of each one's last token."""
        work = self.weights(sum(prompt_lens), len(prompt_lens), num_steps=num_steps)
        for kind in self.attention:
            work = _sum(work, kind.prefill(prompt_lens))
        return work


class Floor(NamedTuple):
    """The least work and time for a set of requests."""

    prefill: Work
    decode: Work
    prefill_s: float
    decode_s: float
    num_decode_steps: int

    @property
    def total_s(self) -> float:
        """Prompts, then decoding."""
        return self.prefill_s + self.decode_s


def model_cost(hf_config: Mapping[str, Any], resolved: ResolvedConfig) -> ModelCost:
    """Count a model, held in the formats that an engine has settled on. Allocates nothing.

    Mixing of several streams and pooling of entries are left out: their weights are read, their operations are few.
    """
    place = resolved.placement(torch.device("meta"), 1)
    return cost_of(build_model(hf_config, place), place)


def cost_of(model: Model, place: Placement) -> ModelCost:
    """What one rank holds and computes of a model that was built there, on whatever device."""
    assert isinstance(model, torch.nn.Module)
    attention: Counter[tuple[tuple[Seen, ...], float]] = Counter()
    experts: Counter[tuple[int, int, float, float]] = Counter()
    inside_experts: set[torch.nn.Module] = set()
    dense_bytes = dense_values = head_bytes = head_values = embedding_bytes = 0
    num_products = 1  # the head
    for module in model.modules():  # parents come before their children
        if module in inside_experts:
            continue
        if isinstance(module, VocabParallelEmbedding):
            embedding_bytes = 0 if model.tied_tensors else _bytes_of(module)
            continue
        if isinstance(module, ParallelLMHead):
            head_bytes, head_values = _bytes_of(module), _values_of(module)
            continue
        if isinstance(module, SelfAttention):
            attention[_of_keys(module)] += 1
        elif isinstance(module, MLAttention):
            attention[_of_latents(module)] += 1
        elif isinstance(module, CompressedAttention):
            attention[_of_entries(module, place)] += 1
        elif isinstance(module, SparseMoE | DeepseekMoE):
            parts = set(module.experts.modules())
            count, top_k = (
                (module.gate.num_rows, module.top_k)
                if isinstance(module, SparseMoE)
                else (module.gate.num_experts, module.gate.top_k)
            )
            held = len(module.experts.gate_up)  # of an expert-parallel mesh some
            num_bytes, num_values = (sum(map(of, parts)) / held for of in (_bytes_of, _values_of))
            experts[count, top_k, num_bytes, num_values] += 1
            inside_experts |= parts
            num_products += 2
        dense_values += _values_of(module)
        num_products += isinstance(module, StackedWeight | HyperConnection)
        # Loaded in the checkpoint's format, and then kept in plain numbers.
        unpacked = isinstance(module, LatentUpProjection)
        dense_bytes += _values_of(module) * place.dtype.itemsize if unpacked else _bytes_of(module)
    return ModelCost(
        dense_bytes=dense_bytes,
        dense_values=dense_values,
        head_bytes=head_bytes,
        head_values=head_values,
        attention=tuple(AttentionCost(layers, *kind) for kind, layers in attention.items()),
        experts=tuple(ExpertsCost(layers, *kind) for kind, layers in experts.items()),
        embedding_bytes=embedding_bytes,
        num_products=num_products,
    )


def _of_keys(layer: SelfAttention) -> tuple[tuple[Seen, ...], float]:
    spec = layer.spec
    flops = 4 * layer.qkv_proj.num_heads * spec.head_dim
    return (Seen(spec.bytes_per_row(), flops, window=spec.sliding_window),), 0.0


def _of_latents(layer: MLAttention) -> tuple[tuple[Seen, ...], float]:
    """Absorbed where answers go on; a prompt's pairs as few operations as its expanded keys and values take."""
    config, (latent, *index) = layer.config, layer.spec.parts
    absorbed, expanded = (
        2 * layer.num_heads * width
        for width in (
            2 * config.kv_lora_rank + config.qk_rope_head_dim,
            config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim,
        )
    )
    most = None if config.index is None else config.index.topk
    seen = [Seen(latent.bytes, absorbed, most=most, prompt_flops_per_row=min(absorbed, expanded))]
    if config.index is not None:
        seen.append(Seen(index[0].bytes, 2 * config.index.n_heads * (config.index.head_dim + 1)))
    return tuple(seen), 0.0


def _of_entries(layer: CompressedAttention, place: Placement) -> tuple[tuple[Seen, ...], float]:
    """A window; entries, all or the best of them, and their index keys; each token's state, written once and read by
    the entries that it is part of."""
    shape, kind = layer.shape, layer.kind
    window, *compressed = cache_specs(shape, kind, place)
    flops = 4 * layer.num_heads * shape.head_dim
    seen = [Seen(window.bytes_per_row(), flops, window=shape.sliding_window)]
    if not compressed:
        return tuple(seen), 0.0
    (entry, *index), states = compressed[0].parts, compressed[1]
    seen.append(Seen(entry.bytes, flops, kind.ratio, most=shape.index_topk if kind.sparse else None))
    if index:
        index_flops = 2 * shape.index_n_heads * (shape.index_head_dim + 1)
        seen.append(Seen(index[0].bytes, index_flops, kind.ratio))
    return tuple(seen), float(states.bytes_per_row() * (1 + kind.spans))


def workload_floor(
    cost: ModelCost,
    limits: Limits,
    prompt_lens: Sequence[int],
    output_lens: Sequence[int],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Floor:
    """The floor of requests that are all there at the start and share no prefix.

    Prompts take as few steps as their tokens allow, and give each request its first token. Then every sequence decodes
    in every step from when one of max_num_seqs places is free for it. Each part takes the longer of its reading and its
    computing, a decode step for itself.
    """
    num_steps = -(-sum(prompt_lens) // max_num_batched_tokens)
    prefill = cost.prefill(prompt_lens, num_steps=num_steps)
    starts, ends = _places(output_lens, max_num_seqs)
    first_contexts = np.asarray(prompt_lens, np.int64) + 1
    decode, decode_s, num_decode_steps = Work(0.0, 0.0), 0.0, int(ends.max())
    for step in range(num_decode_steps):
        running = (starts <= step) & (step < ends)
        work = cost.decode_step((first_contexts + (step - starts))[running])
        decode, decode_s = _sum(decode, work), decode_s + limits.seconds(work)
    return Floor(prefill, decode, limits.seconds(prefill), decode_s, num_decode_steps)


def _places(output_lens: Sequence[int], max_num_seqs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The decode steps [start, end) of each sequence, in order, as places become free."""
    free_at = [0] * min(max_num_seqs, len(output_lens))
    starts = np.zeros(len(output_lens), np.int64)
    ends = np.zeros_like(starts)
    for i, length in enumerate(output_lens):
        starts[i] = heapq.heappop(free_at)
        ends[i] = starts[i] + length - 1  # the first token came with the prompt
        heapq.heappush(free_at, int(ends[i]))
    return starts, ends


def visible_keys(length: int, window: int | None) -> int:
    """Keys that all tokens of a prompt see together: token i sees i + 1, or the window."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def _sum(one: Work, other: Work) -> Work:
    return Work(one.num_bytes + other.num_bytes, one.flops + other.flops)


def _bytes_of(module: torch.nn.Module) -> int:
    """Bytes of a module's own weights, without its children's."""
    plain = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
    return plain + (module.integer_bytes() if isinstance(module, Layer) else 0)


def _values_of(module: torch.nn.Module) -> int:
    return sum(module.format_sizes().values()) if isinstance(module, StackedWeight) else 0
