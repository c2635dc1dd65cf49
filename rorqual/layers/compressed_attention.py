"""DeepSeek-V4's attention: a window of shared keys and values, beside it compressed entries of all that came before.

Everything that a layer keeps lies in caches of rows: the window, the entries (with the indexer's keys where there is an
indexer), and the states that later entries are made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.cache.paging import Retention
from rorqual.cache.spec import RowPart, RowSpec
from rorqual.cache.storage import KVStorage
from rorqual.distributed.mesh import Mesh
from rorqual.layers.compressor import Compressor, state_width
from rorqual.layers.decoder import Placement
from rorqual.layers.float32_tensor import Float32Tensor
from rorqual.layers.grouped_linear import GroupedLinear
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.lightning_indexer import IndexConfig, IndexScorer
from rorqual.layers.linear import ColumnParallelLinear, RowParallelLinear
from rorqual.ops.kv_transform import NormStage, RopeStage, transform_kv
from rorqual.ops.rope import rotary_embedding
from rorqual.ops.row_attention import RowRange, RowSource, row_attention
from rorqual.ops.row_cache import store_rows
from rorqual.quantization.kv_record import KVRecord, entry_record, index_record


class LayerKind(NamedTuple):
    """What a layer attends to beside its window."""

    ratio: int
    """Tokens per compressed entry; 0 for none."""
    sparse: bool
    """Whether entries overlap, and an indexer chooses some of them for each token."""

    @property
    def spans(self) -> int:
        """Windows of `ratio` tokens that one entry pools."""
        return 2 if self.sparse else 1


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes that all layers share, under the names of config.json where those are as long."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    rope_dim: int
    """The last channels of a head, which are rotated."""
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    """Tokens that a token sees, itself included."""
    rms_norm_eps: float
    index_n_heads: int = 0
    index_head_dim: int = 0
    index_topk: int = 0


def cache_specs(shape: AttentionShape, kind: LayerKind, place: Placement) -> tuple[RowSpec, ...]:
    """What a layer keeps: the window, and where it compresses entries and states.

    Raises ValueError for formats that rows of this width cannot have.
    """
    packed = place.kv_cache_dtype == torch.float8_e4m3fn
    plain = place.dtype if packed else place.kv_cache_dtype
    entry = RowPart(shape.head_dim, plain, _entry_record(shape) if packed else None)
    window = RowSpec((entry,), retention=Retention(shape.sliding_window - 1))
    if not kind.ratio:
        return (window,)
    entries, widths = [entry], [shape.head_dim]
    if kind.sparse:
        entries.append(RowPart(shape.index_head_dim, plain, _index_record(shape, place)))
        widths.append(shape.index_head_dim)
    states = tuple(RowPart(state_width(width, overlap=kind.sparse), torch.float32) for width in widths)
    kept = Retention((kind.spans - 1) * kind.ratio, kind.ratio)
    return window, RowSpec(tuple(entries), tokens_per_row=kind.ratio), RowSpec(states, retention=kept)


def _entry_record(shape: AttentionShape) -> KVRecord:
    nope = shape.head_dim - shape.rope_dim
    if nope % 64 or not nope:
        raise ValueError(
            "an FP8 cache keeps the channels that are not rotated in blocks of 64, which do not divide the "
            f"{nope} of head_dim {shape.head_dim} and qk_rope_head_dim {shape.rope_dim}: use kv_cache_dtype auto"
        )
    return entry_record(nope, shape.rope_dim)


def _index_record(shape: AttentionShape, place: Placement) -> KVRecord | None:
    kind, dims = place.index_cache_format, shape.index_head_dim
    if kind == "plain":
        return None
    if dims & (dims - 1) or dims < 32:
        raise ValueError(
            f"index keys in {kind.upper()} go through a Hadamard transform and into blocks of 32 or more, so "
            f"index_head_dim must be a power of two from 32 on, got {dims}: use plain index keys"
        )
    return index_record(dims, kind)


class Indexer(IndexScorer):
    """Chooses the compressed entries that a token attends to, by scores of keys of its own."""

    def __init__(
        self, shape: AttentionShape, kind: LayerKind, place: Placement, prefix: str, *, cos_sin: torch.Tensor
    ) -> None:
        super().__init__(
            IndexConfig(shape.index_n_heads, shape.index_head_dim, shape.index_topk),
            place,
            prefix,
            hidden_size=shape.hidden_size,
            q_lora_rank=shape.q_lora_rank,
            record=_index_record(shape, place),
        )
        self.compressor = Compressor(
            shape.hidden_size,
            shape.index_head_dim,
            ratio=kind.ratio,
            overlap=kind.sparse,
            eps=shape.rms_norm_eps,
            cos_sin=cos_sin,
            hadamard=self.hadamard is not None,
            dtype=place.dtype,
            device=place.device,
        )


class CompressedAttention(nn.Module):
    """One layer's attention.

    Args:
        shape, kind: what it is.
        place: where and how it is built.
        prefix: its name in the checkpoint.
        cos_sin: the layer's rotary table, [max_position, rope_dim].
        first_cache: the number of its first cache; the others follow, as `cache_specs` has them.
    """

    def __init__(
        self,
        shape: AttentionShape,
        kind: LayerKind,
        place: Placement,
        prefix: str,
        *,
        cos_sin: torch.Tensor,
        first_cache: int,
    ) -> None:
        super().__init__()
        mesh, dtype, device = place.mesh, place.dtype, place.device
        heads = mesh.shard(shape.num_attention_heads, what="num_attention_heads")
        self.shape, self.kind, self.num_heads = shape, kind, heads.stop - heads.start
        self.cos_sin, self.first_cache = cos_sin, first_cache
        eps, width = shape.rms_norm_eps, shape.num_attention_heads * shape.head_dim
        self.wq_a_wkv = ColumnParallelLinear(
            shape.hidden_size,
            {"wq_a": shape.q_lora_rank, "wkv": shape.head_dim},
            mesh=Mesh.single(),  # all heads share them
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "wq_a", "wkv"),
        )
        self.q_norm = RMSNorm(shape.q_lora_rank, eps=eps, dtype=dtype, device=device)
        self.kv_norm = RMSNorm(shape.head_dim, eps=eps, dtype=dtype, device=device)
        self.wq_b = ColumnParallelLinear(
            shape.q_lora_rank,
            {"wq_b": width},
            mesh=mesh,
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "wq_b"),
        )
        self._head_norm = NormStage(torch.ones(shape.head_dim, dtype=dtype, device=device), eps)  # has no weight
        self.attn_sink = Float32Tensor(shape.num_attention_heads, rows=heads, device=device)
        self.wo_a = GroupedLinear(
            shape.o_groups,
            width // shape.o_groups,
            shape.o_lora_rank,
            mesh=mesh,
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "wo_a"),
        )
        self.wo_b = RowParallelLinear(
            shape.o_groups * shape.o_lora_rank,
            shape.hidden_size,
            mesh=mesh,
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "wo_b"),
        )
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        if kind.ratio:
            self.compressor = Compressor(
                shape.hidden_size,
                shape.head_dim,
                ratio=kind.ratio,
                overlap=kind.sparse,
                eps=eps,
                cos_sin=cos_sin,
                hadamard=False,
                dtype=dtype,
                device=device,
            )
        if kind.sparse:
            self.indexer = Indexer(shape, kind, place, f"{prefix}.indexer", cos_sin=cos_sin)

    def forward(self, x: torch.Tensor, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """x [num_tokens, hidden_size], normed -> the same shape; writes the batch's rows into kv."""
        shape, num_tokens = self.shape, len(x)
        rope = RopeStage(batch.positions, self.cos_sin, interleaved=True)
        low, row = self.wq_a_wkv(x).split((shape.q_lora_rank, shape.head_dim), dim=-1)
        low = self.q_norm(low)
        heads = self.wq_b(low).view(num_tokens, self.num_heads, shape.head_dim)
        query = transform_kv(heads, norm=self._head_norm, rope=rope)
        assert isinstance(query, torch.Tensor)

        (window,) = kv.rows(self.first_cache)
        norm = NormStage(self.kv_norm.weight.data, self.kv_norm.eps)
        store_rows(row, window, batch.caches[window.group].slot_mapping, norm=norm, rope=rope)
        sources = [RowSource(window, _last_rows(batch, window.group, shape.sliding_window))]
        if self.compressor is not None:
            sources.append(self._compress(self.compressor, x, low, rope, batch, kv))
        out = row_attention(
            query,
            sources,
            batch,
            scale=shape.head_dim**-0.5,
            value_dim=shape.head_dim,
            sinks=self.attn_sink.tensor,
        )
        # Values carry the rotation of their own positions; turned back by the query's, what is left is the distance.
        out = rotary_embedding(
            out,
            batch.positions,
            self.cos_sin,
            interleaved=True,
            offset=shape.head_dim - shape.rope_dim,
            conjugate=True,
            inplace=True,
            scratch=batch.scratch,
        ).query
        grouped = self.wo_a(out.reshape(num_tokens, self.wo_a.num_groups, self.wo_a.in_features))
        merged: torch.Tensor = self.wo_b(grouped.flatten(1))
        return merged

    def _compress(
        self,
        compressor: Compressor,
        x: torch.Tensor,
        low: torch.Tensor,
        rope: RopeStage,
        batch: Batch,
        kv: KVStorage,
    ) -> RowSource:
        """Write the tokens' states and entries; the entries that each token attends to."""
        entries, *keys = kv.rows(self.first_cache + 1)
        states, *key_states = kv.rows(self.first_cache + 2)
        compressor(x, states, entries, batch)
        rows = _complete_rows(batch, entries.group, self.kind.ratio)
        if self.indexer is None:
            return RowSource(entries, rows)
        self.indexer.compressor(x, key_states[0], keys[0], batch)
        return RowSource(entries, self.indexer.select(x, low, keys[0], rows, rope, batch))


def _last_rows(batch: Batch, group: int, window: int) -> RowRange:
    """The rows of each token and of those before it, `window` in all."""

    def make() -> RowRange:
        stop = batch.positions.int() + 1
        return RowRange(batch.caches[group].block_tables, (stop - window).clamp_(min=0), stop, window)

    return batch.once(("last_rows", group, window), make)


def _complete_rows(batch: Batch, group: int, ratio: int) -> RowRange:
    """The entries that are complete with each token, itself included."""

    def make() -> RowRange:
        stop = (batch.positions.int() + 1) // ratio
        return RowRange(batch.caches[group].block_tables, None, stop)

    return batch.once(("complete_rows", group, ratio), make)
