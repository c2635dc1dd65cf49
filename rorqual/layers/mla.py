"""Multi-head latent attention (MLA) of DeepSeek-V2 and later: one latent per token in place of keys and values."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rorqual.batch import Batch
from rorqual.cache.spec import RowPart, RowSpec
from rorqual.cache.storage import KVStorage
from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.lightning_indexer import IndexConfig, LightningIndexer
from rorqual.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from rorqual.layers.rotary_embedding import RopeParameters, RotaryEmbedding
from rorqual.layers.stacked_weight import Part, StackedWeight
from rorqual.loader.layer import WantedTensor
from rorqual.ops.kv_transform import NormStage, RopeStage
from rorqual.ops.latent_attention import LatentUp, latent_attention
from rorqual.ops.rope import rotary_embedding
from rorqual.ops.row_attention import RowList, RowRange, RowSource
from rorqual.ops.row_cache import store_rows
from rorqual.quantization import QTensor, QuantFormat

_LORA_NORM_EPS = 1e-6
"""Of the norms between the low-rank products: fixed in the reference code, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """The shape of such attention, under the names of config.json."""

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    """None: queries come in one product."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: RopeParameters
    index: IndexConfig | None
    """None: every token sees all before it."""

    @property
    def softmax_scale(self) -> float:
        """(query dims)^-0.5, times YaRN's (0.1 mscale_all_dim ln(factor) + 1)^2 where that is given."""
        scale: float = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        numbers: dict[str, Any] = dict(self.rope.numbers)
        weight, factor = numbers.get("mscale_all_dim"), numbers.get("factor", 1.0)
        if weight and factor > 1:
            scale *= (0.1 * weight * math.log(factor) + 1.0) ** 2
        return scale


