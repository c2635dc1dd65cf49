"""The mixture of experts of DeepSeek-V3 and V4 against transformers' modules, and what its parts are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV4Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

from rorqual.distributed.mesh import Mesh
from rorqual.layers.deepseek_moe import DeepseekMoE, MoENames
from rorqual.loader.quantization_config import WeightQuantization, read_weight_quantization
from rorqual.loader.weights import fill_with_dummy_weights, prepare_weights, wanted_tensors
from rorqual.ops.registry import load_backends
from rorqual.quantization import FP8_BLOCK_UE8M0, FP8_ROW_UE8M0, MXFP4, QTensor
from tests.layers.ranks import ranks
from tests.ops.values import normal

load_backends("native", "cpu")
CPU = torch.device("cpu")
HIDDEN, INNER, NUM_EXPERTS, TOP_K, VOCAB = 48, 32, 16, 4, 40
V4 = MoENames("gate.bias", ("w1", "w3", "w2"))


def fill(layer: DeepseekMoE, theirs: dict[str, torch.Tensor], names: MoENames) -> None:
    """transformers' state, its experts in one piece each, into ours under the checkpoint's names."""
    gate, up, down = names.projections
    there = {"gate.weight": theirs["gate.weight"]}
    for key, name in (("gate.e_score_correction_bias", names.bias), ("gate.tid2eid", names.table)):
        if key in theirs:
            there[name] = theirs[key]
    for expert, (both, third) in enumerate(
        zip(theirs["experts.gate_up_proj"], theirs["experts.down_proj"], strict=True)
    ):
        for name, matrix in zip(names.projections, (*both.chunk(2), third), strict=True):
            there[f"experts.{expert}.{name}.weight"] = matrix
    for name, key in ((gate, "gate_proj"), (up, "up_proj"), (down, "down_proj")):
        there[f"shared_experts.{name}.weight"] = theirs[f"shared_experts.{key}.weight"]
    wanted = wanted_tensors(layer)
    assert wanted.keys() == there.keys()
    for name, tensor in wanted.items():
        assert tensor.shape == there[name].shape
        tensor.copy(there[name])


def drawn(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The module's state with normal values; a bias of both signs that changes who is chosen."""
    state = {}
    for i, (name, value) in enumerate(module.state_dict().items()):
        if value.is_floating_point():
            state[name] = normal(*value.shape, seed=i) * (0.3 if value.dim() == 1 else 1.5 * value.shape[-1] ** -0.5)
        else:
            state[name] = normal(VOCAB, NUM_EXPERTS, seed=i).argsort(1)[:, :TOP_K]
    module.load_state_dict(state)
    return state


def ours(**options) -> DeepseekMoE:
    defaults = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_experts": NUM_EXPERTS,
        "top_k": TOP_K,
        "num_shared_experts": 1,
        "scoring": "sigmoid",
        "renormalize": True,
        "routed_scaling_factor": 1.5,
        "mesh": Mesh(),
        "dtype": torch.float32,
        "device": CPU,
        "prefix": "mlp",
    }
    return DeepseekMoE(**(defaults | options))


@torch.no_grad()
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (8, 3), (4, 4)])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("num_shared", [1, 2])
def test_v3_is_transformers(num_groups, top_groups, renormalize, num_shared):
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=num_shared,
        n_group=num_groups,
        topk_group=top_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    config._experts_implementation = "eager"
    theirs = DeepseekV3MoE(config).float()
    layer = ours(
        num_shared_experts=num_shared,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
        num_groups=num_groups,
        top_groups=top_groups,
    )
    fill(layer, drawn(theirs), MoENames())
    x = normal(33, HIDDEN, seed=5)
    close(layer(x, torch.zeros(33, dtype=torch.int32)), theirs(x[None])[0])


@torch.no_grad()
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("limit", [10.0, 0.5])
@pytest.mark.parametrize("names", [MoENames(), V4], ids=["resaved", "official"])
def test_v4_is_transformers(hashed, limit, names):
    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        n_routed_experts=NUM_EXPERTS,
        num_experts_per_tok=TOP_K,
        n_shared_experts=1,
        vocab_size=VOCAB,
        num_hidden_layers=2,
        compress_ratios=[0, 0],
        num_hash_layers=1,
        routed_scaling_factor=1.5,
        swiglu_limit=limit,
    )
    config._experts_implementation = "eager"
    theirs = DeepseekV4SparseMoeBlock(config, 0 if hashed else 1).float()
    layer = ours(scoring="sqrtsoftplus", swiglu_limit=limit, names=names, hash_vocab_size=VOCAB if hashed else None)
    fill(layer, drawn(theirs), names)
    x, ids = normal(33, HIDDEN, seed=5), normal(33, seed=6).argsort()
    close(layer(x, ids), theirs(x[None], ids[None])[0])


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.abs().max() > 0.5
    assert (got - want).abs().max() < 1e-5


# --- packed experts


def v4(activations: bool) -> WeightQuantization:
    """FP4 experts beside FP8 layers, as released; or with inputs left as they are."""
    found = read_weight_quantization({"expert_dtype": "fp4", "quantization_config": V4_FORMATS})
    if activations:
        return found
    return replace(
        found, linear=found.linear._replace(activation=None), experts=found.experts._replace(activation=None)
    )


V4_FORMATS = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
WIDE = {"hidden_size": 256, "intermediate_size": 128}
NAMES = {"names": V4, "scoring": "sqrtsoftplus", "swiglu_limit": 2.0, "prefix": "layers.0.ffn"}


def filled_from(layer: DeepseekMoE, there: dict[str, torch.Tensor]) -> DeepseekMoE:
    for name, tensor in wanted_tensors(layer).items():
        found = next(n for n in (name, *tensor.aliases) if n in there)
        assert tuple(there[found].shape) == tensor.shape
        tensor.copy(there[found])
    return layer


