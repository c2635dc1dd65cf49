"""Strict reading of config.json: every key is honoured, harmless, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from rorqual.loader.config_reader import ConfigReader


def reader(**config: Any) -> ConfigReader:
    return ConfigReader(config, model_type="llama")


def take_ordinary_keys(config: dict[str, Any]) -> None:
    """Read what a Llama-like model reads, and finish."""
    keys = ConfigReader(config, model_type=config["model_type"])
    keys.require("hidden_act", "silu")
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        keys.take(key, int)
    for key in ("num_key_value_heads", "head_dim", "max_position_embeddings"):
        keys.take(key, int, None)
    keys.take("rms_norm_eps", float)
    keys.take("tie_word_embeddings", bool, False)
    keys.ignore("rope_theta", "rope_scaling", "rope_parameters")
    model_type = config["model_type"]
    if model_type != "qwen2":
        keys.take("attention_bias", bool, False)
    if model_type == "llama":
        keys.take("mlp_bias", bool, False)
    if model_type != "llama":
        keys.take("sliding_window", int, None)
    if model_type.startswith("qwen"):
        keys.take("use_sliding_window", bool, False)
        keys.take("max_window_layers", int, 0)
        keys.take("layer_types", list, None)
    if model_type == "qwen3_moe":
        keys.take("num_experts", int, aliases=("num_local_experts",))
        keys.take("norm_topk_prob", bool)
        for key in ("moe_intermediate_size", "num_experts_per_tok", "decoder_sparse_step"):
            keys.take(key, int)
        keys.take("mlp_only_layers", list, None)
        keys.require("use_qk_norm", True)
    keys.finish()


LLAMA_2_7B = """{"_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
"eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
"max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
"num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
"tie_word_embeddings": false, "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": true,
"vocab_size": 32000}"""
LLAMA_3_1_8B = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
"initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
"high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true,
"vocab_size": 128256}"""
MISTRAL_7B = """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
"model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}"""
QWEN_2_5_7B = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
"eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
"intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
"num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
"rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
"transformers_version": "4.43.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
"vocab_size": 152064}"""
QWEN_3_0_6B = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
"model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
"use_sliding_window": false, "vocab_size": 151936}"""
QWEN_3_CODER_30B_A3B = """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28,
"mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
"num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
"num_key_value_heads": 4, "output_router_logits": false, "qkv_bias": false, "rms_norm_eps": 1e-06,
"rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0,
"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.52.3",
"use_cache": true, "use_qk_norm": true, "use_sliding_window": false, "vocab_size": 151936}"""
SMOLLM2_135M = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
"initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true,
"max_position_embeddings": 8192, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 9,
"num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
"rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true,
"torch_dtype": "bfloat16", "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
"transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}"""


@pytest.mark.parametrize(
    "text",
    [LLAMA_2_7B, LLAMA_3_1_8B, MISTRAL_7B, QWEN_2_5_7B, QWEN_3_0_6B, QWEN_3_CODER_30B_A3B, SMOLLM2_135M],
)
def test_configs_as_published_are_read_whole(text: str) -> None:
    take_ordinary_keys(json.loads(text))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe"])
@pytest.mark.parametrize("whole", [False, True])
def test_configs_that_transformers_writes_are_read_whole(tmp_path: Path, family: str, whole: bool) -> None:
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}ForCausalLM"], dtype="bfloat16")
    config.to_json_file(tmp_path / "config.json", use_diff=not whole)  # whole: defaults too
    take_ordinary_keys(json.loads((tmp_path / "config.json").read_text()))


