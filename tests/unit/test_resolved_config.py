"""What becomes of the engine's options: numerics of products and caches, and options that a model cannot honour."""

from __future__ import annotations

import pytest
import torch

from rorqual.config import EngineConfig
from rorqual.engine.resolved_config import ResolvedConfig, resolve
from rorqual.loader.integer_quantization import IntegerQuantization
from rorqual.models.registry import build_model
from rorqual.quantization import MXFP4, MXFP8, MXFP8_TILE
from tests.tiny import CONFIGS, DEEPSEEK_CONFIGS

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32], "scale_fmt": "ue8m0"}
DENSE = {"model_type": "qwen3", **CONFIGS["qwen3"][1], "hidden_size": 64, "intermediate_size": 96}


def resolved(config: dict, **options) -> ResolvedConfig:
    return resolve(EngineConfig(**{"device": "cpu", "dtype": "float32"} | options), config)


def linear_format(made: ResolvedConfig, config: dict):
    """The formats of a layer's first product, in a model built as the engine does."""
    model = build_model(config, made.placement(torch.device("meta"), 64))
    layer = model.model.layers[0].self_attn.qkv_proj
    return layer.product().weight.format, layer.product().options.get("activation")


def test_inputs_of_quantised_products_are_rounded_or_left_alone():
    config = DENSE | {"quantization_config": FP8}
    assert linear_format(resolved(config), config) == (MXFP8_TILE, MXFP8)
    assert linear_format(resolved(config, activation_quantization="none"), config) == (MXFP8_TILE, None)
    mixed = config | {"quantization_config": FP8 | {"expert_dtype": "fp4"}}
    quantization = resolved(mixed, activation_quantization="none").quantization
    assert quantization.of("model.layers.0.mlp.experts.3", "up_proj") == (MXFP4, None)


def test_inputs_of_integer_products_are_rounded_or_left_alone():
    for wanted, dynamic in (("auto", True), ("none", False)):
        made = resolved(DENSE, quantization="int8", activation_quantization=wanted).quantization
        assert isinstance(made, IntegerQuantization)
        assert made.dynamic is dynamic


def test_an_unquantised_model_has_no_inputs_to_round():
    assert resolved(DENSE, activation_quantization="none").quantization is None


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_index_cache_dtype_is_for_models_with_an_indexer(kind):
    with pytest.raises(ValueError, match=f"index_cache_dtype '{kind}' is for models with an indexer.*'qwen3'"):
        resolved(DENSE, index_cache_dtype=kind)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_index_keys_take_the_bytes_of_their_format(name):
    model_type, options = DEEPSEEK_CONFIGS[name]
    config = {"model_type": model_type, **options, "index_head_dim": 128}
    sizes = [
        sum(group.bytes_per_row() for group in resolved(config, index_cache_dtype=kind).groups)
        for kind in ("auto", "fp8", "fp4")
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_cache_dtype_that_a_model_does_not_keep_is_refused_by_name():
    model_type, options = DEEPSEEK_CONFIGS["deepseek_v3"]
    with pytest.raises(ValueError, match="kv_cache_dtype 'float8_e4m3fn'"):
        resolved({"model_type": model_type, **options}, kv_cache_dtype="fp8")
