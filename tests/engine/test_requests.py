"""What a request gets: ends, stop strings, limits, logprobs, cache accounting, and faults that stay its own."""

from __future__ import annotations

import random

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.tokenizer.tokenizer import Tokenizer
from tests.engine.engines import byte_tokenizer, scripted_llm, tiny_llm
from tests.tiny import VOCAB, checkpoint_folder, edit_config, reference_logits, reference_model

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def one(llm: LLM, ids: list[int], params: SamplingParams = GREEDY):
    return llm.generate(ids, params, use_tqdm=False)[0]


# ---- prefix cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 11, 12, 13])
def test_pc2_fully_cached_prompt_recomputes_its_last_token(length, chunk):
    with tiny_llm(long_prefill_token_threshold=chunk) as llm:
        cold, warm = one(llm, prompt(length)), one(llm, prompt(length))
    assert warm.token_ids == cold.token_ids
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (length - 1) // 4 * 4 < length


def test_pc3_answers_that_ended_on_stop_strings_do_not_poison_the_cache(tmp_path):
    llm = llm_with_tokenizer(tmp_path, "qwen3")
    with llm:
        text = llm.get_tokenizer().decode(one(llm, prompt(9)).token_ids)
        stop = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop=[text[1:3], text[5:6]])
        llm.generate([prompt(9), prompt(10), prompt(9) + prompt(5, 1)], stop, use_tqdm=False)
        targets = [prompt(9) + one(llm, prompt(9)).token_ids[:k] for k in (1, 2, 3, 7)]
        warm = [one(llm, ids).token_ids for ids in targets]
    for ids, tokens in zip(targets, warm, strict=True):
        with tiny_llm("qwen3") as cold:
            assert one(cold, ids).token_ids == tokens


@pytest.mark.parametrize("bits", [0, 4])
def test_pc4_digest_collisions_never_hit(bits, monkeypatch):
    from rorqual.cache import prefix

    real = prefix.chain_digest
    monkeypatch.setattr(prefix, "chain_digest", lambda parent, tokens: bytes([real(parent, tokens)[0] % 2**bits]))
    prompts = [prompt(n, n) for n in (8, 9, 12, 13, 8, 17, 21, 9)] * 2
    with tiny_llm(enable_prefix_caching=False) as plain, tiny_llm(num_kv_blocks=20) as llm:
        want = [out.token_ids for out in plain.generate(prompts, GREEDY, use_tqdm=False)]
        assert [one(llm, ids).token_ids for ids in prompts] == want
        assert [out.token_ids for out in llm.generate(prompts, GREEDY, use_tqdm=False)] == want


@pytest.mark.parametrize("name", ["qwen2_windows", "mistral_window"])
def test_pc6_repeats_with_windows_stay_the_same(name):
    with tiny_llm(name) as llm, tiny_llm(name, enable_prefix_caching=False) as plain:
        repeats = [one(llm, prompt(21)) for _ in range(4)]
        want = one(plain, prompt(21)).token_ids
    assert [out.token_ids for out in repeats] == [want] * 4
    assert [out.num_cached_tokens for out in repeats] == [0, 20, 20, 20]


def test_pc7_salts_separate_cached_prefixes():
    with tiny_llm() as llm:
        outputs = [one(llm, {"prompt_token_ids": prompt(12), "cache_salt": salt}) for salt in ("a", "a", "b", "", "b")]
    assert [out.num_cached_tokens for out in outputs] == [0, 8, 0, 0, 8]
    assert len({tuple(out.token_ids) for out in outputs}) == 1


def test_pc9_equal_prompts_at_once_are_computed_once():
    with tiny_llm() as llm:
        first, second = llm.generate([prompt(13)] * 2, GREEDY, use_tqdm=False)
        third = one(llm, prompt(13))
    assert first.token_ids == second.token_ids == third.token_ids
    assert [out.num_cached_tokens for out in (first, second, third)] == [0, 12, 12]


