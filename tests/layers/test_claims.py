"""What contracts of DeepInfer's layers say and the tests beside each layer do not: how layers and models fit together.

`docs/lineage.md` lists every claim with its test.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import rorqual
from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.layers.layernorm import RMSNorm
from rorqual.layers.linear import ReplicatedLinear
from rorqual.layers.rotary_embedding import RopeParameters, inverse_frequencies
from rorqual.loader.quantization_config import LinearFormat
from rorqual.loader.weights import wanted_tensors
from rorqual.models.registry import build_model
from rorqual.ops.linear import linear
from rorqual.ops.registry import load_backends, watch
from rorqual.quantization import FP8_BLOCK, FP8_ROW, QTensor
from tests.layers.ranks import in_model
from tests.models.test_against_transformers import logits_by_chunks, tokens
from tests.models.test_configs import CONFIGS as PLAIN_CONFIGS
from tests.models.test_configs import read
from tests.ops.linear_cases import FORMATS
from tests.ops.number_values import numbers
from tests.ops.values import normal
from tests.tiny import CONFIGS

load_backends("native", "cpu")
BF16, CPU = torch.bfloat16, torch.device("cpu")
PACKAGE = Path(rorqual.__file__).parent


def test_no_two_classes_have_one_name():
    """DeepInfer has two ReplicatedLinear, one that runs and one that does not."""
    found = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert found["ReplicatedLinear"] == 1
    assert [name for name, count in found.items() if count > 1] == []


# --- linear layers


@pytest.mark.parametrize("name", [None, *FORMATS])
def test_a_weight_outlives_its_layer(name):
    """Whoever holds a weight keeps it: laying it out, or the layer's end, frees and rewrites nothing."""
    quantization = LinearFormat(FORMATS[name][0], None) if name else None
    model = in_model(ReplicatedLinear(64, 32, dtype=BF16, device=CPU, quantization=quantization))
    whole = normal(32, 64).to(BF16)
    kept = whole.double().numpy()
    tensors = {"0.weight": whole}
    if quantization is not None:
        made = QTensor.quantize(whole, quantization.weight)
        kept, tensors = numbers(made), {"0.weight": made.values, "0.weight_scale_inv": made.scales}
    for key, want in wanted_tensors(model).items():
        want.copy(tensors[key])
    before = model[0].operand
    model[0].prepare()
    after = model[0].operand
    x = normal(3, 64, seed=1).to(BF16)
    del model
    for weight in (before, after):
        got = linear(x, weight, out_dtype=torch.float32)
        np.testing.assert_allclose(got.double().numpy(), x.double().numpy() @ kept.T, rtol=1e-5, atol=1e-4)


# --- norms


def test_a_quantised_norm_feeds_a_product_as_it_is():
    """The norm's codes are those that the product would make of the norm itself, so that either may quantise."""
    norm = RMSNorm(256, eps=1e-5, dtype=BF16, device=CPU)
    norm.weight.copy_(normal(256, seed=9) * 0.1 + 1)
    x, weight = normal(5, 256, dtype=BF16), QTensor.quantize(normal(80, 256, seed=1), FP8_BLOCK)
    codes = norm.quantised(x, None, FP8_ROW).out
    assert isinstance(codes, QTensor)
    want = numbers(codes) @ numbers(weight).T
    got = linear(codes, weight)
    np.testing.assert_allclose(got.double().numpy(), want, rtol=2**-8 * 1.01, atol=1e-4)
    # Another order of sums in the norm may move a value to the next of its codes, a sixteenth away.
    other = linear(norm(x), weight, activation=FP8_ROW).double().numpy()
    assert np.abs(other - want).max() < 0.01 * np.abs(want).max()


@pytest.mark.parametrize("key", ["kv_lora_norm_out_scale", "is_exp_norm", "use_fp8_gemm"])
@pytest.mark.parametrize("model_type", PLAIN_CONFIGS)
def test_settings_that_no_config_has_are_refused_by_name(model_type, key):
    """DeepInfer keeps these for itself; none of them comes from config.json, and none is passed over if it does."""
    with pytest.raises(ValueError, match=f"does not honour here: {key}"):
        read(model_type, **{key: 1.5 if key.endswith("scale") else True})


@pytest.mark.parametrize(("name", "norms"), [("llama", 2), ("qwen3", 4)])
def test_a_layer_runs_each_op_as_often_as_it_has_to(name, norms):
    """Before attention and before the feed-forward block, Qwen3 also over query and key heads; the last one of all is
    the model's. Four products: q, k and v at once, o, gate and up at once, down; and the head's. One rotation."""
    layers, calls = CONFIGS[name][1]["num_hidden_layers"], Counter()
    with watch(lambda op, *_: calls.update([op.name])):
        logits_by_chunks(name, tokens(9), chunk_size=9)
    expected = {"rms_norm": norms * layers + 1, "linear": 4 * layers + 1}
    expected |= dict.fromkeys(("rotary_embedding", "store_kvcache", "paged_attention", "silu_and_mul"), layers)
    assert {op: calls[op] for op in expected} == expected


# --- rotary tables


def test_casting_a_model_leaves_its_tables_alone():
    """They stay float32, at the address that a captured graph knows."""
    model_type, options = CONFIGS["qwen3_yarn"]
    model = build_model({"model_type": model_type} | options, Placement(Mesh.single(), torch.float32, CPU, BF16, 64))
    tables = [layer.self_attn.rotary.cos_sin for layer in model.model.layers]
    before = [(table.data_ptr(), table.clone()) for table in tables]
    model.to(BF16)
    assert {parameter.dtype for parameter in model.parameters()} == {BF16}
    for layer, (address, values) in zip(model.model.layers, before, strict=True):
        assert layer.self_attn.rotary.cos_sin.data_ptr() == address
        assert torch.equal(layer.self_attn.rotary.cos_sin, values)
    assert not any("cos_sin" in name for name in model.state_dict())


def test_yarn_of_the_worked_example_mixes_the_pairs_between_15_and_25():
    """Base 160000, 64 channels, 65,536 positions stretched 16 times: pairs that turn 32 times or more stay as they are,
    pairs that turn less than once are slowed 16 times."""
    scaling = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536}
    got = inverse_frequencies(RopeParameters.from_rope_scaling(160000, scaling), 64, max_model_len=10)[0].tolist()
    plain = [160000 ** (-2 * i / 64) for i in range(32)]
    turns = [65536 * frequency / (2 * math.pi) for frequency in plain]
    assert turns[15] > 32 > turns[16]
    assert turns[24] > 1 > turns[25]
    for i, (frequency, original) in enumerate(zip(got, plain, strict=True)):
        if i <= 15:
            assert frequency == pytest.approx(original, rel=1e-6)
        elif i >= 25:
            assert frequency == pytest.approx(original / 16, rel=1e-6)
        else:
            assert original / 16 * 1.001 < frequency < original * 0.999
