"""The first promise for DeepSeek's models on texts of more than two windows and two entries of 128 tokens.

`test_same_answer_rows.py` has the same on shorter ones, over more switches.
"""

from __future__ import annotations

import functools
import importlib
import random
from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from rorqual.ops.registry import around
from rorqual.outputs import CompletionOutput, RequestOutput
from tests.engine.engines import TINY_OPTIONS
from tests.models.test_deepseek_v4_packed import each_token_alone, folders
from tests.tiny import VOCAB, checkpoint_folder, reference_logits


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


TEXT = prompt(330, 99)
SHARED = (0, 300, 256, 150, 129, 70, 305, 0)
"""How much of TEXT each prompt has in common with one before it: hits inside windows and entries, and at their ends."""
PROMPTS = [
    TEXT[:305],
    *(TEXT[:n] + prompt(own, n) for n, own in zip(SHARED[1:6], (9, 20, 5, 3, 40), strict=True)),
    TEXT,
    prompt(17, 6),
]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
SEEDED = GREEDY.clone(temperature=1.1, seed=8)
ROOM: dict[str, Any] = {"max_model_len": 352, "num_kv_blocks": 700, "max_num_batched_tokens": 512}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "deepseek_v4 packed": {"activation_quantization": "none"},
}


def llm_of(model: str, **options: Any) -> LLM:
    """Packed: FP8 layers and FP4 experts, their inputs not rounded."""
    folder: Path = folders("fp4")[0] if model == "deepseek_v4 packed" else checkpoint_folder(model)
    return LLM(str(folder), **(TINY_OPTIONS | ROOM | MODELS.get(model, {}) | options))


def one(llm: LLM, ids: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    return llm.generate(ids, params, use_tqdm=False)[0]


@functools.cache
def alone(model: str) -> list[CompletionOutput]:
    """Each prompt in one chunk, in an engine that keeps nothing; every second one with seeded sampling."""
    with llm_of(model, enable_prefix_caching=False, max_num_seqs=1) as llm:
        return [one(llm, ids, params).outputs[0] for ids, params in zip(PROMPTS, PARAMS, strict=True)]


PARAMS = [SEEDED if i % 2 else GREEDY for i in range(len(PROMPTS))]


def assert_same(got: CompletionOutput, want: CompletionOutput) -> None:
    """Equal tokens, and log-probabilities that differ by the order of float32's sums."""
    assert got.token_ids == want.token_ids
    for ours, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
        assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-4 for token in theirs)


@pytest.mark.parametrize(
    ("model", "block_size"),
    [
        ("deepseek_v3", 16),
        ("deepseek_v32", 64),
        *(("deepseek_v4", block_size) for block_size in (4, 16, 64, 128)),
        ("deepseek_v4 packed", 64),
    ],
)
def test_hits_end_at_every_block_and_change_nothing(model, block_size):
    """The longest whole blocks that are shared: no kind of cache makes the grain coarser."""
    num_blocks = ROOM["num_kv_blocks"] * 4 // block_size + 8
    with llm_of(model, block_size=block_size, num_kv_blocks=num_blocks) as llm:
        for ids, params, shared, want in zip(PROMPTS, PARAMS, SHARED, alone(model), strict=True):
            out = one(llm, ids, params)
            assert out.num_cached_tokens == shared // block_size * block_size
            assert_same(out.outputs[0], want)
            llm.engine.scheduler.check()


SWITCHES: dict[str, dict[str, Any]] = {
    "steps of 64 tokens": {"max_num_batched_tokens": 64},
    "chunks of 33, ahead": {"long_prefill_token_threshold": 33},
    "few blocks, no prefix cache": {
        "block_size": 16,
        "num_kv_blocks": 22,
        "max_num_batched_tokens": 100,
        "enable_prefix_caching": False,
    },
    "few blocks, ahead": {"block_size": 16, "num_kv_blocks": 22},
}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(
    "model", ["deepseek_v32", "deepseek_v4", pytest.param("deepseek_v4 packed", marks=pytest.mark.slow)]
)
def test_company_changes_nothing(model, switch):
    """All at once. Where blocks are few, of texts that barely fit, some are put back and begin again."""
    with llm_of(model, **SWITCHES[switch]) as llm:
        llm.engine._looks_ahead = switch.endswith("ahead")
        for out, want in zip(llm.generate(PROMPTS, PARAMS, use_tqdm=False), alone(model), strict=True):
            assert_same(out.outputs[0], want)
        llm.engine.scheduler.check()
        assert (llm.engine.stats.num_cached_tokens > 0) == ("no prefix" not in switch)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("model", ["deepseek_v32", "deepseek_v4"])
