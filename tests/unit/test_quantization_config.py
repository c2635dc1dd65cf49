"""Reading config.json's quantization_config: which module has which format, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from rorqual.loader.quantization_config import LinearFormat, WeightQuantization, read_weight_quantization
from rorqual.quantization import FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_ROW, FP8_ROW_UE8M0, MXFP4, MXFP8, MXFP8_TILE

FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
MX4: dict[str, Any] = {"quant_method": "mxfp4"}


def read(options: dict[str, Any], **changes: Any) -> WeightQuantization:
    return WeightQuantization.from_config(options | changes)


@pytest.mark.parametrize(
    ("options", "weight", "activation"),
    [
        (FP8, FP8_BLOCK, FP8_ROW),
        (FP8 | {"scale_fmt": "float"}, FP8_BLOCK, FP8_ROW),
        (FP8 | {"scale_fmt": "ue8m0"}, FP8_BLOCK_UE8M0, FP8_ROW_UE8M0),
        (FP8 | {"scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, MXFP8_TILE, MXFP8),
        (FP8 | {"weight_block_size": [32, 32]}, MXFP8_TILE, MXFP8),
        (FP8 | {"scale_fmt": "ue8m0", "weight_block_size": [1, 32]}, MXFP8, MXFP8),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, FP8_BLOCK, FP8_ROW),
        (MX4, MXFP4, None),
        (MX4 | {"activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}, MXFP4, MXFP8),
    ],
)
def test_formats_of_layers_and_experts(options, weight, activation):
    quantization = read(options)
    assert quantization.linear == quantization.experts == LinearFormat(weight, activation)
    assert quantization.of("model.layers.0.mlp", "gate_proj", "up_proj") == LinearFormat(weight, activation)


def test_the_standard_activation_format_is_e4m3_with_a_power_of_two_per_32_channels():
    """DeepInfer's cast parameters."""
    activation = read(FP8, weight_block_size=[32, 32], scale_fmt="ue8m0").linear.activation
    assert (activation.element, activation.block, activation.scale) == ("e4m3", (1, 32), "ue8m0")


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        (FP8, FP8_ROW),
        (FP8 | {"scale_fmt": "ue8m0"}, FP8_ROW_UE8M0),
        (FP8 | {"scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, MXFP8),
    ],
)
def test_experts_in_fp4_beside_layers_in_fp8_have_the_layers_inputs(options, activation):
    quantization = read(options, expert_dtype="fp4")
    assert quantization.experts == LinearFormat(MXFP4, activation)
    assert quantization.of("model.layers.3.mlp", "experts.7.gate_proj").weight == MXFP4
    assert quantization.of("model.layers.3.mlp.experts", "7.gate_proj").weight == MXFP4
    assert quantization.of("model.layers.3.mlp", "shared_experts.gate_proj") == quantization.linear
    assert quantization.linear.weight.element == "e4m3"
    assert read(options, expert_dtype="fp8").experts == quantization.linear


def test_a_config_without_it_has_none():
    assert read_weight_quantization({"model_type": "qwen3"}) is None
    assert read_weight_quantization({"quantization_config": None}) is None
    assert read_weight_quantization({"quantization_config": FP8}) == read(FP8)
    with pytest.raises(ValueError, match="quantization_config must be an object, got 'fp8'"):
        read_weight_quantization({"quantization_config": "fp8"})


V4 = {
    "expert_dtype": "fp4",
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}


def test_deepseek_v4_has_the_experts_format_beside_the_others():
    quantization = read_weight_quantization(V4)
    assert quantization == read_weight_quantization(
        {"quantization_config": V4["quantization_config"] | {"expert_dtype": "fp4"}}
    )
    for expert in ("layers.2.ffn.experts", "mtp.0.ffn.experts"):
        assert quantization.of(expert, "255.w1", "255.w3", "255.w2") == LinearFormat(MXFP4, FP8_ROW_UE8M0)
    assert quantization.of("layers.2.ffn.shared_experts", "w1", "w3").weight == FP8_BLOCK_UE8M0
    assert quantization.of("layers.2.attn", "wq_a").weight == FP8_BLOCK_UE8M0


@pytest.mark.parametrize("beside", [{}, {"expert_dtype": None}, {"expert_dtype": "fp8"}])
def test_deepseek_v4_base_has_experts_as_its_layers(beside):
    quantization = read_weight_quantization({"quantization_config": V4["quantization_config"]} | beside)
    assert quantization.of("layers.2.ffn.experts", "0.w1") == LinearFormat(FP8_BLOCK_UE8M0, FP8_ROW_UE8M0)
    assert quantization.of("layers.2.ffn.experts", "0.w1") == quantization.linear


