"""Rotary embedding as DeepInfer defines it, against plain formulas in float64: tables, pruning, pairings, inverse."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.layers.rotary_embedding import RopeParameters, RotaryEmbedding, RotaryTables, inverse_frequencies
from rorqual.models.registry import build_model
from rorqual.ops.registry import load_backends
from rorqual.ops.rope import rotary_embedding
from tests.tiny import CONFIGS

load_backends("native", "cpu")
CPU = torch.device("cpu")
V41 = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
"""The rotary scaling of compressed layers: base 160000, 64 channels."""


def rotary_of(
    parameters: RopeParameters | None = None, rotary_dim: int = 16, *, max_model_len: int = 64, **options
) -> RotaryEmbedding:
    parameters = parameters or RopeParameters("default", 1e4)
    return RotaryEmbedding(parameters, rotary_dim, max_model_len=max_model_len, device=CPU, **options)


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def frequencies(base: float, rotary_dim: int) -> np.ndarray:
    return base ** -(np.arange(0, rotary_dim, 2) / rotary_dim)


def yarn(base: float, rotary_dim: int, scaling: dict) -> np.ndarray:
    """YaRN's frequencies, one at a time."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]
    dims = [
        rotary_dim * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(base))
        for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    ]
    low, high = max(math.floor(dims[0]), 0), min(math.ceil(dims[1]), rotary_dim - 1)
    mixed = []
    for i, plain in enumerate(frequencies(base, rotary_dim)):
        ramp = min(max((i - low) / (high - low if high != low else 0.001), 0), 1)
        kept = (1 - ramp) * scaling.get("extrapolation_factor", 1)
        mixed.append(plain / factor * (1 - kept) + plain * kept)
    return np.array(mixed)


def mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


# --- tables


@pytest.mark.parametrize(("base", "rotary_dim"), [(1e4, 64), (160000.0, 64), (1e6, 128), (5e5, 2)])
def test_table_is_cosines_beside_sines_of_position_times_frequency(base, rotary_dim):
    table = rotary_of(RopeParameters("default", base), rotary_dim, max_model_len=300).cos_sin
    assert (table.shape, table.dtype) == ((300, rotary_dim), torch.float32)
    angles = np.outer(np.arange(300), frequencies(base, rotary_dim))
    want = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    np.testing.assert_allclose(table.double().numpy(), want, atol=300 * 2**-23)


@pytest.mark.parametrize("mscales", [{"mscale": False, "mscale_all_dim": False}, {"mscale": True}, {"mscale": 0.707}])
def test_yarn_table_is_scaled_as_a_whole(mscales):
    parameters = RopeParameters.from_rope_scaling(160000, V41 | mscales)
    table = rotary_of(parameters, 64, max_model_len=2000).cos_sin.double().numpy()
    angles, factor = np.outer(np.arange(2000), yarn(160000, 64, V41)), mscale(16, float(mscales["mscale"]))
    want = factor * np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    np.testing.assert_allclose(table, want, atol=2000 * 2**-23)
    np.testing.assert_allclose(table[:, :32] ** 2 + table[:, 32:] ** 2, factor**2, rtol=5e-7)


def test_float64_angles_are_right_far_out_where_float32_angles_are_not():
    last = 999_983
    tables = [rotary_of(rotary_dim=8, max_model_len=last + 1, float64_angles=wide).cos_sin for wide in (False, True)]
    angles = last * frequencies(1e4, 8)
    want = np.concatenate((np.cos(angles), np.sin(angles)))
    assert tables[1].dtype == torch.float32
    np.testing.assert_allclose(tables[1][last].double().numpy(), want, atol=1e-7)
    error = np.abs(tables[0][last].double().numpy() - want).max()
    assert 5e-4 < error < 0.1


# --- YaRN


def test_yarn_frequencies_of_the_worked_example():
    got, factor = inverse_frequencies(
        RopeParameters.from_rope_scaling(160000, V41 | {"mscale": False}), 64, max_model_len=10
    )
    want = {0: 1.0, 15: 3.6355386e-3, 16: 2.265625e-3, 20: 2.9697778e-4, 24: 1.953125e-5, 31: 5.680529e-7}
    for index, value in want.items():
        assert float(got[index]) == pytest.approx(value, rel=1e-6)
    assert factor == 1.0
    assert inverse_frequencies(RopeParameters.from_rope_scaling(160000, V41), 64, max_model_len=10)[1] == (
        pytest.approx(1.2772588722, rel=1e-10)
    )


