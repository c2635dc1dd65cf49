"""DeepSeek-V3 against transformers in float32, and what its configs may say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rorqual import SamplingParams
from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.layers.rotary_embedding import RotaryTables
from rorqual.models.registry import build_model, read_model_config
from tests.engine.engines import tiny_llm
from tests.models.scattered import loaded_model, logits_by_chunks, tokens
from tests.tiny import (
    DEEPSEEK_CONFIGS,
    checkpoint_folder,
    random_deepseek,
    reference_greedy,
    reference_logits,
)

NAMES = ["deepseek_v3", "deepseek_v3_noqlora"]
LENGTH = 210


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 64, 128, 129, LENGTH])
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_transformers(name, chunk_size):
    """2e-5 to 4e-5 apart on logits of up to 9."""
    token_ids = tokens(LENGTH)
    got = logits_by_chunks(loaded_model(checkpoint_folder(name)), token_ids, chunk_size)
    assert (got - reference_logits(name, token_ids)).abs().max() < 5e-5


@pytest.mark.parametrize("num_prompt", [1, 100, 209])
@pytest.mark.parametrize("name", NAMES)
def test_prompt_and_cached_decode_equal_transformers(name, num_prompt):
    """Chunks of 64, with the tokens of an answer each a sequence of its own."""
    token_ids = tokens(LENGTH)
    model = loaded_model(checkpoint_folder(name))
    got = logits_by_chunks(model, token_ids, 64, num_prompt=num_prompt)
    assert (got - reference_logits(name, token_ids)).abs().max() < 5e-5


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers(name):
    prompts = [tuple(tokens(length, seed=length)) for length in (1, 5, 16, 33, 150)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    options = {"max_model_len": 192, "max_num_batched_tokens": 16, "num_kv_blocks": 100}
    with tiny_llm(name, **options) as llm:
        outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False)
    assert [out.token_ids for out in outputs] == [reference_greedy(name, prompt, 24) for prompt in prompts]


# --- what config.json may say

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""As the model's makers publish it."""
PUBLISHED: dict[str, dict[str, Any]] = {
    "v3": {},
    "v3.1": {"quantization_config": V3["quantization_config"] | {"scale_fmt": "ue8m0"}},
    "moonlight": {
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_hidden_layers": 27,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "quantization_config": None,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "max_position_embeddings": 8192,
        "vocab_size": 163840,
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "vocab_size": 163840,
    },
}


def read(**changes: Any) -> Any:
    return read_model_config({key: value for key, value in (V3 | changes).items() if value is not None})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    changes = PUBLISHED[name]
    config = read(**changes)
    wanted = {k: v for k, v in (V3 | changes).items() if hasattr(config, k)}
    assert {key: getattr(config, key) for key in wanted} == wanted
    assert config.dense_layers == set(range((V3 | changes)["first_k_dense_replace"]))


