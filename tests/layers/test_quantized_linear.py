"""Linear layers whose weights are quantised: what they load, keep and compute, whole and split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.linear import ColumnParallelLinear, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from rorqual.layers.mlp import GatedMLP
from rorqual.layers.moe import Experts, SparseMoE
from rorqual.loader.layer import Layer
from rorqual.loader.quantization_config import LinearFormat, WeightQuantization
from rorqual.loader.weights import wanted_tensors
from rorqual.ops.linear import allocate_output, unpack_weight
from rorqual.ops.moe import route_softmax
from rorqual.quantization import FP8_BLOCK, FP8_ROW, MXFP4, MXFP8, MXFP8_TILE, QTensor
from tests.layers.ranks import in_model, ranks
from tests.ops.number_values import numbers
from tests.quantized import SCHEMES, Scheme, Tensors, is_linear, quantized

CPU = torch.device("cpu")
PLACE = {"dtype": torch.float32, "device": CPU}
SIZES = [1, 2, 4]
HEADS = {"head_dim": 24, "num_heads": 8, "num_kv_heads": 2}
HIDDEN, PARTS, INNER = 96, {"gate_proj": 200, "up_proj": 120}, 400


def weight_only(scheme: Scheme) -> LinearFormat:
    return LinearFormat(scheme.format, None)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def checkpoint_of(make_plain: torch.nn.Module, scheme: Scheme) -> tuple[Tensors, Tensors]:
    """(a quantised checkpoint with what the layer wants, whole; the numbers that it holds)."""
    plain = {n: normal(*want.shape, seed=i) for i, (n, want) in enumerate(wanted_tensors(make_plain).items())}
    return quantized(plain, scheme, lambda name: is_linear(name) or name == "0.weight")


def load(layer: torch.nn.Module, tensors: Tensors, *, prepare: bool = True) -> torch.nn.Module:
    """Fill one rank's layer from whole tensors, every name once, and prepare it as the loader does; what is left are
    other ranks' experts."""
    left = dict(tensors)
    for want in wanted_tensors(layer).values():
        (name,) = {want.name, *want.aliases} & left.keys()
        assert left[name].shape == want.shape
        want.copy(left.pop(name))
    names = (at for prefix, it in layer.named_modules() if isinstance(it, Layer) for at in it.elsewhere(prefix))
    elsewhere = tuple(f"{name}." for name in names)
    assert all(name.startswith(elsewhere) for name in left)
    for module in layer.modules() if prepare else ():
        if isinstance(module, Layer):
            module.prepare()
    return layer


def share(whole: torch.Tensor, rank: int, size: int, dim: int = 0) -> torch.Tensor:
    return whole.chunk(size, dim)[rank]


