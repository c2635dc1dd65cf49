"""The first promise where a GPU's real kernels run: bfloat16, heads of 128, matrices of which cuBLAS has its choice.

Every token may hang on the last bit of its logits, so equal answers of hundreds of requests mean that no sum on the way
depends on company, chunks, caches or how a step is launched. `test_same_answer.py` is the same for tiny models.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.ops.native.library import usable_isas
from tests.engine.engines import tiny_llm
from tests.tiny import VOCAB

MEDIUM: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 6,
    "layer_types": None,  # as many as the tiny model has layers
    "vocab_size": 16384,
    "max_position_embeddings": 1024,
}
SMALL: dict[str, Any] = {  # of what the compiled kernels of a CPU take
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 208,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "qwen3": MEDIUM,
        "mistral_window": MEDIUM | {"sliding_window": 200},
        "qwen3_moe": MEDIUM
        | {"num_experts": 32, "num_local_experts": None, "num_experts_per_tok": 4, "moe_intermediate_size": 384},
    },
    "cpu": {
        "qwen3": SMALL,
        "mistral_window": SMALL | {"sliding_window": 20},
        "qwen3_moe": SMALL
        | {"num_experts": 16, "num_local_experts": None, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    },
}
SIZES: dict[str, dict[str, int]] = {
    "cuda": {"prompts": 256, "longest": 700, "tokens": 40, "blocks": 12_000, "step": 8192, "alone": 4},
    "cpu": {"prompts": 16, "longest": 70, "tokens": 40, "blocks": 200, "step": 256, "alone": 2},
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "no graphs": {"enforce_eager": True},
        "no steps ahead": {"async_scheduling": False},
        "steps of 256 tokens": {"max_num_batched_tokens": 256},
        "chunks of 33, few seats, no prefix cache": {
            "long_prefill_token_threshold": 33,
            "max_num_seqs": 37,
            "enable_prefix_caching": False,
        },
        "few blocks": {"num_kv_blocks": 1500},
    },
    "cpu": {
        "steps of 24 tokens": {"max_num_batched_tokens": 24},
        "chunks of 3, few seats, no prefix cache": {
            "long_prefill_token_threshold": 3,
            "max_num_seqs": 3,
            "enable_prefix_caching": False,
        },
        "few blocks": {"num_kv_blocks": 16},
    },
}


def random_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """From 20 tokens to the longest; every third one begins as others do."""
    draw = random.Random(17)
    beginning = [draw.randrange(2, vocab_size) for _ in range(longest // 2)]
    prompts = []
    for i in range(count):
        length = draw.randint(20, longest)
        shared = beginning[: min(draw.randint(1, len(beginning)), length - 1)] if i % 3 == 0 else []
        prompts.append(shared + [draw.randrange(2, vocab_size) for _ in range(length - len(shared))])
    return prompts


@pytest.mark.parametrize(
    ("device", "model"),
    [
        *(("cpu", model) for model in MODELS["cpu"]),
        *(pytest.param("cuda", model, marks=pytest.mark.gpu) for model in MODELS["cuda"]),
    ],
)
def test_answers_do_not_depend_on_how_they_are_computed(device: str, model: str) -> None:
    if device == "cpu" and not usable_isas():
        pytest.skip("torch's own products in bfloat16 depend on company")
    sizes, overrides = SIZES[device], MODELS[device][model]
    prompts = random_prompts(sizes["prompts"], sizes["longest"], overrides["vocab_size"])
    params = [  # drawn answers do not fall into loops as the best ones of random weights may
        SamplingParams(max_tokens=sizes["tokens"], ignore_eos=True, temperature=float(i % 2), seed=i)
        for i in range(len(prompts))
    ]
    options = {
        "device": device,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "hf_overrides": overrides,
        "block_size": 16,
        "max_model_len": sizes["longest"] + sizes["tokens"],
        "max_num_seqs": sizes["prompts"],
        "max_num_batched_tokens": sizes["step"],
        "num_kv_blocks": sizes["blocks"],
    }

    def answers(llm: LLM, every: int = 1) -> list[list[int]]:
        outputs = llm.generate(prompts[::every], params[::every], use_tqdm=False)
        assert {out.finish_reason for out in outputs} == {"length"}
        return [out.token_ids for out in outputs]

    with tiny_llm(model, **options) as llm:
        assert (llm.engine._runner._graphs is not None) == llm.engine._looks_ahead == (device == "cuda")
        want = answers(llm)
        cached = llm.engine.stats.num_cached_tokens
        assert_same(answers(llm), want, "warm prefix cache")
        assert llm.engine.stats.num_cached_tokens >= cached + sum(len(ids) // 16 - 1 for ids in prompts) * 16
    assert len({tuple(tokens) for tokens in want}) > 0.9 * len(want)
    for variant, changes in VARIANTS[device].items():
        with tiny_llm(model, **options | changes) as llm:
            assert_same(answers(llm), want, variant)
            assert (llm.engine._runner._graphs is not None) == (device == "cuda" and "enforce_eager" not in changes)
            if variant == "few blocks":
                assert llm.engine.scheduler.num_preemptions > 0 or model == "mistral_window"  # keeps few blocks
    every = sizes["alone"]
    with tiny_llm(model, **options | {"max_num_seqs": 1, "enable_prefix_caching": False}) as llm:
        assert_same(answers(llm, every), want[::every], "alone")


def assert_same(got: list[list[int]], want: list[list[int]], how: str) -> None:
    """Say which answers differ, and from which token on, rather than show thousands of tokens."""
    firsts = {}
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a != b:
            firsts[i] = next(k for k, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
    assert not firsts, f"{how}: {len(firsts)} of {len(want)} answers differ, answer: first token: {firsts}"


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
LATENTS: dict[str, Any] = {  # of published widths where attention is: 576 numbers a token, of which 512 are values
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 128,
    "vocab_size": 16384,
}
COMPRESSED: dict[str, Any] = {  # 512 numbers a token, keys and values; layers of all three kinds
    "hidden_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "partial_rotary_factor": None,
    "q_lora_rank": 512,
    "o_groups": 8,
    "o_lora_rank": 256,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 64,
    "rope_parameters": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 256},
    "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5,
    "vocab_size": 16384,
}
DEEPSEEK: dict[str, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "cuda": {
        "v3": (
            "deepseek_v3",
            {k: v for k, v in LATENTS.items() if "index" not in k} | {"quantization_config": FP8},
            {},
        ),
        "v32": ("deepseek_v32", LATENTS, {"index_cache_dtype": "fp8"}),
        "v4": ("deepseek_v4", COMPRESSED, {}),
        "v4 as released": (
            "deepseek_v4",
            COMPRESSED | {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}, "expert_dtype": "fp4"},
            {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp4"},
        ),
    },
    "cpu": {"v32": ("deepseek_v32", {}, {}), "v4": ("deepseek_v4", {}, {})},
}
"""Of which checkpoint, with which changes, and options of the engine."""
DEEPSEEK_SIZES: dict[str, dict[str, int]] = {
    "cuda": {"prompts": 96, "longest": 440, "tokens": 40, "blocks": 4000, "few": 300, "step": 4096, "alone": 8},
    "cpu": {"prompts": 9, "longest": 100, "tokens": 18, "blocks": 100, "few": 10, "step": 256, "alone": 3},
}
FEW_ROWS = {"prompts": 48, "step": 64, "few": 150}
"""For layers in FP8: cuBLAS multiplies more rows than 64 of them, and adds up in another order."""


@pytest.mark.parametrize(
    ("device", "model"),
    [
        *(("cpu", model) for model in DEEPSEEK["cpu"]),
        *(pytest.param("cuda", model, marks=pytest.mark.gpu) for model in DEEPSEEK["cuda"]),
    ],
)
def test_answers_of_deepseek_do_not_depend_on_how_they_are_computed(device: str, model: str) -> None:
    """On the CPU in float32, where an answer hardly ever hangs on the last bit: torch's products depend on company."""
    (name, overrides, more), sizes, on_gpu = DEEPSEEK[device][model], DEEPSEEK_SIZES[device], device == "cuda"
    if "quantization_config" in overrides:
        sizes = sizes | FEW_ROWS
    prompts = random_prompts(sizes["prompts"], sizes["longest"], overrides.get("vocab_size", VOCAB))
    params = [
        SamplingParams(max_tokens=sizes["tokens"], ignore_eos=True, temperature=float(i % 2), seed=i)
        for i in range(len(prompts))
    ]
    options = more | {
        "device": device,
        "dtype": "bfloat16" if on_gpu else "float32",
        "load_format": "dummy" if on_gpu else "auto",
        "hf_overrides": overrides,
        "block_size": 16,
        "max_model_len": sizes["longest"] + sizes["tokens"],
        "max_num_seqs": sizes["prompts"],
        "max_num_batched_tokens": sizes["step"],
        "num_kv_blocks": sizes["blocks"],
    }

    def answers(llm: LLM, every: int = 1) -> list[list[int]]:
        return [out.token_ids for out in llm.generate(prompts[::every], params[::every], use_tqdm=False)]

    with tiny_llm(name, **options) as llm:
        assert (llm.engine._runner._graphs is not None) == on_gpu
        if on_gpu:
            found = llm.engine.kernels
            for op in ("row_attention", "select_rows", "compress_rows", "mix_streams", "fused_experts", "store_rows"):
                assert found.get(op, "triton") == "triton", found
        want = answers(llm)
        cached = llm.engine.stats.num_cached_tokens
        assert_same(answers(llm), want, "warm prefix cache")
        assert llm.engine.stats.num_cached_tokens > cached + 8 * sizes["prompts"]
    assert len({tuple(tokens) for tokens in want}) > 0.9 * len(want)
    variants: dict[str, dict[str, Any]] = {
        "no graphs, no steps ahead, steps of a sixteenth": {
            "enforce_eager": True,
            "async_scheduling": False,
            "max_num_batched_tokens": sizes["step"] // 16,
            "max_num_seqs": min(sizes["prompts"], sizes["step"] // 16),
        },
        "chunks of 33, few seats, no prefix cache": {
            "long_prefill_token_threshold": 33,
            "max_num_seqs": sizes["prompts"] // 3,
            "enable_prefix_caching": False,
        },
        "few blocks": {"num_kv_blocks": sizes["few"]},
    }
    for variant, changes in variants.items():
        with tiny_llm(name, **options | changes) as llm:
            assert_same(answers(llm), want, variant)
            llm.engine.scheduler.check()
            assert llm.engine.scheduler.num_preemptions > 0 or variant != "few blocks"
    every = sizes["alone"]
    with tiny_llm(name, **options | {"max_num_seqs": 1, "enable_prefix_caching": False}) as llm:
        assert_same(answers(llm, every), want[::every], "alone")
