"""Qwen3: Llama's decoder with an explicit head_dim and RMSNorm over each query and key head.

Source: Qwen team 2025, arXiv:2505.09388; config and tensor names as transformers' Qwen3ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.layers.decoder import CausalLM, DecoderConfig, Placement
from rorqual.layers.mlp import GatedMLP
from rorqual.layers.rotary_embedding import RopeParameters
from rorqual.loader.config_reader import ConfigReader
from rorqual.loader.decoder_keys import read_decoder_keys, read_sliding_windows


@dataclass(frozen=True, slots=True)
class Qwen3Config(DecoderConfig):
    """A decoder with dense feed-forward blocks."""

    intermediate_size: int = 0


def read_config(config: Mapping[str, Any]) -> Qwen3Config:
    """Parse a config.json of model_type qwen3."""
    reader = ConfigReader(config, model_type="qwen3")
    reader.require("hidden_act", "silu")
    reader.require("use_qk_norm", True)
    keys = read_decoder_keys(reader, default_head_dim=128)
    bias = reader.take("attention_bias", bool, False)
    parsed = Qwen3Config(
        **keys,
        rope=RopeParameters.from_config(config),
        sliding_windows=read_sliding_windows(reader, keys["num_hidden_layers"]),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        intermediate_size=reader.take("intermediate_size", int),
    )
    reader.finish()
    return parsed


def build(config: Qwen3Config, place: Placement) -> CausalLM:
    """The model, its weights allocated and not filled."""

    def make_mlp(layer: int) -> GatedMLP:
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            mesh=place.mesh,
            dtype=place.dtype,
            device=place.device,
            quantization=place.quantization,
            prefix=f"model.layers.{layer}.mlp",
        )

    return CausalLM(config, place, make_mlp)
