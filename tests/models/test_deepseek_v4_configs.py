"""What config.json of DeepSeek-V4 may say: the released forms, the re-saved one, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.compressed_attention import LayerKind
from rorqual.layers.decoder import Placement
from rorqual.models.registry import build_model, read_model_config

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "vocab_size": 129280,
}
TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
ROPES = {
    "main": {"partial_rotary_factor": 0.125, "rope_theta": 10000.0, "rope_type": "default"},
    "compress": {
        "attention_factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "partial_rotary_factor": 0.125,
        "rope_theta": 160000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def resaved() -> dict[str, Any]:
    """FLASH as transformers writes it."""
    official = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "topk_method", "expert_dtype")
    return without(FLASH, *official) | {
        "layer_types": [TYPES[ratio] for ratio in FLASH["compress_ratios"][:43]],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "partial_rotary_factor": 0.125,
        "rope_parameters": ROPES,
        "quantization_config": FLASH["quantization_config"] | {"expert_dtype": "fp4"},
        "mlp_bias": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "output_router_logits": False,
    }


def test_flash_as_released():
    config = read_model_config(FLASH)
    kinds = [LayerKind(0, sparse=False), LayerKind(4, sparse=True), LayerKind(128, sparse=False)]
    assert [kinds.index(kind) for kind in config.layer_kinds] == [0, 0, *[1, 2] * 20, 1]
    assert config.hash_layers == {0, 1, 2}
    assert (config.attention.rope_dim, config.attention.sliding_window) == (64, 128)
    assert config.main_rope.rope_type == "default"
    assert config.main_rope.theta == 1e4
    assert config.compress_rope.theta == 1.6e5
    assert config.compress_rope.numbers == {
        "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
        "attention_factor": 1.0,
    }  # fmt: skip


def test_a_resaved_config_is_the_same_model():
    assert read_model_config(resaved()) == read_model_config(FLASH)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": FLASH["rope_scaling"] | {"rope_theta": 10000.0, "rope_type": "yarn"}},
        {"rope_scaling": None, "rope_parameters": FLASH["rope_scaling"]},
        {"rope_scaling": None, "rope_parameters": ROPES},
        {"partial_rotary_factor": 0.125},
        {"dtype": "bfloat16", "torch_dtype": None},
        {"layer_types": resaved()["layer_types"]},
        {"expert_dtype": None, "quantization_config": resaved()["quantization_config"]},
    ],
)
def test_other_spellings_are_the_same_model(changes):
    assert read_model_config(FLASH | changes) == read_model_config(FLASH)


def test_pro_begins_with_two_heavily_compressed_layers():
    pro = {"num_hidden_layers": 61, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]}
    assert [kind.ratio for kind in read_model_config(FLASH | pro).layer_kinds[:4]] == [128, 128, 4, 128]


def test_base_releases_have_fp8_experts():
    config = without(FLASH, "expert_dtype")
    assert read_model_config(config) == read_model_config(FLASH | {"expert_dtype": "fp8"}) == read_model_config(FLASH)


def test_no_layer_types_are_made_up():
    """transformers' own default is none of the released models."""
    with pytest.raises(ValueError, match="lacks compress_ratios or layer_types, and no default fits"):
        read_model_config(without(FLASH, "compress_ratios"))