def test_pc10_hits_are_counted_on_the_cpu():
    with tiny_llm() as llm:
        one(llm, prompt(13))
        one(llm, prompt(13))
        assert (llm.engine.stats.num_cached_tokens, llm.engine.stats.num_queried_tokens) == (12, 26)


# ---- logprobs ----------------------------------------------------------------------------------------------------


def values(entries):
    return [None if e is None else {t: round(p.logprob, 4) for t, p in e.items()} for e in entries]


def test_pc11_prompt_logprobs_are_the_same_on_a_warm_cache():
    params = GREEDY.clone(prompt_logprobs=1)
    with tiny_llm() as llm:
        cold, warm = one(llm, prompt(13), params), one(llm, prompt(13), params)
    assert len(cold.prompt_logprobs) == len(warm.prompt_logprobs) == 13
    assert values(warm.prompt_logprobs) == values(cold.prompt_logprobs)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17])
def test_cp1_prompt_logprobs_of_a_chunked_prompt(length):
    ids = prompt(length)
    with tiny_llm(long_prefill_token_threshold=8) as llm:
        out = one(llm, ids, GREEDY.clone(prompt_logprobs=2))
    want = reference_logits("llama", ids).log_softmax(-1)
    assert len(out.prompt_logprobs) == length
    assert out.prompt_logprobs[0] is None
    for i, entry in enumerate(out.prompt_logprobs[1:]):
        assert entry[ids[i + 1]].logprob == pytest.approx(float(want[i, ids[i + 1]]), abs=1e-4)
        assert entry[ids[i + 1]].rank == int((want[i] >= want[i, ids[i + 1]]).sum())
        assert {t for t, p in entry.items() if p.rank <= 2} == set(want[i].topk(2).indices.tolist())


