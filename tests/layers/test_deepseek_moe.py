"""The mixture of experts of DeepSeek-V3 and V4 against transformers' modules, and what its parts are."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV4Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

from rorqual.distributed.mesh import Mesh
from rorqual.layers.deepseek_moe import DeepseekMoE, MoENames
from rorqual.loader.weights import wanted_tensors
from tests.ops.values import normal

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
    return DeepseekMoE(HIDDEN, INNER, **(defaults | options))


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
