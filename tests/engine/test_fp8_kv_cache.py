"""A KV cache of one byte per value: what it costs, what it changes, and that nothing else does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rorqual.ops.decoder_blocks
from rorqual import SamplingParams
from rorqual.config import EngineConfig
from rorqual.ops.registry import load_backends
from rorqual.ops.store_kvcache import store_kvcache
from tests.engine.engines import tiny_llm
from tests.engine.test_same_answer import PROMPTS
from tests.models.test_against_transformers import logits_by_chunks, tokens
from tests.quantization.numbers import E4M3, nearest

load_backends("native", "cpu")
FP8 = torch.float8_e4m3fn


# ---- what is kept


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_fp8_takes_a_byte_per_value(name):
    with tiny_llm("qwen3", kv_cache_dtype=name) as small, tiny_llm("qwen3") as large:
        assert small.engine.resolved.kv_cache_dtype == FP8
        spec = small.engine.resolved.groups[0].spec
        assert spec.bytes_per_row() == 2 * spec.num_kv_heads * spec.head_dim
        assert 4 * small.engine.resolved.kv_cache_bytes == large.engine.resolved.kv_cache_bytes
        assert small.engine._runner.kv[0].key.dtype == FP8


def test_more_tokens_fit_the_same_memory():
    options = {"num_kv_blocks": None, "kv_cache_memory": 1 << 20, "dtype": "bfloat16", "load_format": "dummy"}
    found = []
    for dtype in ("auto", "fp8"):
        with tiny_llm("llama", kv_cache_dtype=dtype, **options) as llm:
            found.append(llm.engine.resolved.num_kv_tokens)
    assert found[1] == 2 * found[0]


def test_other_spellings_are_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be 'auto', .* 'fp8' or 'fp8_e4m3', got 'fp8_e5m2'"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")


# ---- what it changes


def rounded(x: torch.Tensor) -> torch.Tensor:
    """The nearest number of e4m3, found in the table of all of them."""
    codes = nearest(x.numpy(), "e4m3")
    values = E4M3[codes & 0x7F] * np.where(codes & 0x80, -1.0, 1.0)
    return torch.from_numpy(values).float().view(x.shape)


def coarsened(x: torch.Tensor) -> torch.Tensor:
    """One bit less than e4m3 keeps: what a wrong format would do."""
    return x.to(torch.float8_e5m2).float()


def scaled(x: torch.Tensor) -> torch.Tensor:
    """A scale that is multiplied in and not divided out."""
    return rounded(x * 1.25)


def logits_with(change, monkeypatch, name: str, token_ids: list[int]) -> torch.Tensor:
    """Logits of a full cache whose keys and values were changed before they were stored."""

    def store(key, value, *caches, **options):
        store_kvcache(change(key), change(value), *caches, **options)

    with monkeypatch.context() as patched:
        patched.setattr(rorqual.ops.decoder_blocks, "store_kvcache", store)
        return logits_by_chunks(name, token_ids, 7)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2_windows", "qwen3_yarn", "qwen3_moe"])
def test_an_fp8_cache_is_a_full_cache_of_rounded_keys_and_values(name, monkeypatch):
    token_ids = tokens(50)
    got = logits_by_chunks(name, token_ids, 7, kv_cache_dtype=FP8)
    want = logits_with(rounded, monkeypatch, name, token_ids)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert not torch.equal(got, logits_by_chunks(name, token_ids, 7))


BOUNDS = {
    # Largest and mean change of a logit, mean Kullback-Leibler divergence from the full cache's distribution in nats.
    # The models are random: their logits spread by 2, and three bits of mantissa move them more than those of a
    # trained one.
    "llama": (5.5, 0.30, 0.080),
    "mistral_window": (4.0, 0.23, 0.046),
    "qwen3": (1.7, 0.14, 0.016),
    "qwen3_yarn": (1.7, 0.15, 0.020),
}


def effect(name: str, logits_of) -> tuple[float, float, float]:
    full, other = (torch.cat([made(ids) for ids in (tokens(60, seed) for seed in range(4))])
                   for made in (lambda ids: logits_by_chunks(name, ids, 7), logits_of))  # fmt: skip
    log_p, log_q = full.double().log_softmax(-1), other.double().log_softmax(-1)
    change = (full - other).abs()
    return change.max().item(), change.mean().item(), (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


@pytest.mark.parametrize("name", BOUNDS)
def test_effect_on_logits_is_bounded(name, monkeypatch):
    measured = effect(name, lambda ids: logits_by_chunks(name, ids, 7, kv_cache_dtype=FP8))
    assert all(0 < got < bound for got, bound in zip(measured, BOUNDS[name], strict=True)), measured
    for wrong in (coarsened, scaled):  # the bounds would notice
        mistaken = effect(name, lambda ids, wrong=wrong: logits_with(wrong, monkeypatch, name, ids))
        assert mistaken[1] > BOUNDS[name][1]
        assert mistaken[2] > BOUNDS[name][2]


# ---- what it does not change

SWITCHES = {
    "chunk of 1": {"long_prefill_token_threshold": 1},
    "chunk of 3": {"long_prefill_token_threshold": 3},
    "steps of 64 tokens": {"max_num_batched_tokens": 64},
    "block of 1": {"block_size": 1, "num_kv_blocks": 256},
    "block of 5": {"block_size": 5},
    "block of 16": {"block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "tight cache": {"num_kv_blocks": 16},
}
TIE = 0.05
"""Nats. float32 sums differ in their last bit with the number of rows; where that moves a key over the middle between
two codes, logits move by a few thousandths, and two tokens closer than this may swap."""


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen3"])
def test_promise_1_holds_with_fp8(name):
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, logprobs=2)
    alone = []
    with tiny_llm(name, kv_cache_dtype="fp8", enable_prefix_caching=False, max_num_seqs=1) as llm:
        for ids in PROMPTS:
            alone.append(llm.generate(ids, params, use_tqdm=False)[0].outputs[0])
    differing = 0
    for switch, options in SWITCHES.items():
        with tiny_llm(name, kv_cache_dtype="fp8", **options) as llm:
            for attempt in ("cold", "warm"):
                for want, got in zip(alone, llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
                    if got.token_ids == want.token_ids:
                        continue
                    differing += 1
                    pairs = zip(got.token_ids, want.token_ids, strict=True)
                    at = next(i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
                    best, second = sorted((entry.logprob for entry in want.logprobs[at].values()), reverse=True)[:2]
                    assert best - second < TIE, (switch, attempt, at)
            llm.engine.scheduler.check()
            if "tight" in switch:
                assert llm.engine.scheduler.num_preemptions > 0
    assert differing <= len(PROMPTS) * len(SWITCHES) * 2 // 50