def test_prompt_logprobs_of_a_long_prompt_need_no_more_logits_at_once_than_draws(monkeypatch):
    ids, seen = prompt(150), []
    with tiny_llm(max_model_len=160, max_num_batched_tokens=256) as llm:
        runner = llm.engine._runner
        compute = runner.compute_logits
        monkeypatch.setattr(runner, "compute_logits", lambda hidden: seen.append(len(hidden)) or compute(hidden))
        out = one(llm, ids, GREEDY.clone(prompt_logprobs=0, max_tokens=1))
    assert seen == [64, 64, 21, 1]
    want = reference_logits("llama", ids).log_softmax(-1)
    got = [entry[token].logprob for token, entry in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
    assert got == pytest.approx([float(want[i, t]) for i, t in enumerate(ids[1:])], abs=1e-4)


def test_prompt_logprobs_survive_preemption():
    params = [GREEDY.clone(prompt_logprobs=0, max_tokens=20)] * 6
    prompts = [prompt(11, i) for i in range(6)]
    with tiny_llm(num_kv_blocks=17, enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
    for ids, out in zip(prompts, outputs, strict=True):
        want = reference_logits("llama", ids).log_softmax(-1)
        got = [entry[token].logprob for token, entry in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
        assert got == pytest.approx([float(want[i, t]) for i, t in enumerate(ids[1:])], abs=1e-4)


def test_logprobs_of_an_answer_are_the_models():
    ids = prompt(9)
    with tiny_llm() as llm:
        out = one(llm, ids, SamplingParams(temperature=0.7, seed=1, max_tokens=6, ignore_eos=True, logprobs=3))
    want = reference_logits("llama", ids + out.token_ids).log_softmax(-1)
    answer = out.outputs[0]
    assert len(answer.logprobs) == 6
    for i, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = want[len(ids) - 1 + i]
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert set(row.topk(3).indices.tolist()) <= set(entry)
    total = sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


# ---- limits ------------------------------------------------------------------------------------------------------


def test_pr6_a_prompt_must_leave_room_for_one_token():
    with tiny_llm(max_model_len=16) as llm:
        for params in (GREEDY.clone(max_tokens=1), GREEDY.clone(max_tokens=None)):
            out = one(llm, prompt(15), params)
            assert (len(out.token_ids), out.finish_reason) == (1, "length")
            for length in (16, 17):
                with pytest.raises(ValueError, match=f"prompt has {length} tokens and the context holds 16"):
                    one(llm, prompt(length), params)
        assert not llm.engine.has_work


def test_le4_max_tokens_beyond_the_context_fills_it():
    with tiny_llm(max_model_len=32) as llm:
        for max_tokens in (1000, None):
            out = one(llm, prompt(10), GREEDY.clone(max_tokens=max_tokens))
            assert (len(out.token_ids), out.finish_reason) == (22, "length")


@pytest.mark.parametrize("length", range(4, 12))
def test_pr1_preemption_at_any_length_loses_no_token(length):
    """The younger of two sequences is preempted at every length modulo the block, and resumes."""
    older, younger = prompt(9, 1), prompt(length, 2)
    params = GREEDY.clone(max_tokens=20)
    with tiny_llm() as roomy:
        want = [one(roomy, ids, params).token_ids for ids in (older, younger)]
    with tiny_llm(num_kv_blocks=8, max_model_len=33, enable_prefix_caching=False) as llm:
        outputs = llm.generate([older, younger], params, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
    assert [out.token_ids for out in outputs] == want


def test_a_request_that_can_never_fit_is_refused_at_once():
    with tiny_llm(num_kv_blocks=8, max_model_len=33) as llm:
        assert one(llm, prompt(20), GREEDY.clone(max_tokens=13)).finish_reason == "length"
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes .* raise --num-kv-blocks or lower --max-model-len"):
        tiny_llm(num_kv_blocks=8, max_model_len=40)


# ---- ends --------------------------------------------------------------------------------------------------------


def llm_with_tokenizer(tmp_path, name: str = "llama", *, special: tuple[str, ...] = (), config=None, **options) -> LLM:
    import json
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(checkpoint_folder(name), folder)
    byte_tokenizer(special).save(str(folder / "tokenizer.json"))
    if special:
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[0]}))
    edit_config(folder, **(config or {}))
    from tests.engine.engines import TINY_OPTIONS

    return LLM(str(folder), **(TINY_OPTIONS | {"skip_tokenizer_init": False} | options))


def scripted_text(tmp_path, text: str, *, special: tuple[str, ...] = (), config=None, **options):
    """An LLM with a tokenizer whose model says `text` after the one-token prompt [5]."""
    from tests.engine.engines import ScriptedRunner

    llm = llm_with_tokenizer(tmp_path, special=special, config=config, **options)
    script = llm.get_tokenizer().encode(text, add_special_tokens=False)
    llm.engine._runner = ScriptedRunner(llm, {5: script}, {5: 1})
    return llm, script


def test_tm2_tm3_every_listed_end_token_ends(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model").rmdir()
    llm = llm_with_tokenizer(tmp_path, special=("<eos>",), config={"eos_token_id": 31})
    llm.close()
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [31, 37]}')
    from tests.engine.engines import TINY_OPTIONS, ScriptedRunner

    with LLM(str(tmp_path / "model"), **(TINY_OPTIONS | {"skip_tokenizer_init": False})) as llm:
        eos = llm.get_tokenizer().eos_token_ids[0]
        assert set(llm.engine.eos_token_ids) == {31, 37, eos}
        for end in (31, 37, eos):
            llm.engine._runner = ScriptedRunner(llm, {5: [9, 9, end, 9]}, {5: 1})
            out = one(llm, [5], SamplingParams(temperature=0, max_tokens=8))
            assert (out.token_ids, out.finish_reason, out.outputs[0].stop_reason) == ([9, 9, end], "stop", None)


def test_tm4_ignore_eos_ignores_all_ends_but_the_users():
    llm, _ = scripted_llm({5: [9, 1, 1, 8, 7, 9]})
    with llm:
        assert len(one(llm, [5], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)).token_ids) == 16
        out = one(llm, [5], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop_token_ids=[7]))
        assert (out.token_ids, out.finish_reason, out.outputs[0].stop_reason) == ([9, 1, 1, 8, 7], "stop", 7)