def test_configs_that_transformers_saved_are_read():
    """Its head_dim is the rotated part's, and rope_scaling lies in rope_parameters."""
    rope = V3["rope_scaling"] | {"rope_theta": 10000.0, "rope_type": "yarn"}
    saved = {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True, "rope_parameters": rope}
    gone = dict.fromkeys(("rope_scaling", "rope_theta", "scoring_func", "topk_method", "moe_layer_freq"))
    renamed = {"n_routed_experts": None, "num_local_experts": 256}
    assert read(**saved, **gone, **renamed) == read()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act must be 'silu' for model_type 'deepseek_v3', got 'gelu'"),
        ({"scoring_func": "softmax"}, r"scoring_func must be 'sigmoid'.*got 'softmax'"),
        ({"topk_method": "greedy"}, r"topk_method must be 'noaux_tc'.*got 'greedy'"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq must be 1"),
        ({"attention_bias": True}, r"attention_bias must be False"),
        ({"rope_interleave": False}, r"rope_interleave must be True"),
        ({"head_dim": 192}, r"head_dim must be 64"),
        ({"qk_head_dim": 128}, r"qk_head_dim must be 192"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads must be 128"),
        ({"n_group": None}, r"lacks n_group"),
        ({"routed_scaling_factor": None}, r"lacks routed_scaling_factor"),
        ({"num_local_experts": 8}, r"n_routed_experts = 256 and num_local_experts = 8"),
        ({"index_topk": 2048}, r"does not honour here: index_topk = 2048"),
        ({"swiglu_limit": 10.0}, r"does not honour here: swiglu_limit = 10.0"),
        ({"sliding_window": 128}, r"does not honour here: sliding_window = 128"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\) is not supported"),
        ({"rope_scaling": V3["rope_scaling"] | {"type": "su"}}, r"rope type 'su' is not supported"),
    ],
)
def test_values_that_are_not_honoured_are_refused_by_name(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(**changes)


def test_a_cache_in_fp8_is_refused_by_name():
    meta = Placement(Mesh.single(), torch.bfloat16, torch.device("meta"), torch.float8_e4m3fn, 8)
    config = V3 | {"num_hidden_layers": 1, "n_routed_experts": 8}
    with pytest.raises(ValueError, match=r"kv_cache_dtype 'float8_e4m3fn' is not for this model.*'auto'"):
        build_model(config, meta)


def test_what_is_cached_per_token():
    """One latent of 576 numbers for every layer, in one group; nothing for the block that is not built."""
    config = V3 | {"num_hidden_layers": 2, "n_routed_experts": 8}
    for with_mtp, count in ((False, 2), (True, 3)):
        meta = Placement(Mesh.single(), torch.bfloat16, torch.device("meta"), torch.bfloat16, 8, with_mtp=with_mtp)
        specs = build_model(config, meta).kv_specs
        assert [spec.bytes_per_row() for spec in specs] == [1152] * count
        assert len(set(specs)) == 1


# --- the softmax scale


@pytest.mark.parametrize(
    ("rope_scaling", "factor"),
    [
        (V3["rope_scaling"], (0.1 * math.log(40) + 1) ** 2),
        (V3["rope_scaling"] | {"mscale_all_dim": 0.5}, (0.05 * math.log(40) + 1) ** 2),
        (V3["rope_scaling"] | {"mscale_all_dim": 0}, 1.0),
        (V3["rope_scaling"] | {"factor": 1.0}, 1.0),
        (None, 1.0),
    ],
)
def test_yarn_widens_the_softmax_by_mscale_all_dim(rope_scaling, factor):
    assert read(rope_scaling=rope_scaling).softmax_scale == pytest.approx(192**-0.5 * factor, rel=1e-12)


def test_cosines_carry_the_ratio_of_both_mscales():
    """1 for DeepSeek-V3, whose config gives both alike."""
    cpu = torch.device("cpu")
    for scaling, amplitude in (
        (V3["rope_scaling"], 1.0),
        (V3["rope_scaling"] | {"mscale": 0.5}, (0.05 * math.log(40) + 1) / (0.1 * math.log(40) + 1)),
    ):
        table = RotaryTables().get(read(rope_scaling=scaling).rope, 64, max_model_len=2, device=cpu)
        assert table[0, 0].item() == pytest.approx(amplitude, rel=1e-6)


# --- what is easily got wrong


def logits_of_both(folder: Path, theirs: Any, count: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    theirs.save_pretrained(folder)
    token_ids = tokens(count)
    with torch.inference_mode():
        want = theirs(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits_by_chunks(loaded_model(folder), token_ids, 32), want


def changed_model(**changes: Any) -> Any:
    model_type, options = DEEPSEEK_CONFIGS["deepseek_v3"]
    return random_deepseek(model_type, options | changes)


def test_norms_between_low_rank_products_have_an_epsilon_of_their_own(tmp_path):
    """1e-6, whatever rms_norm_eps says: DeepSeek-V3's is 1e-6 as well, and hides it."""
    got, want = logits_of_both(tmp_path, changed_model(rms_norm_eps=0.1))
    assert (got - want).abs().max() < 5e-5


def test_groups_that_are_not_chosen_lose_also_where_all_biases_are_negative(tmp_path):
    """A score of zero in their place would win."""
    theirs = changed_model()
    biases = [layer.mlp.gate.e_score_correction_bias for layer in theirs.model.layers[1:]]
    for bias in biases:
        bias.data.sub_(3)
    assert all(bool((bias < -1).all()) for bias in biases)
    got, want = logits_of_both(tmp_path, theirs)
    assert (got - want).abs().max() < 5e-5


def test_a_tied_head_is_not_in_the_file(tmp_path):
    got, want = logits_of_both(tmp_path, changed_model(tie_word_embeddings=True))
    assert (got - want).abs().max() < 1e-5 * want.abs().max()
    (file,) = tmp_path.glob("*.safetensors")
    assert "lm_head.weight" not in load_file(file)


def test_weights_that_are_not_renormalised(tmp_path):
    got, want = logits_of_both(tmp_path, changed_model(norm_topk_prob=False, n_shared_experts=2))
    assert (got - want).abs().max() < 5e-5


def test_absorbed_and_expanded_latents_give_the_same_logits():
    """A prompt's tokens and an answer's go different ways on the CPU."""
    token_ids = tokens(100)
    for name in NAMES:
        model = loaded_model(checkpoint_folder(name))
        expanded, absorbed = (logits_by_chunks(model, token_ids, 50, num_prompt=count) for count in (100, 1))
        assert (expanded - absorbed).abs().max() < 5e-5