@pytest.mark.parametrize(
    "change",
    [{}, {"extrapolation_factor": 0.5}, {"beta_fast": 16, "beta_slow": 4}, {"factor": 40.0}, {"factor": 1.0},
     {"original_max_position_embeddings": 4096}, {"beta_fast": 2, "beta_slow": 2}],
)  # fmt: skip
@pytest.mark.parametrize("base", [1e4, 160000.0])
def test_yarn_mixes_extended_and_original_frequencies(base, change):
    got, _ = inverse_frequencies(RopeParameters.from_rope_scaling(base, V41 | change), 64, max_model_len=10)
    np.testing.assert_allclose(got.double().numpy(), yarn(base, 64, V41 | change), rtol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0, 16.0])
@pytest.mark.parametrize("weight", [False, True, 0, 0.707])
@pytest.mark.parametrize("all_dim", [None, False, True, 1.3])
@pytest.mark.parametrize("attn_factor", [None, 0.8])
def test_deepinfer_factor_is_the_ratio_of_mscales_times_attn_factor(factor, weight, all_dim, attn_factor):
    given = V41 | {"factor": factor, "mscale": weight, "mscale_all_dim": all_dim, "attn_factor": attn_factor}
    _, got = inverse_frequencies(RopeParameters.from_rope_scaling(1e4, given), 64, max_model_len=10)
    want = mscale(factor, float(weight)) / mscale(factor, float(all_dim or 0)) * (attn_factor or 1)
    assert got == pytest.approx(want, rel=1e-12)


def test_the_two_rules_differ_where_one_mscale_stands_alone():
    config = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", **V41, "mscale": 0.707, "mscale_all_dim": 0.0}}
    transformers = RopeParameters.from_config(config)
    deepinfer = RopeParameters.from_rope_scaling(1e4, V41 | {"mscale": 0.707, "mscale_all_dim": 0.0})
    assert inverse_frequencies(transformers, 64, max_model_len=10)[1] == pytest.approx(mscale(16, 1))
    assert inverse_frequencies(deepinfer, 64, max_model_len=10)[1] == pytest.approx(mscale(16, 0.707))


def test_attn_factor_multiplies_the_factor_of_a_config():
    config = {"rope_theta": 1e4, "rope_scaling": V41 | {"attn_factor": 0.5}}
    _, factor = inverse_frequencies(RopeParameters.from_config(config), 64, max_model_len=10)
    assert factor == pytest.approx(0.5 * mscale(16, 1))


def test_the_four_numbers_of_a_config_are_enough():
    """The others have defaults: mscale counts, mscale_all_dim does not."""
    spelled_out = {"extrapolation_factor": 1.0, "attn_factor": 1.0, "mscale": True, "mscale_all_dim": 0}
    got, want = (RopeParameters.from_rope_scaling(1e4, V41 | more) for more in ({}, spelled_out))
    tables = [rotary_of(parameters, 64).cos_sin for parameters in (got, want)]
    assert torch.equal(*tables)


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        ({"factor": 2.0}, "rope_scaling needs a type, one of default, .*; it has factor"),
        ({"type": "yarm"}, "rope type 'yarm' is not supported: did you mean 'yarn'"),
        ({"type": "yarn", "factor": 2.0}, "rope type 'yarn' needs original_max_position_embeddings"),
        ({"type": "yarn", "original_max_position_embeddings": 64}, "rope type 'yarn' needs factor"),
        (V41 | {"fast": 1}, "rope type 'yarn' does not know 'fast'"),
        (V41 | {"mscale": "1"}, "mscale must be a number, got '1'"),
        (
            V41 | {"rope_freq_sample_interval": 1.5},
            "rope_freq_sample_interval must be a whole number from 1 on, got 1.5",
        ),
        (V41 | {"rope_freq_sample_interval": 0}, "rope_freq_sample_interval must be a whole number from 1 on, got 0"),
        (V41 | {"high_freq_cycle_threshold": -1}, "high_freq_cycle_threshold must be a positive number, got -1"),
    ],
)
def test_scaling_that_is_not_honoured_is_refused_by_name(scaling, sentence):
    with pytest.raises(ValueError, match=sentence):
        RopeParameters.from_rope_scaling(1e4, scaling)