def test_le3_min_tokens_hold_off_ends_and_stop_strings(tmp_path):
    llm, _ = scripted_text(tmp_path, "ab" * 10, config={"eos_token_id": 31})
    with llm:
        llm.engine._runner.scripts = {5: [31]}
        out = one(llm, [5], SamplingParams(temperature=0, min_tokens=20, max_tokens=20))
        assert (len(out.token_ids), out.finish_reason) == (20, "length")
        assert 31 not in out.token_ids
        out = one(llm, [5], SamplingParams(temperature=0, min_tokens=5, max_tokens=20))
        assert (len(out.token_ids), out.token_ids[-1], out.finish_reason) == (6, 31, "stop")
    llm, _ = scripted_text(tmp_path / "2", "ab" * 10)
    with llm:
        out = one(llm, [5], SamplingParams(temperature=0, min_tokens=5, max_tokens=20, stop="b"))
        assert (out.text, len(out.token_ids)) == ("ababa", 6)


@pytest.mark.parametrize(("include", "text"), [(False, "one two "), (True, "one two three")])
def test_stop_strings_across_tokens_leak_no_byte(tmp_path, include, text):
    llm, script = scripted_text(tmp_path, "one two three four")
    params = SamplingParams(temperature=0, max_tokens=30, stop=["three", "zzz"], include_stop_str_in_output=include)
    with llm:
        deltas = list(llm.stream([5], params))
        out = one(llm, [5], params)
    assert "".join(d.text for d in deltas) == out.text == text
    assert (out.finish_reason, out.outputs[0].stop_reason) == ("stop", "three")
    assert [t for d in deltas for t in d.token_ids] == out.token_ids == script[: len("one two three")]
    if not include:
        assert not any("t" in d.text for d in deltas[6:])  # "two" is out by then


def test_text_held_back_for_a_stop_string_comes_at_the_end(tmp_path):
    llm, script = scripted_text(tmp_path, "stopping sto")
    with llm:
        params = SamplingParams(temperature=0, max_tokens=len(script), stop="stop!")
        assert "".join(d.text for d in llm.stream([5], params)) == one(llm, [5], params).text == "stopping sto"


def test_dt7_special_tokens_and_the_end_token(tmp_path):
    llm, _ = scripted_text(tmp_path, "ab<x>c", special=("<eos>", "<x>"))
    with llm:
        eos = llm.get_tokenizer().eos_token_ids[0]
        llm.engine._runner.scripts = {5: [*llm.engine._runner.scripts[5], eos]}
        base = SamplingParams(temperature=0, max_tokens=20)
        assert one(llm, [5], base).text == "abc"
        assert one(llm, [5], base.clone(skip_special_tokens=False)).text == "ab<x>c"
        kept = base.clone(skip_special_tokens=False, include_stop_str_in_output=True)
        assert one(llm, [5], kept).text == "ab<x>c<eos>"
        assert one(llm, [5], base).token_ids[-1] == eos


def test_dt1_streamed_pieces_equal_the_whole(tmp_path):
    text = "plain ASCII, then more"
    llm, script = scripted_text(tmp_path, text)
    with llm:
        params = SamplingParams(temperature=0, max_tokens=len(script))
        pieces = [d.text for d in llm.stream([5], params)]
        assert "".join(pieces) == llm.get_tokenizer().decode(script) == text
        assert len(pieces) == len(script)


# ---- faults stay where they are ----------------------------------------------------------------------------------


def test_mo4_nan_logits_end_their_own_request_only():
    llm, runner = scripted_llm({5: [9], 6: [8], 7: [7]})
    with llm:
        runner.spoil = {6}
        outputs = llm.generate([[5], [6], [7]], GREEDY, use_tqdm=False)
        assert [out.finish_reason for out in outputs] == ["length", "error", "length"]
        assert "NaN" in outputs[1].outputs[0].error
        assert (outputs[0].token_ids, outputs[2].token_ids) == ([9] * 8, [7] * 8)
        runner.spoil = set()
        assert one(llm, [6]).token_ids == [8] * 8