def test_two_expert_dtypes_that_differ_are_refused():
    with pytest.raises(ValueError, match="expert_dtype is 'fp4' and quantization_config has 'fp8'"):
        read_weight_quantization(V4 | {"quantization_config": FP8 | {"expert_dtype": "fp8"}})


# --- modules that stay as they are


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("entry", "prefix", "name", "skipped"),
    [
        ("model.layers.0.mlp.gate", "model.layers.0.mlp", "gate", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp", "gate_proj", False),
        ("model.layers.1", "model.layers.1.mlp", "gate_proj", True),
        ("model.layers.1", "model.layers.10.mlp", "gate_proj", False),
        ("layers.1", "model.layers.1.mlp", "gate_proj", True),
        ("lm_head", "", "lm_head", True),
        ("q_proj", "model.layers.0.self_attn", "q_proj", True),
        ("proj", "model.layers.0.self_attn", "q_proj", False),
        ("self_attn", "model.layers.0.self_attn", "o_proj", True),
        ("self_attn", "model.layers.0.mlp", "down_proj", False),
        ("experts.3", "model.layers.0.mlp.experts", "3.up_proj", True),
        ("experts.3", "model.layers.0.mlp.experts", "30.up_proj", False),
    ],
)
def test_names_match_whole_parts(key, entry, prefix, name, skipped):
    quantization = read(FP8, **{key: ["embed_tokens", entry]})
    assert (quantization.of(prefix, name) is None) == skipped


def test_both_lists_count():
    quantization = read(FP8, modules_to_not_convert=["lm_head", "a"], ignored_layers=["b", "a"])
    assert quantization.not_converted == ("lm_head", "a", "b")


def test_parts_of_one_product_are_quantised_together_or_not_at_all():
    names = ["q_proj", "k_proj", "v_proj"]
    all_of_them = read(FP8, modules_to_not_convert=[f"model.layers.0.self_attn.{name}" for name in names])
    assert all_of_them.of("model.layers.0.self_attn", *names) is None
    assert all_of_them.of("model.layers.1.self_attn", *names) is not None
    one = read(FP8, modules_to_not_convert=["model.layers.0.self_attn.k_proj"])
    with pytest.raises(
        ValueError, match=r"leaves k_proj of model\.layers\.0\.self_attn unquantised and not q_proj, v_"
    ):
        one.of("model.layers.0.self_attn", *names)


# --- refusals


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quant_method": "awq", "bits": 4}, r"quantization_config \(awq\) is not supported \(fp8 and mxfp4 are\)"),
        ({"bits": 4}, r"quantization_config \(unnamed\) is not supported"),
        (
            {"quant_method": "fp8"},
            r"weight_block_size = 'absent' is not supported, only one of \[128, 128\], \[32, 32\]",
        ),
        (FP8 | {"weight_block_size": None}, "weight_block_size = None is not supported"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\] is not supported"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size = \[128\] is not supported"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported, only 'e4m3' is"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme = 'static' is not supported, only 'dynamic' is"),
        (FP8 | {"scale_fmt": "e4m3"}, "scale_fmt = 'e4m3' is not supported, only 'float' or 'ue8m0' is"),
        (
            FP8 | {"weight_block_size": [32, 32], "scale_fmt": "float"},
            "scale_fmt = 'float' is not supported, only 'ue8m0'",
        ),
        (FP8 | {"expert_dtype": "int4"}, "expert_dtype = 'int4' is not supported, only 'fp8' or 'fp4' is"),
        (MX4 | {"expert_dtype": "fp8"}, "expert_dtype = 'fp8' is not supported, only 'fp4' is"),
        (MX4 | {"weight_block_size": [1, 16]}, r"weight_block_size = \[1, 16\] is not supported, only \[1, 32\] is"),
        (MX4 | {"scale_fmt": "float"}, "scale_fmt = 'float' is not supported"),
        (FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert = .* only leaving it out is"),
        (FP8 | {"dequantize": True}, "dequantize = True is not supported"),
        (FP8 | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme = .* is not supported"),
        (FP8 | {"modules_to_not_convert": ["re:.*gate$"]}, "a list of module names .patterns are not read"),
        (FP8 | {"ignored_layers": "lm_head"}, "ignored_layers = 'lm_head' is not supported, only a list"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        WeightQuantization.from_config(options)


@pytest.mark.parametrize(
    "options", [{"dequantize": False}, {"modules_to_convert": None}, {"modules_to_not_convert": None}]
)
def test_keys_that_ask_for_nothing_are_passed_over(options):
    assert read(FP8, **options) == read(FP8)
