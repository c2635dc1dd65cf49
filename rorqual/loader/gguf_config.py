"""A GGUF file's metadata told as a Hugging Face config.json, so that models read one kind of config. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rorqual.loader.gguf_file import TensorInfo

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_MODEL_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor that Llama 3 files hold instead of rope scaling parameters: one divisor per rotation frequency."""

# Keys that say nothing about the result: rope.scaling.finetuned is a remark, the layout only ever names the converter.
_REMARKS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"} | {
    "penalty_repeat": "repetition_penalty"
}


def synthesise_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], *, rope_factors: list[float] | None
) -> dict[str, Any]:
    """The config.json that this file's model would have.

    Architecture keys that we do not know keep their GGUF name, so that the model refuses them by that name.

    Args:
        metadata: as `read_metadata` gives it.
        tensors: by GGUF name; vocabulary size, biases and tied embeddings are read off their shapes and presence.
        rope_factors: the values of `rope_freqs.weight`, if the file has it; given as rope_type "gguf_factors".

    Raises: ValueError for an unknown architecture, a missing key, or values that no model here has.
    """
    keys = _ArchitectureKeys(metadata)
    model_type, window = _MODEL_TYPES[keys.architecture], keys.take("attention.sliding_window", 0)
    if model_type == "llama" and window:  # the family of GGUF's name that has a window
        model_type = "mistral"
    heads, hidden = keys.need("attention.head_count"), keys.need("embedding_length")
    config: dict[str, Any] = {
        "architectures": [_MODEL_CLASSES[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "num_hidden_layers": keys.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, hidden // heads),
        "rms_norm_eps": _shortest(keys.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(keys.take("rope.freq_base", 10000.0)),
        "max_position_embeddings": keys.need("context_length"),
        "vocab_size": _vocab_size(tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if (ffn := keys.take("feed_forward_length", None)) is not None:
        config["intermediate_size"] = ffn
    if model_type not in ("qwen2", "mistral"):  # which always and never have them
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    config |= _experts(keys) | _sliding_window(window, model_type)
    if scaling := _rope_scaling(keys, rope_factors):
        config["rope_scaling"] = scaling
    return config | keys.unread()


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a file recommends, under generation_config.json's names; {} when it has none."""
    prefix = "general.sampling."
    found = {name: metadata[prefix + key] for key, name in _SAMPLING.items() if prefix + key in metadata}
    return {name: _shortest(value) if isinstance(value, float) else value for name, value in found.items()}


class _ArchitectureKeys:
    """The metadata under `<architecture>.`, and which of it has been read."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in _MODEL_TYPES:
            known = ", ".join(_MODEL_TYPES)
            raise ValueError(f"unknown GGUF architecture {architecture!r}; known ones: {known}")
        self.architecture = architecture
        prefix = f"{self.architecture}."
        self._values = {key.removeprefix(prefix): v for key, v in metadata.items() if key.startswith(prefix)}
        self._read = set(_REMARKS)

    def take(self, key: str, default: Any) -> Any:
        """The value, or `default`. A list with one value per layer must hold equal values, and is read as that one."""
        self._read.add(key)
        value = self._values.get(key, default)
        if not isinstance(value, list):
            return value
        if not value or value != [value[0]] * len(value):
            raise ValueError(f"{self.architecture}.{key} must be the same in every layer, got {value}")
        return value[0]

    def need(self, key: str) -> Any:
        """The value, which must be there and above zero."""
        value = self.take(key, None)
        if not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"GGUF metadata {self.architecture}.{key} must be a number above 0, got {value!r}")
        return value

    def unread(self) -> dict[str, Any]:
        """What nobody took, under its full name."""
        return {f"{self.architecture}.{key}": v for key, v in self._values.items() if key not in self._read}


def _shortest(value: float) -> float:
    """A float32 by its shortest spelling: 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _head_dim(keys: _ArchitectureKeys, default: int) -> int:
    rotated = keys.take("rope.dimension_count", None)
    head_dim = int(keys.take("attention.key_length", rotated or default))
    for key, got in (
        ("attention.value_length", keys.take("attention.value_length", head_dim)),
        ("rope.dimension_count", rotated or head_dim),
    ):
        if got != head_dim:
            raise ValueError(f"{keys.architecture}.{key} must equal the head size {head_dim}, got {got}")
    return head_dim


def _vocab_size(tensors: Mapping[str, TensorInfo]) -> int:
    if "token_embd.weight" not in tensors:
        raise ValueError("the GGUF file has no tensor 'token_embd.weight', which every language model has")
    return tensors["token_embd.weight"].shape[0]


def _experts(keys: _ArchitectureKeys) -> dict[str, Any]:
    if keys.architecture != "qwen3moe":
        keys.take("expert_used_count", 0)
        if experts := keys.take("expert_count", 0):
            raise ValueError(
                f"GGUF architecture {keys.architecture!r} with {experts} experts is not supported; "
                "of the mixtures of experts, 'qwen3moe' is"
            )
        return {}
    return {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "norm_topk_prob": True,  # the format has no key for it; every released Qwen3-MoE normalises
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _sliding_window(window: int, model_type: str) -> dict[str, Any]:
    if not window or model_type == "mistral":
        return {"sliding_window": window} if window else {}
    return {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}  # 0: in every layer


def _rope_scaling(keys: _ArchitectureKeys, rope_factors: list[float] | None) -> dict[str, Any] | None:
    kind = keys.take("rope.scaling.type", "linear")  # GGUF's default; its factor is 1 then
    factor = _shortest(keys.take("rope.scaling.factor", 0) or keys.take("rope.scale_linear", 1.0))
    trained = keys.take("rope.scaling.original_context_length", None)
    plain = kind == "none" or (kind == "linear" and factor == 1.0)
    if rope_factors is not None:
        if not plain:
            raise ValueError(f"the GGUF file has both {ROPE_FACTORS} and rope.scaling.type {kind!r}; one must go")
        return {"rope_type": "gguf_factors", "factors": rope_factors}
    if plain:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ValueError(f"{keys.architecture}.rope.scaling.type must be none, linear or yarn, got {kind!r}")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for name in ("beta_fast", "beta_slow"):
        if (value := keys.take(f"rope.scaling.yarn_{name}", None)) is not None:
            scaling[name] = _shortest(value)
    if trained is not None:
        scaling["original_max_position_embeddings"] = trained
    if (attention := _shortest(keys.take("rope.scaling.attn_factor", 1.0))) != 1.0:
        # GGUF's multiplies YaRN's own factor, Hugging Face's replaces it.
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling
