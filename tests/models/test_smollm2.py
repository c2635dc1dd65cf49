"""SmolLM2-135M-Instruct from its GGUF file, greedy, against transformers on the same float32 weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rorqual import LLM, SamplingParams
from rorqual.loader.gguf import GGUFCheckpoint

NUM_TOKENS = 64
LONG = "The minke whale is the smallest rorqual, and the blue whale the largest animal that has ever lived. " * 70
PROMPTS = {
    "prose": "The blue whale is",
    "question": "<|im_start|>user\nWhy is the sea salty?<|im_end|>\n<|im_start|>assistant\n",
    "emoji": "🐋🌊 A story told in emoji: 👩‍👩‍👧‍👦 ->",
    "cjk": "日本語で自己紹介をしてください。鯨は",
    "code": "def quicksort(items: list[int]) -> list[int]:\n    ",
    "digits": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "spaces": "name    value\n\n    alpha\t1\n",
    "long": LONG,
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2_path):
    with LLM(str(smollm2_path), dtype="float32", max_model_len=2048, kv_cache_memory="1GiB", progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(smollm2_path):
    checkpoint = GGUFCheckpoint(smollm2_path)
    config = AutoConfig.for_model(**checkpoint.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    weights = {name: checkpoint.load(name).float() for name in checkpoint.names()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table was made on the meta device
    return model.eval()


@torch.inference_mode()
def reference_tokens(model, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token behind the prompt and behind each token of the answer but the last: equal to the answer if
    and only if it is the model's greedy one. All from one pass, which takes a fraction of the time of one a token."""
    tokens = torch.tensor([prompt + answer[:-1]])
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=len(answer)).logits
    return logits[0].argmax(-1).tolist()


def test_greedy_text_equals_transformers(llm, reference):
    prompts = {name: llm.get_tokenizer().encode(text) for name, text in PROMPTS.items()}
    assert len(prompts["long"]) > 1400
    outputs = llm.generate(list(prompts.values()), GREEDY, use_tqdm=False)
    for (name, prompt), out in zip(prompts.items(), outputs, strict=True):
        assert len(out.token_ids) == NUM_TOKENS, name
        assert out.token_ids == reference_tokens(reference, prompt, out.token_ids), name
        assert out.text == llm.get_tokenizer().decode(out.token_ids), name


def test_streamed_text_of_a_chat_equals_the_whole(llm):
    messages = [{"role": "user", "content": "Write one line with the emoji 🐋 and the word 鯨 in it."}]
    streamed = "".join(delta.text for delta in llm.stream_chat(messages, GREEDY))
    (whole,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert streamed == whole.text
    assert whole.num_cached_tokens > 0
