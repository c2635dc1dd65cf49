"""Reading config.json: what each model_type makes of its keys, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from rorqual.models.registry import read_model_config, supported_model_types

SHARED: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "vocab_size": 199,
}
MOE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SHARED,
    "mistral": SHARED,
    "qwen2": SHARED,
    "qwen3": SHARED | {"head_dim": 16},
    "qwen3_moe": SHARED | {"head_dim": 16} | MOE,
}
QWEN = ["qwen2", "qwen3", "qwen3_moe"]
READ_ELSEWHERE = {"deepseek_v3", "deepseek_v32", "deepseek_v4", "kimi_k2"}
"""model_types that keep no keys and values of heads, and have configs and refusals in test files of their own."""


def read(model_type: str, **changes: Any) -> Any:
    return read_model_config(CONFIGS[model_type] | {"model_type": model_type} | changes)


def test_every_model_type_is_read_here():
    assert set(CONFIGS) | READ_ELSEWHERE == set(supported_model_types())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_plain_config_has_the_shape_it_says(model_type):
    config = read(model_type)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (199, 64, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    assert config.sliding_windows == (None,) * 4
    assert config.qk_norm == model_type.startswith("qwen3")
    assert (config.qkv_bias, config.o_bias) == (model_type == "qwen2", False)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_qwen3_always_has_norms_on_query_and_key_heads(model_type):
    assert read(model_type, use_qk_norm=True).qk_norm  # as Qwen3-Coder's config.json says
    with pytest.raises(ValueError, match="use_qk_norm must be True for model_type"):
        read(model_type, use_qk_norm=False)


# --- RO7: sliding windows

WINDOWS = {
    "switched_off": ({"sliding_window": 4, "use_sliding_window": False}, [None] * 4),
    "switched_off_with_max_window_layers": (
        {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 2},
        [None] * 4,
    ),
    "not_switched_on": ({"sliding_window": 4}, [None] * 4),
    "no_window": ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
    "from_layer_2_on": (
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 2},
        [None, None, 4, 4],
    ),
    "from_the_first_layer_on": ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, [4] * 4),
    "beyond_the_last_layer": (
        {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 28},
        [None] * 4,
    ),
    "layer_types": (
        {
            "sliding_window": 4,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        },
        [4, None, None, 4],
    ),
    "layer_types_over_max_window_layers": (
        {
            "sliding_window": 4,
            "use_sliding_window": True,
            "max_window_layers": 0,
            "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
        },
        [None, None, None, 4],
    ),
    "layer_types_but_switched_off": (
        {"sliding_window": 4, "use_sliding_window": False, "layer_types": ["full_attention"] * 4},
        [None] * 4,
    ),
}


@pytest.mark.parametrize("model_type", QWEN)
@pytest.mark.parametrize("case", WINDOWS)
def test_ro7_sliding_windows_of_qwen(model_type, case):
    changes, windows = WINDOWS[case]
    assert read(model_type, **changes).sliding_windows == tuple(windows)


@pytest.mark.parametrize(("model_type", "case"), [(m, c) for m in ("qwen2", "qwen3") for c in WINDOWS])
def test_ro7_sliding_windows_are_those_of_transformers(model_type, case):
    from transformers import AutoConfig

    changes, _ = WINDOWS[case]
    theirs = AutoConfig.for_model(model_type, **(CONFIGS[model_type] | changes))
    per_layer = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert list(read(model_type, **changes).sliding_windows) == per_layer


@pytest.mark.parametrize(("window", "windows"), [(4, (4,) * 4), (None, (None,) * 4)])
def test_ro7_mistral_has_one_window_for_all_layers(window, windows):
    assert read("mistral", sliding_window=window).sliding_windows == windows


@pytest.mark.parametrize(
    ("layer_types", "sentence"),
    [
        (["full_attention"] * 3, r"layer_types has 3 entries for 4 layers"),
        (["full_attention"] * 3 + ["linear_attention"], r"layer_types may hold .*got 'linear_attention'"),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(layer_types, sentence):
    with pytest.raises(ValueError, match=sentence):
        read("qwen3", layer_types=layer_types)


def test_sliding_layers_without_a_window_are_refused():
    types = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(ValueError, match=r"layer_types.*sliding_attention.*use_sliding_window.*sliding_window"):
        read("qwen3", layer_types=types, sliding_window=4, use_sliding_window=False)


# --- head sizes


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3_moe"])
def test_head_dim_follows_from_the_hidden_size(model_type):
    config = CONFIGS[model_type] | {"model_type": model_type, "hidden_size": 96}
    config.pop("head_dim", None)
    assert read_model_config(config).head_dim == 24


def test_head_dim_of_qwen3_is_128_unless_given():
    assert read("qwen3", head_dim=None).head_dim == 128
    assert read("qwen3", head_dim=24).head_dim == 24


def test_kv_heads_are_the_query_heads_unless_given():
    assert read("llama", num_key_value_heads=None).num_key_value_heads == 4


def test_query_heads_must_be_a_multiple_of_kv_heads():
    with pytest.raises(ValueError, match=r"num_attention_heads \(4\).*num_key_value_heads \(3\)"):
        read("llama", num_key_value_heads=3)


# --- mixtures of experts


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, set()),
        ({"mlp_only_layers": [1, 3]}, {1, 3}),
        ({"decoder_sparse_step": 2}, {0, 2}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, {0, 1, 2}),
    ],
)
def test_which_layers_of_qwen3_moe_are_dense(changes, dense):
    assert read("qwen3_moe", **changes).dense_layers == dense


def test_number_of_experts_under_either_name():
    config = {k: v for k, v in CONFIGS["qwen3_moe"].items() if k != "num_experts"}
    config |= {"model_type": "qwen3_moe", "num_local_experts": 8}
    assert read_model_config(config).num_experts == 8
    with pytest.raises(ValueError, match=r"num_experts = 8 and num_local_experts = 4"):
        read("qwen3_moe", num_local_experts=4)


# --- refusals


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act must be 'silu' for model_type '{model_type}', got 'gelu'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, r"rope type 'su' is not supported"),
        ({"attn_logit_softcapping": 50.0}, r"does not honour here: attn_logit_softcapping = 50.0"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\) is not supported"),
        ({"hidden_size": "64"}, r"hidden_size must be an integer, got '64'"),
        ({"num_hidden_layers": None}, r"lacks num_hidden_layers"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings must be true or false, got 1"),
    ],
)
def test_unsupported_values_are_refused_by_name(model_type, changes, sentence):
    with pytest.raises(ValueError, match=sentence.format(model_type=model_type)):
        read(model_type, **changes)


@pytest.mark.parametrize(
    ("model_type", "key"), [("mistral", "attention_bias"), ("qwen2", "mlp_bias"), ("llama", "sliding_window")]
)
def test_keys_of_another_model_type_are_refused(model_type, key):
    with pytest.raises(ValueError, match=f"does not honour here: {key}"):
        read(model_type, **{key: 4 if key == "sliding_window" else True})


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        ("qwen33", r"'qwen33' is not supported: did you mean 'qwen3'\?"),
        ("lama", r"did you mean 'llama'\?"),
        ("qwen3-moe", r"did you mean 'qwen3_moe'\?"),
        ("zzz", r"allowed: deepseek_v3, .*, llama, mistral, qwen2, qwen3, qwen3_moe"),
        (None, r"model_type None is not supported"),
        (["llama"], r"is not supported"),
    ],
)
def test_unknown_model_type_names_the_nearest(model_type, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_model_config(SHARED | {"model_type": model_type})


def test_absent_model_type_is_refused():
    with pytest.raises(ValueError, match=r"model_type None is not supported"):
        read_model_config(SHARED)
