"""The first promise for models that keep several kinds of rows: latents, index keys, windows, entries, states."""

from __future__ import annotations

import random
from typing import Any

import pytest

from rorqual import SamplingParams
from tests.engine.engines import tiny_llm
from tests.tiny import VOCAB

MODELS = ["deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v4_window"]


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


SYSTEM = prompt(137, 99)  # longer than a window and than an entry of 128 tokens
PROMPTS = [prompt(n, n) for n in (1, 4, 31, 123)] + [SYSTEM[:n] + prompt(9, n) for n in (22, 130, 137)]
OPTIONS: dict[str, Any] = {"max_model_len": 160, "num_kv_blocks": 300, "max_num_batched_tokens": 64}
SWITCHES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "chunk of 3": {"long_prefill_token_threshold": 3},
    "block of 16": {"block_size": 16, "num_kv_blocks": 80},
    "block of 24": {"block_size": 24, "num_kv_blocks": 60},  # divides no 128: blocks of 384 tokens
    "no prefix cache": {"enable_prefix_caching": False},
    "tight cache": {"num_kv_blocks": 40, "max_num_seqs": 5},
    "ahead, tight cache": {"num_kv_blocks": 40, "max_num_seqs": 5, "long_prefill_token_threshold": 7},
}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.1, seed=8, max_tokens=9, ignore_eos=True),
}
_ALONE: dict[str, dict[str, list[list[int]]]] = {}


def expected(name: str) -> dict[str, list[list[int]]]:
    """Each prompt by itself, in one chunk as far as a step goes, in an engine that keeps nothing."""
    if name not in _ALONE:
        with tiny_llm(name, **OPTIONS | {"enable_prefix_caching": False, "max_num_seqs": 1}) as llm:
            _ALONE[name] = {
                kind: [llm.generate(ids, params, use_tqdm=False)[0].token_ids for ids in PROMPTS]
                for kind, params in PARAMS.items()
            }
    return _ALONE[name]


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_do_not_depend_on(name, switch):
    want = expected(name)
    with tiny_llm(name, **OPTIONS | SWITCHES[switch]) as llm:
        llm.engine._looks_ahead = switch.startswith("ahead")
        order = list(range(len(PROMPTS)))
        requests = [("greedy", i) for i in order]
        random.Random(3).shuffle(order)
        requests += [("seeded", i) for i in order]
        outputs = llm.generate(
            [PROMPTS[i] for _, i in requests], [PARAMS[kind] for kind, _ in requests], use_tqdm=False
        )
        assert [out.token_ids for out in outputs] == [want[kind][i] for kind, i in requests]
        llm.engine.scheduler.check()
        if "tight" in switch:
            assert llm.engine.scheduler.num_preemptions > 0
        assert (llm.engine.stats.num_cached_tokens > 0) == (switch != "no prefix cache")


def test_the_start_says_what_a_token_and_a_sequence_take():
    """Five windows of 128 rows of 32; entries of 32, and index keys of 16, per 4 tokens in two layers, per 128 in one;
    their states, values and gates, of twice the width where windows overlap."""
    with tiny_llm("deepseek_v4", **OPTIONS) as llm:
        banner = llm.engine.banner()
    per_token = 2 * (32 + 16) * 4 // 4 + 32 * 4 // 128
    windows = 5 * 32 * 4 * 4 * (128 // 4 + 1)
    states = 2 * 4 * (32 + 16) * 4 * 4 * (8 // 4 + 1) + 2 * 32 * 4 * 4 * (128 // 4 + 1)
    assert f"{per_token} bytes per token and {windows + states:,} per sequence" in banner
    with tiny_llm("llama") as llm:
        assert llm.engine.banner().count(", 384 bytes per token\n") == 1
