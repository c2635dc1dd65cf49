"""DeepSeek-V4's layers put together, and what its checkpoints call them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.cache.spec import CacheSpec
from rorqual.cache.storage import KVStorage
from rorqual.layers.compressed_attention import CompressedAttention, cache_specs
from rorqual.layers.decoder import Placement
from rorqual.layers.deepseek_moe import DeepseekMoE, MoENames
from rorqual.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from rorqual.layers.hyper_connection import HyperConnection
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import ReplicatedLinear
from rorqual.models.deepseek_v4.config import WINDOW, DeepseekV4Config
from rorqual.ops.hyper_connection import (
    StreamMix,
    collapse_streams,
    merge_and_mix_streams,
    merge_streams,
    mix_streams,
)
from rorqual.ops.kv_transform import NormStage

_MOE_NAMES = MoENames(bias="gate.bias", projections=("w1", "w3", "w2"))
_RESAVED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\."), "embed."),
    (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^hc_head\.hc_"), "hc_head_"),
    (re.compile(r"^(layers\.\d+\.attn)\.norm\."), r"\1.kv_norm."),
)
"""What transformers writes where DeepSeek has another name."""


class Sublayer(NamedTuple):
    """One of the two halves of a layer."""

    mix: StreamMix
    norm: NormStage
    run: Callable[[torch.Tensor, Batch, KVStorage], torch.Tensor]
    """Its input [num_tokens, hidden_size], behind mix and norm -> its output."""


class Block(nn.Module):
    """One attention and one mixture of experts, the streams mixed before each and merged behind it."""

    def __init__(
        self, config: DeepseekV4Config, place: Placement, prefix: str, *, layer: int, first_cache: int
    ) -> None:
        """`layer` is its number; those from the number of layers on have windows alone."""
        super().__init__()
        shape, dtype, device = config.attention, place.dtype, place.device
        kind = config.layer_kinds[layer] if layer < len(config.layer_kinds) else WINDOW
        self.attn_norm, self.ffn_norm = (_norm(config, place) for _ in "12")
        self.hc_attn, self.hc_ffn = (_connection(config, place) for _ in "12")
        cos_sin = place.rotary_tables.get(
            config.compress_rope if kind.ratio else config.main_rope,
            shape.rope_dim,
            max_model_len=place.max_model_len,
            device=device,
        )
        self.attn = CompressedAttention(shape, kind, place, f"{prefix}.attn", cos_sin=cos_sin, first_cache=first_cache)
        self.ffn = DeepseekMoE(
            shape.hidden_size,
            config.moe_intermediate_size,
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            num_shared_experts=config.n_shared_experts,
            scoring="sqrtsoftplus",
            renormalize=True,
            routed_scaling_factor=config.routed_scaling_factor,
            has_bias=layer not in config.hash_layers,
            hash_vocab_size=config.vocab_size if layer in config.hash_layers else None,
            swiglu_limit=config.swiglu_limit,
            names=_MOE_NAMES,
            mesh=place.mesh,
            dtype=dtype,
            device=device,
            quantization=place.quantization,
            prefix=f"{prefix}.ffn",
        )

    @functools.cached_property
    def sublayers(self) -> tuple[Sublayer, Sublayer]:
        """Attention, then experts. The weights are there by now, and stay where they are."""

        def experts(x: torch.Tensor, batch: Batch, _kv: KVStorage) -> torch.Tensor:
            out: torch.Tensor = self.ffn(x, batch.input_ids, batch.exchange)
            return out

        return (
            Sublayer(self.hc_attn.mix(), _stage(self.attn_norm), self.attn),
            Sublayer(self.hc_ffn.mix(), _stage(self.ffn_norm), experts),
        )


class MTPBlock(Block):
    """Predicts the token after the next one, from the streams of a token and the next token."""

    def __init__(
        self, config: DeepseekV4Config, place: Placement, prefix: str, *, layer: int, first_cache: int
    ) -> None:
        super().__init__(config, place, prefix, layer=layer, first_cache=first_cache)
        size = config.attention.hidden_size
        self.e_proj, self.h_proj = (
            ReplicatedLinear(
                size, size, dtype=place.dtype, device=place.device, quantization=place.format_of(prefix, name)
            )
            for name in ("e_proj", "h_proj")
        )
        self.enorm, self.hnorm, self.norm = (_norm(config, place) for _ in "123")
        self.hc_head = _connection(config, place, head=True)

    def forward(self, streams: torch.Tensor, embedded: torch.Tensor, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """Streams [num_tokens, N, hidden_size] behind the last layer, and the embeddings [num_tokens, hidden_size] of
        the tokens that follow -> what the head reads, [num_tokens, hidden_size]."""
        from_streams = self.h_proj(self.hnorm(streams))
        streams = from_streams + self.e_proj(self.enorm(embedded))[:, None]
        streams = run_blocks([self], streams, batch, kv)
        return collapse_streams(streams, self.hc_head.mix(), _stage(self.norm))


class DeepseekV4(nn.Module):
    """The model; its attributes are called as the checkpoint's tensors are."""

    def __init__(self, config: DeepseekV4Config, place: Placement) -> None:
        super().__init__()
        shape, dtype, device = config.attention, place.dtype, place.device
        self.vocab_size, self.num_streams = config.vocab_size, config.hc_mult
        self.tied_tensors: dict[str, str] = {}
        self.kv_specs: list[CacheSpec] = []
        self.embed = VocabParallelEmbedding(
            config.vocab_size,
            shape.hidden_size,
            mesh=place.mesh,
            dtype=dtype,
            device=device,
            quantization=place.format_of_table("embed"),
        )
        self.layers = nn.ModuleList()
        for layer, kind in enumerate(config.layer_kinds):
            prefix = f"layers.{layer}"
            self.layers.append(Block(config, place, prefix, layer=layer, first_cache=len(self.kv_specs)))
            self.kv_specs += cache_specs(shape, kind, place)
        self.norm = _norm(config, place)
        self.hc_head = _connection(config, place, head=True)
        self.head = ParallelLMHead(
            config.vocab_size,
            shape.hidden_size,
            tied=None,
            mesh=place.mesh,
            dtype=dtype,
            device=device,
            quantization=place.format_of_table("head"),
        )
        self.mtp = nn.ModuleList()
        if place.with_mtp and config.num_nextn_predict_layers:
            if config.num_nextn_predict_layers > 1:
                raise ValueError(
                    "one block that predicts a further token is supported, got num_nextn_predict_layers = "
                    f"{config.num_nextn_predict_layers}: build the model without them"
                )
            number = len(config.layer_kinds)
            self.mtp.append(MTPBlock(config, place, "mtp.0", layer=number, first_cache=len(self.kv_specs)))
            self.kv_specs += cache_specs(shape, WINDOW, place)

    def own_name(self, name: str) -> str | None:
        """Names of re-saved checkpoints are DeepSeek's; further-token blocks are not read unless they are built.

        Raises ValueError where those that are to be read are DSpark's.
        """
        for pattern, ours in _RESAVED:
            name = pattern.sub(ours, name)
        if not name.startswith("mtp."):
            return name
        if not self.mtp:
            return None
        if name.startswith("mtp.0.main_proj."):
            raise ValueError(
                f"{name} belongs to DSpark's draft blocks, which are not supported: build the model without the blocks "
                "that predict further tokens"
            )
        return name

    def streams(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """-> [num_tokens, N, hidden_size] behind the last layer; writes the batch's rows into kv."""
        embedded = self.embed(batch.input_ids)
        return run_blocks(self.layers, embedded[:, None].repeat(1, self.num_streams, 1), batch, kv)

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """-> what the head reads, [num_tokens, hidden_size]; writes the batch's rows into kv."""
        return collapse_streams(self.streams(batch, kv), self.hc_head.mix(), _stage(self.norm))

    def predict_next(self, streams: torch.Tensor, next_ids: torch.Tensor, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """What the further-token block makes of each token t of a batch, for the logits of token t + 2.

        Args:
            streams: [num_tokens, N, hidden_size], what `streams` returned for the batch.
            next_ids: [num_tokens] int64: the token behind each.
            batch, kv: as in `forward`; the block's rows are written into its own cache, at the tokens' slots.

        Returns: [num_tokens, hidden_size], for `compute_logits`. Raises ValueError where there is no such block.
        """
        if not self.mtp:
            raise ValueError(
                "the model was built without a block that predicts further tokens (Placement.with_mtp, and "
                "num_nextn_predict_layers of the config)"
            )
        hidden: torch.Tensor = self.mtp[0](streams, self.embed(next_ids), batch, kv)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> [num_rows, vocab_size]."""
        logits: torch.Tensor = self.head(hidden)
        return logits


def run_blocks(blocks: Iterable[nn.Module], streams: torch.Tensor, batch: Batch, kv: KVStorage) -> torch.Tensor:
    """Streams [num_tokens, N, hidden_size] through all sublayers of some blocks."""
    sublayers = [half for block in blocks if isinstance(block, Block) for half in block.sublayers]
    mixed = mix_streams(streams, sublayers[0].mix, sublayers[0].norm)
    for this, following in itertools.pairwise(sublayers):
        output = this.run(mixed.hidden, batch, kv)
        streams, mixed = merge_and_mix_streams(output, streams, mixed.post, mixed.comb, following.mix, following.norm)
    return merge_streams(sublayers[-1].run(mixed.hidden, batch, kv), streams, mixed.post, mixed.comb)


def build(config: DeepseekV4Config, place: Placement) -> DeepseekV4:
    """The model, its weights allocated and not filled."""
    return DeepseekV4(config, place)


def _norm(config: DeepseekV4Config, place: Placement) -> RMSNorm:
    shape = config.attention
    return RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps, dtype=place.dtype, device=place.device)


def _connection(config: DeepseekV4Config, place: Placement, *, head: bool = False) -> HyperConnection:
    return HyperConnection(
        config.hc_mult,
        config.attention.hidden_size,
        norm_eps=config.attention.rms_norm_eps,
        eps=config.hc_eps,
        iterations=0 if head else config.hc_sinkhorn_iters,
        device=place.device,
    )


def _stage(norm: RMSNorm) -> NormStage:
    return NormStage(norm.weight.data, norm.eps)
