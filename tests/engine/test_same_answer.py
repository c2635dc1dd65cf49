"""The first promise: tokens do not depend on chunking, blocks, company, cache, preemption or order."""

from __future__ import annotations

import random

import pytest

from rorqual import LLM, SamplingParams
from rorqual.ops.native.library import usable_isas, using
from tests.engine.engines import TINY_OPTIONS, tiny_llm
from tests.tiny import VOCAB, reference_greedy
from tests.unit.tiny_gguf import MIXED_SIZES, mixed_kinds, smollm2_kinds, write_llama

MODELS = ["llama", "mistral_window", "qwen2_windows", "qwen3_yarn", "qwen3_moe"]


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


SYSTEM = prompt(10, 99)
PROMPTS = [prompt(n, n) for n in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 30)] + [SYSTEM + prompt(n, n) for n in (1, 6, 7)]

SWITCHES: dict[str, dict] = {
    "defaults": {},
    "chunk of 1": {"long_prefill_token_threshold": 1},
    "chunk of 3": {"long_prefill_token_threshold": 3},
    "chunk equals block": {"long_prefill_token_threshold": 4},
    "steps of 8 tokens": {"max_num_batched_tokens": 8},
    "steps of 64 tokens": {"max_num_batched_tokens": 64},
    "block of 1": {"block_size": 1, "num_kv_blocks": 256},
    "block of 5": {"block_size": 5},
    "block of 16": {"block_size": 16},
    "no prefix cache": {"enable_prefix_caching": False},
    "one at a time": {"max_num_seqs": 1},
    "tight cache": {"num_kv_blocks": 16},
    "tight cache, chunks of 2, no prefix cache": {
        "num_kv_blocks": 16,
        "long_prefill_token_threshold": 2,
        "enable_prefix_caching": False,
    },
}
AHEAD: dict[str, dict] = {
    "steps started before the last is read": {},
    "steps started before the last is read, tight cache": {"num_kv_blocks": 16},
    "steps started before the last is read, few seats": {"max_num_seqs": 3},
    "steps started before the last is read, chunks of 3": {"long_prefill_token_threshold": 3, "num_kv_blocks": 20},
}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=18, ignore_eos=True),
    "seeded": SamplingParams(temperature=1.2, top_p=0.95, seed=5, max_tokens=18, ignore_eos=True),
    "drawn from all": SamplingParams(temperature=1.1, seed=8, max_tokens=18, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0.8, seed=6, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=18, ignore_eos=True
    ),
}


def alone(name: str, params: SamplingParams) -> list[list[int]]:
    """Each prompt in an engine that has never seen another."""
    found = []
    with tiny_llm(name, enable_prefix_caching=False, max_num_seqs=1) as llm:
        for ids in PROMPTS:
            found.append(llm.generate(ids, params, use_tqdm=False)[0].token_ids)
    return found


_ALONE: dict[tuple[str, str], list[list[int]]] = {}


def expected(name: str, kind: str) -> list[list[int]]:
    if (name, kind) not in _ALONE:
        _ALONE[name, kind] = alone(name, PARAMS[kind])
    return _ALONE[name, kind]


@pytest.mark.parametrize("name", MODELS)
def test_alone_greedy_is_what_transformers_says(name):
    assert expected(name, "greedy") == [reference_greedy(name, tuple(ids), 18) for ids in PROMPTS]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("switch", [*SWITCHES, *AHEAD])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_do_not_depend_on(name, switch, kind):
    with tiny_llm(name, **(SWITCHES | AHEAD)[switch]) as llm:
        llm.engine._looks_ahead = switch in AHEAD
        order = list(range(len(PROMPTS)))
        for attempt in ("cold", "warm", "shuffled"):
            if attempt == "shuffled":
                random.Random(3).shuffle(order)
            outputs = llm.generate([PROMPTS[i] for i in order], PARAMS[kind], use_tqdm=False)
            assert [out.token_ids for out in outputs] == [expected(name, kind)[i] for i in order], attempt
            llm.engine.scheduler.check()
        if "tight" in switch:
            assert llm.engine.scheduler.num_preemptions > 0
        if switch == "defaults":
            assert llm.engine.stats.num_cached_tokens > 0


WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"moe_intermediate_size": 32, "num_experts": 16, "num_local_experts": None, "num_experts_per_tok": 3}
COMPILED: dict[str, dict] = {
    "chunk of 1": {"long_prefill_token_threshold": 1},
    "chunk of 3": {"long_prefill_token_threshold": 3},
    "steps of 64 tokens": {"max_num_batched_tokens": 64},
    "block of 48": {"block_size": 48},
    "tight cache": {"num_kv_blocks": 5},
}