def test_no_scaling_is_the_default_kind():
    assert RopeParameters.from_rope_scaling(1e4, None) == RopeParameters("default", 1e4)


# --- pruned frequencies

PRUNED = list(itertools.product([None, 1, 50.0, 2 * math.pi, 1e4, 1e6], [None, 1, 2, 5]))


@pytest.mark.parametrize(("threshold", "interval"), PRUNED)
@pytest.mark.parametrize("scaling", [{"type": "default"}, V41])
def test_pruning_keeps_the_slow_frequencies_and_every_nth_of_them(scaling, threshold, interval):
    given = scaling | {"high_freq_cycle_threshold": threshold, "rope_freq_sample_interval": interval}
    parameters = RopeParameters.from_rope_scaling(160000, given)
    plain = frequencies(160000, 64) if scaling["type"] == "default" else yarn(160000, 64, V41)
    slow = [f for f in plain if threshold is None or 2 * math.pi / f >= threshold * (1 - 1e-9)]
    if not slow:
        with pytest.raises(ValueError, match="leaves no frequency"):
            inverse_frequencies(parameters, 64, max_model_len=10)
        return
    want = [f for i, f in enumerate(slow) if i % (interval or 1) == 0]
    got, _ = inverse_frequencies(parameters, 64, max_model_len=10)
    np.testing.assert_allclose(got.double().numpy(), want, rtol=1e-6)
    assert RotaryTables().get(parameters, 64, max_model_len=10, device=CPU).shape == (10, 2 * len(want))


def test_only_a_threshold_needs_descending_frequencies():
    rising = {"rope_type": "gguf_factors", "factors": [1e6, 1.0, 1.0, 1.0]}
    for more in ({}, {"rope_freq_sample_interval": 2}):
        parameters = RopeParameters.from_config({"rope_theta": 1e4, "rope_scaling": rising | more})
        got, _ = inverse_frequencies(parameters, 8, max_model_len=10)
        np.testing.assert_allclose(got[0], 1e-6)
    with_threshold = {"rope_theta": 1e4, "rope_scaling": rising | {"high_freq_cycle_threshold": 1.0}}
    with pytest.raises(ValueError, match="high_freq_cycle_threshold needs frequencies in descending order"):
        inverse_frequencies(RopeParameters.from_config(with_threshold), 8, max_model_len=10)


@pytest.mark.parametrize("more", [{"rope_freq_sample_interval": 2}, {"high_freq_cycle_threshold": 100.0}])
def test_a_narrower_table_is_refused_where_it_would_rotate(more):
    rotary = rotary_of(RopeParameters.from_rope_scaling(1e4, {"type": "default", **more}))
    columns = rotary.cos_sin.shape[1]
    assert 0 < columns < 16
    with pytest.raises(ValueError, match=f"table has {columns} columns for 16 channels: rope_freq_sample_interval and"):
        rotary(torch.arange(3), heads(3, 2, 16))


@pytest.mark.parametrize("rotary_dim", [0, 7])
def test_rotary_dim_is_even(rotary_dim):
    with pytest.raises(ValueError, match=f"even and at least 2, got {rotary_dim}"):
        rotary_of(rotary_dim=rotary_dim)


# --- the rotation

LAYOUTS = {"halves": {}, "interleaved": {"interleaved": True}, "tail": {"offset": 8}, "middle": {"offset": 3},
           "interleaved_tail": {"interleaved": True, "offset": 8}}  # fmt: skip


