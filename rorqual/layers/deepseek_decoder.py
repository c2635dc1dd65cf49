"""The decoder of DeepSeek-V3 and V3.2: latent attention, some dense layers, then mixtures of experts, and behind them
blocks that predict the token after the next one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.cache.spec import CacheSpec
from rorqual.cache.storage import KVStorage
from rorqual.layers.decoder import Placement
from rorqual.layers.deepseek_moe import DeepseekMoE
from rorqual.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import ReplicatedLinear
from rorqual.layers.mla import MLAConfig, MLAttention
from rorqual.layers.mlp import GatedMLP


@dataclass(frozen=True, slots=True)
class DeepseekConfig(MLAConfig):
    """The shape of such a decoder, under the names of config.json."""

    vocab_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    intermediate_size: int
    """Width of a dense block."""
    dense_layers: frozenset[int]
    """Layers with a dense block."""
    moe_intermediate_size: int
    """Width of one expert."""
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int
    """Blocks behind the layers, for multi-token prediction."""


class DeepseekDecoderLayer(nn.Module):
    """h += attention(norm(h)); h += mlp(norm(h)), with the residual carried beside."""

    def __init__(self, config: DeepseekConfig, place: Placement, layer: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (_norm(config, place) for _ in "12")
        self.self_attn = MLAttention(config, place, layer, cache=layer)
        prefix = f"model.layers.{layer}.mlp"
        self.mlp: GatedMLP | DeepseekMoE
        if layer in config.dense_layers:
            self.mlp = GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                mesh=place.mesh,
                dtype=place.dtype,
                device=place.device,
                quantization=place.quantization,
                prefix=prefix,
            )
        else:
            self.mlp = DeepseekMoE(
                config.hidden_size,
                config.moe_intermediate_size,
                num_experts=config.n_routed_experts,
                top_k=config.num_experts_per_tok,
                num_shared_experts=config.n_shared_experts,
                scoring="sigmoid",
                renormalize=config.norm_topk_prob,
                routed_scaling_factor=config.routed_scaling_factor,
                num_groups=config.n_group,
                top_groups=config.topk_group,
                mesh=place.mesh,
                dtype=place.dtype,
                device=place.device,
                quantization=place.quantization,
                prefix=prefix,
            )

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, input_ids: torch.Tensor, batch: Batch, kv: KVStorage
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden, residual) of [num_tokens, hidden_size] whose sum is the stream -> the same, one layer on."""
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, batch, kv)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        if isinstance(self.mlp, GatedMLP):
            return self.mlp(hidden), residual
        return self.mlp(hidden, input_ids, batch.exchange), residual


class NextTokenBlock(DeepseekDecoderLayer):
    """A layer that sees what the model made of a token, and the token that came next, and predicts the one after.

    Embedding and head are the model's; checkpoints repeat them under the block's name.
    """

    def __init__(self, config: DeepseekConfig, place: Placement, layer: int) -> None:
        super().__init__(config, place, layer)
        self.enorm, self.hnorm = (_norm(config, place) for _ in "eh")
        # Published FP8 checkpoints keep it in bfloat16.
        self.eh_proj = ReplicatedLinear(
            2 * config.hidden_size, config.hidden_size, dtype=place.dtype, device=place.device
        )
        self.shared_head = nn.ModuleDict({"norm": _norm(config, place)})

    def predict(
        self, hidden: torch.Tensor, embedded: torch.Tensor, input_ids: torch.Tensor, batch: Batch, kv: KVStorage
    ) -> torch.Tensor:
        """See `DeepseekForCausalLM.predict_next`; `embedded` are the next tokens' embeddings."""
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        out, residual = self.forward(joined, None, input_ids, batch, kv)
        norm = self.shared_head["norm"]
        assert isinstance(norm, RMSNorm)
        return norm.add(out, residual)[0]


