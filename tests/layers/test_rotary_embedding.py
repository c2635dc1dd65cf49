"""Rotary embedding against transformers: reading every spelling of the parameters, the frequencies, the rotation.

What transformers does not have is in test_rotary_contract.py.
"""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rorqual.layers.rotary_embedding import RopeParameters, RotaryEmbedding, inverse_frequencies

HEAD_DIM = 32
TRAINED = 256
SHAPE = {
    "hidden_size": 2 * HEAD_DIM,
    "num_attention_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": TRAINED,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHORT = [1.0 + 0.05 * i for i in range(HEAD_DIM // 2)]
LONG = [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 64}


def transformers_frequencies(config: dict, seq_len: int | None = None) -> tuple[torch.Tensor, float]:
    """(inv_freq, attention factor) of transformers for a config.json."""
    parsed = LlamaConfig.from_dict(dict(config))
    kind = parsed.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(parsed)
    return ROPE_INIT_FUNCTIONS[kind](parsed, seq_len=seq_len)


def our_frequencies(config: dict, max_model_len: int = TRAINED, **options) -> tuple[torch.Tensor, float]:
    return inverse_frequencies(RopeParameters.from_config(config, **options), HEAD_DIM, max_model_len=max_model_len)


def assert_same(got: tuple[torch.Tensor, float], want: tuple[torch.Tensor, float]) -> None:
    assert got[0].dtype == torch.float32
    torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=0)
    assert got[1] == pytest.approx(want[1], rel=1e-9)


# --- RO1: every spelling

SPELLINGS = {
    "theta_at_top": {"rope_theta": 5e5},
    "theta_in_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "theta_in_both": {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "theta_at_top_kind_in_parameters": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    "old_key_type": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "new_key_rope_type": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "both_keys_agree": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
    "old_key_in_parameters": {"rope_parameters": {"type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    "null_scaling": {"rope_theta": 5e5, "rope_scaling": None},
    "empty_scaling": {"rope_theta": 5e5, "rope_scaling": {}},
    "theta_as_integer": {"rope_theta": 500000},
    "trained_length_at_top": {
        "rope_theta": 1e4, "original_max_position_embeddings": 32,
        "rope_scaling": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
    },
    "trained_length_not_given": {
        "rope_theta": 1e4, "rope_scaling": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
    },
    "trained_length_in_both_and_equal": {
        "rope_theta": 1e4, "original_max_position_embeddings": 64, "rope_scaling": YARN,
    },
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_ro1_spelling_gives_the_frequencies_of_transformers(spelling):
    config = SHAPE | SPELLINGS[spelling]
    assert_same(our_frequencies(config), transformers_frequencies(config))


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_ro1_parameters_per_layer_type(layer_type):
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    got = our_frequencies(SHAPE | {"rope_parameters": nested}, layer_type=layer_type)
    assert_same(got, transformers_frequencies(SHAPE | {"rope_parameters": nested[layer_type]}))


def test_ro1_parameters_per_layer_type_name_a_missing_one():
    nested = {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}}
    with pytest.raises(ValueError, match=r"no entry for layer type 'sliding_attention'.*full_attention"):
        our_frequencies(SHAPE | nested, layer_type="sliding_attention")


@pytest.mark.parametrize("config", [{}, {"rope_theta": None}, {"rope_scaling": {"type": "linear", "factor": 2.0}}])
def test_ro1_missing_theta_warns_and_is_the_default_of_transformers(config, caplog):
    with caplog.at_level(logging.WARNING):
        got = our_frequencies(SHAPE | config)
    assert "no rope_theta" in caplog.text
    present = {key: value for key, value in config.items() if value is not None}
    assert_same(got, transformers_frequencies(SHAPE | present))


def test_equal_scaling_and_parameters_may_stand_side_by_side():
    both = {"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 1e4}}
    assert_same(our_frequencies(SHAPE | both), our_frequencies(SHAPE | {"rope_theta": 1e4, "rope_scaling": YARN}))


def test_ro1_given_theta_does_not_warn(caplog):
    with caplog.at_level(logging.WARNING):
        our_frequencies(SHAPE | {"rope_theta": 1e4})
    assert not caplog.records


# --- each kind's numbers

KINDS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3_as_published": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn_mscale_unequal": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn_mscale_equal": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn_mscale_alone": YARN | {"mscale": 0.707},
    "yarn_mscale_zero": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn_attention_factor": YARN | {"attention_factor": 1.5},
    "yarn_attention_factor_beats_mscale": YARN | {"attention_factor": 1.5, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn_not_truncated": YARN | {"truncate": False},
    "yarn_betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_betas_that_meet": YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn_factor_below_one": YARN | {"factor": 0.5},
    "longrope": LONGROPE,
    "longrope_factor": LONGROPE | {"factor": 16.0},
    "longrope_attention_factor": LONGROPE | {"attention_factor": 1.25},
}


@pytest.mark.parametrize("theta", [1e4, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_attention_factor_equal_transformers(kind, theta):
    config = SHAPE | {"rope_theta": theta, "rope_scaling": KINDS[kind] or None}
    assert_same(our_frequencies(config), transformers_frequencies(config, seq_len=TRAINED))


def test_longrope_with_a_factor_needs_no_longest_context():
    config = {"rope_theta": 1e4, "rope_scaling": LONGROPE | {"factor": 4.0}}
    assert_same(our_frequencies(config), our_frequencies(SHAPE | {"rope_theta": 1e4, "rope_scaling": LONGROPE}))


@pytest.mark.parametrize("max_model_len", [63, 64, 65, 256])
def test_longrope_is_short_up_to_the_trained_length_and_long_beyond(max_model_len):
    config = SHAPE | {"rope_theta": 1e4, "rope_scaling": LONGROPE}
    assert_same(our_frequencies(config, max_model_len), transformers_frequencies(config, seq_len=max_model_len))
    stretch = torch.tensor(LONG if max_model_len > 64 else SHORT)
    plain = our_frequencies(SHAPE | {"rope_theta": 1e4})[0]
    torch.testing.assert_close(our_frequencies(config, max_model_len)[0], plain / stretch)


@pytest.mark.parametrize("max_model_len", [1, 64, 255, 256])
def test_ro5_dynamic_scales_nothing_up_to_the_trained_length(max_model_len):
    config = SHAPE | {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    got = our_frequencies(config, max_model_len)
    assert_same(got, our_frequencies(SHAPE | {"rope_theta": 1e4}))
    assert_same(got, transformers_frequencies(config, seq_len=max_model_len))


def test_ro5_dynamic_trained_2048_served_512_is_finite():
    config = SHAPE | {"max_position_embeddings": 2048, "rope_theta": 1e4}
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    rotary = RotaryEmbedding(
        RopeParameters.from_config(config), HEAD_DIM, max_model_len=512, device=torch.device("cpu")
    )
    assert bool(rotary.cos_sin.isfinite().all())


@pytest.mark.parametrize("max_model_len", [257, 512, 1000])
def test_ro5_dynamic_beyond_the_trained_length_is_that_of_the_longest_sequence(max_model_len):
    config = SHAPE | {"rope_theta": 1e4, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    got = our_frequencies(config, max_model_len)
    assert_same(got, transformers_frequencies(config, seq_len=max_model_len))
    assert not torch.allclose(got[0], our_frequencies(SHAPE | {"rope_theta": 1e4})[0], rtol=1e-4)


def test_gguf_factors_divide_the_frequencies():
    config = SHAPE | {"rope_theta": 1e4, "rope_scaling": {"rope_type": "gguf_factors", "factors": LONG}}
    got, factor = our_frequencies(config)
    torch.testing.assert_close(got, our_frequencies(SHAPE | {"rope_theta": 1e4})[0] / torch.tensor(LONG))
    assert factor == 1.0


# --- RO2: the rotation


@pytest.mark.parametrize("kind", ["default", "llama3", "yarn", "longrope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ro2_rotation_equals_transformers(kind, dtype):
    config = SHAPE | {"max_position_embeddings": 4096, "rope_theta": 1e4, "rope_scaling": KINDS[kind] or None}
    positions = torch.tensor([0, 1, 17, 4095])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(4, 3, HEAD_DIM, generator=generator).to(dtype)
    k = torch.randn(4, 1, HEAD_DIM, generator=generator).to(dtype)

    module = LlamaRotaryEmbedding(LlamaConfig.from_dict(dict(config)))
    cos, sin = module(q.float(), positions[None])
    want = apply_rotary_pos_emb(q.float().transpose(0, 1)[None], k.float().transpose(0, 1)[None], cos, sin)

    rotary = RotaryEmbedding(
        RopeParameters.from_config(config), HEAD_DIM, max_model_len=4096, device=torch.device("cpu")
    )
    assert rotary.cos_sin.shape == (4096, HEAD_DIM)
    assert rotary.cos_sin.dtype == torch.float32
    for ours, theirs in zip(rotary(positions, q, k), want, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(
            ours, theirs[0].transpose(0, 1).to(dtype), atol=1e-5, rtol=2**-7 if dtype == torch.bfloat16 else 0
        )


def test_position_zero_keeps_the_vector_and_lengths_never_change():
    rotary = RotaryEmbedding(RopeParameters("default", 1e4), HEAD_DIM, max_model_len=64, device=torch.device("cpu"))
    x = torch.randn(64, 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    turned = rotary(torch.arange(64), x).query
    torch.testing.assert_close(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    pair = rotary(torch.arange(64), *(row.expand(64, -1, -1) for row in (x[:1], x[1:2])))
    scores = (pair.query * pair.key).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand_as(scores), atol=1e-4, rtol=0)  # only the distance counts


# --- refusals

REFUSED = {
    "unknown_kind": ({"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, r"rope type 'yarm'.*did you mean 'yarn'"),
    "unknown_old_kind": ({"rope_scaling": {"type": "mrope"}}, r"rope type 'mrope' is not supported"),
    "linear_without_factor": ({"rope_scaling": {"type": "linear"}}, r"'linear' needs factor"),
    "null_factor": ({"rope_scaling": {"type": "linear", "factor": None}}, r"'linear' needs factor"),
    "llama3_without_numbers": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"needs low_freq_factor, high_freq_factor",
    ),
    "longrope_without_factors": ({"rope_scaling": {"rope_type": "longrope"}}, r"needs short_factor, long_factor"),
    "unknown_parameter": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "facter": 2.0}}, r"does not know 'facter'.*'factor'",
    ),
    "parameter_of_another_kind": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, r"does not know 'mscale'",
    ),
    "part_of_the_head": (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, r"partial_rotary_factor must be 1",
    ),
    "not_an_object": ({"rope_scaling": "linear"}, r"rope_scaling must be an object or null, got 'linear'"),
    "contradiction": (
        {"rope_scaling": {"type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, r"rope_scaling.*factor.*rope_parameters",
    ),
    "longrope_of_the_wrong_length": (
        {"rope_scaling": LONGROPE | {"long_factor": LONG[:-1]}}, r"long_factor must have 16 entries, got 15",
    ),
    "number_as_text": (
        {"rope_scaling": {"type": "linear", "factor": "4.0"}}, r"factor must be a number, got '4.0'",
    ),
    "number_for_a_list": (
        {"rope_scaling": LONGROPE | {"short_factor": 2.0}}, r"short_factor must be a list of numbers, got 2.0",
    ),
    "theta_as_text": ({"rope_theta": "1e4"}, r"rope_theta must be a number, got '1e4'"),
    "number_for_truth": ({"rope_scaling": YARN | {"truncate": 0}}, r"truncate must be true or false, got 0"),
    "truth_for_a_number": ({"rope_scaling": YARN | {"mscale": False}}, r"mscale must be a number, got False"),
    "factor_of_zero": ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor must be a positive number, got 0"),
    "infinite_theta": ({"rope_theta": float("inf")}, r"rope_theta must be a positive number, got inf"),
    "two_rules_for_the_factor": (
        {"rope_scaling": YARN | {"attention_factor": 1.5, "attn_factor": 2.0}}, r"attention_factor.*attn_factor.*drop",
    ),
    "longrope_of_unknown_extension": (
        {"rope_scaling": LONGROPE, "max_position_embeddings": None},
        r"'longrope' needs factor, or both max_position_embeddings and .*; got None and 64",
    ),
    "longrope_of_unknown_length": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG},
         "max_position_embeddings": None}, r"'longrope' needs factor, or both .*; got None and None",
    ),
    "longrope_of_a_length_in_words": (
        {"rope_scaling": LONGROPE, "max_position_embeddings": "long"}, r"max_position_embeddings must be a number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_are_not_honoured_are_refused_by_name(case):
    config, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        our_frequencies(SHAPE | {"rope_theta": 1e4} | config)


def test_the_comparison_is_with_transformers():
    assert issubclass(LlamaConfig, PreTrainedConfig)
    assert set(ROPE_INIT_FUNCTIONS) >= {"linear", "dynamic", "llama3", "yarn", "longrope"}
