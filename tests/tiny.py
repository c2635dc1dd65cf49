"""Tiny random checkpoints of every architecture, made with transformers, and its answers about them."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

VOCAB = 199  # not a round number, so that padding to one would show

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "max_position_embeddings": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_QWEN3 = _BASE | {"head_dim": 16, "num_attention_heads": 4, "rope_theta": 1e6, "attention_bias": False}
_MOE = _QWEN3 | {
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _BASE | {"rope_theta": 1e5, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama_bias": ("llama", _BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama3_rope": (
        "llama",
        _BASE
        | {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama_linear_rope": ("llama", _BASE | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral_window": ("mistral", _BASE | {"sliding_window": 7, "num_key_value_heads": 3}),
    "qwen2": ("qwen2", _BASE | {"rope_theta": 1e6}),
    "qwen2_windows": (
        "qwen2",
        _BASE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", _QWEN3),
    "qwen3_tied": ("qwen3", _QWEN3 | {"tie_word_embeddings": True}),
    "qwen3_yarn": (
        "qwen3",
        _QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "qwen3_moe_raw": ("qwen3_moe", _MOE | {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
}


_DEEPSEEK = _BASE | {
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rope_theta": 1e4,
    "rope_scaling": {
        "type": "yarn",
        "factor": 8.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    },
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

_V4 = {key: value for key, value in _BASE.items() if key != "intermediate_size"} | {
    "max_position_embeddings": 1024,
    "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 128,
    # Heads enough that no index score is exactly zero.
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 16,
    "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_nextn_predict_layers": 0,
}

DEEPSEEK_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "deepseek_v3_noqlora": (
        "deepseek_v3",
        _DEEPSEEK | {"q_lora_rank": None, "rope_scaling": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    # Heads enough that no index score is exactly zero.
    "deepseek_v32": ("deepseek_v32", _DEEPSEEK | {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 16}),
    "deepseek_v4": ("deepseek_v4", _V4),
    "deepseek_v4_window": (
        "deepseek_v4",
        _V4
        | {
            "compress_ratios": [128, 4, 0, 4],
            "num_hidden_layers": 4,
            "num_hash_layers": 1,
            "sliding_window": 16,
            "swiglu_limit": 0.5,
            "o_groups": 4,
            "index_topk": 8,
            "hc_sinkhorn_iters": 3,
            "rope_scaling": None,
        },
    ),
}
"""Those that keep something else than keys and values; the suites over CONFIGS leave them to suites of their own."""


@functools.cache
def reference_model(name: str, seed: int = 0) -> Any:
    """The transformers model of a config, in float32 on the CPU, with random weights."""
    model_type, options = (CONFIGS | DEEPSEEK_CONFIGS)[name]
    if name in DEEPSEEK_CONFIGS:
        return random_deepseek(model_type, options, seed)
    return random_model(model_type, options, seed)


def random_model(model_type: str, options: dict[str, Any], seed: int = 0) -> Any:
    """A transformers model in float32 on the CPU, with random weights."""
    config = AutoConfig.for_model(model_type, **options)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.1 + (0.0 if tensor_name.endswith("bias") else 1.0))
            else:
                # Wide logits, so that a greedy token does not hang on the last bit.
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
    return model.eval()


def random_deepseek(model_type: str, options: dict[str, Any], seed: int = 0) -> Any:
    """As `random_model`, with weights that give a DeepSeek model sharp attention, uneven experts and alive streams.

    Weights are numbers that bfloat16 holds, so that a checkpoint in either dtype is the same model.
    """
    config = AutoConfig.for_model(model_type, **options)
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor_name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        kind = tensor_name.rpartition(".")[2]
        if kind.endswith("inv_freq"):
            continue
        if not tensor.is_floating_point():  # experts of a token
            drawn = [torch.randperm(config.n_routed_experts, generator=generator)[: tensor.shape[1]] for _ in tensor]
            tensor.data.copy_(torch.stack(drawn))
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        spread, mean = _spread_of(tensor_name, kind, tensor.dim())
        if tensor.dim() > 1 and kind != "position_bias" and "embed_tokens" not in tensor_name:
            spread /= tensor.shape[-1] ** 0.5
        tensor.data.copy_((noise * spread + mean).bfloat16())
    return made.eval()


def _spread_of(name: str, kind: str, dims: int) -> tuple[float, float]:
    """(spread, mean) of a DeepSeek model's tensor, that of a matrix before it is divided by its inputs' root."""
    by_kind = {
        "e_score_correction_bias": (0.1, 0.0),
        "bias": (0.1, 0.0),
        "sinks": (1.0, 0.5),
        "position_bias": (0.7, 0.0),
        "base": (0.5, 0.0),
        "hc_base": (0.5, 0.0),
        "scale": (0.2, 0.8),
        "hc_scale": (0.2, 0.8),
        "fn": (1.0, 0.0),
        "hc_fn": (1.0, 0.0),
    }
    if kind in by_kind:
        return by_kind[kind]
    if dims == 1:
        return 0.15, 1.0  # norms
    gains = {"lm_head": 2.0, "q_proj": 1.7, "q_b_proj": 1.7, "kv_b_proj": 1.7, "down_proj": 1.3, "o_proj": 1.3}
    gains |= {"o_b_proj": 1.3, "gate_up_proj": 1.5, "up_proj": 1.5, "gate_proj": 1.5, "gate.weight": 1.5}
    return next((gain for part, gain in gains.items() if part in name), 1.0), 0.0


@functools.cache
def checkpoint_folder(name: str, seed: int = 0) -> Path:
    """The model saved as a folder, without a tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix=f"rorqual-{name}-"))
    reference_model(name, seed).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of a saved config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@torch.inference_mode()
def reference_logits(name: str, token_ids: Sequence[int]) -> torch.Tensor:
    """[num_tokens, vocab] float32, the whole text at once."""
    return reference_model(name)(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


@functools.cache
def reference_greedy(name: str, prompt: tuple[int, ...], num_tokens: int, eos: int | None = None) -> list[int]:
    """The greedy continuation, token by token with transformers' cache."""
    model, out = reference_model(name), []
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        step = torch.tensor([list(prompt)])
        for _ in range(num_tokens):
            logits = model(input_ids=step, past_key_values=cache, use_cache=True).logits[0, -1]
            out.append(int(logits.argmax()))
            if out[-1] == eos:
                break
            step = torch.tensor([[out[-1]]])
    return out
