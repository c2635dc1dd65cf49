"""Every key of DeepSeek's published configs given another value: another model, or a refusal that names the key."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.loader.weights import fill_with_dummy_weights, prepare_weights, wanted_tensors
from rorqual.models.registry import build_model, read_model_config
from rorqual.quantization import QTensor
from tests.models.scattered import CPU, MAX_LEN, logits_by_chunks
from tests.models.test_deepseek_v3 import V3
from tests.models.test_deepseek_v4_configs import FLASH, TYPES, resaved
from tests.models.test_deepseek_v32 import V32

_V3_SIZES: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "n_routed_experts": 16,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "topk_group": 2,
    "v_head_dim": 8,
    "vocab_size": 199,
}
_V4_SIZES: dict[str, Any] = {
    "compress_ratios": [0, 4, 128, 0],
    "head_dim": 32,
    "hidden_size": 32,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "num_hidden_layers": 3,
    "o_groups": 2,
    "o_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "sliding_window": 16,
    "vocab_size": 199,
}
_RESAVED_SIZES = {key: value for key, value in _V4_SIZES.items() if key in resaved()} | {
    "layer_types": [TYPES[ratio] for ratio in (0, 4, 128)],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "partial_rotary_factor": 0.25,
    "rope_parameters": {
        name: rope | {"partial_rotary_factor": 0.25} for name, rope in resaved()["rope_parameters"].items()
    },
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "v3": V3 | _V3_SIZES,
    "v32": V32 | _V3_SIZES | {"index_head_dim": 16, "index_n_heads": 16, "index_topk": 24},
    "v4": FLASH | _V4_SIZES,
    "v4 resaved": resaved() | _RESAVED_SIZES,
}
"""Every key of the published files, the sizes small."""

SILENT: dict[str, Any] = {
    # remarks, and who is to load it
    "architectures": ["SomethingForCausalLM"],
    "auto_map": {"AutoConfig": "elsewhere.Config"},
    "torch_dtype": "float16",  # what the engine's own dtype is, unless it is told one
    "transformers_version": "5.0.0",
    "use_cache": False,
    # the tokenizer's and the engine's
    "bos_token_id": 7,
    "eos_token_id": 7,
    # training
    "attention_dropout": 0.5,
    "aux_loss_alpha": 0.5,
    "ep_size": 8,
    "initializer_range": 0.5,
    "output_router_logits": True,
    "pretraining_tp": 8,
    "router_aux_loss_coef": 0.5,
    "seq_aux": False,
}
"""Keys that no forward pass depends on, with other values."""
OTHER: dict[str, Any] = {
    "attention_bias": True,
    "compress_rates.compressed_sparse_attention": 8,
    "compress_rates.heavily_compressed_attention": 64,
    "compress_ratios": [0, 128, 4, 0],
    "compress_rope_theta": 10000,
    "expert_dtype": "fp8",
    "first_k_dense_replace": 2,
    "hc_eps": 1e-2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "head_dim": 48,
    "hidden_act": "gelu",
    "hidden_size": 48,
    "index_head_dim": 32,
    "index_n_heads": 32,
    "index_topk": 16,
    "intermediate_size": 64,
    "kv_lora_rank": 32,
    "layer_types": [TYPES[ratio] for ratio in (0, 128, 4)],
    "max_position_embeddings": 4096,
    "mlp_bias": True,
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe"],
    "model_type": "deepseek_v5",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 2,
    "n_group": 2,
    "n_routed_experts": 32,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 8,
    "num_experts_per_tok": 3,
    "num_hash_layers": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 0,
    "o_groups": 4,
    "o_lora_rank": 32,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 4,
    "quantization_config.activation_scheme": "static",
    "quantization_config.expert_dtype": "fp8",
    "quantization_config.fmt": "e5m2",
    "quantization_config.quant_method": "awq",
    "quantization_config.scale_fmt": "float",
    "quantization_config.weight_block_size": [32, 32],
    "rms_norm_eps": 1e-2,
    "rope_parameters.compress.attention_factor": 1.277,
    "rope_parameters.compress.partial_rotary_factor": 0.5,
    "rope_parameters.compress.rope_theta": 10000.0,
    "rope_parameters.compress.rope_type": "linear",
    "rope_parameters.main.partial_rotary_factor": 0.5,
    "rope_parameters.main.rope_theta": 50000.0,
    "rope_parameters.main.rope_type": "yarn",
    "rope_scaling.mscale": 0.5,
    "rope_scaling.mscale_all_dim": 0.5,
    "rope_theta": 50000,
    "router_jitter_noise": 0.1,
    "routed_scaling_factor": 2.0,
    "scoring_func": "softmax",
    "sliding_window": 32,
    "swiglu_limit": 0.01,
    "tie_word_embeddings": True,
    "topk_group": 3,
    "topk_method": "greedy",
    "v_head_dim": 16,
    "vocab_size": 256,
}
"""Another plausible value, or one of another kind. swiglu_limit is one that small weights reach."""
for _where in ("rope_scaling", "rope_parameters.compress"):
    OTHER |= {
        f"{_where}.beta_fast": 4,
        f"{_where}.beta_slow": 8,
        f"{_where}.factor": 4,
        f"{_where}.original_max_position_embeddings": 512,
        f"{_where}.type": "linear",
    }


WITH_IT: dict[str, dict[str, Any]] = {
    "num_attention_heads": {"num_key_value_heads": 8},
    "num_hidden_layers": {
        "compress_ratios": [0, 0],
        "layer_types": [TYPES[0]],
        "mlp_layer_types": ["hash_moe"],
    },
}
"""Keys that say the same of another side, where a file has them, and DeepSeek-V4's one head of keys aside."""


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"rope_scaling.factor": 16, ...}"""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) and key != "auto_map" else {prefix + key: value}
        )
    return found


def changed(name: str, key: str, value: Any) -> dict[str, Any]:
    config = copy.deepcopy(PUBLISHED[name])
    inner, (*way, last) = config, key.split(".")
    for step in way:
        inner = inner[step]
    inner[last] = value
    also = {other: number for other, number in WITH_IT.get(key, {}).items() if config.get(other, 1) != 1}
    return config | also


class Made(NamedTuple):
    """What a config makes."""

    tensors: dict[str, Any]
    """Shapes of what a checkpoint holds, by name."""
    formats: list[Any]
    caches: list[Any]
    longest: int
    logits: torch.Tensor


def made(config: dict[str, Any], *, quantized: bool) -> Made:
    if not quantized:
        config = {key: value for key, value in config.items() if key not in ("quantization_config", "expert_dtype")}
    longest = read_model_config(config).max_position_embeddings
    place = Placement(Mesh.single(), torch.float32, CPU, torch.float32, MAX_LEN, with_mtp=True)
    model: Any = build_model(config, place)
    tensors = {name: tuple(tensor.shape) for name, tensor in wanted_tensors(model).items()}
    fill_with_dummy_weights(model, seed=0)
    prepare_weights(model)
    operands = [layer.operand for layer in model.modules() if hasattr(layer, "operand")]
    formats = [weight.format if isinstance(weight, QTensor) else None for weight in operands]
    return Made(tensors, formats, model.kv_specs, longest, logits_by_chunks(model, IDS, len(IDS)))


IDS = torch.randint(2, 190, (140,), generator=torch.Generator().manual_seed(0)).tolist()
"""An entry of 128 tokens, and more than any window."""
_MADE: dict[tuple[str, bool], Made] = {}


def base(name: str, *, quantized: bool) -> Made:
    if (name, quantized) not in _MADE:
        _MADE[name, quantized] = made(PUBLISHED[name], quantized=quantized)
    return _MADE[name, quantized]


def differ(one: Made, other: Made) -> bool:
    if one[:-1] != other[:-1]:
        return True
    return not torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_key_has_another_value_here(name):
    keys = flat(PUBLISHED[name])
    assert not [key for key in keys if (key in OTHER) == (key in SILENT)]
    assert not [key for key, value in keys.items() if (OTHER | SILENT)[key] == value]


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in PUBLISHED for key in OTHER if key in flat(PUBLISHED[name])]
)
def test_another_value_makes_another_model_or_is_refused_by_name(name, key):
    quantized = key.startswith(("quantization_config", "expert_dtype"))
    want = base(name, quantized=quantized)
    got, refusal = None, ""
    try:
        got = made(changed(name, key, OTHER[key]), quantized=quantized)
    except ValueError as error:
        refusal = str(error)
    if got is None:
        spoken = {"quant_method": "quantization_config (awq)", "rope_type": "type"}
        last = key.rpartition(".")[2]
        assert spoken.get(last, last) in refusal
    else:
        assert differ(got, want)


@pytest.mark.parametrize("name", PUBLISHED)
def test_remarks_and_training_change_nothing(name):
    config = PUBLISHED[name] | {key: value for key, value in SILENT.items() if key in PUBLISHED[name]}
    assert not differ(made(config, quantized=False), base(name, quantized=False))