class LatentUpProjection(StackedWeight):
    """kv_b_proj, cut into what makes keys and what makes values. It is loaded as the checkpoint has it, and becomes
    plain numbers when all is loaded: the absorbed product takes one half transposed, which block scales do not allow.
    """

    def __init__(self, config: MLAConfig, place: Placement, prefix: str) -> None:
        self._heads = place.mesh.shard(config.num_attention_heads, what="num_attention_heads")
        self._nope, self._value = config.qk_nope_head_dim, config.v_head_dim
        self._dtype, per_head = place.dtype, config.qk_nope_head_dim + config.v_head_dim
        quantization = place.format_of(prefix, "kv_b_proj")
        format = quantization.weight if quantization else None
        super().__init__(
            config.kv_lora_rank,
            [
                Part(
                    None,
                    config.num_attention_heads * per_head,
                    slice(self._heads.start * per_head, self._heads.stop * per_head),
                )
            ],
            format=format if isinstance(format, QuantFormat) else None,  # integers would be taken apart at once
            dtype=place.dtype,
            device=place.device,
        )
        self.up: LatentUp | None = None

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The matrix, and its scales if it has any."""
        return self.wanted_parts([prefix])

    def prepare(self) -> None:
        """Take the matrix apart."""
        loaded = self._loaded()
        if isinstance(loaded, QTensor):
            loaded = loaded.dequantize(self._dtype)
            del self.weight_scale_inv
        assert isinstance(loaded, torch.Tensor)
        per_head = loaded.view(self._heads.stop - self._heads.start, self._nope + self._value, self.in_features)
        key = per_head[:, : self._nope].transpose(1, 2).contiguous()
        self.up = LatentUp(key, per_head[:, self._nope :].contiguous())
        del self.weight


class MLAttention(nn.Module):
    """Low-rank queries, one cached latent per token, many heads; with an indexer only the tokens that it chooses.

    `cache` is the number of its cache in the model's list, `spec` what it keeps there.
    """

    def __init__(self, config: MLAConfig, place: Placement, layer: int, cache: int) -> None:
        super().__init__()
        dtype, device = place.dtype, place.device
        prefix = f"model.layers.{layer}.self_attn"
        self.config, self.cache = config, cache
        latent = config.kv_lora_rank + config.qk_rope_head_dim
        self.num_heads, self.head_dim = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        heads = place.mesh.shard(self.num_heads, what="num_attention_heads")
        self.num_heads = heads.stop - heads.start
        self.scale = config.softmax_scale

        self._joint_q_a = False
        joint = {"kv_a_proj_with_mqa": latent}
        if config.q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(
                config.hidden_size,
                {"q_proj": config.num_attention_heads * self.head_dim},
                mesh=place.mesh,
                dtype=dtype,
                device=device,
                quantization=place.format_of(prefix, "q_proj"),
            )
        else:
            if place.format_of(prefix, "q_a_proj") == place.format_of(prefix, "kv_a_proj_with_mqa"):
                joint, self._joint_q_a = {"q_a_proj": config.q_lora_rank} | joint, True
            else:
                self.q_a_proj = ReplicatedLinear(
                    config.hidden_size,
                    config.q_lora_rank,
                    dtype=dtype,
                    device=device,
                    quantization=place.format_of(prefix, "q_a_proj"),
                )
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=_LORA_NORM_EPS, dtype=dtype, device=device)
            self.q_b_proj = ColumnParallelLinear(
                config.q_lora_rank,
                {"q_b_proj": config.num_attention_heads * self.head_dim},
                mesh=place.mesh,
                dtype=dtype,
                device=device,
                quantization=place.format_of(prefix, "q_b_proj"),
            )
        self.joint_a_proj = ColumnParallelLinear(
            config.hidden_size,
            joint,
            mesh=Mesh.single(),  # every rank has all of what comes before the heads
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, *joint),
        )
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=_LORA_NORM_EPS, dtype=dtype, device=device)
        self.kv_b_proj = LatentUpProjection(config, place, prefix)
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.v_head_dim,
            config.hidden_size,
            mesh=place.mesh,
            dtype=dtype,
            device=device,
            quantization=place.format_of(prefix, "o_proj"),
        )
        self.rotary = RotaryEmbedding(
            config.rope,
            config.qk_rope_head_dim,
            max_model_len=place.max_model_len,
            device=device,
            tables=place.rotary_tables,
            interleaved=True,
            offset=config.qk_nope_head_dim,
        )
        parts = [RowPart(latent, place.kv_cache_dtype)]
        self.indexer: LightningIndexer | None = None
        if config.index is not None:
            assert config.q_lora_rank is not None
            self.indexer = LightningIndexer(
                config.index,
                place,
                f"{prefix}.indexer",
                hidden_size=config.hidden_size,
                q_lora_rank=config.q_lora_rank,
                rotary=RotaryEmbedding(
                    config.rope,
                    config.qk_rope_head_dim,
                    max_model_len=place.max_model_len,
                    device=device,
                    tables=place.rotary_tables,
                ),
            )
            parts.append(self.indexer.part)
        self.spec = RowSpec(tuple(parts))

    def forward(self, x: torch.Tensor, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape; writes the tokens' latents, and index keys, into kv."""
        config, latents, positions = self.config, kv.rows(self.cache)[0], batch.positions
        view = batch.caches[latents.group]
        projected = self.joint_a_proj(x)
        latent = projected[:, -config.kv_lora_rank - config.qk_rope_head_dim :]
        store_rows(
            latent,
            latents,
            view.slot_mapping,
            norm=NormStage(self.kv_a_layernorm.weight, _LORA_NORM_EPS),
            rope=RopeStage(positions, self.rotary.cos_sin, interleaved=True),
        )
        rows: RowRange | RowList = batch.once(
            ("rows_so_far", latents.group), lambda: _rows_so_far(batch, latents.group)
        )
        if config.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            q_lora = self.q_a_layernorm(projected[:, : config.q_lora_rank] if self._joint_q_a else self.q_a_proj(x))
            query = self.q_b_proj(q_lora)
            if self.indexer is not None:
                assert isinstance(rows, RowRange)
                rows = self.indexer(x, q_lora, kv.rows(self.cache)[1], rows, batch)
        query = rotary_embedding(
            query.view(len(x), self.num_heads, self.head_dim),
            positions,
            self.rotary.cos_sin,
            interleaved=True,
            offset=config.qk_nope_head_dim,
            inplace=True,
            scratch=batch.scratch,
        ).query
        assert self.kv_b_proj.up is not None, "not prepared"
        out = latent_attention(query, RowSource(latents, rows), self.kv_b_proj.up, batch, scale=self.scale)
        attended: torch.Tensor = self.o_proj(out.flatten(1))
        return attended


def _rows_so_far(batch: Batch, group: int) -> RowRange:
    """What each token sees without an indexer: its sequence up to itself."""
    return RowRange(batch.caches[group].block_tables, None, (batch.positions + 1).int())
