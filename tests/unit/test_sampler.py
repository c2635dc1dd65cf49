"""The sampler: filters against a plain definition and transformers, rows that never mix, state only `accept` moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import rorqual.engine.sampler as sampler_module
import rorqual.ops.cpu.sample  # noqa: F401  (registers the CPU answers that an engine uses)
from rorqual.engine.sampler import Sampler, SamplerOutput, draw_tokens, prompt_logprobs
from rorqual.ops.sample import noise_bits, row_key
from rorqual.sampling_params import SamplingParams


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(sampler, logits, rows) -> SamplerOutput:
    """Draw for rows of (slot, position)."""
    slots, positions = np.array(rows, np.int64).reshape(-1, 2).T
    return sampler.draw(logits, slots, positions).wait()


def one_row(logits, params, *, seed=1, prompt=(), output=(), end=(), bad_words=(), position=None):
    """What a sampler that holds one sequence makes of one row."""
    row = torch.as_tensor(logits, dtype=torch.float32) if isinstance(logits, list) else logits
    sampler = Sampler(len(row))
    sampler.add(params, seed=seed, prompt_token_ids=prompt, end_token_ids=end, bad_words=bad_words)
    for token_id in output:
        sampler.accept(0, token_id)
    position = len(prompt) + len(output) if position is None else position
    return drawn(sampler, row[None], [(0, position)])


def token(logits, params, **options) -> int:
    out = one_row(logits, params, **options)
    assert out.failed == [False]
    return out.token_ids[0]


def tokens(logits, params, count, **options) -> list[int]:
    """Draws at `count` positions."""
    row = torch.as_tensor(logits, dtype=torch.float32)
    sampler = Sampler(len(row))
    sampler.add(params, seed=3, prompt_token_ids=[], end_token_ids=[], **options)
    return drawn(sampler, row.expand(count, -1), [(0, p) for p in range(count)]).token_ids


def logs(*probabilities) -> list[float]:
    return [math.log(p) if p else -math.inf for p in probabilities]


@pytest.fixture
def kept(monkeypatch):
    """kept(logits, params) -> the set of tokens that the draw chooses from."""
    seen: list[set[int]] = []
    draw = sampler_module.gumbel_argmax

    def spy(logits, temperature, keys, *, last=None):
        ids, inside = torch.arange(logits.shape[1]), logits > -math.inf
        if last is not None:
            value = last.values[:, None]
            inside &= (logits > value) | ((logits == value) & (ids <= last.token_ids[:, None]))
        seen.extend(set(ids[row].tolist()) for row in inside)
        return draw(logits, temperature, keys, last=last)

    monkeypatch.setattr(sampler_module, "gumbel_argmax", spy)

    def run(logits, params):
        seen.clear()
        chosen = token(logits, params)
        assert len(seen) == 1
        assert chosen in seen[0]
        return seen[0]

    return run


# --- greedy


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-12])
def test_sa1_greedy_takes_the_best_token_and_the_lowest_id_of_equals(temperature):
    assert token([1.0, 3.0, 2.0, 3.0], SamplingParams(temperature=temperature)) == 1
    assert token([1.0, 3.0, 2.0, 3.0], SamplingParams(temperature=5.0, top_k=1)) == 1
    assert token([0.0] * 9, SamplingParams(temperature=temperature)) == 0
    assert token(torch.tensor([1, 3, 2, 3], dtype=torch.bfloat16), SamplingParams(temperature=temperature)) == 1


def test_sa1_a_greedy_row_does_not_touch_a_drawn_one():
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(300)
    sampler.add(SamplingParams(temperature=0), seed=1, prompt_token_ids=[], end_token_ids=[])
    sampler.add(SamplingParams(temperature=0.7), seed=1, prompt_token_ids=[], end_token_ids=[])
    for position in range(50):
        both = drawn(sampler, logits, [(0, position), (1, position)])
        assert both.token_ids[0] == logits[0].argmax()
        assert both.token_ids[1] == drawn(sampler, logits[1:], [(1, position)]).token_ids[0]


def test_sa2_masked_logits_in_a_greedy_row_make_no_nan_beside_a_drawn_one():
    logits = torch.tensor([[-math.inf, -math.inf, -5.0, -7.0], [0.0, 1.0, -math.inf, -math.inf]])
    sampler = Sampler(4)
    sampler.add(SamplingParams(temperature=0), seed=1, prompt_token_ids=[], end_token_ids=[])
    sampler.add(SamplingParams(temperature=0.8), seed=1, prompt_token_ids=[], end_token_ids=[])
    for position in range(50):
        out = drawn(sampler, logits, [(0, position), (1, position)])
        assert out.failed == [False, False]
        assert out.token_ids[0] == 2
        assert out.token_ids[1] in {0, 1}


# --- filters


def definition(logits, temperature, min_p, top_k, top_p) -> tuple[set[int], float]:
    """Kept tokens by sorting everything, and how near the closest decision was."""
    scaled = np.asarray(logits, np.float64) / temperature
    order = np.lexsort((np.arange(len(scaled)), -np.asarray(logits, np.float64)))
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = [i for i in order if p[i] > 0]
    margins = [abs(p[i] - min_p * p.max()) / p.max() for i in order if min_p > 0 and p[i] < p.max()]
    order = [i for i in order if p[i] >= min_p * p.max()]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        before = np.cumsum([0.0, *(p[i] for i in order)])[:-1] / sum(p[i] for i in order)
        margins += [abs(b - top_p) for b in before]
        order = [i for i, b in zip(order, before, strict=True) if b < top_p]
    return set(order), min(margins, default=1.0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_filters_keep_what_sorting_everything_would_keep(kept, data):
    width = data.draw(st.sampled_from([1, 2, 7, 300, 700]))
    spread = data.draw(st.sampled_from([0.01, 1.0, 4.0]))
    row = torch.randn(width, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))) * spread
    if data.draw(st.booleans()):
        row = (row * 4).round() / 4  # many equal logits
    if data.draw(st.booleans()):
        row[data.draw(st.integers(1, width)) :] = -math.inf
    temperature = data.draw(st.sampled_from([0.05, 0.7, 1.0, 3.0]))
    min_p = data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    top_k = data.draw(st.sampled_from([-1, 0, 2, 40, 299, 10**6]))
    top_p = data.draw(st.sampled_from([1e-9, 0.31, 0.9, 0.999, 1.0]))
    expected, margin = definition(row.numpy(), temperature, min_p, top_k, top_p)
    assume(margin > 1e-10)
    assert kept(row, SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)) == expected


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"top_k": 5}, lambda hf: hf.TopKLogitsWarper(5)),
        ({"top_k": 400}, lambda hf: hf.TopKLogitsWarper(400)),
        ({"top_p": 0.3}, lambda hf: hf.TopPLogitsWarper(0.3)),
        ({"top_p": 0.98}, lambda hf: hf.TopPLogitsWarper(0.98)),
        ({"min_p": 0.02}, lambda hf: hf.MinPLogitsWarper(0.02)),
        ({"min_p": 0.7}, lambda hf: hf.MinPLogitsWarper(0.7)),
    ],
)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_filters_keep_what_transformers_keeps(kept, options, make, temperature):
    hf = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(20, 500, generator=torch.Generator().manual_seed(6)) * 2
    expected = make(hf)(None, logits.double() / temperature)
    for row, survivors in zip(logits, expected, strict=True):
        params = SamplingParams(temperature=temperature, **options)
        assert kept(row, params) == set((survivors > -math.inf).nonzero()[:, 0].tolist())


def test_repetition_penalty_is_transformers():
    hf = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(200, generator=torch.Generator().manual_seed(7)) * 2
    prompt, output = [3, 3, 3, 50], [int(logits.argmax()), 60, 60]
    for penalty in (0.5, 1.3, 100.0):
        expected = hf.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits[None])
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        assert token(logits, params, prompt=prompt, output=output) == expected.argmax().item()


def test_sa3_top_k_and_top_p_together_never_keep_nothing(kept):
    flat = [0.0] * 50
    assert kept(flat, SamplingParams(top_k=3, top_p=0.5)) == {0, 1}
    assert kept(flat, SamplingParams(top_k=3, top_p=1e-300)) == {0}
    assert kept(flat, SamplingParams(min_p=1.0, top_k=50, top_p=5e-324)) == {0}
    assert token([0.0, 1.0, 2.0], SamplingParams(top_k=1, top_p=0.8, temperature=0.01)) == 2


def test_sa4_top_p_at_its_ends_and_on_the_boundary(kept):
    p = logs(0.5, 0.3, 0.2)
    assert kept(p, SamplingParams(top_p=1e-9)) == {0}
    assert kept(p, SamplingParams(top_p=0.4999)) == {0}
    assert kept(p, SamplingParams(top_p=0.5001)) == {0, 1}
    assert kept(p, SamplingParams(top_p=0.9999999)) == {0, 1, 2}
    assert kept(p, SamplingParams(top_p=1)) == {0, 1, 2}
    assert kept([0.0, 0.0], SamplingParams(top_p=0.5)) == {0}  # exactly reached: enough
    assert kept([0.0] * 4, SamplingParams(top_p=0.75)) == {0, 1, 2}


def test_sa5_the_token_that_crosses_top_p_is_kept():
    drawn = tokens(logs(0.1, 0.2, 0.3, 0.4), SamplingParams(top_p=0.6), 10_000)
    share = drawn.count(3) / len(drawn)
    assert set(drawn) == {2, 3}
    assert abs(share - 0.4 / 0.7) < 4 * 0.5 / math.sqrt(len(drawn))


def test_sa6_temperature_comes_before_min_p_and_raw_logprobs_stay_raw(kept):
    params = SamplingParams(temperature=2, min_p=0.3, logprobs=2)
    assert kept([2.0, 1.0, 0.0], params) == {0, 1, 2}  # e^-1 = 0.37; before temperature it would be e^-2 = 0.14
    assert kept([2.0, 1.0, 0.0], SamplingParams(temperature=1, min_p=0.3)) == {0, 1}
    entry = one_row([2.0, 1.0, 0.0], params).logprobs[0]
    expected = torch.tensor([2.0, 1.0, 0.0]).log_softmax(0)
    assert entry.logprobs == expected[torch.tensor(entry.token_ids)].tolist()


def test_sa6_min_p_top_k_and_top_p_renormalise_after_each_other(kept):
    p = logs(0.4, 0.3, 0.2, 0.1)
    assert kept(p, SamplingParams(top_p=0.71)) == {0, 1, 2}
    assert kept(p, SamplingParams(top_k=3, top_p=0.71)) == {0, 1}  # (.4 + .3) / .9 = .78
    assert kept(p, SamplingParams(min_p=0.3, top_p=0.71)) == {0, 1}
    assert kept(p, SamplingParams(min_p=0.3, top_k=2, top_p=0.5)) == {0}  # .4 / .7 = .57


def test_filters_that_keep_everything_draw_like_none():
    logits = torch.randn(400, generator=torch.Generator().manual_seed(8)).tolist()
    free = tokens(logits, SamplingParams(), 200)
    assert tokens(logits, SamplingParams(top_k=400), 200) == free
    assert tokens(logits, SamplingParams(top_k=399, min_p=1e-30), 200) == free
    assert tokens(logits, SamplingParams(top_p=1 - 1e-12), 200) == free
    assert len(set(free)) > 50


# --- seeds


def test_sa10_equal_seeds_draw_equally_and_other_seeds_differ():
    logits = torch.zeros(1000)
    streams = []
    for seed in (7, 7, 8, 2**64 - 1):
        sampler = Sampler(1000)
        sampler.add(SamplingParams(), seed=seed, prompt_token_ids=[], end_token_ids=[])
        streams.append([drawn(sampler, logits[None], [(0, p)]).token_ids[0] for p in range(64)])
    assert streams[0] == streams[1]
    for i, j in ((1, 2), (2, 3), (1, 3)):
        assert sum(a == b for a, b in zip(streams[i], streams[j], strict=True)) < 5


# --- masks and bias


def test_sa13_logit_bias_forces_and_bans():
    logits = [5.0, 9.0, 0.0, 7.0]
    assert token(logits, SamplingParams(temperature=0, logit_bias={"2": 100})) == 2
    assert token(logits, SamplingParams(temperature=0, logit_bias={1: -100})) == 3
    assert set(tokens(logits, SamplingParams(logit_bias={1: -100, 3: -100}), 300)) <= {0, 2}


def test_allowed_token_ids_are_the_only_ones(kept):
    logits = [5.0, 9.0, 0.0, 7.0]
    assert token(logits, SamplingParams(temperature=0, allowed_token_ids=[0, 2])) == 0
    assert kept(logits, SamplingParams(allowed_token_ids=[2, 0])) == {0, 2}
    assert kept(logits, SamplingParams(allowed_token_ids=[2, 0], top_k=3, top_p=0.9999)) == {0, 2}


def test_min_tokens_masks_ends_until_then():
    params = SamplingParams(temperature=0, min_tokens=2)
    logits = [9.0, 8.0, 1.0]
    options = {"prompt": [2, 2, 2], "end": [0, 1, 10**6]}  # an end token beyond the logits cannot be drawn anyway
    assert token(logits, params, output=[], **options) == 2
    assert token(logits, params, output=[2], **options) == 2
    assert token(logits, params, output=[2, 2], **options) == 0
    assert token(logits, params, position=4, **options) == 2  # a draft's row: its position counts
    assert token(logits, params, position=5, **options) == 0


def test_bad_words_are_never_completed():
    params = SamplingParams(temperature=0, bad_words=["unused here"])
    logits = [1.0, 2.0, 3.0, 4.0, 5.0]
    words = [[4], [1, 3], [2, 1, 3], [2, 2, 2], [0, 99]]
    assert token(logits, params, bad_words=words) == 3
    assert token(logits, params, bad_words=words, output=[1]) == 2
    assert token(logits, params, bad_words=words, output=[1, 0]) == 3
    assert token(logits, params, bad_words=words, output=[0, 0, 1]) == 2
    assert token(logits, params, bad_words=[[4], [2, 1, 3]], output=[1]) == 3
    assert token(logits, params, bad_words=[[4], [2, 1, 3]], output=[0, 2, 1]) == 2
    assert token(logits, params, bad_words=words, output=[2, 2], prompt=[1]) == 3
    assert token(logits, params, bad_words=words, prompt=[1]) == 3  # a prompt completes nothing


# --- penalties


def test_sa7_presence_and_frequency_count_the_output_only():
    logits = [5.0, 4.0, 0.0]
    prompt = [0] * 10
    for options in ({"presence_penalty": 2}, {"frequency_penalty": 2}):
        params = SamplingParams(temperature=0, **options)
        assert token(logits, params, prompt=prompt) == 0
        assert token(logits, params, prompt=prompt, output=[0]) == 1
    once = SamplingParams(temperature=0, presence_penalty=0.9)
    per_time = SamplingParams(temperature=0, frequency_penalty=0.9)
    assert token(logits, once, output=[0, 0]) == 0
    assert token(logits, per_time, output=[0, 0]) == 1


def test_sa7_repetition_counts_the_prompt_once_per_token():
    params = SamplingParams(temperature=0, repetition_penalty=1.2)
    assert token([5.0, 4.1, 0.0], params, prompt=[0] * 10) == 0  # 5 / 1.2 = 4.17
    assert token([5.0, 4.2, 0.0], params, prompt=[0]) == 1
    assert token([5.0, 4.2, 0.0], params, output=[0]) == 1
    assert token([-1.0, -1.1], params, prompt=[0]) == 1  # a negative logit is multiplied


def test_bias_comes_before_penalties():
    params = SamplingParams(temperature=0, repetition_penalty=2.0, logit_bias={0: 10})
    assert token([-2.0, 5.0], params, prompt=[0]) == 1  # (-2 + 10) / 2 = 4; the other way round: -4 + 10 = 6


def test_only_accepted_tokens_count():
    sampler = Sampler(3)
    params = SamplingParams(temperature=0, presence_penalty=2)
    sampler.add(params, seed=1, prompt_token_ids=[2], end_token_ids=[])
    logits = torch.tensor([[5.0, 4.0, 0.0]])
    for _ in range(3):
        assert drawn(sampler, logits, [(0, 1)]).token_ids == [0]
    sampler.accept(0, 0)
    assert drawn(sampler, logits, [(0, 2)]).token_ids == [1]
    sampler.remove(0)
    sampler.add(params, seed=1, prompt_token_ids=[2], end_token_ids=[])
    assert drawn(sampler, logits, [(0, 1)]).token_ids == [0]


def test_what_is_drawn_counts_once_the_sequence_moves_past_it():
    """Steps ahead of `accept`: a position drawn again, as behind a preemption or a dropped step, counts once."""
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    logits = torch.tensor([[5.0, 3.5, 0.0]])
    sampler = Sampler(3)
    slot = sampler.add(params, seed=1, prompt_token_ids=[2], end_token_ids=[])

    def at(position):
        return drawn(sampler, logits, [(slot, position)]).token_ids[0]

    assert [at(1), at(1), at(1), at(2), at(2)] == [0] * 5
    sampler.accept(slot, 0)
    assert [at(3), at(3)] == [1, 1]  # 5 - 2 < 3.5
    sampler.accept(slot, 0)
    sampler.accept(slot, 1)
    assert at(4) == 0  # 3 > 2.5
    sampler.accept(slot, 0)
    sampler.accept(slot, 1)  # not drawn here
    assert at(6) == 0  # 5 - 3 > 3.5 - 2


def test_slots_and_table_rows_are_reused_and_grow():
    logits = torch.zeros(200, 5)
    logits[:, 0] = 1.0
    sampler = Sampler(5)
    biased, plain = SamplingParams(temperature=0, logit_bias={3: 9.0}), SamplingParams(temperature=0)
    options = {"seed": 1, "prompt_token_ids": [1], "end_token_ids": []}
    slots = [sampler.add(biased if i % 2 else plain, **options) for i in range(200)]
    assert sorted(slots) == list(range(200))
    assert drawn(sampler, logits, [(slot, 1) for slot in slots]).token_ids == [0, 3] * 100
    for slot in slots[:150]:
        sampler.remove(slot)
    again = [
        sampler.add(plain if i % 2 else SamplingParams(temperature=0, logit_bias={4: 9.0}), **options)
        for i in range(150)
    ]
    assert sorted(again) == sorted(slots[:150])
    assert drawn(sampler, logits, [(slot, 1) for slot in again + slots[150:]]).token_ids == [4, 0] * 75 + [0, 3] * 25


def test_only_bad_words_of_several_tokens_wait_for_what_was_drawn():
    sampler = Sampler(9)
    options = {"seed": 1, "prompt_token_ids": [1], "end_token_ids": [2]}
    others = [sampler.add(params, **options) for params in MIXED]
    one = sampler.add(SamplingParams(), bad_words=[[3]], **options)
    several = sampler.add(SamplingParams(), bad_words=[[3], [3, 4]], **options)
    assert sampler.can_draw_later(np.array([*others, one]))
    assert not sampler.can_draw_later(np.array([*others, several]))


# --- logprobs


def test_logprobs_are_the_chosen_token_and_the_top_ones_without_it():
    logits = [1.0, 4.0, 3.0, 3.0, 0.0]
    raw = torch.tensor(logits).log_softmax(0).tolist()
    greedy = one_row(logits, SamplingParams(temperature=0, logprobs=3)).logprobs[0]
    assert greedy.token_ids == [1, 2, 3]
    assert greedy.ranks == [1, 3, 3]  # tokens at least as likely
    assert greedy.logprobs == [raw[1], raw[2], raw[3]]
    forced = one_row(logits, SamplingParams(temperature=0, logprobs=2, allowed_token_ids=[4])).logprobs[0]
    assert forced == ([4, 1, 2], [raw[4], raw[1], raw[2]], [5, 1, 3])
    alone = one_row(logits, SamplingParams(temperature=0, logprobs=0)).logprobs[0]
    assert alone == ([1], [raw[1]], [1])
    everything = one_row(logits, SamplingParams(temperature=0, logprobs=20)).logprobs[0]
    assert everything.token_ids == [1, 2, 3, 0, 4]
    assert one_row(logits, SamplingParams(temperature=0)).logprobs == [None]


@pytest.mark.parametrize("temperature", [0, 0.01, 1])
def test_lp1_logprobs_may_be_minus_infinity_but_never_nan(temperature):
    params = SamplingParams(temperature=temperature, logprobs=5, allowed_token_ids=[3])
    entry = one_row([1.0, -math.inf, 2.0, 0.5, -math.inf, -math.inf], params).logprobs[0]
    assert entry.token_ids[0] == 3
    assert entry.logprobs[-1] == -math.inf
    assert not any(math.isnan(value) for value in entry.logprobs)


def test_prompt_logprobs_say_what_the_model_thought_of_each_next_token():
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(9))
    next_ids = torch.randint(40, (150,), generator=torch.Generator().manual_seed(9)).tolist()
    entries = prompt_logprobs(logits.to(torch.bfloat16), next_ids, 4)
    expected = logits.to(torch.bfloat16).float().log_softmax(1)
    assert len(entries) == 150
    for row, token_id, entry in zip(expected, next_ids, entries, strict=True):
        best = sorted(range(40), key=lambda i: (-row[i].item(), i))[:4]
        assert entry.token_ids == [token_id, *(i for i in best if i != token_id)]
        assert entry.logprobs == [row[i].item() for i in entry.token_ids]
        assert entry.ranks == [int((row >= row[i]).sum()) for i in entry.token_ids]
    assert prompt_logprobs(logits, next_ids, 0)[5].token_ids == [next_ids[5]]
    assert prompt_logprobs(logits[:0], [], 4) == []


def test_lp1_prompt_logprobs_of_broken_logits_are_minus_infinity():
    logits = torch.zeros(4, 3)
    logits[0, 1], logits[1, 1], logits[2] = math.nan, math.inf, -math.inf
    entries = prompt_logprobs(logits, [0, 0, 0, 0], 2)
    assert all(value == -math.inf for entry in entries[:3] for value in entry.logprobs)
    assert entries[3].logprobs == pytest.approx([-math.log(3)] * 2)


# --- broken rows


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("width", [40, 5003])
def test_mo4_a_broken_row_is_reported_and_its_mates_are_untouched(temperature, width):
    logits = torch.randn(6, width, generator=torch.Generator().manual_seed(10))
    whole = logits.clone()
    logits[1, 13] = math.nan
    logits[2] = -math.inf
    logits[3, 5] = math.inf
    logits[4, 13] = math.nan  # hidden by this row's mask
    masked = SamplingParams(temperature=temperature, allowed_token_ids=[1, 2], logprobs=2)
    plain = SamplingParams(temperature=temperature, logprobs=2, top_p=0.9)
    sampler = Sampler(width)
    for i in range(6):
        sampler.add(masked if i == 4 else plain, seed=i, prompt_token_ids=[], end_token_ids=[])
    rows = [(i, 0) for i in range(6)]
    out, expected = drawn(sampler, logits, rows), drawn(sampler, whole, rows)
    assert out.failed == [False, True, True, True, True, False]
    assert expected.failed == [False] * 6
    for i in range(6):
        if out.failed[i]:
            assert out.logprobs[i] is None
        else:
            assert (out.token_ids[i], out.logprobs[i]) == (expected.token_ids[i], expected.logprobs[i])


def test_mo4_a_row_where_nothing_is_allowed_fails():
    params = SamplingParams(temperature=0, allowed_token_ids=[1], min_tokens=1)
    assert one_row([1.0, 2.0, 3.0], params, end=[1]).failed == [True]
    assert one_row([1.0, 2.0, 3.0], params, end=[0]).failed == [False]


# --- company

MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.6, logprobs=3),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40),
    SamplingParams(temperature=0, repetition_penalty=1.5, logprobs=0),
    SamplingParams(top_p=0.95),
    SamplingParams(temperature=1.5, top_p=0.999),
    SamplingParams(min_p=0.1, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(top_k=1),
    SamplingParams(temperature=2, top_k=700, repetition_penalty=0.8),
    SamplingParams(logit_bias={3: 20, 4: -100}, logprobs=5),
    SamplingParams(temperature=0, allowed_token_ids=[5, 6, 7]),
    SamplingParams(allowed_token_ids=[5, 6, 7], top_p=0.5),
    SamplingParams(temperature=0.8, min_tokens=50),
    SamplingParams(temperature=0.8, min_p=1e-6, top_p=0.9),
]


def plainly(row, params, *, seed, position, prompt, output, end):
    """One token by the definition alone: float32 edits, everything sorted in float64, one score per token."""
    logits, f32 = np.asarray(row, np.float32).copy(), np.float32
    if params.allowed_token_ids is not None:
        logits[[i for i in range(len(logits)) if i not in params.allowed_token_ids]] = -np.inf
    if len(output) < params.min_tokens:
        logits[end] = -np.inf
    for i, value in (params.logit_bias or {}).items():
        logits[i] += f32(value)
    for i in set(prompt + output):
        factor = f32(params.repetition_penalty)
        logits[i] = logits[i] / factor if logits[i] > 0 else logits[i] * factor
    for i in set(output):
        logits[i] -= f32(params.frequency_penalty) * f32(output.count(i))
        logits[i] -= f32(params.presence_penalty)
    if params.greedy:
        return int(logits.argmax())
    kept, _ = definition(logits, params.temperature, params.min_p, params.top_k, params.top_p)
    ids = np.array(sorted(kept))
    key = torch.tensor([row_key(seed, position)])
    v = (noise_bits(torch.tensor(ids)[None], key)[0].double().numpy() + 0.5) * 2.0**-32
    scores = logits[ids].astype(np.float64) / params.temperature - np.log(-np.log1p(-v))
    return int(ids[scores.argmax()])


@pytest.mark.parametrize("width", [300, 5003])
def test_a_mixture_follows_the_definition_step_by_step(width):
    """Drawn ahead of `accept`, as an engine that does not wait does."""
    sampler, prompts, ends = Sampler(width), [], [5, 6, 7]
    for i, params in enumerate(MIXED):
        prompts.append([1, 2, i])
        sampler.add(params, seed=i, prompt_token_ids=prompts[i], end_token_ids=ends)
    outputs = [[] for _ in MIXED]
    generator = torch.Generator().manual_seed(12)
    for position in range(3, 11):
        logits = torch.randn(len(MIXED), width, generator=generator) * 2
        logits[:, position : position + 4] += 3.0  # some come again
        found = drawn(sampler, logits, [(i, position) for i in range(len(MIXED))]).token_ids
        for i, params in enumerate(MIXED):
            expected = plainly(
                logits[i], params, seed=i, position=position, prompt=prompts[i], output=outputs[i], end=ends
            )
            assert found[i] == expected, (position, params)
            outputs[i].append(found[i])


@pytest.mark.parametrize("width", [800, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_of_a_mixed_batch_gets_what_it_gets_alone(width, dtype):
    generator = torch.Generator().manual_seed(11)
    logits = (torch.randn(len(MIXED), width, generator=generator) * 2).to(dtype)
    before = logits.clone()
    sampler = Sampler(width)
    for i, params in enumerate(MIXED):
        sampler.add(
            params,
            seed=i % 3,
            prompt_token_ids=[1, 2, i],
            end_token_ids=logits[i].topk(5).indices.tolist(),
            bad_words=[[9], [int(logits[i].argmax())]] if i == 1 else [],
        )
        for token_id in (4, 4, i):
            sampler.accept(i, token_id)
    rows = [(i, 6) for i in range(len(MIXED))]
    mixed = drawn(sampler, logits, rows)
    backwards = drawn(sampler, logits.flip(0), rows[::-1])
    for i in range(len(MIXED)):
        alone = drawn(sampler, logits[i : i + 1], rows[i : i + 1])
        assert mixed.failed[i] is alone.failed[0] is False
        assert mixed.token_ids[i] == alone.token_ids[0] == backwards.token_ids[len(MIXED) - 1 - i]
        assert mixed.logprobs[i] == alone.logprobs[0] == backwards.logprobs[len(MIXED) - 1 - i]
    assert torch.equal(logits, before)


def test_several_rows_of_one_sequence_draw_by_their_positions():
    sampler = Sampler(500)
    sampler.add(SamplingParams(), seed=5, prompt_token_ids=[], end_token_ids=[])
    logits = torch.zeros(1, 500)
    together = drawn(sampler, logits.expand(6, -1), [(0, p) for p in range(10, 16)]).token_ids
    assert together == [drawn(sampler, logits, [(0, p)]).token_ids[0] for p in range(10, 16)]
    assert len(set(together)) > 3


def test_no_rows_give_no_tokens():
    assert drawn(Sampler(10), torch.empty(0, 10), []) == ([], [], [])


def test_plain_draws_are_all_that_plain_rows_need():
    """What a recorded step draws by is what `draw` draws by; whatever needs more than that is told apart."""
    sampler = Sampler(50)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    plain = [SamplingParams(temperature=0.0), *(SamplingParams(temperature=t) for t in (0.5, 1.0, 3.0))]
    slots = np.array([sampler.add(p, seed=7 + i, prompt_token_ids=[1], end_token_ids=[2]) for i, p in enumerate(plain)])
    for position in (1, 9, 400):
        positions = np.full(4, position)
        draws = sampler.plain_draws(slots, positions)
        assert draws is not None
        shown = draw_tokens(logits, torch.from_numpy(draws.temperature.copy()), torch.from_numpy(draws.keys.copy()))
        assert shown.tolist() == sampler.draw(logits, slots, positions).wait().token_ids
    for options in ({"top_p": 0.5}, {"logprobs": 0}, {"min_tokens": 3}, {"presence_penalty": 1.0}, {"top_k": 2}):
        other = sampler.add(SamplingParams(**options), seed=1, prompt_token_ids=[1], end_token_ids=[2])
        assert sampler.plain_draws(np.array([slots[0], other]), np.array([1, 1])) is None
        past = sampler.plain_draws(np.array([slots[0], other]), np.array([1, 4]))  # ends are allowed from there on
        assert (past is not None) == ("min_tokens" in options)
