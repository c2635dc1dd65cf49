"""The option `quantization`: what it makes of every kind of checkpoint, and what it refuses."""

from __future__ import annotations

import pytest

from rorqual.config import EngineConfig
from rorqual.loader.integer_quantization import IntegerQuantization, choose_integers
from rorqual.loader.quantization_config import IntegerParts
from rorqual.quantization.integer import Q4_1, Q4_K, Q6_K, Q8_0

STORED = {
    "model.embed_tokens.weight": Q6_K,
    "model.layers.0.self_attn.q_proj.weight": Q4_K,
    "model.layers.0.self_attn.k_proj.weight": Q4_K,
    "model.layers.0.self_attn.v_proj.weight": Q6_K,
}
ATTENTION = ("model.layers.0.self_attn", "q_proj", "k_proj", "v_proj")
MLP = ("model.layers.0.mlp", "gate_proj", "up_proj")
FP8 = {"quantization_config": {"quant_method": "fp8"}}


def choose(wanted: str, config=None, stored=None, *, dtype: str = "auto", device: str = "cpu"):
    return choose_integers(wanted, config or {}, STORED if stored is None else stored, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_auto_keeps_what_is_stored_as_integers_and_nothing_else(dtype):
    found = choose("auto", dtype=dtype)
    assert found.of(*ATTENTION) == (IntegerParts((Q4_K, Q4_K, Q6_K), True), None)
    assert found.of("model.layers.0.self_attn", "q_proj", "o_proj").weight.formats == (Q4_K, None)
    assert found.of(*MLP) is None
    assert found.of_table("model.embed_tokens").weight == IntegerParts((Q6_K,), True)
    assert found.of_table("lm_head") is None


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"device": "cuda"}, {"stored": {}}, {"config": FP8, "stored": {}}]
)
def test_auto_keeps_nothing_in_float32_on_a_gpu_and_where_nothing_is_stored_so(options):
    assert choose("auto", **options) is None


def test_none_keeps_nothing():
    assert choose("none") is None
    assert choose("none", device="cuda") is None


@pytest.mark.parametrize("wanted", ["int8", "int4", "int8_weight_only", "int4_weight_only"])
def test_int8_and_int4_round_what_is_not_stored_as_integers(wanted):
    found = choose(wanted)
    rounded, dynamic = Q8_0 if "8" in wanted else Q4_1, "only" not in wanted
    assert found.of(*ATTENTION).weight == IntegerParts((Q4_K, Q4_K, Q6_K), dynamic)
    assert found.of(*MLP).weight == IntegerParts((rounded, rounded), dynamic)
    assert found.of_table("model.embed_tokens").weight == IntegerParts((Q6_K,), dynamic)
    assert found.of_table("lm_head").weight == IntegerParts((Q8_0,), dynamic), "tables take eight bits"
    assert choose(wanted, dtype="float32") == found


@pytest.mark.parametrize("wanted", ["none", "int8", "int4", "int8_weight_only", "int4_weight_only"])
def test_a_checkpoint_that_is_quantised_otherwise_is_refused(wanted):
    with pytest.raises(ValueError, match=rf"'{wanted}' is for unquantised.*\(quantization_config: fp8\): leave it"):
        choose(wanted, FP8, {})


@pytest.mark.parametrize("wanted", ["int8", "int4_weight_only"])
def test_a_gpu_is_refused(wanted):
    with pytest.raises(ValueError, match=rf"'{wanted}' is for device 'cpu', got 'cuda': leave it at 'auto'"):
        choose(wanted, device="cuda")


def test_only_known_words_are_options():
    with pytest.raises(ValueError, match=r"quantization must be 'auto', 'none', 'int8'.*got 'fp8'"):
        EngineConfig(quantization="fp8")


def test_formats_of_several_modules_are_in_their_order():
    experts = {f"mlp.experts.{e}.{n}.weight": Q4_K for e in range(2) for n in ("gate_proj", "up_proj")}
    names = [f"{e}.{n}" for e in range(2) for n in ("gate_proj", "up_proj", "down_proj")]
    found = IntegerQuantization(dynamic=True, stored=experts).of("mlp.experts", *names)
    assert found.weight.formats == (Q4_K, Q4_K, None) * 2
