"""The two halves of a pre-norm decoder layer, each as one op: on a CPU, a step of few tokens would otherwise spend more
time between kernels than in them.

Each reference is the sequence of ops that the half consists of, so that a device without a fused kernel runs its own
kernels for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.ops.attention import paged_attention
from rorqual.ops.linear import linear
from rorqual.ops.registry import op
from rorqual.ops.rms_norm import rms_norm
from rorqual.ops.rope import rotary_embedding
from rorqual.ops.silu_and_mul import silu_and_mul
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
def attention_block(
    hidden: torch.Tensor, residual: torch.Tensor | None, block: AttentionBlock, batch: Batch, cache: LayerKV
) -> tuple[torch.Tensor, torch.Tensor]:
    """(attention's output projection, hidden + residual), both [num_tokens, hidden_size]; the stream is the sum of
    hidden and residual. Writes the batch's keys and values into the cache.

    The sum is rounded to hidden's dtype, then normalised and projected to query, key and value; query and key heads are
    normalised (if the block has such norms) and rotated.
    """
    normed, total = add_norm(hidden, residual, block.norm)
    heads, kv_heads = block.num_heads, block.num_kv_heads
    qkv = block.qkv(normed).view(normed.shape[0], heads + 2 * kv_heads, block.head_dim)
    qk, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    query, key = qk[:, :heads], qk[:, heads:]
    turn: dict[str, Any] = {
        "interleaved": block.rotation.interleaved,
        "offset": block.rotation.offset,
        "inplace": True,
        "scratch": batch.scratch,
    }
    if block.query_norm is not None and block.key_norm is not None:
        query, key = _norm(query, block.query_norm), _norm(key, block.key_norm)
        rotary_embedding(query, batch.positions, block.rotation.cos_sin, key=key, **turn)
    else:  # query and key heads lie side by side: together they are one tensor
        rotary_embedding(qk, batch.positions, block.rotation.cos_sin, **turn)
    view = batch.caches[cache.group]
    store_kvcache(key, value, cache.key, cache.value, view.slot_mapping, scratch=batch.scratch)
    attended = paged_attention(
        query,
        cache.key,
        cache.value,
        batch,
        view.block_tables,
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
    return block.down(silu_and_mul(block.gate_up(normed))), total
