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


@functools.cache
def reference_model(name: str, seed: int = 0) -> Any:
    """The transformers model of a config, in float32 on the CPU, with random weights."""
    model_type, options = CONFIGS[name]
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