def kv_share(whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    head = rank * HEADS["num_kv_heads"] // size
    count = max(1, HEADS["num_kv_heads"] // size)
    return whole[head * HEADS["head_dim"] : (head + count) * HEADS["head_dim"]]


def columns(mesh: Mesh, quantization: LinearFormat | None = None, **options) -> torch.nn.Module:
    return in_model(ColumnParallelLinear(HIDDEN, PARTS, mesh=mesh, quantization=quantization, **PLACE, **options))


def heads(mesh: Mesh, quantization: LinearFormat | None = None, **options) -> torch.nn.Module:
    return in_model(QKVParallelLinear(HIDDEN, **HEADS, mesh=mesh, quantization=quantization, **PLACE, **options))


def rows(mesh: Mesh, quantization: LinearFormat | None = None, **options) -> torch.nn.Module:
    return in_model(RowParallelLinear(INNER, 72, mesh=mesh, quantization=quantization, **PLACE, **options))


SPLIT: dict[str, tuple[Callable[..., torch.nn.Module], Callable[[Tensors, int, int], torch.Tensor]]] = {
    "columns": (columns, lambda t, r, n: torch.cat([share(t[f"{name}.weight"], r, n) for name in PARTS])),
    "heads": (
        heads,
        lambda t, r, n: torch.cat(
            [share(t["q_proj.weight"], r, n), *(kv_share(t[f"{name}_proj.weight"], r, n) for name in "kv")]
        ),
    ),
    "rows": (rows, lambda t, r, n: share(t["0.weight"], r, n, dim=1)),
}
"""A layer split over ranks, and a rank's weight cut from the whole numbers."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("name", SCHEMES)
def test_every_rank_keeps_exactly_its_share(name, kind, size):
    """Shares of 24, 50 and 100 rows or columns end within blocks of 32 and 128: scales are repeated, no more."""
    make, cut = SPLIT[kind]
    files, plain = checkpoint_of(make(Mesh.single()), SCHEMES[name])
    for rank, mesh in enumerate(ranks(size)):
        layer = load(make(mesh, weight_only(SCHEMES[name])), files)[0]
        kept = unpack_weight(layer.operand)
        assert isinstance(kept, QTensor)
        assert kept.format.element == SCHEMES[name].format.element
        want = cut(plain, rank, size)
        assert np.array_equal(numbers(kept).astype(np.float32), want.numpy())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_together_compute_the_product(name, size, bias):
    scheme = SCHEMES[name]
    x = normal(5, HIDDEN, seed=8)
    files, plain = checkpoint_of(columns(Mesh.single(), bias=bias), scheme)
    layers = [load(columns(mesh, weight_only(scheme), bias=bias), files)[0] for mesh in ranks(size)]
    found = [layer(x).split([width // size for width in PARTS.values()], dim=1) for layer in layers]
    for i, part in enumerate(PARTS):
        want = torch.nn.functional.linear(x, plain[f"{part}.weight"], plain.get(f"{part}.bias"))
        torch.testing.assert_close(torch.cat([pieces[i] for pieces in found], 1), want, rtol=1e-5, atol=1e-4)

    files, plain = checkpoint_of(rows(Mesh.single(), bias=bias), scheme)
    inner = normal(5, INNER, seed=9)
    total = sum(
        load(rows(mesh, weight_only(scheme), bias=bias), files)[0](part)
        for mesh, part in zip(ranks(size), inner.chunk(size, 1), strict=True)
    )
    want = torch.nn.functional.linear(inner, plain["0.weight"], plain.get("0.bias"))
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-3)


def test_heads_come_out_by_head_and_share_kv_heads():
    scheme = SCHEMES["fp8"]
    files, plain = checkpoint_of(heads(Mesh.single()), scheme)
    x = normal(3, HIDDEN, seed=8)
    q, k, v = ((x @ plain[f"{n}_proj.weight"].T).view(3, -1, 24) for n in "qkv")
    for rank, mesh in enumerate(ranks(4)):
        out = load(heads(mesh, weight_only(scheme)), files)[0](x)
        want = torch.cat((q[:, 2 * rank : 2 * rank + 2], k[:, rank // 2, None], v[:, rank // 2, None]), 1)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-4)


def test_what_activation_says_is_done_to_the_input():
    """Beside FP8 blocks, each row's groups of 128 are quantised; without a format the input stays as it is."""
    scheme = SCHEMES["fp8"]
    make = lambda q=None: in_model(ReplicatedLinear(256, 72, quantization=q, **PLACE))  # noqa: E731
    files, plain = checkpoint_of(make(), scheme)
    x = normal(5, 256, seed=8)
    rounded = torch.from_numpy(numbers(QTensor.quantize(x, FP8_ROW))).float()
    dynamic = load(make(LinearFormat(FP8_BLOCK, FP8_ROW)), files)[0](x)
    torch.testing.assert_close(dynamic, rounded @ plain["0.weight"].T, rtol=1e-5, atol=1e-4)
    exact = load(make(LinearFormat(FP8_BLOCK, None)), files)[0](x)
    torch.testing.assert_close(exact, x @ plain["0.weight"].T, rtol=1e-5, atol=1e-4)
    assert (dynamic - exact).abs().max() > 0.1


@pytest.mark.parametrize("name", [None, *SCHEMES])
def test_replicated_layers_accumulate_in_float32_outputs_with_a_bias(name):
    """All of out_dtype, out_acc and bias at once, for every kind of weight; and inputs of one to four dimensions."""
    formats = weight_only(SCHEMES[name]) if name else None

    def make(quantization=None):
        return in_model(
            ReplicatedLinear(96, 33, bias=True, quantization=quantization, out_dtype=torch.float32,
                             dtype=torch.bfloat16, device=CPU)
        )  # fmt: skip

    if name:
        files, plain = checkpoint_of(make(), SCHEMES[name])
    else:
        files = plain = {n: normal(*w.shape).bfloat16() for n, w in wanted_tensors(make()).items()}
    layer = load(make(formats), files)[0]
    for shape in ((), (1,), (0,), (5,), (2, 3), (2, 1, 3)):
        x = normal(*shape, 96, seed=4).bfloat16()
        want = x.double() @ plain["0.weight"].double().T + plain["0.bias"].bfloat16().double()
        got = layer(x)
        assert got.dtype == torch.float32
        assert got.shape == (*shape, 33)
        assert not shape or got.numel() == 0 or got.stride(-2) == 40
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
        acc = allocate_output((*shape, 33), torch.float32, CPU).fill_(100.0)
        assert layer(x, out_acc=acc) is acc
        torch.testing.assert_close(acc.double(), want + 100, rtol=1e-5, atol=1e-4)


def test_a_quantised_input_gives_bfloat16_by_itself():
    files, _ = checkpoint_of(in_model(ReplicatedLinear(96, 32, **PLACE)), SCHEMES["mxfp8_tile"])
    layer = load(in_model(ReplicatedLinear(96, 32, quantization=LinearFormat(MXFP8_TILE, MXFP8), **PLACE)), files)[0]
    x = normal(5, 96)
    got = layer(QTensor.quantize(x, MXFP8))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, layer(x).bfloat16(), rtol=2**-7, atol=1e-6)


# --- what is kept


@pytest.mark.parametrize(
    ("name", "values", "scales", "repeated"),
    [
        ("fp8", 256 * 384, 2 * 3 * 4, 256 * 3 * 4),
        ("fp8_ue8m0", 256 * 384, 2 * 3, 256 * 3),
        ("mxfp8_tile", 256 * 384, 8 * 12, 256 * 12),
        ("mxfp8", 256 * 384, 256 * 12, 256 * 12),
        ("mxfp4", 256 * 384 // 2, 256 * 12, 256 * 12),
    ],
)
def test_weights_stay_packed_in_memory(name, values, scales, repeated):
    """A byte or half a byte per value plus the scales, which a prepared weight may repeat for each of its rows."""
    scheme = SCHEMES[name]

    def made(quantization=None, **place):
        return in_model(ReplicatedLinear(384, 256, quantization=quantization, **(PLACE | place)))

    def size(model):
        return sum(p.numel() * p.element_size() for p in model.parameters())

    files, _ = checkpoint_of(made(), scheme)
    layer = load(made(weight_only(scheme)), files, prepare=False)
    assert size(layer) == size(made(weight_only(scheme), device=torch.device("meta"))) == values + scales
    layer[0].prepare()
    assert values + scales <= size(layer) <= values + repeated
    assert [name for name, _ in layer.named_parameters()] == ["0.weight", "0.weight_scale_inv"]


def test_preparing_keeps_one_copy():
    files, _ = checkpoint_of(in_model(ReplicatedLinear(96, 32, **PLACE)), SCHEMES["mxfp4"])
    layer = load(in_model(ReplicatedLinear(96, 32, quantization=LinearFormat(MXFP4, None), **PLACE)), files)[0]
    assert layer.operand is layer.operand
    assert layer.operand.values.data_ptr() == layer.weight.data_ptr()
    assert layer.operand.scales.data_ptr() == layer.weight_scale_inv.data_ptr()


def test_plain_layers_know_nothing_of_scales():
    layer = in_model(ReplicatedLinear(96, 32, **PLACE))
    assert list(wanted_tensors(layer)) == ["0.weight"]
    assert list(layer[0].quantized()) == []
    assert isinstance(layer[0].operand, torch.Tensor)


# --- what is refused


def values(**options) -> torch.nn.Module:
    return in_model(ReplicatedLinear(96, 32, quantization=LinearFormat(FP8_BLOCK, None), **PLACE, **options))


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("0.weight", torch.zeros(32, 96), "format fp8_block has values of float8_e4m3fn, got torch.float32"),
        ("0.weight", torch.zeros(32, 96, dtype=torch.int8), "has values of float8_e4m3fn, got torch.int8"),
        ("0.weight_scale_inv", torch.ones(1, 1, dtype=torch.int32), "fp8_block has float32 scales, got torch.int32"),
    ],
)
def test_tensors_of_other_dtypes_are_refused(name, tensor, sentence):
    with pytest.raises(TypeError, match=sentence):
        wanted_tensors(values())[name].copy(tensor)