def test_a_value_comes_out_in_its_type() -> None:
    keys = reader(a=3, b=3, c=True, d="x", e=[1], f={"g": 1})
    assert keys.take("a", int) == 3
    value = keys.take("b", float)
    assert (value, type(value)) == (3.0, float)
    assert keys.take("c", bool) is True
    assert (keys.take("d", str), keys.take("e", list), keys.take("f", dict)) == ("x", [1], {"g": 1})
    keys.finish()


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ("3", int, "must be an integer, got '3'"),
        (3.5, int, "must be an integer, got 3.5"),
        (True, int, "must be an integer, got True"),
        (True, float, "must be a finite number, got True"),
        (float("nan"), float, "must be a finite number, got nan"),
        ("1e-5", float, "must be a finite number, got '1e-5'"),
        (1, bool, "must be true or false, got 1"),
        (1, str, "must be a string, got 1"),
        ({}, list, "must be a list"),
        ([], dict, "must be an object"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"hidden_size {message}"):
        reader(hidden_size=value).take("hidden_size", kind)


def test_null_means_absent() -> None:
    assert reader(head_dim=None).take("head_dim", int, 64) == 64
    with pytest.raises(ValueError, match="'llama' lacks hidden_size"):
        reader(hidden_size=None).take("hidden_size", int)


def test_a_function_reads_a_value_and_its_fault_names_the_key() -> None:
    def even(value: int) -> int:
        if value % 2:
            raise ValueError(f"must be even, got {value}")
        return value

    assert reader(n=4).take("n", even) == 4
    with pytest.raises(ValueError, match=r"config\.json: n: must be even, got 3"):
        reader(n=3).take("n", even)


def test_an_alias_is_read_and_must_not_contradict() -> None:
    keys = reader(num_local_experts=8)
    assert keys.take("num_experts", int, aliases=("num_local_experts",)) == 8
    keys.finish()
    assert reader(num_experts=8, num_local_experts=8).take("num_experts", int, aliases=("num_local_experts",)) == 8
    with pytest.raises(ValueError, match="num_experts = 8 and num_local_experts = 4"):
        reader(num_experts=8, num_local_experts=4).take("num_experts", int, aliases=("num_local_experts",))
    with pytest.raises(ValueError, match="lacks num_experts or num_local_experts"):
        reader().take("num_experts", int, aliases=("num_local_experts",))


def test_a_required_value_may_be_absent_but_not_different() -> None:
    keys = reader(hidden_act="silu", use_cache=True)
    keys.require("hidden_act", "silu")
    keys.require("absent", 1)
    keys.finish()
    with pytest.raises(ValueError, match="hidden_act must be 'silu' for model_type 'llama', got 'gelu'"):
        reader(hidden_act="gelu").require("hidden_act", "silu")
    with pytest.raises(ValueError, match="n must be 1 or 2 for"):
        reader(n=True).require("n", 1, 2)


def test_what_nobody_read_is_refused_with_the_way_out() -> None:
    keys = reader(hidden_size=8, attn_logit_softcapping=50.0, embedding_multiplier=12, unused=None, empty=[])
    keys.take("hidden_size", int)
    with pytest.raises(ValueError, match="'llama' does not honour here: attn_logit_softcapping = 50") as caught:
        keys.finish()
    assert """--hf-overrides '{"attn_logit_softcapping": null, "embedding_multiplier": null}'""" in str(caught.value)
    assert "hidden_size" not in str(caught.value)
    assert "unused" not in str(caught.value)


def test_false_is_a_value_too() -> None:
    with pytest.raises(ValueError, match="use_rope = false"):
        reader(use_rope=False).finish()


def test_an_inert_key_is_refused_as_soon_as_it_asks_for_something() -> None:
    reader(rope_interleaved=False, shared_expert_intermediate_size=0).finish()
    with pytest.raises(ValueError, match="rope_interleaved = true"):
        reader(rope_interleaved=True).finish()
    with pytest.raises(ValueError, match="shared_expert_intermediate_size = 512"):
        reader(shared_expert_intermediate_size=512).finish()


def test_a_quantised_checkpoint_is_refused_by_its_method() -> None:
    with pytest.raises(ValueError, match=r"quantization_config \(gptq\) is not supported"):
        reader(quantization_config={"quant_method": "gptq", "bits": 4}).finish()
    reader(quantization_config=None).finish()


def test_ignored_keys_are_left_alone() -> None:
    keys = reader(rope_theta=1.0)
    keys.ignore("rope_theta")
    keys.finish()