BAD_PROMPTS = {
    "empty": ([], "empty"),
    "negative": ([3, -1], "out of vocabulary"),
    "too large": ([VOCAB], "out of vocabulary"),
    "huge": ([2**63], "out of vocabulary"),
    "float": ([5, 1.5], "out of vocabulary"),
    "bool": ([5, True], "out of vocabulary"),
    "string among ids": ([5, "x"], "out of vocabulary"),
    "text without a tokenizer": ("hello", "without a tokenizer"),
    "both kinds": ({"prompt": "a", "prompt_token_ids": [5]}, "either 'prompt' or 'prompt_token_ids'"),
    "unknown key": ({"prompt_token_ids": [5], "image": 1}, "got the keys"),
    "longer than the context": ([5] * 64, "prompt has 64 tokens"),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_va1_va2_a_bad_prompt_is_refused_and_harms_nobody(case):
    bad, message = BAD_PROMPTS[case]
    with tiny_llm() as llm:
        running = llm.stream(prompt(6), GREEDY)
        first = next(running)
        for attempt in (lambda: llm.generate([prompt(3), bad], GREEDY, use_tqdm=False), lambda: llm.stream(bad)):
            with pytest.raises(ValueError, match=message):
                attempt()
        rest = [t for d in running for t in d.token_ids]
        assert [*first.token_ids, *rest] == one(llm, prompt(6)).token_ids
        assert not llm.engine.has_work


BAD_PARAMS = {
    "bias": ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    "allowed": ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    "stop ids": ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
    "prompt logprobs": ({"prompt_logprobs": 10**9}, "prompt_logprobs"),
    "stop without tokenizer": ({"stop": ["x"]}, "tokenizer"),
}


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_sa13_lp3_va3_parameters_that_this_model_lacks_are_refused(case):
    options, message = BAD_PARAMS[case]
    with tiny_llm() as llm:
        with pytest.raises(ValueError, match=message):
            one(llm, [5], SamplingParams(**options))
        assert len(one(llm, [5]).token_ids) == 8


def test_one_bad_prompt_in_a_list_queues_nothing():
    with tiny_llm() as llm:
        with pytest.raises(ValueError, match="vocabulary"):
            llm.generate([[5], [6], [-1]], GREEDY, use_tqdm=False)
        assert not llm.engine.has_work
        llm.engine.scheduler.check()


def test_as_many_params_as_prompts():
    with tiny_llm() as llm:
        outputs = llm.generate([[5], [6]], [GREEDY, GREEDY.clone(max_tokens=3)], use_tqdm=False)
        assert [len(out.token_ids) for out in outputs] == [8, 3]
        with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
            llm.generate([[5], [6], [7]], [GREEDY, GREEDY], use_tqdm=False)


# ---- streams, aborts, several engines ----------------------------------------------------------------------------


def test_streams_interleave_and_equal_generate():
    ids = [prompt(n, n) for n in (3, 9, 20)]
    with tiny_llm() as llm:
        want = [one(llm, p).token_ids for p in ids]
        streams = [llm.stream(p, GREEDY) for p in ids]
        got = [[] for _ in ids]
        live = set(range(len(ids)))
        rng = random.Random(0)
        while live:
            i = rng.choice(sorted(live))
            delta = next(streams[i], None)
            if delta is None:
                live.discard(i)
            else:
                got[i] += delta.token_ids
        assert got == want


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_closing_or_dropping_a_stream_frees_its_blocks(taken):
    with tiny_llm() as llm:
        for drop in (False, True):
            stream = llm.stream(prompt(20), GREEDY)
            for _ in range(taken):
                next(stream)
            if drop:
                del stream
            else:
                stream.close()
                stream.close()
                assert next(stream, None) is None
            assert not llm.engine.has_work
            assert all(g.pool.num_free == g.pool.num_blocks for g in llm.engine.cache.groups)
        assert len(one(llm, [5]).token_ids) == 8


def test_an_interrupt_leaves_nothing_behind(monkeypatch):
    with tiny_llm() as llm:
        steps = iter(range(3))
        real = llm.engine._runner.hidden_states

        def hidden_states(batch):
            if next(steps, None) is None:
                raise KeyboardInterrupt
            return real(batch)

        monkeypatch.setattr(llm.engine._runner, "hidden_states", hidden_states)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt(5), prompt(9)], GREEDY, use_tqdm=False)
        assert not llm.engine.has_work
        monkeypatch.undo()
        assert len(one(llm, prompt(5)).token_ids) == 8