def test_scales_that_are_no_power_of_two_are_refused_where_they_must_be():
    layer = in_model(ReplicatedLinear(96, 32, quantization=LinearFormat(MXFP8_TILE, None), **PLACE))
    with pytest.raises(ValueError, match=r"scales of format mxfp8_tile are powers of two, got 0\.75"):
        wanted_tensors(layer)["0.weight_scale_inv"].copy(torch.full((1, 3), 0.75))


def test_ranks_cannot_cut_a_byte_in_two():
    with pytest.raises(ValueError, match=r"input features must be even in format mxfp4.*got 25 to 50: use another"):
        RowParallelLinear(100, 8, mesh=Mesh(1, 4), quantization=LinearFormat(MXFP4, None), **PLACE)
    with pytest.raises(ValueError, match="must be even in format mxfp4"):
        ReplicatedLinear(33, 8, quantization=LinearFormat(MXFP4, None), **PLACE)


# --- blocks of layers


def all_layers(scheme: Scheme, *skipped: str) -> WeightQuantization:
    return WeightQuantization(weight_only(scheme), weight_only(scheme), skipped)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEMES)
def test_gated_feed_forward_of_the_ranks_sums_to_one(name, size):
    def make(mesh, quantization=None):
        return in_model(GatedMLP(HIDDEN, 200, mesh=mesh, quantization=quantization, prefix="mlp", **PLACE))

    files, plain = checkpoint_of(make(Mesh.single()), SCHEMES[name])
    x = normal(4, HIDDEN, seed=5)
    gate, up, down = (plain[f"0.{n}_proj.weight"] for n in ("gate", "up", "down"))
    want = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    total = sum(load(make(mesh, all_layers(SCHEMES[name])), files)(x) for mesh in ranks(size))
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_feed_forward_whose_down_projection_is_not_quantised():
    quantization = all_layers(SCHEMES["fp8"], "mlp.down_proj")
    layer = GatedMLP(96, 200, mesh=Mesh.single(), quantization=quantization, prefix="model.layers.0.mlp", **PLACE)
    assert isinstance(layer.gate_up_proj.operand, QTensor)
    assert isinstance(layer.down_proj.operand, torch.Tensor)


