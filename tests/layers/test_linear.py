"""Layers split over ranks: the ranks' outputs, side by side or summed, are what a single rank computes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from rorqual.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    heads_per_rank,
)
from rorqual.layers.mlp import GatedMLP
from rorqual.layers.moe import Experts
from rorqual.loader.layer import Layer
from rorqual.loader.weights import wanted_tensors
from rorqual.ops.moe import route_softmax
from tests.layers.ranks import in_model, ranks

PLACE = {"dtype": torch.float32, "device": torch.device("cpu")}
RANKS = [1, 2, 4]


def tensors_for(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A checkpoint with what the layer wants, whole."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(want.shape, generator=generator) for name, want in wanted_tensors(layer).items()}


def load(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Fill one rank's layer from the whole tensors, and prepare it as the loader does."""
    for parameter in layer.parameters():
        parameter.data.fill_(float("nan"))
    wanted = wanted_tensors(layer)
    assert {name: want.shape for name, want in wanted.items()} == {name: tuple(t.shape) for name, t in tensors.items()}
    for name, want in wanted.items():
        want.copy(tensors[name])
    for module in layer.modules():
        if isinstance(module, Layer):
            module.prepare()
    assert not any(bool(p.isnan().any()) for p in layer.parameters()), "every row was filled"
    return layer


