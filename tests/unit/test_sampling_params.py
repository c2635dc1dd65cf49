"""SamplingParams: what it accepts, and the one sentence with which it refuses."""

from __future__ import annotations

import math
import pickle
import timeit

import pytest

from rorqual.sampling_params import SamplingParams


def refusal(**options) -> str:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    return str(caught.value)


def test_defaults_are_neutral():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.stop == ()
    assert params.seed is params.logit_bias is params.logprobs is params.bad_words is None
    assert params.min_tokens == 0
    assert params.max_tokens is None  # fills the context; not vLLM's 16
    assert params.skip_special_tokens
    assert params.detokenize
    assert not params.greedy


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
COUNTS = ["n", "top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", None])
def test_sa14_numbers_refuse_nan_infinity_bools_and_strings(name, value):
    assert refusal(**{name: value}).startswith(f"{name} must be a ")


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [True, 1.0, "1", math.nan])
def test_counts_refuse_everything_but_integers(name, value):
    message = refusal(**{name: value})
    assert message.startswith(f"{name} must be a valid integer")
    assert repr(value) in message


@pytest.mark.parametrize(
    ("name", "low_ok", "high_ok", "bad"),
    [
        ("temperature", 0, 1e6, [-1e-9, -1]),
        ("top_p", 1e-9, 1, [0, -0.1, 1.0000001]),
        ("min_p", 0, 1, [-0.1, 1.1]),
        ("presence_penalty", -2, 2, [-2.1, 2.1]),
        ("frequency_penalty", -2, 2, [-2.1, 2.1]),
        ("repetition_penalty", 1e-3, 2, [0, -1]),
        ("top_k", -1, 10**6, [-2]),
        ("n", 1, 128, [0, -1]),
        ("min_tokens", 0, 10, [-1]),
        ("max_tokens", 1, 10**6, [0, -1]),
        ("logprobs", 0, 20, [-1]),
        ("prompt_logprobs", 0, 20, [-1]),
    ],
)
def test_bounds_are_vllms(name, low_ok, high_ok, bad):
    for value in (low_ok, high_ok):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in bad:
        message = refusal(**{name: value})
        assert message.startswith(f"{name} must be ")
        assert f"got {value!r}" in message


def test_sa14_repetition_penalty_of_zero_says_what_is_neutral():
    assert refusal(repetition_penalty=0) == "repetition_penalty must be greater than 0, got 0 (1.0 is neutral)"


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-12, 9e-6])
def test_sa1_a_temperature_of_almost_zero_is_greedy(temperature):
    assert SamplingParams(temperature=temperature).greedy
    assert not SamplingParams(temperature=1e-5).greedy


def test_st3_an_empty_stop_string_is_refused_and_none_or_no_string_is_none():
    for stop in ("", [""], ["", "x"]):
        assert "must hold no empty string" in refusal(stop=stop)
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")
    for stop in (3, [3], ["x", None]):
        assert "must be a string or a list of strings" in refusal(stop=stop)


def test_st4_stop_strings_without_text_are_refused():
    message = refusal(stop=["x"], detokenize=False)
    assert "detokenize" in message
    assert "stop_token_ids" in message
    assert SamplingParams(detokenize=False, stop_token_ids=[1]).stop == ()


def test_sa13_logit_bias_reads_ids_as_strings_and_refuses_what_is_no_id():
    assert SamplingParams(logit_bias={"5": -100, 7: 100}).logit_bias == {5: -100.0, 7: 100.0}
    for bias in ({"-1": 5}, {"abc": 5}, {-1: 5}, {True: 5}, {1.0: 5}, {"": 5}, {"٣": 5}):
        assert "keys must be token ids" in refusal(logit_bias=bias)
    for value in (101, -100.5, math.nan, math.inf, True, "1", None):
        assert "values must be numbers from -100 (never) to 100 (always)" in refusal(logit_bias={"5": value})
    assert "token 5 is there twice" in refusal(logit_bias={"5": 1, 5: 2})
    assert "logit_bias must be a valid dictionary" in refusal(logit_bias=[5])


def test_token_id_lists_hold_ids():
    assert "at least one" in refusal(allowed_token_ids=[])
    for name in ("allowed_token_ids", "stop_token_ids"):
        for bad in (-1, True, 1.5, "1"):
            assert refusal(**{name: [0, bad]}).startswith(f"{name}.1 must be ")
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == []


def test_bad_words_hold_words():
    assert SamplingParams(bad_words=["a b"]).bad_words == ["a b"]
    for words in ([""], ["a", " "]):
        assert "no empty or blank word" in refusal(bad_words=words)
    assert "bad_words must be a valid list" in refusal(bad_words="word")


def test_seeds_are_taken_modulo_2_to_the_64():
    assert SamplingParams(seed=7).seed == 7
    assert SamplingParams(seed=-1).seed == 2**64 - 1
    assert SamplingParams(seed=2**64 + 7).seed == 7


def test_min_tokens_above_max_tokens_is_refused():
    assert refusal(min_tokens=5, max_tokens=4) == (
        "min_tokens (5) must be at most max_tokens (4): lower the first or raise the second"
    )
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=4).max_tokens is None


def test_unknown_options_are_refused_with_the_nearest_name():
    assert refusal(temprature=1) == "unknown option 'temprature': did you mean 'temperature'?"


def test_clone_checks_its_changes_and_leaves_the_original():
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    changed = params.clone(temperature=0, max_tokens=4)
    assert (changed.temperature, changed.max_tokens, changed.stop, changed.seed) == (0, 4, ("x",), 3)
    assert params.temperature == 0.5
    assert changed.model_fields_set == {"temperature", "stop", "seed", "max_tokens"}
    with pytest.raises(ValueError, match="top_p must be greater than 0"):
        params.clone(top_p=0)
    with pytest.raises(ValueError, match="did you mean 'top_p'"):
        params.clone(topp=0)


def test_params_are_frozen_and_survive_pickling():
    params = SamplingParams(temperature=0.5, logit_bias={"5": 1})
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(ValueError, match="frozen"):
        params.temperature = 1.0


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("bad", [100, 10**9, 2**63])
def test_sa13_va3_ids_outside_the_vocabulary_are_refused(name, bad):
    value = {bad: 5} if name == "logit_bias" else [5, bad]
    params = SamplingParams(**{name: value}, min_tokens=5)
    with pytest.raises(ValueError, match=f"^{name} must hold ids of this model's vocabulary, 0 to 99, got {bad}:"):
        params.validate_for(100, 20)
    params.validate_for(bad + 1, 20)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_lp3_more_logprobs_than_the_engine_gives_are_refused(name):
    for count in (21, 2_000_000_000):
        with pytest.raises(ValueError, match=f"^{name} must be at most 20, got {count}: .*max_logprobs"):
            SamplingParams(**{name: count}).validate_for(100, 20)
    SamplingParams(**{name: 20}).validate_for(100, 20)


def test_construction_is_cheap():
    seconds = (
        min(timeit.repeat(lambda: SamplingParams(temperature=0.7, top_p=0.9, stop="x"), number=200, repeat=5)) / 200
    )
    assert seconds < 200e-6  # about 10 us; the rest is for busy machines
