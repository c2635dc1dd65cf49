"""The two halves of a pre-norm decoder layer, each as one op, and all layers as one: on a CPU, a step of few tokens
would otherwise spend more time between kernels than in them.

Each reference is the sequence of ops that it consists of, so that a device without a fused kernel runs its own kernels
for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.attention import paged_attention
from rorqual.ops.gated_linear import gated_linear
from rorqual.ops.linear import linear
from rorqual.ops.registry import op
from rorqual.ops.rms_norm import rms_norm
from rorqual.ops.rope import rotary_embedding
from rorqual.ops.store_kvcache import LayerKV, store_kvcache
from rorqual.quantization import QTensor


class Product(NamedTuple):
    """What `linear` takes beside the input."""

    weight: Any
    """As `prepare_weight` made it."""
    bias: torch.Tensor | None = None
    options: dict[str, Any] = {}  # noqa: RUF012 - never written to

    def __call__(self, x: torch.Tensor | QTensor) -> torch.Tensor:
        """The product with x [num_tokens, in_features]."""
        return linear(x, self.weight, self.bias, **self.options)


class Norm(NamedTuple):
    """An RMSNorm."""

    weight: torch.Tensor
    eps: float


class Rotation(NamedTuple):
    """A rotary embedding; see `rotary_embedding`."""

    cos_sin: torch.Tensor
    interleaved: bool
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """A layer's norm, projections and attention."""

    norm: Norm
    qkv: Product
    out: Product
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotation: Rotation
    query_norm: Norm | None
    key_norm: Norm | None
    scale: float
    sliding_window: int | None
    prepared: dict[str, Any] = field(default_factory=dict)
    """What kernels made of the above, by backend."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLPBlock:
    """A layer's second norm and its gated feed-forward block."""

    norm: Norm
    gate_up: Product
    down: Product
    prepared: dict[str, Any] = field(default_factory=dict)
    """What kernels made of the above, by backend."""


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayers:
    """The halves of consecutive layers, and the norm behind the last one."""

    halves: tuple[tuple[AttentionBlock, GatedMLPBlock], ...]
    norm: Norm
    prepared: dict[str, Any] = field(default_factory=dict)
    """What kernels made of the above, by backend."""


def _norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    out = rms_norm(x, norm.weight, eps=norm.eps).out
    assert isinstance(out, torch.Tensor)
    return out


def add_norm(hidden: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(s), s) of s = hidden + residual, rounded. All [num_tokens, hidden_size]."""
    if residual is None:
        return _norm(hidden, norm), hidden
    out, total, _ = rms_norm(hidden, norm.weight, eps=norm.eps, residual=residual)
    assert isinstance(out, torch.Tensor)
    assert total is not None
    return out, total


@op
def rotate_and_store(
    qkv: torch.Tensor,
    batch: Batch,
    cache: LayerKV,
    *,
    num_heads: int,
    rotation: Rotation,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
) -> torch.Tensor:
    """Normalise (if there are norms, then of both) and rotate query and key heads, and write keys and values into the
    cache, where the batch's slots say.

    qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim], query then key then value, may be overwritten. Each stage
    rounds to its dtype. Returns the query heads [num_tokens, num_heads, head_dim].
    """
    num_kv_heads = cache.key.shape[2]
    qk, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    query, key = qk[:, :num_heads], qk[:, num_heads:]
    turn: dict[str, Any] = {
        "interleaved": rotation.interleaved,
        "offset": rotation.offset,
        "inplace": True,
        "scratch": batch.scratch,
    }
    if query_norm is not None and key_norm is not None:
        query, key = _norm(query, query_norm), _norm(key, key_norm)
        rotary_embedding(query, batch.positions, rotation.cos_sin, key=key, **turn)
    else:  # query and key heads lie side by side: together they are one tensor
        rotary_embedding(qk, batch.positions, rotation.cos_sin, **turn)
    slots = batch.caches[cache.group].slot_mapping
    store_kvcache(key, value, cache.key, cache.value, slots, scratch=batch.scratch)
    return query


@op
def attention_block(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: AttentionBlock, batch: Batch, cache: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention's output projection, hidden + residual), both [num_tokens, hidden_size]; the stream is the sum of
    hidden and residual. Writes the batch's keys and values into the cache.

    The sum is rounded to hidden's dtype, then normalised and projected to query, key and value; query and key heads are
    normalised (if the block has such norms) and rotated.
    """
    normed, total = add_norm(hidden, residual, block.norm)
    qkv = block.qkv(normed).view(normed.shape[0], block.num_heads + 2 * block.num_kv_heads, block.head_dim)
    query = rotate_and_store(
        qkv,
        batch,
        cache,
        num_heads=block.num_heads,
        rotation=block.rotation,
        query_norm=block.query_norm,
        key_norm=block.key_norm,
    )
    attended = paged_attention(
        query,
        cache.key,
        cache.value,
        batch,
        batch.caches[cache.group].block_tables,
        scale=block.scale,
        sliding_window=block.sliding_window,
    )
    return block.out(attended.flatten(1)), total


@op
def gated_mlp_block(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: GatedMLPBlock
) -> tuple[torch.Tensor, torch.Tensor]:
    """(down(silu(gate(norm(s))) * up(norm(s))), s) of s = hidden + residual, rounded. All [num_tokens, hidden_size]."""
    normed, total = add_norm(hidden, residual, block.norm)
    gate_up = block.gate_up
    return block.down(gated_linear(normed, gate_up.weight, gate_up.bias, **gate_up.options)), total


@op
def decoder_layers(
    hidden: torch.Tensor, layers: DecoderLayers, batch: Batch, caches: tuple[LayerKV, ...]
) -> torch.Tensor:
    """One layer after the other, each with its cache: hidden [num_tokens, hidden_size] -> the stream behind the last
    one, normalised, of the same shape. Kernels know caches again by their tuple."""
    residual: torch.Tensor | None = None
    for (attention, feed_forward), cache in zip(layers.halves, caches, strict=True):
        hidden, residual = attention_block(hidden, residual, attention, batch, cache)
        hidden, residual = gated_mlp_block(hidden, residual, feed_forward)
    return add_norm(hidden, residual, layers.norm)[0]