DSPARK = {"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42]}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 43 layers"),
        ({"compress_ratios": [0] * 42 + [8]}, "compress_ratios may hold 0, 4, 128, got 8"),
        ({"compress_ratios": [0] * 43 + [4]}, r"windows alone, so 0 each; got \[4\] behind the 43 layers"),
        ({"layer_types": ["sliding_attention"] * 43}, "compress_ratios and layer_types contradict each other"),
        ({"compress_ratios": None, "layer_types": ["full_attention"] * 43}, "layer_types may hold .* 'full_attention'"),
        ({"compress_ratios": None, "layer_types": ["sliding_attention"]}, "layer_types has 1 entries for 43 layers"),
        (
            {"compress_ratios": None, "layer_types": [TYPES[4]] * 43, "compress_rates": {TYPES[4]: 0}},
            "compress_rates maps .* at least 1, got 'compressed_sparse_attention': 0",
        ),
        ({"num_hash_layers": None}, "lacks num_hash_layers or mlp_layer_types"),
        ({"mlp_layer_types": ["moe"] * 43}, "num_hash_layers and mlp_layer_types contradict each other"),
        ({"num_hash_layers": None, "mlp_layer_types": ["dense"] * 43}, "mlp_layer_types holds 'hash_moe' or 'moe'"),
        ({"qk_rope_head_dim": None}, "lacks qk_rope_head_dim or partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "qk_rope_head_dim = 64, and partial_rotary_factor = 0.25 of head_dim 512"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"rope_theta": None}, "lacks rope_theta"),
        ({"compress_rope_theta": None}, "lacks compress_rope_theta"),
        ({"rope_scaling": FLASH["rope_scaling"] | {"rope_theta": 5.0}}, "rope_theta = 5.0, which is neither of"),
        ({"rope_scaling": FLASH["rope_scaling"] | {"mscale": 1.0}}, "mscale = 1.0 is not honoured"),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.277}},
            "attention_factor must be 1.0, got 1.2",
        ),
        ({"rope_scaling": FLASH["rope_scaling"] | {"type": "linear"}}, "must be of type default or yarn, got linear"),
        ({"rope_scaling": without(FLASH["rope_scaling"], "factor")}, "rope type 'yarn' needs factor"),
        ({"rope_parameters": ROPES}, "rope_scaling and rope_parameters contradict each other"),
        (
            {"rope_scaling": None, "rope_parameters": ROPES | {"main": ROPES["compress"]}},
            "of main layers must be of type default, got yarn",
        ),
        (
            {"rope_scaling": None, "rope_parameters": ROPES | {"main": {"rope_theta": 7.0}}},
            "of main layers: rope_theta is 7.0 in rope_parameters, and rope_theta beside it 10000.0",
        ),
        ({"num_attention_heads": 60}, r"num_attention_heads \(60\) must be a multiple of o_groups \(8\)"),
        ({"index_topk": None}, "lacks index_topk"),
        ({"index_head_dim": 32}, "index_head_dim must hold the 64 rotated channels, got 32"),
        ({"swiglu_limit": None}, "lacks swiglu_limit"),
        ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters must be at least 1, got 0"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be 'sqrtsoftplus'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise must be 0.0"),
        ({"quantization_config": None}, "expert_dtype = 'fp4' without a quantization_config"),
        ({"expert_dtype": "fp6"}, "expert_dtype = 'fp6' is not supported"),
        ({"kv_source_layer_ids": [2, 8]}, "does not honour here: kv_source_layer_ids"),
        (DSPARK, r"DSpark's draft blocks, which are not supported: dspark_block_size = 5, .* --hf-overrides"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_model_config(FLASH | changes)


def test_the_way_out_of_draft_blocks_works():
    released = FLASH | {"compress_ratios": [*FLASH["compress_ratios"], 0, 0]} | DSPARK
    assert read_model_config(released | dict.fromkeys(DSPARK)) == read_model_config(FLASH)


SMALL = {"num_hidden_layers": 5, "compress_ratios": [0, 4, 128, 4, 0, 0], "n_routed_experts": 8}


def built(changes: dict[str, Any], **options: Any) -> Any:
    """Five layers of it on the meta device: nothing is allocated."""
    options = {"kv_cache_dtype": torch.bfloat16, "max_model_len": 1} | options
    return build_model(
        FLASH | SMALL | changes, Placement(Mesh.single(), torch.bfloat16, torch.device("meta"), **options)
    )


def test_flash_keeps_as_many_bytes_per_token_as_released():
    """584 per row of window and entries, 68 beside each CSA entry; states in float32."""
    model = built({}, kv_cache_dtype=torch.float8_e4m3fn, index_cache_format="fp4")
    sizes = {(spec.tokens_per_row, len(spec.parts), spec.bytes_per_row()) for spec in model.kv_specs}
    assert sizes == {
        (1, 1, 584),
        (4, 2, 584 + 68),
        (128, 1, 584),
        (1, 2, 4 * 4 * (512 + 128)),
        (1, 1, 2 * 4 * 512),
    }


@pytest.mark.parametrize(
    ("changes", "options", "sentence"),
    [
        (
            {"head_dim": 96},
            {"kv_cache_dtype": torch.float8_e4m3fn},
            "blocks of 64, which do not divide the 32",
        ),
        ({"index_head_dim": 96}, {"index_cache_format": "fp4"}, "index_head_dim must be a power of two .* got 96"),
        ({"index_head_dim": 96}, {"index_cache_format": "fp8"}, "index_head_dim must be a power of two .* got 96"),
        ({"num_nextn_predict_layers": 2}, {"with_mtp": True}, "got num_nextn_predict_layers = 2"),
    ],
)
def test_caches_and_blocks_that_do_not_fit_are_refused_by_name(changes, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        built(changes, **options)


def test_a_sketch_allocates_nothing():
    """Tables and constants neither."""
    model = built({}, with_mtp=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(layer.attn.cos_sin.is_meta and layer.attn._head_norm.weight.is_meta for layer in model.layers)
