"""DeepSeek-V4's attention and its grouped output product over several ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.compressed_attention import AttentionShape, CompressedAttention, LayerKind, cache_specs
from rorqual.layers.decoder import Placement
from rorqual.layers.grouped_linear import GroupedLinear
from rorqual.loader.quantization_config import LinearFormat
from rorqual.loader.weights import prepare_weights, wanted_tensors
from rorqual.quantization import FP8_BLOCK_UE8M0, QTensor
from tests.layers.ranks import in_model, ranks
from tests.models.scattered import CPU, steps, tokens
from tests.ops.values import normal

F32 = torch.float32
SHAPE = AttentionShape(
    hidden_size=48,
    num_attention_heads=4,
    head_dim=32,
    rope_dim=8,
    q_lora_rank=24,
    o_groups=2,
    o_lora_rank=16,
    sliding_window=16,
    rms_norm_eps=1e-6,
    index_n_heads=16,
    index_head_dim=16,
    index_topk=4,
)


def fill(layer: torch.nn.Module) -> None:
    """The same whole tensors for every rank."""
    for i, (_, tensor) in enumerate(sorted(wanted_tensors(layer).items())):
        tensor.copy(normal(*tensor.shape, seed=i) * tensor.shape[-1] ** -0.5)
    prepare_weights(layer)


@torch.inference_mode()
def outputs(mesh: Mesh, kind: LayerKind) -> torch.Tensor:
    """[num_tokens, hidden_size] of one rank, in chunks."""
    with torch.inference_mode(mode=False):
        place = Placement(mesh, F32, CPU, F32, 64)
        angles = torch.outer(torch.arange(64.0), 50 ** -(torch.arange(4) / 4))
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
        layer = CompressedAttention(SHAPE, kind, place, "0", cos_sin=cos_sin, first_cache=0)
        fill(in_model(layer))
    model, x = SimpleNamespace(kv_specs=cache_specs(SHAPE, kind, place)), normal(45, 48)
    return torch.cat([layer(x[part], batch, kv) for batch, part, kv in steps(model, tokens(45), 10)])


@pytest.mark.parametrize("kind", [LayerKind(0, sparse=False), LayerKind(4, sparse=True), LayerKind(8, sparse=False)])
def test_ranks_have_some_heads_and_their_groups_each(kind):
    """All keep the same rows, and choose the same entries."""
    whole = outputs(Mesh.single(), kind)
    parts = [outputs(mesh, kind) for mesh in ranks(2)]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(parts[0], whole, atol=1e-2)


def test_ranks_must_share_groups_evenly():
    with pytest.raises(ValueError, match=r"the number of groups \(2\) cannot be split over 4 ranks"):
        outputs(ranks(4)[0], LayerKind(0, sparse=False))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_groups_lie_below_one_another_in_one_matrix(quantised, prepared):
    """Four groups of 40 rows, which cut blocks of 128; two ranks have two each."""
    weight, x = normal(160, 200), normal(3, 4, 200)
    kept = QTensor.quantize(weight, FP8_BLOCK_UE8M0)
    if quantised:
        weight = kept.dequantize()
    want = torch.stack([x[:, g] @ weight[40 * g : 40 * g + 40].T for g in range(4)], dim=1)
    found = []
    for mesh in ranks(2):
        format = LinearFormat(FP8_BLOCK_UE8M0, None) if quantised else None
        layer = GroupedLinear(4, 200, 40, mesh=mesh, dtype=F32, device=CPU, quantization=format)
        wanted = wanted_tensors(in_model(layer))
        wanted["0.weight"].copy(kept.values if quantised else weight)
        if quantised:
            wanted["0.weight_scale_inv"].copy(kept.scales)
        if prepared:
            prepare_weights(layer)
        found.append(layer(x[:, 2 * mesh.tp_rank : 2 * mesh.tp_rank + 2]))
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=1e-5, atol=1e-5)