def packed_and_plain() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same weights as the files have them, and dequantised."""
    packed = {"gate.weight": normal(NUM_EXPERTS, 256) / 16, "gate.bias": normal(NUM_EXPERTS, seed=1) / 4}
    plain = dict(packed)
    blocks = [(f"experts.{e}", MXFP4) for e in range(NUM_EXPERTS)] + [("shared_experts", FP8_BLOCK_UE8M0)]
    for seed, (block, format) in enumerate(blocks):
        for i, (name, shape) in enumerate({"w1": (128, 256), "w3": (128, 256), "w2": (256, 128)}.items()):
            made = QTensor.quantize(normal(*shape, seed=10 + 3 * seed + i) * 1.5 * shape[1] ** -0.5, format)
            packed[f"{block}.{name}.weight"] = made.values
            packed[f"{block}.{name}.scale"] = made.scales.view(torch.float8_e8m0fnu)
            plain[f"{block}.{name}.weight"] = made.dequantize(torch.float32)
    return packed, plain


@torch.no_grad()
def test_packed_experts_are_their_dequantised_ones_and_stay_packed():
    packed, plain = packed_and_plain()
    with_formats = filled_from(ours(**WIDE, **NAMES, quantization=v4(activations=False)), packed)
    without = filled_from(ours(**WIDE, **NAMES), plain)
    x, ids = normal(33, 256, seed=5), torch.zeros(33, dtype=torch.int64)
    close(with_formats(x, ids), without(x, ids))
    prepare_weights(with_formats)
    close(with_formats(x, ids), without(x, ids))
    bits = {"experts.": 4 + 8 / 32, "shared_experts.": 8 + 8 / 128}  # the kernels repeat a block's scale for its rows
    for part, most in bits.items():
        values = [p for n, p in with_formats.named_parameters() if n.startswith(part)]
        count = sum(p.numel() for n, p in without.named_parameters() if n.startswith(part))
        assert 8 * sum(p.nbytes for p in values) <= most * count


@torch.no_grad()
def test_inputs_of_packed_experts_are_rounded_only_if_asked():
    packed, _ = packed_and_plain()
    x, ids = normal(33, 256, seed=5), torch.zeros(33, dtype=torch.int64)
    as_they_are, rounded = (
        filled_from(ours(**WIDE, **NAMES, quantization=v4(activations)), packed) for activations in (False, True)
    )
    assert as_they_are.experts.weights().activation is None
    assert rounded.experts.weights().activation == FP8_ROW_UE8M0
    difference = (rounded(x, ids) - as_they_are(x, ids)).abs().max()
    assert 1e-3 < difference < 0.2 * as_they_are(x, ids).abs().max()


@torch.no_grad()
@pytest.mark.parametrize("quantized", [False, True])
def test_ranks_add_up(quantized):
    packed, plain = packed_and_plain()
    options = {**NAMES, "quantization": v4(activations=False) if quantized else None}
    x, ids = normal(33, 256, seed=5), torch.zeros(33, dtype=torch.int64)
    whole = filled_from(ours(**WIDE, **NAMES), plain)
    parts = [filled_from(ours(**WIDE, **options, mesh=mesh), packed if quantized else plain) for mesh in ranks(2)]
    close(sum(part(x, ids) for part in parts), whole(x, ids))


# --- what is refused


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_groups": 3}, "n_group must divide the 16 experts, .* got n_group 3 and topk_group 1"),
        ({"num_groups": 4, "top_groups": 5}, "topk_group be from 1 to n_group, got n_group 4 and topk_group 5"),
        ({"num_groups": 8, "top_groups": 1}, r"num_experts_per_tok \(4\) must be from 1 to the 2 experts"),
        ({"num_groups": 16, "top_groups": 8}, "which have two experts or more; got groups of 1"),
        ({"top_k": 17}, r"num_experts_per_tok \(17\) must be from 1 to the 16 experts"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        ours(**options)


def test_a_table_of_experts_that_are_not_there_is_refused():
    layer = ours(hash_vocab_size=VOCAB)
    want = wanted_tensors(layer)["gate.tid2eid"]
    with pytest.raises(ValueError, match="experts are numbered from 0 to 15, got 0 to 16"):
        want.copy(torch.arange(VOCAB * TOP_K).view(VOCAB, TOP_K) % 17)
    with pytest.raises(TypeError, match=r"has whole numbers, got torch\.float32"):
        want.copy(torch.zeros(VOCAB, TOP_K))
    table = torch.arange(VOCAB * TOP_K).view(VOCAB, TOP_K) % NUM_EXPERTS
    for dtype in (torch.int32, torch.int64):
        want.copy(table.flip(0).to(dtype))
        assert torch.equal(layer.gate.table, table.flip(0))


@torch.no_grad()
def test_a_made_up_model_has_a_table_too():
    layer = ours(hash_vocab_size=VOCAB)
    fill_with_dummy_weights(layer, seed=0)
    assert len(layer.gate.table.unique()) == NUM_EXPERTS
    assert layer(normal(3, HIDDEN), torch.tensor([0, 7, VOCAB - 1])).isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_token_gets_the_same_alone(threads, quantized):
    packed, plain = packed_and_plain()
    options = {**NAMES, "quantization": v4(activations=True) if quantized else None, "dtype": torch.bfloat16}
    layer = filled_from(ours(**WIDE, **options), packed if quantized else plain)
    prepare_weights(layer)
    x, ids = normal(70, 256, seed=5, dtype=torch.bfloat16), torch.zeros(70, dtype=torch.int32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = layer(x, ids)
        alone = torch.cat([layer(x[i : i + 1], ids[i : i + 1]) for i in range(70)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
