"""DeepSeek-V3.2: DeepSeek-V3 whose tokens attend to those alone that an indexer chooses.

Source: DeepSeek-AI 2025, DeepSeek-V3.2-Exp; config and tensor names as transformers' DeepseekV32ForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rorqual.layers.decoder import Placement
from rorqual.layers.deepseek_decoder import DeepseekConfig, DeepseekForCausalLM
from rorqual.layers.lightning_indexer import IndexConfig
from rorqual.layers.rotary_embedding import RopeParameters
from rorqual.loader.config_reader import ConfigReader
from rorqual.loader.decoder_keys import read_decoder_keys, read_mla_keys, read_routing_keys

_ATTENTION_KINDS = ("indexed_attention", "deepseek_sparse_attention")
"""What versions of transformers call it."""


def read_config(config: Mapping[str, Any]) -> DeepseekConfig:
    """Parse a config.json of model_type deepseek_v32, official or re-saved by transformers."""
    reader = ConfigReader(config, model_type="deepseek_v32")
    keys = read_decoder_keys(reader) | read_mla_keys(reader) | read_routing_keys(reader)
    num_layers = keys["num_hidden_layers"]
    if keys["q_lora_rank"] is None:
        raise ValueError("q_lora_rank must be a number for model_type 'deepseek_v32', whose indexer reads it, got null")
    _check_kinds("layer_types", reader.take("layer_types", list, None), num_layers, *_ATTENTION_KINDS)
    index = IndexConfig(
        reader.take("index_n_heads", int), reader.take("index_head_dim", int), reader.take("index_topk", int)
    )
    if index.head_dim < keys["qk_rope_head_dim"]:
        raise ValueError(
            f"index_head_dim ({index.head_dim}) must be at least qk_rope_head_dim ({keys['qk_rope_head_dim']}), the "
            "channels that are rotated"
        )
    parsed = DeepseekConfig(
        **{key: value for key, value in keys.items() if key not in ("num_key_value_heads", "head_dim")},
        rope=RopeParameters.from_config(config),
        index=index,
        dense_layers=_dense_layers(reader, num_layers),
    )
    reader.finish()
    return parsed


def build(config: DeepseekConfig, place: Placement) -> DeepseekForCausalLM:
    """The model, its weights allocated and not filled."""
    return DeepseekForCausalLM(config, place)


def _dense_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """By mlp_layer_types if given, else the first ones. Both may be there; they must agree."""
    first = reader.take("first_k_dense_replace", int, None)
    kinds = reader.take("mlp_layer_types", list, None)
    _check_kinds("mlp_layer_types", kinds, num_layers, "dense", "sparse")
    by_count = None if first is None else frozenset(range(min(first, num_layers)))
    if kinds is None:
        if by_count is None:
            raise ValueError("config.json of model_type 'deepseek_v32' lacks first_k_dense_replace or mlp_layer_types")
        return by_count
    by_kind = frozenset(i for i, kind in enumerate(kinds) if kind == "dense")
    if by_count is not None and by_count != by_kind:
        raise ValueError(
            f"config.json says first_k_dense_replace = {first} and mlp_layer_types with dense layers "
            f"{sorted(by_kind)}; they mean the same, so drop one: --hf-overrides '{{\"first_k_dense_replace\": null}}'"
        )
    return by_kind


def _check_kinds(key: str, kinds: list[Any] | None, num_layers: int, *known: str) -> None:
    if kinds is None:
        return
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ValueError(f"{key} may hold {', '.join(known)}, got {unknown[0]!r}")
    if len(kinds) != num_layers:
        raise ValueError(f"{key} has {len(kinds)} entries for {num_layers} layers")