def turned(x: torch.Tensor, positions: list[int], rotary: RotaryEmbedding) -> np.ndarray:
    """exp(i angle) times each pair as a complex number, whatever the table says."""
    out, half = x.double().numpy().copy(), rotary.rotary_dim // 2
    for token, position in enumerate(positions):
        for pair, frequency in enumerate(frequencies(1e4, rotary.rotary_dim)):
            ends = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + half)
            first, second = (rotary.offset + end for end in ends)
            number = (out[token, :, first] + 1j * out[token, :, second]) * np.exp(1j * position * frequency)
            out[token, :, first], out[token, :, second] = number.real, number.imag
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_turn_like_complex_numbers_and_other_channels_stay(layout, inplace, dtype):
    rotary, positions = rotary_of(**LAYOUTS[layout]), [0, 1, 7, 63, 7]
    given = [heads(5, 4, 24, dtype=dtype), heads(5, 1, 24, seed=1, dtype=dtype)]
    before = [x.clone() for x in given]
    got = rotary(torch.tensor(positions), *given, inplace=inplace)
    for ours, x, old in zip(got, given, before, strict=True):
        assert (ours is x) == inplace
        assert torch.equal(x, old) != inplace
        np.testing.assert_allclose(
            ours.double().numpy(),
            turned(old, positions, rotary),
            rtol=2**-8 if dtype == torch.bfloat16 else 0,
            atol=2e-5,
        )
        others = [i for i in range(24) if not rotary.offset <= i < rotary.offset + 16]
        assert torch.equal(ours[..., others], old[..., others])