@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SCHEMES)
def test_experts_of_the_ranks_sum_to_one(name, size, whole):
    def make(mesh, quantization=None):
        return in_model(Experts(4, HIDDEN, 40, mesh=mesh, quantization=quantization, **PLACE))

    files, plain = checkpoint_of(make(Mesh.single()), SCHEMES[name])
    x, routing = normal(4, HIDDEN, seed=5), route_softmax(normal(4, 4), top_k=2, renormalize=True)
    want = torch.zeros(4, HIDDEN)
    for token in range(4):
        for expert, weight in zip(routing.expert_ids[token].tolist(), routing.weights[token], strict=True):
            gate, up, down = (plain[f"0.{expert}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            want[token] += weight * (down @ (torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])))
    meshes = [replace(mesh, expert_parallel=whole) for mesh in ranks(size)]
    layers = [load(make(mesh, weight_only(SCHEMES[name])), files)[0] for mesh in meshes]
    assert [len(layer.gate_up) for layer in layers] == [4 // size if whole else 4] * size
    total = sum(layer(x, routing) for layer in layers)
    torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    assert all(
        isinstance(weight.operand, QTensor) for weight in (*layers[0].gate_up.values(), *layers[0].down.values())
    )


def test_experts_quantise_their_inputs_too():
    def make(quantization=None):
        return in_model(Experts(1, 256, 40, mesh=Mesh.single(), quantization=quantization, **PLACE))

    files, plain = checkpoint_of(make(), SCHEMES["fp8"])
    layer = load(make(LinearFormat(FP8_BLOCK, FP8_ROW)), files)[0]
    x, routing = normal(4, 256, seed=5), route_softmax(torch.zeros(4, 1), top_k=1, renormalize=True)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(numbers(QTensor.quantize(x, FP8_ROW))).float()

    gate, up, down = (plain[f"0.0.{n}_proj.weight"] for n in ("gate", "up", "down"))
    inner = torch.nn.functional.silu(rounded(x) @ gate.T) * (rounded(x) @ up.T)
    want = rounded(inner) @ down.T
    # An inner value on the edge of a step may round to either side: one step of 2^-3 of one of 40 values.
    torch.testing.assert_close(layer(x, routing), want, rtol=1e-3, atol=2e-2 * want.abs().max().item())
    unrounded = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    assert (want - unrounded).abs().max() > 2e-2 * want.abs().max()


def test_the_router_of_experts_is_never_quantised():
    block = SparseMoE(
        96, 40, num_experts=4, top_k=2, renormalize=True, mesh=Mesh.single(),
        quantization=all_layers(SCHEMES["fp8"]), prefix="model.layers.0.mlp", **PLACE,
    )  # fmt: skip
    assert isinstance(block.gate.operand, torch.Tensor)
    assert all(isinstance(weight.operand, QTensor) for weight in block.experts.gate_up.values())


def test_experts_may_have_a_format_of_their_own():
    fp8, fp4 = (weight_only(SCHEMES[name]) for name in ("fp8", "mxfp4"))
    block = SparseMoE(
        96, 40, num_experts=4, top_k=2, renormalize=True, mesh=Mesh.single(),
        quantization=WeightQuantization(fp8, fp4), prefix="model.layers.0.mlp", **PLACE,
    )  # fmt: skip
    assert {weight.operand.format for weight in (*block.experts.gate_up.values(), *block.experts.down.values())} == {
        MXFP4
    }
