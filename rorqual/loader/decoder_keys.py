"""The config.json keys that Llama, Mistral and Qwen spell alike."""

from __future__ import annotations

from typing import Any

from rorqual.loader.config_reader import ConfigReader
from rorqual.loader.quantization_config import WeightQuantization


def read_decoder_keys(reader: ConfigReader, *, default_head_dim: int | None = None) -> dict[str, Any]:
    """vocab_size to tie_word_embeddings. A missing head_dim is the default, or hidden_size / num_attention_heads."""
    num_heads = reader.take("num_attention_heads", int)
    hidden_size = reader.take("hidden_size", int)
    num_kv_heads = reader.take("num_key_value_heads", int, None) or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})"
        )
    if (quantization := reader.take("quantization_config", dict, None)) is not None:
        WeightQuantization.from_config(quantization)  # refuses what is not supported; `build_model` reads it again
    reader.ignore("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")  # RopeParameters
    return {
        "vocab_size": reader.take("vocab_size", int),
        "hidden_size": hidden_size,
        "num_hidden_layers": reader.take("num_hidden_layers", int),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": reader.take("head_dim", int, None) or default_head_dim or hidden_size // num_heads,
        "rms_norm_eps": reader.take("rms_norm_eps", float, 1e-6),
        "max_position_embeddings": reader.take("max_position_embeddings", int),
        "tie_word_embeddings": reader.take("tie_word_embeddings", bool, False),
    }


def read_sliding_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's window per layer: by layer_types if given, else from layer max_window_layers on; None if unused."""
    window = reader.take("sliding_window", int, None)
    used = reader.take("use_sliding_window", bool, False)
    first = reader.take("max_window_layers", int, num_layers)
    layer_types = reader.take("layer_types", list, None)
    if not used or window is None:
        window = None
    if layer_types is None:
        return tuple(window if i >= first else None for i in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := [kind for kind in layer_types if kind not in known]:
        raise ValueError(f"layer_types may hold {', '.join(known)}, got {unknown[0]!r}")
    if len(layer_types) != num_layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    if window is None and "sliding_attention" in layer_types:
        raise ValueError(
            "layer_types holds 'sliding_attention', which needs use_sliding_window = true and a sliding_window: "
            "set both, or make every entry 'full_attention'"
        )
    return tuple(known[kind] for kind in layer_types)


def read_mla_keys(reader: ConfigReader) -> dict[str, Any]:
    """What multi-head latent attention adds: q_lora_rank to v_head_dim. Refuses what it is not computed with."""
    nope, rope = reader.take("qk_nope_head_dim", int), reader.take("qk_rope_head_dim", int)
    reader.require("qk_head_dim", nope + rope)
    reader.require("head_dim", rope)  # so transformers writes it, for its rotary embedding
    reader.require("num_key_value_heads", reader.take("num_attention_heads", int))
    reader.require("rope_interleave", True)
    for key in ("attention_bias", "mlp_bias"):
        reader.require(key, False)
    return {
        "q_lora_rank": reader.take("q_lora_rank", int, None),
        "kv_lora_rank": reader.take("kv_lora_rank", int),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": reader.take("v_head_dim", int),
    }


def read_routing_keys(reader: ConfigReader) -> dict[str, Any]:
    """DeepSeek-V3's experts: intermediate_size to num_nextn_predict_layers. Refuses other ways to choose experts."""
    reader.require("hidden_act", "silu")
    reader.require("scoring_func", "sigmoid")
    reader.require("topk_method", "noaux_tc")
    reader.require("moe_layer_freq", 1)
    reader.ignore("ep_size", "aux_loss_alpha", "seq_aux")  # how it was trained, and spread over machines
    return {
        "intermediate_size": reader.take("intermediate_size", int),
        "moe_intermediate_size": reader.take("moe_intermediate_size", int),
        "n_routed_experts": reader.take("n_routed_experts", int, aliases=("num_local_experts", "num_experts")),
        "n_shared_experts": reader.take("n_shared_experts", int, 0),
        "num_experts_per_tok": reader.take("num_experts_per_tok", int),
        "n_group": reader.take("n_group", int),
        "topk_group": reader.take("topk_group", int),
        "norm_topk_prob": reader.take("norm_topk_prob", bool, True),
        "routed_scaling_factor": reader.take("routed_scaling_factor", float),
        "num_nextn_predict_layers": reader.take("num_nextn_predict_layers", int, 0, aliases=("num_mtp_layers",)),
    }