def on_all_ranks(
    make: Callable[[Mesh], torch.nn.Module], size: int
) -> tuple[list[torch.nn.Module], dict[str, torch.Tensor]]:
    """(one layer per rank, the whole tensors they were loaded from)."""
    tensors = tensors_for(in_model(make(Mesh.single())))
    return [load(in_model(make(mesh)), tensors)[0] for mesh in ranks(size)], tensors


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", RANKS)
def test_column_parallel_ranks_side_by_side_are_one(size, bias):
    parts = {"gate_proj": 8, "up_proj": 12}
    layers, tensors = on_all_ranks(lambda mesh: ColumnParallelLinear(6, parts, mesh=mesh, bias=bias, **PLACE), size)
    assert set(tensors) == {f"{name}.{kind}" for name in parts for kind in ("weight", "bias")[: 1 + bias]}
    x = inputs(5, 6)
    found = [layer(x).split((8 // size, 12 // size), dim=1) for layer in layers]
    for i, name in enumerate(parts):
        want = torch.nn.functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
        torch.testing.assert_close(torch.cat([parts_of_rank[i] for parts_of_rank in found], dim=1), want)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("size", RANKS)
def test_qkv_heads_of_the_ranks_are_those_of_one(size, num_heads, num_kv_heads, bias):
    """With fewer KV heads than ranks, each rank has a copy of the one that its query heads read."""
    hidden, head_dim = 6, 3

    def make(mesh: Mesh) -> QKVParallelLinear:
        return QKVParallelLinear(
            hidden, head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, mesh=mesh, bias=bias, **PLACE
        )

    layers, tensors = on_all_ranks(make, size)
    assert set(tensors) >= {"q_proj.weight", "k_proj.weight", "v_proj.weight"}
    x = inputs(5, hidden)
    q, k, v = (
        torch.nn.functional.linear(x, tensors[f"{n}_proj.weight"], tensors.get(f"{n}_proj.bias")).view(5, -1, head_dim)
        for n in "qkv"
    )
    group = num_heads // num_kv_heads
    for rank, layer in enumerate(layers):
        out = layer(x)
        assert (layer.num_heads, layer.num_kv_heads) == (num_heads // size, max(1, num_kv_heads // size))
        ours_q, ours_k, ours_v = out.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1)
        for head in range(layer.num_heads):
            whole_head = rank * layer.num_heads + head
            kv_head = head // (layer.num_heads // layer.num_kv_heads)
            torch.testing.assert_close(ours_q[:, head], q[:, whole_head])
            torch.testing.assert_close(ours_k[:, kv_head], k[:, whole_head // group])
            torch.testing.assert_close(ours_v[:, kv_head], v[:, whole_head // group])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", RANKS)
def test_row_parallel_ranks_sum_to_one_and_add_the_bias_once(size, bias):
    layers, tensors = on_all_ranks(lambda mesh: RowParallelLinear(12, 5, mesh=mesh, bias=bias, **PLACE), size)
    x = inputs(7, 12)
    total = sum(layer(part) for layer, part in zip(layers, x.chunk(size, dim=1), strict=True))
    torch.testing.assert_close(total, torch.nn.functional.linear(x, tensors["0.weight"], tensors.get("0.bias")))


def test_row_parallel_asks_its_mesh_for_the_sum():
    @dataclass(frozen=True, slots=True)
    class Doubling(Mesh):
        def tp_all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    layer = load(in_model(RowParallelLinear(4, 3, mesh=Doubling(1, 2), **PLACE)), {"0.weight": torch.ones(3, 4)})[0]
    assert layer(torch.ones(1, 2)).tolist() == [[4.0, 4.0, 4.0]]


@pytest.mark.parametrize("vocab_size", [12, 13, 15])
@pytest.mark.parametrize("size", RANKS)
def test_embedding_ranks_sum_to_one(size, vocab_size):
    layers, tensors = on_all_ranks(lambda mesh: VocabParallelEmbedding(vocab_size, 5, mesh=mesh, **PLACE), size)
    ids = torch.tensor([0, vocab_size - 1, 3, 5, 6, 2, 9, 3, 4, 7, 8, 11])
    torch.testing.assert_close(sum(layer(ids) for layer in layers), tensors["0.weight"][ids])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [12, 13, 15])
@pytest.mark.parametrize("size", RANKS)
def test_head_logits_of_the_ranks_side_by_side_are_one(size, vocab_size, tied):
    """Those of the last rank are fewer, and what fills them up goes: a vocabulary need not be even."""

    def make(mesh: Mesh) -> torch.nn.Module:
        embedding = VocabParallelEmbedding(vocab_size, 5, mesh=mesh, **PLACE)
        head = ParallelLMHead(vocab_size, 5, tied=embedding if tied else None, mesh=mesh, **PLACE)
        return torch.nn.ModuleDict({"embed_tokens": embedding, "lm_head": head})

    tensors = tensors_for(make(Mesh.single()))
    assert set(tensors) == {"embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    source = tensors["embed_tokens.weight" if tied else "lm_head.weight"]
    x, logits = inputs(3, 5), []
    for mesh in ranks(size):
        model = make(mesh)
        if tied:
            assert model["lm_head"].weight.is_meta, "a tied head allocates nothing"
            for parameter in model["embed_tokens"].parameters():
                parameter.data.fill_(float("nan"))
        for name, want in wanted_tensors(model).items():
            want.copy(tensors[name])
        for module in (model["embed_tokens"], model["lm_head"]):
            module.prepare()
        logits.append(model["lm_head"](x))
    whole = torch.cat(logits, dim=1)
    assert whole.shape[1] < vocab_size + size
    torch.testing.assert_close(whole[:, :vocab_size], x @ source.T)


@pytest.mark.parametrize("vocab_size", [12, 13])
def test_a_head_gives_all_logits_whatever_fills_up_the_last_rank(vocab_size):
    @dataclass(frozen=True, slots=True)
    class Gathering(Mesh):
        def tp_all_gather(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (2, -(-vocab_size // 4))
            return torch.cat([x + rank for rank in range(4)], dim=1)

    make = functools.partial(ParallelLMHead, vocab_size, 3, tied=None, mesh=Gathering(3, 4), **PLACE)
    layer = load(in_model(make()), {"0.weight": torch.ones(vocab_size, 3)})[0]
    logits = layer(torch.ones(2, 3))
    assert logits.shape == (2, vocab_size)
    assert logits[0, -1] == 3.0 + 3


def test_tied_head_shares_the_memory_of_the_embedding():
    embedding = VocabParallelEmbedding(12, 5, mesh=Mesh.single(), **PLACE)
    head = ParallelLMHead(12, 5, tied=embedding, mesh=Mesh.single(), **PLACE)
    head.prepare()
    assert head.weight.data_ptr() == embedding.weight.data_ptr()


@pytest.mark.parametrize("size", RANKS)
def test_gated_feed_forward_of_the_ranks_sums_to_one(size):
    layers, tensors = on_all_ranks(lambda mesh: GatedMLP(6, 8, mesh=mesh, **PLACE), size)
    x = inputs(4, 6)
    gate, up = x @ tensors["0.gate_proj.weight"].T, x @ tensors["0.up_proj.weight"].T
    want = (torch.nn.functional.silu(gate) * up) @ tensors["0.down_proj.weight"].T
    torch.testing.assert_close(sum(layer(x) for layer in layers), want)


@pytest.mark.parametrize("size", RANKS)
def test_experts_of_the_ranks_sum_to_one(size):
    layers, tensors = on_all_ranks(lambda mesh: Experts(3, 6, 8, mesh=mesh, **PLACE), size)
    x, routing = inputs(4, 6), route_softmax(inputs(4, 3), top_k=2, renormalize=True)
    want = torch.zeros(4, 6)
    for token in range(4):
        for expert, weight in zip(routing.expert_ids[token].tolist(), routing.weights[token], strict=True):
            gate, up, down = (tensors[f"0.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            want[token] += weight * (down @ (torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])))
    torch.testing.assert_close(sum(layer(x, routing) for layer in layers), want)


def test_replicated_layer_is_whole_on_every_rank():
    layer = load(in_model(ReplicatedLinear(6, 4, bias=True, **PLACE)), {"0.weight": inputs(4, 6), "0.bias": inputs(4)})
    torch.testing.assert_close(layer(torch.eye(6)), inputs(4, 6).T + inputs(4))


# --- sizes that ranks cannot share


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda mesh: ColumnParallelLinear(6, {"gate_proj": 10}, mesh=mesh, **PLACE),
            r"gate_proj's out_features \(10\) cannot be split over 4 ranks: use a tensor_parallel_size that divides it",
        ),
        (lambda mesh: RowParallelLinear(10, 4, mesh=mesh, **PLACE), r"in_features \(10\) cannot be split over 4 ranks"),
        (
            lambda mesh: VocabParallelEmbedding(9, 4, mesh=mesh, **PLACE),
            r"vocab_size \(9\) is too small for 4 ranks with 3 tokens each: use a smaller tensor_parallel_size",
        ),
        (
            lambda mesh: QKVParallelLinear(6, head_dim=2, num_heads=6, num_kv_heads=2, mesh=mesh, **PLACE),
            r"num_attention_heads \(6\) cannot be split over 4 ranks",
        ),
        (
            lambda mesh: QKVParallelLinear(6, head_dim=2, num_heads=12, num_kv_heads=3, mesh=mesh, **PLACE),
            r"num_key_value_heads \(3\) and tensor_parallel_size \(4\): one must divide the other",
        ),
        (lambda mesh: Experts(2, 6, 10, mesh=mesh, **PLACE), r"moe_intermediate_size \(10\) cannot be split over 4"),
    ],
)
def test_uneven_sizes_are_refused_in_a_sentence(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(Mesh(0, 4))


@pytest.mark.parametrize(("size", "want"), [(1, (8, 2)), (2, (4, 1)), (4, (2, 1)), (8, (1, 1))])
def test_heads_per_rank(size, want):
    assert heads_per_rank(8, 2, Mesh(0, size)) == want