@pytest.mark.parametrize(
    ("name", "quantization"),
    [(name, "auto") for name in ("llama", "mistral_window", "qwen3", "qwen3_moe")] + [("qwen3_moe", "int4")],
)
@pytest.mark.parametrize("isa", usable_isas())
def test_compiled_kernels_keep_the_promise_in_bfloat16(isa, name, quantization):
    options = {"dtype": "bfloat16", "load_format": "dummy", "block_size": 16, "num_kv_blocks": 64}
    options["hf_overrides"] = WIDE | {"vocab_size": 208} | (MIXTURE if name == "qwen3_moe" else {})
    options["quantization"] = quantization
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=18, ignore_eos=True)
    with using(isa):
        with tiny_llm(name, **options, enable_prefix_caching=False, max_num_seqs=1) as llm:
            assert {backend for op, backend in llm.engine.kernels.items() if op != "embedding"} == {"native"}
            assert (llm.engine.resolved.quantization is not None) == (quantization == "int4")
            assert ("sparse_moe_block" in llm.engine.kernels) == (name == "qwen3_moe")
            want = [llm.generate(ids, params, use_tqdm=False)[0].token_ids for ids in PROMPTS]
        for switch, changes in COMPILED.items():
            with tiny_llm(name, **(options | changes)) as llm:
                for attempt in ("cold", "warm"):
                    got = llm.generate(PROMPTS, params, use_tqdm=False)
                    assert [out.token_ids for out in got] == want, (switch, attempt)
                if "tight" in switch:
                    assert llm.engine.scheduler.num_preemptions > 0


@pytest.fixture(scope="module", params=["smollm2", "mixed"])
def packed(request, tmp_path_factory):
    """A GGUF file as SmolLM2's, and one with matrices in formats of four, five and six bits."""
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    if request.param == "mixed":
        return write_llama(path, mixed_kinds, **MIXED_SIZES)
    return write_llama(path, smollm2_kinds, hidden_size=128)


@pytest.mark.parametrize("isa", usable_isas())
def test_packed_weights_keep_the_promise(isa, packed):
    """Products of integers too: a row's inputs are rounded by themselves, and its sums have one order."""
    options = TINY_OPTIONS | {"dtype": "auto", "block_size": 16, "num_kv_blocks": 64}
    with using(isa):
        found = {}
        for kind, params in PARAMS.items():
            with LLM(str(packed), **options | {"enable_prefix_caching": False, "max_num_seqs": 1}) as llm:
                assert llm.engine.resolved.quantization is not None
                assert set(llm.engine.kernels.values()) == {"native"}
                found[kind] = [llm.generate(ids, params, use_tqdm=False)[0].token_ids for ids in PROMPTS]
        for switch, changes in (COMPILED | {"no prefix cache": {"enable_prefix_caching": False}}).items():
            with LLM(str(packed), **(options | changes)) as llm:
                for kind, params in PARAMS.items():
                    got = llm.generate(PROMPTS, params, use_tqdm=False)
                    assert [out.token_ids for out in got] == found[kind], (switch, kind)
                if "tight" in switch:
                    assert llm.engine.scheduler.num_preemptions > 0


def test_sa11_answers_of_one_request_differ_and_repeat():
    params = SamplingParams(n=3, temperature=1.5, seed=1, max_tokens=12, ignore_eos=True)
    with tiny_llm() as llm:
        first, again = (llm.generate(PROMPTS[-1], params, use_tqdm=False)[0] for _ in range(2))
    texts = [tuple(answer.token_ids) for answer in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [tuple(answer.token_ids) for answer in again.outputs]
    assert [answer.index for answer in first.outputs] == [0, 1, 2]


def test_first_of_several_answers_is_the_single_answer():
    one = SamplingParams(temperature=1.5, seed=1, max_tokens=12, ignore_eos=True)
    with tiny_llm() as llm:
        single = llm.generate(PROMPTS[5], one, use_tqdm=False)[0].token_ids
        several = llm.generate(PROMPTS[5], one.clone(n=4), use_tqdm=False)[0]
    assert several.outputs[0].token_ids == single


@pytest.mark.parametrize("num_answers", [5, 64])
def test_pr11_more_answers_than_seats_come_in_waves(num_answers):
    params = SamplingParams(n=num_answers, temperature=1.5, seed=1, max_tokens=8, ignore_eos=True)
    with tiny_llm(max_num_seqs=4, num_kv_blocks=16) as llm:
        (out,) = llm.generate(PROMPTS[6], params, use_tqdm=False)
    assert [len(answer.token_ids) for answer in out.outputs] == [8] * num_answers
    assert out.finished


def test_sa10_equal_seeds_agree_and_others_do_not():
    one = SamplingParams(temperature=1.0, seed=7, max_tokens=40, ignore_eos=True)
    with tiny_llm() as llm:
        outputs = llm.generate([PROMPTS[8]] * 3, [one, one, one.clone(seed=8)], use_tqdm=False)
    assert outputs[0].token_ids == outputs[1].token_ids != outputs[2].token_ids


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them():
    params = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)

    def run(seed: int | None) -> list[tuple[int, ...]]:
        with tiny_llm(seed=seed) as llm:
            return [tuple(out.token_ids) for out in llm.generate([PROMPTS[8]] * 4, params, use_tqdm=False)]

    assert len(set(run(None) + run(None))) == 8
    assert len(set(run(3))) == 4
    assert run(3) == run(3)
