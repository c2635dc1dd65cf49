"""Greedy text of packed Q4_1 weights against transformers in float32, the weights as the `gguf` package reads them.

Nothing of Rorqual's loader, quantisation or kernels is in the reference: `gguf` belongs to llama.cpp and takes the
blocks apart by llama.cpp's own arithmetic. Packed products round their inputs to 8 bits, so near ties may fall
otherwise. Hence teacher forcing: the reference reads the tokens that the engine chose, and at every position that token
must be the reference's best, or one whose logit is close to the best.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rorqual import LLM, SamplingParams
from tests.models.test_smollm2 import PROMPTS

pytestmark = pytest.mark.slow

NUM_TOKENS = 48
EXACT = 0.95
"""Of all positions, the share where the chosen token is the best."""
FURTHEST = 1.0
"""A chosen token's logit is at most so far below the best one's; at half of the positions the second is 1.6 below."""
BEHIND = 0.006
"""The same, as a mean over all positions. With noise of 3 % on every weight it is 0.02."""
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def reference(path: Path) -> LlamaForCausalLM:
    """The file's model in float32."""
    reader = gguf.GGUFReader(path)

    def field(name: str):
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_theta=field("rope.freq_base"),
        max_position_embeddings=field("context_length"),
        vocab_size=field("vocab_size"),
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    weights = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        kind = tensor.name.removesuffix(".weight")
        if kind in ("token_embd", "output_norm"):
            weights["model.embed_tokens.weight" if kind == "token_embd" else "model.norm.weight"] = value
            continue
        _, layer, part = kind.split(".")
        if part in ("attn_q", "attn_k"):
            # llama.cpp rotates neighbouring features, transformers the two halves of a head.
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        weights[f"model.layers.{layer}.{NAMES[part]}.weight"] = value
    model = LlamaForCausalLM(config).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"], "tied to the embedding"
    assert not unexpected
    model.tie_weights()
    return model


@pytest.fixture(scope="module")
def chosen(smollm2_path) -> dict[str, tuple[list[int], list[int]]]:
    """Name of a prompt -> its tokens and those that the engine added, with the file's integers kept."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(smollm2_path), max_model_len=2048, num_kv_blocks=512, progress=False) as llm:
        outputs = llm.generate(list(PROMPTS.values()), params, use_tqdm=False)
    return {name: (list(out.prompt_token_ids), list(out.token_ids)) for name, out in zip(PROMPTS, outputs, strict=True)}


@torch.inference_mode()
def logits(model: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """float32 [len(answer), vocabulary]: the logits from which each token of the answer would have been taken."""
    read = torch.tensor([prompt + answer[:-1]])
    return model(input_ids=read, use_cache=False, logits_to_keep=len(answer)).logits[0]


def test_every_token_is_the_best_or_close_to_it(smollm2_path, chosen):
    model = reference(smollm2_path)
    behind = {}
    for name, (prompt, answer) in chosen.items():
        assert len(answer) == NUM_TOKENS
        found = logits(model, prompt, answer)
        behind[name] = found.amax(-1) - found[torch.arange(NUM_TOKENS), torch.tensor(answer)]
    every = torch.cat(list(behind.values()))
    assert float((every == 0).float().mean()) >= EXACT
    assert float(every.max()) <= FURTHEST, {name: float(gaps.max()) for name, gaps in behind.items()}
    assert float(every.mean()) <= BEHIND