class DeepseekModel(nn.Module):
    """Embedding, layers and final norm; next-token blocks among the layers, where checkpoints have them."""

    def __init__(self, config: DeepseekConfig, place: Placement) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            mesh=place.mesh,
            dtype=place.dtype,
            device=place.device,
            quantization=place.format_of_table("model.embed_tokens"),
        )
        last = config.num_hidden_layers
        self.main = [DeepseekDecoderLayer(config, place, i) for i in range(last)]
        count = config.num_nextn_predict_layers if place.with_mtp else 0
        self.mtp = [NextTokenBlock(config, place, last + i) for i in range(count)]
        self.layers = nn.ModuleList([*self.main, *self.mtp])
        self.norm = _norm(config, place)

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """-> [num_tokens, hidden_size], normalised."""
        hidden, residual = self.embed_tokens(batch.input_ids), None
        for layer in self.main:
            hidden, residual = layer(hidden, residual, batch.input_ids, batch, kv)
        return self.norm.add(hidden, residual)[0]


class DeepseekForCausalLM(nn.Module):
    """The decoder with a language-model head."""

    def __init__(self, config: DeepseekConfig, place: Placement) -> None:
        super().__init__()
        if place.kv_cache_dtype.itemsize == 1:
            raise ValueError(
                f"kv_cache_dtype {str(place.kv_cache_dtype).removeprefix('torch.')!r} is not for this model: it caches "
                "latents, which have no scales and would lose too much; leave it at 'auto' or take 'bfloat16'"
            )
        self.vocab_size = config.vocab_size
        self.model = DeepseekModel(config, place)
        self.kv_specs: list[CacheSpec] = [layer.self_attn.spec for layer in (*self.model.main, *self.model.mtp)]
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            tied=self.model.embed_tokens if config.tie_word_embeddings else None,
            mesh=place.mesh,
            dtype=place.dtype,
            device=place.device,
            quantization=place.format_of_table("lm_head"),
        )
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.tied_tensors = {"lm_head.weight": head} if config.tie_word_embeddings else {}
        """Checkpoint names that may repeat another tensor."""
        for i in range(len(self.model.main), len(self.model.layers)):
            self.tied_tensors[f"model.layers.{i}.embed_tokens.weight"] = "model.embed_tokens.weight"
            self.tied_tensors[f"model.layers.{i}.shared_head.head.weight"] = head
        self._left_out = range(
            len(self.model.layers), config.num_hidden_layers + max(1, config.num_nextn_predict_layers)
        )

    def own_name(self, name: str) -> str | None:
        """The name as it is; None for a next-token block that is not built here."""
        found = _OF_LAYER.match(name)
        return None if found and int(found[1]) in self._left_out else name

    def forward(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """-> hidden states [num_tokens, hidden_size]; writes the batch's latents into kv."""
        hidden: torch.Tensor = self.model(batch, kv)
        return hidden

    def predict_next(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, batch: Batch, kv: KVStorage, *, block: int = 0
    ) -> torch.Tensor:
        """What a next-token block makes of each token t of a batch, for the logits of token t + 2.

        Args:
            hidden: [num_tokens, hidden_size], what `forward` returned for the batch, or the block before this one.
            next_ids: [num_tokens] int64: the token behind each.
            batch, kv: as in `forward`; the block's latents are written into its own cache, at the tokens' slots.
            block: which of them.

        Returns: [num_tokens, hidden_size], for `compute_logits`. Raises ValueError where there is no such block.
        """
        if block >= len(self.model.mtp):
            raise ValueError(
                f"next-token block {block} is not there: the model was built with {len(self.model.mtp)} of them "
                "(Placement.with_mtp, and num_nextn_predict_layers of the config)"
            )
        return self.model.mtp[block].predict(hidden, self.model.embed_tokens(next_ids), next_ids, batch, kv)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> [num_rows, vocab_size]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits


_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def _norm(config: DeepseekConfig, place: Placement) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=place.dtype, device=place.device)
