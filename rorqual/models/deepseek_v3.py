"""DeepSeek-V3, V3.1 and R1, Moonlight, Kimi-K2: latent attention, and experts chosen by sigmoid scores in groups.

Source: DeepSeek-AI 2024, arXiv:2412.19437; config and tensor names as transformers' DeepseekV3ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rorqual.layers.decoder import Placement
from rorqual.layers.deepseek_decoder import DeepseekConfig, DeepseekForCausalLM
from rorqual.layers.rotary_embedding import RopeParameters
from rorqual.loader.config_reader import ConfigReader
from rorqual.loader.decoder_keys import read_decoder_keys, read_mla_keys, read_routing_keys


def read_config(config: Mapping[str, Any]) -> DeepseekConfig:
    """Parse a config.json of model_type deepseek_v3 or kimi_k2, official or re-saved by transformers."""
    reader = ConfigReader(config, model_type=config["model_type"])
    keys = read_decoder_keys(reader) | read_mla_keys(reader) | read_routing_keys(reader)
    parsed = DeepseekConfig(
        **{key: value for key, value in keys.items() if key not in ("num_key_value_heads", "head_dim")},
        rope=RopeParameters.from_config(config),
        index=None,
        dense_layers=frozenset(range(reader.take("first_k_dense_replace", int))),
    )
    reader.finish()
    return parsed


def build(config: DeepseekConfig, place: Placement) -> DeepseekForCausalLM:
    """The model, its weights allocated and not filled."""
    return DeepseekForCausalLM(config, place)