def test_without_a_key_there_is_none():
    assert rotary_of()(torch.arange(3), heads(3, 2, 16)).key is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_conjugate_undoes_the_rotation(layout):
    rotary, positions, x = rotary_of(**LAYOUTS[layout]), torch.tensor([0, 5, 63]), heads(3, 4, 24)
    there = rotary(positions, x).query
    torch.testing.assert_close(rotary(positions, there, conjugate=True).query, x, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(rotary(positions, there).query, x, atol=0.1)


@pytest.mark.parametrize("weight", [False, True])
def test_conjugate_is_the_inverse_up_to_the_square_of_the_table_factor(weight):
    rotary = rotary_of(RopeParameters.from_rope_scaling(160000, V41 | {"mscale": weight}), 64, interleaved=True)
    positions, x = torch.tensor([0, 5, 63]), heads(3, 4, 64)
    back = rotary(positions, rotary(positions, x).query, conjugate=True).query
    torch.testing.assert_close(back, x * mscale(16, float(weight)) ** 2, atol=1e-5, rtol=1e-5)


def test_conjugate_makes_the_sum_of_shared_keys_and_values_depend_on_distances_alone():
    """Where one rotated vector is key and value: the output, turned back by the query's angle, forgets where it is."""
    rotary = rotary_of(interleaved=True)
    query, latent = heads(1, 1, 16), heads(4, 1, 16, seed=1)
    outs = []
    for start in (0, 40):
        q = rotary(torch.tensor([start + 9]), query).query
        kv = rotary(start + torch.tensor([1, 2, 5, 9]), latent).query
        weights = (q * kv).sum(-1, keepdim=True).softmax(0)
        out = (weights * kv).sum(0, keepdim=True)
        outs.append((out, rotary(torch.tensor([start + 9]), out, conjugate=True).query))
    torch.testing.assert_close(outs[0][1], outs[1][1], atol=1e-5, rtol=0)
    assert not torch.allclose(outs[0][0], outs[1][0], atol=0.05)


def test_positions_may_be_int32_and_anywhere_in_the_table():
    rotary, x = rotary_of(), heads(4, 2, 16)
    positions = torch.tensor([63, 0, 63, 2])
    assert torch.equal(rotary(positions, x).query, rotary(positions.int(), x).query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", [64, -65])
def test_a_position_outside_the_table_is_an_error(position, dtype):
    with pytest.raises(IndexError):
        rotary_of()(torch.tensor([3, position]), heads(2, 2, 16, dtype=dtype))


MISFITS = {
    "two_dimensions": (
        {"query": heads(3, 16)},
        r"takes query \[num_tokens, num_heads, head_dim\].*got shapes \[3, 16\]",
    ),
    "offset_too_large": ({"offset": 9}, r"must lie within the head's 24, got offset 9 and R = 16"),
    "offset_negative": ({"offset": -1}, r"must lie within the head's 24, got offset -1"),
    "odd_table": ({"cos_sin": torch.ones(9, 15)}, r"even number of columns, got torch.float32 with 15"),
    "table_of_half_precision": ({"cos_sin": torch.ones(9, 16).half()}, r"must be float32.*got torch.float16"),
    "too_few_positions": ({"positions": torch.arange(2)}, r"positions must be int32 or int64 of shape \[3\].*\[2\]"),
    "positions_of_floats": ({"positions": torch.arange(3.0)}, r"positions must be int32 or int64.*torch.float32"),
    "key_of_other_tokens": ({"key": heads(2, 1, 24)}, r"key must be \[3, num_kv_heads, 24\].*got \[2, 1, 24\]"),
    "key_of_another_size": ({"key": heads(3, 1, 16)}, r"key must be \[3, num_kv_heads, 24\].*got \[3, 1, 16\]"),
    "key_of_another_dtype": (
        {"key": heads(3, 1, 24).half()},
        r"key must be .* torch.float32 like query.*torch.float16",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MISFITS)
def test_arguments_that_do_not_fit_are_refused_in_a_sentence(case, dtype):
    change, sentence = MISFITS[case]
    given = {"query": heads(3, 2, 24), "positions": torch.arange(3), "cos_sin": torch.ones(9, 16)} | change
    if dtype == torch.bfloat16 and case != "key_of_another_dtype":
        given |= {name: given[name].to(dtype) for name in ("query", "key") if name in given}
    with pytest.raises(ValueError, match=sentence):
        rotary_embedding(**given)


# --- shared tables


def test_equal_parameters_share_one_tensor_in_whatever_order_they_come():
    tables = RotaryTables()
    backwards = dict(reversed((V41 | {"mscale": False}).items()))
    one, other = (
        rotary_of(RopeParameters.from_rope_scaling(160000, scaling), 64, tables=tables)
        for scaling in (V41 | {"mscale": False}, backwards)
    )
    assert one.cos_sin is other.cos_sin
    factors = {"rope_type": "gguf_factors", "factors": [1.0, 2.0]}
    lists = [RopeParameters.from_config({"rope_theta": 1e4, "rope_scaling": factors}) for _ in "12"]
    assert rotary_of(lists[0], 4, tables=tables).cos_sin is rotary_of(lists[1], 4, tables=tables).cos_sin
    # Pairing and offset are the layer's, not the table's.
    assert rotary_of(tables=tables, interleaved=True, offset=4).cos_sin is rotary_of(tables=tables).cos_sin


def test_other_parameters_get_another_table():
    tables = RotaryTables()
    kinds = [
        (RopeParameters("default", 1e4), 64, 64, False),  # window and draft layers: the base alone
        (RopeParameters("default", 160000), 64, 64, False),
        (RopeParameters.from_rope_scaling(160000, V41 | {"mscale": False}), 64, 64, False),  # compressed layers
        (RopeParameters.from_rope_scaling(160000, V41), 64, 64, False),
        (RopeParameters("default", 1e4), 32, 64, False),
        (RopeParameters("default", 1e4), 64, 65, False),
        (RopeParameters("default", 1e4), 64, 64, True),
    ]
    made = [
        tables.get(parameters, width, max_model_len=rows, device=CPU, float64_angles=wide)
        for parameters, width, rows, wide in kinds
    ]
    assert len({table.data_ptr() for table in made}) == len(kinds)


def test_layers_of_a_model_share_a_table_and_two_models_do_not():
    model_type, options = CONFIGS["qwen3_yarn"]

    def tables_of_a_model() -> set[torch.Tensor]:
        place = Placement(Mesh.single(), torch.float32, CPU, torch.float32, 64)
        layers = build_model({"model_type": model_type} | options, place).model.layers
        assert len(layers) == 3
        tables = {layer.self_attn.rotary.cos_sin for layer in layers}
        again = rotary_of(RopeParameters.from_config(options), 16, tables=place.rotary_tables)
        assert tables == {again.cos_sin}
        return tables

    first, second = tables_of_a_model(), tables_of_a_model()
    assert len(first) == len(second) == 1
    assert first.isdisjoint(second)
