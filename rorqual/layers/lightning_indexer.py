"""The lightning indexer of DeepSeek-V3.2: which tokens a token should attend to. V4's asks in the same way."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.cache.spec import RowPart
from rorqual.layers.decoder import Placement
from rorqual.layers.linear import ReplicatedLinear
from rorqual.layers.rotary_embedding import RotaryEmbedding
from rorqual.loader.layer import Layer, WantedTensor, copy_into, weight_parameter
from rorqual.ops.kv_transform import CastStage, HadamardStage, RopeStage, transform_kv
from rorqual.ops.row_attention import RowList, RowRange
from rorqual.ops.row_cache import RowCache, store_rows
from rorqual.ops.select_rows import select_rows
from rorqual.quantization.kv_record import KVRecord, index_record

_NORM_EPS = 1e-6
"""Fixed in the reference code, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The indexer's shape, under the names of config.json without their `index_`."""

    n_heads: int
    head_dim: int
    topk: int


class LayerNorm(Layer):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in float32, rounded once."""

    def __init__(self, size: int, *, eps: float, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = (weight_parameter(size, dtype=torch.float32, device=device) for _ in "wb")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, size] -> the same shape and dtype."""
        return nn.functional.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """Weight and bias."""
        for name, tensor in (("weight", self.weight), ("bias", self.bias)):
            yield WantedTensor(f"{prefix}.{name}", tuple(tensor.shape), functools.partial(copy_into, tensor))


class IndexScorer(nn.Module):
    """The half of an indexer that asks: heads of queries from the attention's low-rank vector, and a weight for each.

    Keys are the other half, made in each model's way. Where they are kept in a record, they go through a Hadamard
    transform, and queries too, which are rounded to the same numbers.
    """

    def __init__(
        self,
        config: IndexConfig,
        place: Placement,
        prefix: str,
        *,
        hidden_size: int,
        q_lora_rank: int,
        record: KVRecord | None,
    ) -> None:
        super().__init__()
        dtype, device = place.dtype, place.device
        self.config = config
        self.wq_b = ReplicatedLinear(
            q_lora_rank,
            config.n_heads * config.head_dim,
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "wq_b"),
        )
        # Never quantised. Checkpoints hold it in bfloat16; sums are float32.
        self.weights_proj = ReplicatedLinear(
            hidden_size, config.n_heads, dtype=dtype, device=device, out_dtype=torch.float32
        )
        self.scale = (config.n_heads * config.head_dim) ** -0.5
        self.hadamard: HadamardStage | None = None
        self.cast: CastStage | None = None
        if record is not None and record.format is not None:
            self.hadamard = HadamardStage(config.head_dim**-0.5)
            self.cast = CastStage(record.format, cast_back=True)

    def select(
        self, x: torch.Tensor, q_low: torch.Tensor, keys: RowCache, rows: RowRange, rope: RopeStage, batch: Batch
    ) -> RowList:
        """The rows that each token, x [num_tokens, hidden_size] and q_low [num_tokens, q_lora_rank], attends to."""
        query = transform_kv(
            self.wq_b(q_low).view(-1, self.config.n_heads, self.config.head_dim),
            rope=rope,
            hadamard=self.hadamard,
            cast=self.cast,
        )
        assert isinstance(query, torch.Tensor)
        weights = self.weights_proj(x) * self.scale
        return RowList(select_rows(query, weights, keys, rows, batch, top_k=self.config.topk))


class LightningIndexer(IndexScorer):
    """Scores every cached token by sum over heads of weight_h * relu(q_h . k) and keeps the best.

    Queries come from the same low-rank vector as the attention's, keys are one per token and are cached. Every rank has
    all of it, since all ranks must choose alike. The first channels are rotated, in halves: not as the attention's.

    With an index cache in FP8 or FP4, queries and keys go through a Hadamard transform and are rounded to that format.
    """

    def __init__(
        self,
        config: IndexConfig,
        place: Placement,
        prefix: str,
        *,
        hidden_size: int,
        q_lora_rank: int,
        rotary: RotaryEmbedding,
    ) -> None:
        kind = place.index_cache_format
        record = None if kind == "plain" else index_record(config.head_dim, kind)
        super().__init__(config, place, prefix, hidden_size=hidden_size, q_lora_rank=q_lora_rank, record=record)
        self.rotary = rotary
        self.wk = ReplicatedLinear(
            hidden_size,
            config.head_dim,
            dtype=place.dtype,
            device=place.device,
            quantization=place.format_of(prefix, "wk"),
        )
        self.k_norm = LayerNorm(config.head_dim, eps=_NORM_EPS, device=place.device)
        self.part = RowPart(config.head_dim, place.kv_cache_dtype if record is None else place.dtype, record)
        """What it caches per token."""

    def forward(self, x: torch.Tensor, q_lora: torch.Tensor, cache: RowCache, rows: RowRange, batch: Batch) -> RowList:
        """The rows that each token attends to, of those that it sees.

        x [num_tokens, hidden_size], q_lora [num_tokens, q_lora_rank] behind its norm; writes the tokens' keys.
        """
        rope = RopeStage(batch.positions, self.rotary.cos_sin, self.rotary.interleaved, self.rotary.offset)
        slots = batch.caches[cache.group].slot_mapping
        store_rows(self.k_norm(self.wk(x)), cache, slots, rope=rope, hadamard=self.hadamard)
        return self.select(x, q_lora, cache, rows, rope, batch)