def test_long_texts_that_are_put_back_go_on_where_they_were(model, cached):
    """Two of them outgrow the cache while they answer."""
    texts, params = (TEXT[:165], TEXT[160:325]), GREEDY.clone(max_tokens=14)
    with llm_of(model, enable_prefix_caching=False, max_num_seqs=1) as llm:
        want = [one(llm, ids, params).outputs[0] for ids in texts]
    options = {"block_size": 16, "num_kv_blocks": 23, "enable_prefix_caching": cached}
    with llm_of(model, **options) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
        llm.engine.scheduler.check()
    for out, other in zip(outputs, want, strict=True):
        assert_same(out.outputs[0], other)


@pytest.mark.parametrize("model", ["deepseek_v32", "deepseek_v4"])
def test_several_answers_and_streams_are_those_of_single_requests(model):
    """Answers of one prompt share its blocks, and write behind it in blocks of their own."""
    params = SEEDED.clone(n=3, max_tokens=10)
    with llm_of(model, enable_prefix_caching=False, long_prefill_token_threshold=50) as llm:
        want = one(llm, PROMPTS[0], params).outputs
    assert len({tuple(answer.token_ids) for answer in want}) == 3
    with llm_of(model) as llm:
        one(llm, PROMPTS[1])
        out = one(llm, PROMPTS[0], params)
        assert out.num_cached_tokens == 300
        for got, other in zip(out.outputs, want, strict=True):
            assert_same(got, other)
        llm.engine.add_request(PROMPTS[0], params.clone(n=1), streamed=True)
        streamed = [token for _ in range(40) for delta in llm.engine.step() for token in delta.token_ids]
        assert streamed == want[0].token_ids


@pytest.mark.parametrize("model", ["deepseek_v32", "deepseek_v4"])
def test_prompt_logprobs_are_transformers_ones_on_a_warm_cache(model):
    want = reference_logits(model, PROMPTS[0]).log_softmax(-1)
    with llm_of(model, max_num_batched_tokens=100) as llm:
        one(llm, PROMPTS[1])
        found = one(llm, PROMPTS[0], GREEDY.clone(prompt_logprobs=0)).prompt_logprobs
    assert found is not None
    assert found[0] is None
    for i, token in enumerate(PROMPTS[0][1:]):
        assert abs(found[i + 1][token].logprob - float(want[i, token])) < 1e-4


AS_RELEASED = {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp4"}


def as_released(
    prompts: list[list[int]], *, together: bool, **options: Any
) -> list[tuple[list[int], list[float], int]]:
    """Tokens, their log-probabilities and how many tokens were cached, where every sum has one order."""
    with (
        pytest.MonkeyPatch.context() as patched,
        LLM(str(folders("fp4")[1]), **(TINY_OPTIONS | ROOM | AS_RELEASED | options)) as llm,
        around(each_token_alone),
    ):
        for module in ("row_attention", "select_rows"):
            patched.setattr(importlib.import_module(f"rorqual.ops.{module}"), "_TOKENS_AT_ONCE", 1)
        asked = [prompts] if together else [[ids] for ids in prompts]
        outputs = [out for some in asked for out in llm.generate(some, GREEDY, use_tqdm=False)]
    found = []
    for out in outputs:
        (answer,) = out.outputs
        logprobs = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        found.append((answer.token_ids, logprobs, out.num_cached_tokens))
    return found


@pytest.mark.slow
def test_rounded_caches_keep_the_promise_to_the_bit():
    """FP8 windows and entries, FP4 index keys: a last bit may decide about a code, so sums have one order here."""
    prompts = [TEXT[:140], TEXT[:133] + prompt(3, 1), TEXT[:60] + prompt(5, 2)]
    want = as_released(prompts, together=False, enable_prefix_caching=False)
    hits = as_released(prompts, together=False, block_size=16)
    assert [cached for *_, cached in hits] == [0, 128, 48]
    assert [found[:2] for found in hits] == [found[:2] for found in want]
    chunks = as_released(prompts, together=True, long_prefill_token_threshold=7)
    assert [found[:2] for found in chunks] == [found[:2] for found in want]
