"""Layers whose matrices are integers: what they keep, whole and split over ranks, and what they give to products."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from rorqual.layers.linear import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from rorqual.layers.moe import Experts, SparseMoE
from rorqual.layers.stacked_weight import StackedWeight
from rorqual.loader.dummy import dummy_integers
from rorqual.loader.integer_quantization import IntegerQuantization
from rorqual.loader.layer import Layer
from rorqual.loader.quantization_config import IntegerParts, LinearFormat
from rorqual.loader.weights import wanted_tensors
from rorqual.quantization.integer import INTEGER_FORMATS, Q4_1, Q4_K, Q6_K, Q8_0, IntegerStack, IntegerWeight
from tests.layers.ranks import in_model, ranks

PLACE = {"dtype": torch.float32, "device": torch.device("cpu")}
SIZES = [1, 2, 4]
HEADS = {"head_dim": 16, "num_heads": 8, "num_kv_heads": 2}
HIDDEN = 128


def integers(*formats, dynamic: bool = True) -> LinearFormat:
    return LinearFormat(IntegerParts(formats, dynamic), None)


def stored(layer: torch.nn.Module, format_of=lambda want: want.format) -> dict[str, IntegerWeight]:
    """What a GGUF checkpoint would have for a layer, whole."""
    return {
        name: dummy_integers(want.shape, format_of(want), name)
        for name, want in wanted_tensors(layer).items()
        if len(want.shape) == 2
    }


def load(layer: torch.nn.Module, tensors: dict[str, IntegerWeight]) -> torch.nn.Module:
    for name, want in wanted_tensors(layer).items():
        want.keep(tensors[name].slice_rows(want.rows or slice(None)))
    return layer


def stacked(layer: torch.nn.Module) -> Iterator[StackedWeight]:
    return (module for module in layer.modules() if isinstance(module, StackedWeight))


def num_bytes(layer: torch.nn.Module) -> int:
    return sum(module.integer_bytes() for module in layer.modules() if isinstance(module, Layer))


@pytest.mark.parametrize("size", SIZES)
def test_heads_are_cut_by_rows_and_parts_of_one_format_are_joined(size):
    quantization = integers(Q4_K, Q4_K, Q6_K)

    def make(mesh: Mesh) -> torch.nn.Module:
        return in_model(QKVParallelLinear(HIDDEN, **HEADS, mesh=mesh, quantization=quantization, **PLACE))

    files = stored(make(Mesh.single()))
    whole = {name: weight.dequantize() for name, weight in files.items()}
    for rank, mesh in enumerate(ranks(size)):
        layer = load(make(mesh), files)[0]
        assert not list(layer.parameters()), "nothing is allocated beforehand"
        kept = layer.operand
        assert isinstance(kept, IntegerStack)
        assert [part.format for part in kept] == [Q4_K, Q6_K]
        assert kept.nbytes == layer.integer_bytes()
        q = whole["q_proj.weight"].chunk(size)[rank]
        first = rank * HEADS["num_kv_heads"] // size * HEADS["head_dim"]
        rows = slice(first, first + max(1, HEADS["num_kv_heads"] // size) * HEADS["head_dim"])
        want = torch.cat([q, whole["k_proj.weight"][rows], whole["v_proj.weight"][rows]])
        assert torch.equal(kept.dequantize(), want)


@pytest.mark.parametrize("format", INTEGER_FORMATS.values(), ids=lambda format: format.name)
@pytest.mark.parametrize("size", SIZES)
def test_input_features_are_cut_at_edges_of_groups(size, format):
    def make(mesh: Mesh) -> torch.nn.Module:
        return in_model(RowParallelLinear(HIDDEN, 24, mesh=mesh, quantization=integers(format), **PLACE))

    ((name, whole),) = stored(make(Mesh.single())).items()
    for rank, mesh in enumerate(ranks(size)):
        layer = load(make(mesh), {name: whole})[0]
        assert torch.equal(layer.operand.dequantize(), whole.dequantize().chunk(size, 1)[rank])
        assert layer.operand.nbytes == layer.integer_bytes()
        memory = layer.operand.codes.untyped_storage().nbytes()
        assert memory == layer.operand.codes.nbytes, "the rest of the matrix is not held"


@pytest.mark.parametrize(
    ("in_features", "size", "formats"),
    [(48, 1, (Q8_0, Q8_0)), (96, 1, (Q8_0, None)), (80, 1, (Q6_K, Q8_0))],
)
def test_what_cannot_be_kept_is_plain(in_features, size, formats):
    layer = ColumnParallelLinear(
        in_features, {"gate": 32, "up": 32}, mesh=ranks(size)[0], quantization=integers(*formats), **PLACE
    )
    assert layer.left_plain
    assert (layer.integers, layer.integer_bytes()) == ((), 0)
    assert layer.weight.shape == (64, in_features)
    assert all(want.keep is None for want in wanted_tensors(in_model(layer)).values())


def test_a_share_that_ends_within_a_group_is_plain():
    layers = [
        RowParallelLinear(96, 8, mesh=mesh, quantization=integers(Q8_0), **PLACE)
        for size in (1, 2)
        for mesh in ranks(size)
    ]
    assert [layer.left_plain for layer in layers] == [False, True, True]


@pytest.mark.parametrize("format", [Q8_0, Q4_1])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_plain_tensors_are_rounded_on_their_way_in(size, dynamic, format):
    whole = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = IntegerWeight.quantize(whole, format).dequantize()
    for rank, mesh in enumerate(ranks(size)):
        layer = RowParallelLinear(HIDDEN, 24, mesh=mesh, quantization=integers(format, dynamic=dynamic), **PLACE)
        for tensor in wanted_tensors(in_model(layer)).values():
            tensor.copy(whole)
        assert layer.operand.dynamic is dynamic
        assert layer.operand.format == format
        assert torch.equal(layer.operand.dequantize(), want.chunk(size, 1)[rank])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_tables_stay_integers_and_a_tied_head_reads_the_embeddings(size, tied):
    def make(mesh: Mesh) -> torch.nn.ModuleDict:
        embedding = VocabParallelEmbedding(48, 64, mesh=mesh, quantization=integers(Q6_K), **PLACE)
        other = None if tied else integers(Q8_0)
        head = ParallelLMHead(48, 64, tied=embedding if tied else None, mesh=mesh, quantization=other, **PLACE)
        return torch.nn.ModuleDict({"embed_tokens": embedding, "lm_head": head})

    files = stored(make(Mesh.single()))
    assert set(files) == {"embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    table = files["embed_tokens.weight"].dequantize()
    heads = table if tied else files["lm_head.weight"].dequantize()
    ids, found = torch.tensor([0, 47, 23, 24, 3, 3]), []
    for rank, mesh in enumerate(ranks(size)):
        model = load(make(mesh), files)
        assert torch.equal(model["lm_head"].operand.dequantize(), heads.chunk(size)[rank])
        assert model["embed_tokens"].table.nbytes == model["embed_tokens"].integer_bytes()
        assert not list(model.parameters()), "no floats anywhere"
        for module in (model["embed_tokens"], model["lm_head"]):
            module.prepare()
        found.append(model["embed_tokens"](ids))
    assert torch.equal(sum(found), table[ids])


@pytest.mark.parametrize(
    ("mesh", "held"),
    [(Mesh.single(), [0, 1, 2]), (Mesh.of_rank(2, dp_size=3, expert_parallel=True), [2])],
    ids=["all", "some"],
)
def test_experts_have_formats_of_their_own(mesh, held):
    names = [f"0.{e}.{name}_proj.weight" for e in range(3) for name in ("gate", "up", "down")]
    formats = {name: Q6_K if "down" in name or name.startswith("0.2") else Q4_K for name in names}
    quantization = IntegerQuantization(dynamic=True, stored=formats).of(
        "0", *(name.removeprefix("0.").removesuffix(".weight") for name in names)
    )
    layer = in_model(Experts(3, 64, 96, mesh=mesh, quantization=quantization, **PLACE))
    wanted = {name: format for name, format in formats.items() if int(name.split(".")[1]) in held}
    assert {name: want.format for name, want in wanted_tensors(layer).items()} == wanted
    files = stored(layer)
    load(layer, files)
    assert num_bytes(layer) == sum(weight.nbytes for weight in files.values())
    for e in held:
        gate_up = torch.cat([files[f"0.{e}.{name}_proj.weight"].dequantize() for name in ("gate", "up")])
        assert torch.equal(layer[0].gate_up[str(e)].operand.dequantize(), gate_up)
        assert torch.equal(layer[0].down[str(e)].operand.dequantize(), files[f"0.{e}.down_proj.weight"].dequantize())


def test_a_router_is_never_rounded():
    quantization = IntegerQuantization(dynamic=True, linear=Q8_0, table=Q8_0)
    block = SparseMoE(
        64, 96, num_experts=4, top_k=2, renormalize=True, mesh=Mesh.single(), quantization=quantization, prefix="mlp",
        **PLACE,
    )  # fmt: skip
    assert all(layer.integers for layer in stacked(block.experts))
    assert block.gate.integers == ()
    assert isinstance(block.gate, ReplicatedLinear)


def test_formats_are_told_by_the_number_of_their_values():
    layer = QKVParallelLinear(HIDDEN, **HEADS, mesh=Mesh.single(), quantization=integers(Q4_K, Q4_K, Q6_K), **PLACE)
    assert layer.format_sizes() == {"q4_k": 160 * HIDDEN, "q6_k": 32 * HIDDEN}
    plain = ReplicatedLinear(HIDDEN, 8, **PLACE)
    assert plain.format_sizes() == {"float32": 8 * HIDDEN}
