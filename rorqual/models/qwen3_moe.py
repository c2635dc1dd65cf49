"""Qwen3-MoE: Qwen3 whose feed-forward blocks are mixtures of experts, all or some of them.

Source: Qwen team 2025, arXiv:2505.09388; config and tensor names as transformers' Qwen3MoeForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.layers.decoder import CausalLM, DecoderConfig, FeedForward, Placement
from rorqual.layers.mlp import GatedMLP
from rorqual.layers.moe import SparseMoE
from rorqual.layers.rotary_embedding import RopeParameters
from rorqual.loader.config_reader import ConfigReader
from rorqual.loader.decoder_keys import read_decoder_keys, read_sliding_windows


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig(DecoderConfig):
    """A decoder with sparse feed-forward blocks."""

    intermediate_size: int = 0
    """Width of a dense block."""
    moe_intermediate_size: int = 0
    """Width of one expert."""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = False
    """Whether the chosen experts' weights are made to sum to 1."""
    dense_layers: frozenset[int] = frozenset()
    """Layers with a dense block."""


def read_config(config: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Parse a config.json of model_type qwen3_moe, official or re-saved by transformers."""
    reader = ConfigReader(config, model_type="qwen3_moe")
    reader.require("hidden_act", "silu")
    reader.require("use_qk_norm", True)
    keys = read_decoder_keys(reader, default_head_dim=None)
    num_layers = keys["num_hidden_layers"]
    bias = reader.take("attention_bias", bool, False)
    sparse_step = reader.take("decoder_sparse_step", int, 1)
    dense = {i for i in range(num_layers) if (i + 1) % sparse_step}
    reader.ignore("router_aux_loss_coef", "output_router_logits")  # training only
    parsed = Qwen3MoeConfig(
        **keys,
        rope=RopeParameters.from_config(config),
        sliding_windows=read_sliding_windows(reader, num_layers),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        intermediate_size=reader.take("intermediate_size", int),
        moe_intermediate_size=reader.take("moe_intermediate_size", int),
        num_experts=reader.take("num_experts", int, aliases=("num_local_experts",)),
        num_experts_per_tok=reader.take("num_experts_per_tok", int),
        norm_topk_prob=reader.take("norm_topk_prob", bool, False),
        dense_layers=frozenset(dense | set(reader.take("mlp_only_layers", list, None) or ())),
    )
    reader.finish()
    return parsed


def build(config: Qwen3MoeConfig, place: Placement) -> CausalLM:
    """The model, its weights allocated and not filled."""

    def make_mlp(layer: int) -> FeedForward:
        if layer in config.dense_layers:
            return GatedMLP(
                config.hidden_size,
                config.intermediate_size,
                mesh=place.mesh,
                dtype=place.dtype,
                device=place.device,
                quantization=place.quantization,
                prefix=f"model.layers.{layer}.mlp",
            )
        return SparseMoE(
            config.hidden_size,
            config.moe_intermediate_size,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            renormalize=config.norm_topk_prob,
            mesh=place.mesh,
            dtype=place.dtype,
            device=place.device,
            quantization=place.quantization,
            prefix=f"model.layers.{layer}.mlp",
        )

    return CausalLM(config, place, make_mlp)
