"""The pre-norm decoder that Llama, Mistral and Qwen share: h += attention(norm(h)); h += mlp(norm(h))."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.cache.spec import KVSpec
from rorqual.cache.storage import KVStorage
from rorqual.distributed.mesh import Mesh
from rorqual.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import QKVParallelLinear, RowParallelLinear, heads_per_rank
from rorqual.layers.mlp import GatedMLP
from rorqual.layers.moe import SparseMoE
from rorqual.layers.rotary_embedding import RopeParameters, RotaryEmbedding, RotaryTables
from rorqual.loader.quantization_config import LinearFormat, Quantization
from rorqual.ops.decoder_blocks import (
    AttentionBlock,
    DecoderLayers,
    GatedMLPBlock,
    attention_block,
    decoder_layers,
    gated_mlp_block,
)
from rorqual.ops.moe import SparseMoEBlock, sparse_moe_block
from rorqual.ops.registry import are_calls_observed

FeedForward = GatedMLP | SparseMoE


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The shape of such a decoder, under the names of config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeParameters
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]
    """Per layer: keys that a query sees, itself included; None sees all."""
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each query and key head, before the rotary embedding."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model is built."""

    mesh: Mesh
    dtype: torch.dtype
    device: torch.device
    kv_cache_dtype: torch.dtype
    max_model_len: int
    rotary_tables: RotaryTables = field(default_factory=RotaryTables)
    """The model's own, so that its layers share them and two models do not."""
    quantization: Quantization | None = None
    """What the layers hold; `build_model` takes it from the config if it is not given here."""
    index_cache_format: Literal["plain", "fp8", "fp4"] = "plain"
    """What the keys of an indexer are kept in: numbers of kv_cache_dtype, or behind a Hadamard transform in FP8 or FP4,
    to which its queries are rounded too."""
    with_mtp: bool = False
    """Whether to build the multi-token-prediction blocks of a checkpoint that has them."""

    def format_of(self, prefix: str, *names: str) -> LinearFormat | None:
        """The format of the linear layers `names` below `prefix`, which are one product; None if not quantised."""
        return self.quantization.of(prefix, *names) if self.quantization else None

    def format_of_table(self, name: str) -> LinearFormat | None:
        """The format of the embedding or head called `name`; None if not quantised."""
        return self.quantization.of_table(name) if self.quantization else None


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary embedding, and optional norms on query and key heads."""

    def __init__(
        self, config: DecoderConfig, place: Placement, layer: int, spec: KVSpec, rotary: RotaryEmbedding
    ) -> None:
        super().__init__()
        dtype, device = place.dtype, place.device
        prefix = f"model.layers.{layer}.self_attn"
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim=config.head_dim,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            mesh=place.mesh,
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "q_proj", "k_proj", "v_proj"),
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            mesh=place.mesh,
            bias=config.o_bias,
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "o_proj"),
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.qk_norm = config.qk_norm
        self.rotary = rotary
        self.layer, self.spec = layer, spec

    def block(self, norm: RMSNorm) -> AttentionBlock:
        """All of it, behind a norm, as one op takes it."""
        return AttentionBlock(
            norm=norm.norm(),
            qkv=self.qkv_proj.product(),
            out=self.o_proj.product(),
            num_heads=self.qkv_proj.num_heads,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            head_dim=self.qkv_proj.head_dim,
            rotation=self.rotary.rotation(),
            query_norm=self.q_norm.norm() if self.qk_norm else None,
            key_norm=self.k_norm.norm() if self.qk_norm else None,
            scale=self.qkv_proj.head_dim**-0.5,
            sliding_window=self.spec.sliding_window,
        )


class DecoderLayer(nn.Module):
    """One attention and one feed-forward block, each behind a norm, with the residual carried beside."""

    def __init__(self, config: DecoderConfig, place: Placement, self_attn: SelfAttention, mlp: FeedForward) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=place.dtype, device=place.device) for _ in "12"
        )
        self.self_attn = self_attn
        self.mlp = mlp
        self.mesh = place.mesh

    @functools.cached_property
    def _attention(self) -> AttentionBlock:
        return self.self_attn.block(self.input_layernorm)

    @functools.cached_property
    def _feed_forward(self) -> GatedMLPBlock | SparseMoEBlock:
        return self.mlp.block(self.post_attention_layernorm)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: KVStorage
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) of [num_tokens, hidden_size] whose sum is the stream -> the same, one layer on.

        The weights are laid out by now, and stay where they are.
        """
        hidden, residual = attention_block(hidden, residual, self._attention, batch, kv[self.self_attn.layer])
        hidden = self.mesh.tp_all_reduce(hidden)
        if isinstance(self.mlp, SparseMoE) and self.mesh.ep_size > 1:
            hidden, residual = self.mlp(hidden, residual, self.post_attention_layernorm, batch.exchange)
            return hidden, residual
        if isinstance(self._feed_forward, SparseMoEBlock):
            hidden, residual = sparse_moe_block(hidden, residual, self._feed_forward)
        else:
            hidden, residual = gated_mlp_block(hidden, residual, self._feed_forward)
        return self.mesh.tp_all_reduce(hidden), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: DecoderConfig,
        place: Placement,
        kv_specs: Sequence[KVSpec],
        make_mlp: Callable[[int], FeedForward],
    ) -> None:
        super().__init__()
        dtype, device = place.dtype, place.device
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            mesh=place.mesh,
            dtype=dtype,
            device=device,
            quantization=place.format_of_table("model.embed_tokens"),
        )
        rotary = RotaryEmbedding(
            config.rope,
            config.head_dim,
            max_model_len=place.max_model_len,
            device=device,
            tables=place.rotary_tables,
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, place, SelfAttention(config, place, i, spec, rotary), make_mlp(i))
            for i, spec in enumerate(kv_specs)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device)

    @functools.cached_property
    def _as_one(self) -> tuple[DecoderLayers, tuple[int, ...]] | None:
        """All layers as one op takes them, and the numbers of their caches; None where ranks exchange in between, or
        there are mixtures of experts."""
        halves, numbers = [], []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            if layer.mesh.tp_size > 1 or isinstance(layer.mlp, SparseMoE):
                return None
            assert isinstance(layer._feed_forward, GatedMLPBlock)
            halves.append((layer._attention, layer._feed_forward))
            numbers.append(layer.self_attn.layer)
        return DecoderLayers(tuple(halves), self.norm.norm()), tuple(numbers)

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """-> [num_tokens, hidden_size], normalised."""
        hidden, residual = self.embed_tokens(batch.input_ids), None
        if self._as_one is not None and not are_calls_observed():
            layers, numbers = self._as_one
            return decoder_layers(hidden, layers, batch, kv.several(numbers))
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch, kv)
        return self.norm.add(hidden, residual)[0]


class CausalLM(nn.Module):
    """A decoder with a language-model head. `make_mlp(layer)` builds each layer's feed-forward block."""

    def __init__(self, config: DecoderConfig, place: Placement, make_mlp: Callable[[int], FeedForward]) -> None:
        super().__init__()
        self.vocab_size = config.vocab_size
        _, num_kv_heads = heads_per_rank(config.num_attention_heads, config.num_key_value_heads, place.mesh)
        self.kv_specs = [
            KVSpec(num_kv_heads, config.head_dim, place.kv_cache_dtype, window) for window in config.sliding_windows
        ]
        self.model = Decoder(config, place, self.kv_specs, make_mlp)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
            mesh=place.mesh,
            dtype=place.dtype,
            device=place.device,
            quantization=place.format_of_table("lm_head"),
        )
        self.tied_tensors = {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
        """Checkpoint names that may repeat another tensor."""

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """-> hidden states [num_tokens, hidden_size]; writes the batch's keys and values into kv."""
        hidden: torch.Tensor = self.model(batch, kv)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> [num_rows, vocab_size]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits
