"""Llama 2 and 3, SmolLM2, Mistral, Qwen2: grouped-query attention and a gated feed-forward block.

Source: Touvron et al. 2023, arXiv:2307.09288; config and tensor names as transformers' LlamaForCausalLM,
MistralForCausalLM and Qwen2ForCausalLM.
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
class LlamaConfig(DecoderConfig):
    """A decoder with dense feed-forward blocks."""

    intermediate_size: int = 0
    mlp_bias: bool = False


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Parse a config.json of model_type llama, mistral or qwen2."""
    reader = ConfigReader(config, model_type=config["model_type"])
    reader.require("hidden_act", "silu")
    keys = read_decoder_keys(reader)
    windows: tuple[int | None, ...] = (None,) * keys["num_hidden_layers"]
    if config["model_type"] == "llama":
        bias = reader.take("attention_bias", bool, False)
        qkv_bias, o_bias = bias, bias
        reader.require("pretraining_tp", 1)
    elif config["model_type"] == "mistral":
        qkv_bias = o_bias = False
        if window := reader.take("sliding_window", int, None):
            windows = (window,) * keys["num_hidden_layers"]
    else:  # qwen2
        qkv_bias, o_bias = True, False
        windows = read_sliding_windows(reader, keys["num_hidden_layers"])
    parsed = LlamaConfig(
        **keys,
        rope=RopeParameters.from_config(config),
        sliding_windows=windows,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        intermediate_size=reader.take("intermediate_size", int),
        mlp_bias=reader.take("mlp_bias", bool, False) if config["model_type"] == "llama" else False,
    )
    reader.finish()
    return parsed


def build(config: LlamaConfig, place: Placement) -> CausalLM:
    """The model, its weights allocated and not filled."""

    def make_mlp(layer: int) -> GatedMLP:
        return GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            mesh=place.mesh,
            bias=config.mlp_bias,
            dtype=place.dtype,
            device=place.device,
            quantization=place.quantization,
            prefix=f"model.layers.{layer}.mlp",
        )

    return CausalLM(config, place, make_mlp)