def test_two_engines_do_not_disturb_each_other():
    with tiny_llm("llama") as a, tiny_llm("qwen3_yarn", block_size=8) as b:
        alone = one(a, prompt(9)).token_ids, one(b, prompt(9)).token_ids
        streams = a.stream(prompt(9), GREEDY), b.stream(prompt(9), GREEDY)
        pairs = list(zip(*streams, strict=True))
        together = tuple([t for pair in pairs for t in pair[i].token_ids] for i in (0, 1))
        assert together == alone
        a.close()
        assert one(b, prompt(9)).token_ids == alone[1]
        with pytest.raises(ValueError, match="closed"):
            one(a, prompt(9))


def test_closing_frees_the_weights():
    import gc
    import weakref

    llm = tiny_llm()
    weights = weakref.ref(next(llm.engine._runner.model.parameters()))
    cache = weakref.ref(llm.engine._runner.kv[0].key)
    stream = llm.stream(prompt(5), GREEDY)
    next(stream)
    llm.close()
    gc.collect()
    assert weights() is None
    assert cache() is None


def test_outputs_read_as_dicts_and_as_attributes():
    with tiny_llm() as llm:
        out = one(llm, prompt(5))
    assert out["token_ids"] == out.token_ids == out.outputs[0].token_ids
    assert out["text"] == out.text == ""
    with pytest.raises(KeyError):
        out["nothing"]


def test_unknown_options_name_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'tensor_parallel_size'"):
        tiny_llm(tensor_parallel=8)
    with pytest.raises(ValueError, match="max_num_batched_tokens \\(4\\) must be at least max_num_seqs \\(8\\)"):
        tiny_llm(max_num_batched_tokens=4)


def test_ro6_window_edges_in_every_way_of_computing():
    model = reference_model("mistral_window")
    for length in (5, 6, 7, 8, 14):
        ids = prompt(length, length)
        with torch.inference_mode():
            want = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
        for chunk in (None, 1, 3):
            with tiny_llm("mistral_window", long_prefill_token_threshold=chunk) as llm:
                assert one(llm, ids, GREEDY.clone(max_tokens=1)).token_ids == [want]


def test_tokenizer_of_another_model_can_be_given(tmp_path):
    with llm_with_tokenizer(tmp_path) as first:
        assert isinstance(first.get_tokenizer(), Tokenizer)
    with tiny_llm(skip_tokenizer_init=False, tokenizer=str(tmp_path / "model")) as llm:
        assert llm.get_tokenizer().encode("ab") == first_ids(tmp_path)


def first_ids(tmp_path) -> list[int]:
    return Tokenizer.from_folder(tmp_path / "model").encode("ab")


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_callers_may_be_in_inference_mode_or_not(looks_ahead):
    params = SamplingParams(
        max_tokens=6, temperature=0.5, seed=1, presence_penalty=1.0, logit_bias={3: 1.0}, top_p=0.9, logprobs=1
    )
    with torch.inference_mode():
        llm = tiny_llm()
        llm.engine._looks_ahead = looks_ahead
        inside = one(llm, [1, 2, 3], params)
    with llm:
        assert one(llm, [1, 2, 3], params).token_ids == inside.token_ids
