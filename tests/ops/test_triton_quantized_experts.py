"""Experts in FP8 and MXFP4 by the Triton kernels: what the reference says, the same for a token whatever its company,
and never in memory twice.
"""

from __future__ import annotations

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.moe import Experts
from rorqual.loader.dummy import fill_dummy_quantized
from rorqual.loader.quantization_config import LinearFormat
from rorqual.loader.weights import prepare_weights
from rorqual.ops.linear import unpack_weight
from rorqual.ops.moe import ExpertWeights, Routing, allocate_experts, fused_experts, prepare_experts
from rorqual.ops.registry import load_backends
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization import (
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_ROW,
    FP8_ROW_UE8M0,
    MXFP4,
    MXFP8,
    QTensor,
    QuantFormat,
)
from tests.ops.cases import normal

if not available():
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)
load_backends("triton")
from rorqual.ops.triton import _moe_quantized, moe  # noqa: E402

pytestmark = [] if INTERPRETING else [pytest.mark.gpu]
DEVICE = torch.device("cpu" if INTERPRETING else "cuda")
BF16 = torch.bfloat16
NUM_EXPERTS, TOP_K = 4, 2
KINDS = [
    *((MXFP4, activation) for activation in (None, MXFP8, FP8_ROW)),
    *((FP8_BLOCK, activation) for activation in (None, FP8_ROW)),
    *((FP8_BLOCK_UE8M0, activation) for activation in (FP8_ROW_UE8M0, MXFP8)),
]
NAMES = [f"{format.name}-{activation.name if activation else 'bfloat16'}" for format, activation in KINDS]
_FAMILIES = {(MXFP4, None), (MXFP4, FP8_ROW), (FP8_BLOCK, None), (FP8_BLOCK, FP8_ROW)}
_FIRST = [
    pytest.param(*kind, id=name, marks=[pytest.mark.slow] if INTERPRETING and kind not in _FAMILIES else [])
    for kind, name in zip(KINDS, NAMES, strict=True)
]
"""All; in the interpreter, those that are multiplied as others are (`family_of`) are slow."""


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """Full tiles, which small products would not have: the interpreter runs one program after the other."""
    if INTERPRETING:
        monkeypatch.setattr(moe, "_PROGRAMS", 1)


def filled(rows: int, columns: int, seed: int, format: QuantFormat) -> tuple[QTensor, ...]:
    made = []
    for number, weight in enumerate(
        allocate_experts(NUM_EXPERTS, rows, columns, dtype=BF16, device=DEVICE, format=format)
    ):
        assert isinstance(weight, QTensor)
        loaded = QTensor.quantize(normal(rows, columns, seed=seed + number) * columns**-0.5, format)
        weight.values.view(torch.uint8).copy_(loaded.values.view(torch.uint8))
        weight.scales.copy_(loaded.scales)
        made.append(weight)
    return tuple(made)


def copied(weights: tuple[QTensor, ...]) -> tuple[QTensor, ...]:
    return tuple(QTensor(weight.values.clone(), weight.scales.clone(), weight.format) for weight in weights)


def experts(
    format: QuantFormat, activation: QuantFormat | None, hidden: int, inner: int, limit: float | None = None
) -> tuple[ExpertWeights, ExpertWeights]:
    """(laid out for the kernels, as they came)."""
    both = filled(2 * inner, hidden, 0, format), filled(hidden, inner, 100, format)
    plain = ExpertWeights(*(copied(weights) for weights in both), activation, limit)
    for weights in both:
        assert prepare_experts.explain(weights)["triton"] == "ok"
    return ExpertWeights(*(prepare_experts(weights) for weights in both), activation, limit), plain


def routing(num_tokens: int) -> Routing:
    """Each token's experts in an order of its own, with float32 weights."""
    ids = normal(num_tokens, NUM_EXPERTS, seed=3).argsort(1)[:, :TOP_K]
    return Routing(ids.to(DEVICE), normal(num_tokens, TOP_K, seed=4).softmax(1).to(DEVICE))


def inputs(num_tokens: int, hidden: int) -> torch.Tensor:
    return normal(num_tokens, hidden, seed=7).to(DEVICE, BF16)


def run(x: torch.Tensor, weights: ExpertWeights, chosen: Routing) -> torch.Tensor:
    assert fused_experts.explain(x, weights, chosen)["triton"] == "ok"
    return fused_experts(x, weights, chosen)


@pytest.mark.parametrize(("format", "activation"), KINDS, ids=NAMES)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "inner", "limit"),
    [(1, 160, 96, None), (6, 128, 64, 0.7)]
    if INTERPRETING
    else [(0, 256, 128, None), (1, 160, 96, None), (19, 256, 128, 0.7), (300, 640, 384, None)],
)
def test_triton_quantised_experts_are_the_references(format, activation, num_tokens, hidden, inner, limit):
    weights, plain = experts(format, activation, hidden, inner, limit)
    x, chosen = inputs(num_tokens, hidden), routing(num_tokens)
    got, want = run(x, weights, chosen), fused_experts.reference(x, plain, chosen)
    assert (got.dtype, got.shape) == (x.dtype, x.shape)
    largest = want.abs().max().item() if num_tokens else 0
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * largest)


@pytest.mark.parametrize(("format", "activation"), _FIRST)
def test_triton_a_token_gets_the_same_from_quantised_experts_alone_and_from_every_tile(format, activation, monkeypatch):
    hidden, num_tokens = (128, 9) if INTERPRETING else (384, 21)
    weights, _ = experts(format, activation, hidden, 64)
    x, chosen = inputs(num_tokens, hidden), routing(num_tokens)
    plan = moe._plan_of(weights)
    want = run(x, weights, chosen)
    tiles = _moe_quantized.QUANTIZED_TILES[_moe_quantized.family_of(plan.gate_up, activation)]
    for some in [tiles[max(tiles)]] if INTERPRETING else tiles.values():
        got = moe.multiply_experts(x, plan.gate_up, plan.down, chosen, some, activation=activation)
        assert torch.equal(got, want)
    monkeypatch.setattr(moe, "_PROGRAMS", 1000)
    for i in range(5, num_tokens, 12):
        alone = Routing(chosen.expert_ids[i : i + 1], chosen.weights[i : i + 1])
        assert torch.equal(run(x[i : i + 1], weights, alone)[0], want[i])


@pytest.mark.parametrize(("format", "activation"), _FIRST)
def test_triton_choices_of_quantised_experts_that_are_elsewhere_are_skipped(format, activation):
    """As if they had no weight; experts 1 and 2 are here."""
    weights, _ = experts(format, activation, 128, 64)
    some = ExpertWeights(weights.gate_up[1:3], weights.down[1:3], activation, num_everywhere=NUM_EXPERTS)
    for num_tokens in (1, 7):
        x, chosen = inputs(num_tokens, 128), routing(num_tokens)
        here = (chosen.expert_ids == 1) | (chosen.expert_ids == 2)
        want = run(x, weights, Routing(chosen.expert_ids, chosen.weights * here))
        torch.use_deterministic_algorithms(True)  # memory that was not written is NaN
        try:
            got = run(x, some, Routing(chosen.expert_ids - 1, chosen.weights))
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(got, want)


@pytest.mark.parametrize("format", [MXFP4, FP8_BLOCK, FP8_BLOCK_UE8M0], ids=lambda format: format.name)
@pytest.mark.parametrize(("rows", "columns"), [(192, 256), (72, 96)])
def test_triton_experts_are_laid_out_where_they_are(format, rows, columns):
    weights = filled(rows, columns, 0, format)
    before, places = copied(weights), [weight.values.data_ptr() for weight in weights]
    made = prepare_experts(weights)
    assert [weight.values.data_ptr() for weight in made] == places
    for parts in ([weight.values for weight in made], [weight.scales for weight in made]):
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    if columns % 128 == 0:
        assert made[0].values.untyped_storage().nbytes() == NUM_EXPERTS * before[0].values.nbytes
    for weight, original in zip(made, before, strict=True):
        back = unpack_weight(weight)
        assert isinstance(back, QTensor)
        assert torch.equal(back.dequantize(), original.dequantize())


def test_triton_a_layers_quantised_experts_are_laid_out_together():
    layer = Experts(
        NUM_EXPERTS,
        128,
        64,
        mesh=Mesh.single(),
        dtype=BF16,
        device=DEVICE,
        quantization=LinearFormat(MXFP4, MXFP8),
        swiglu_limit=0.5,
    )
    for module in layer.modules():
        for name, weight in module.quantized() if hasattr(module, "quantized") else ():
            fill_dummy_quantized(weight, name)
    before = layer.weights()
    plain = ExpertWeights(copied(before.gate_up), copied(before.down), MXFP8, 0.5)
    prepare_weights(layer)
    x, chosen = inputs(5, 128), routing(5)
    got = run(x, layer.weights(), chosen)
    want = fused_experts.reference(x, plain, chosen)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * want.abs().max().item())
    for name, parameter in layer.named_parameters():
        if name.endswith("weight"):
            assert parameter.untyped_storage().nbytes() == NUM_EXPERTS * parameter.nbytes


@pytest.mark.skipif(INTERPRETING, reason="the interpreter records nothing")
@pytest.mark.parametrize("num_tokens", [1, 9, 700])
@pytest.mark.parametrize(("format", "activation"), [(MXFP4, MXFP8), (FP8_BLOCK, FP8_ROW)])
def test_triton_a_recorded_graph_of_quantised_experts_routes_anew(format, activation, num_tokens):
    weights, _ = experts(format, activation, 256, 128)
    x, chosen = inputs(num_tokens, 256), routing(num_tokens)
    run(x, weights, chosen)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(x, weights, chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run(x, weights, chosen)
    chosen.expert_ids.copy_((chosen.expert_ids + 1) % NUM_EXPERTS)
    graph.replay()
    assert torch.equal(recorded, run(x, weights, chosen))


def test_triton_quantised_experts_refuse_what_they_do_not_take():
    weights, plain = experts(MXFP4, None, 128, 64)
    x, chosen = inputs(3, 128), routing(3)

    def refusal(given: ExpertWeights, x: torch.Tensor = x) -> str:
        return fused_experts.explain(x, given, chosen)["triton"]

    assert "experts in mxfp4 are not laid out for it" in refusal(plain)
    assert "needs x in torch.bfloat16" in refusal(weights, x.float())
    assert "got mxfp4" in refusal(ExpertWeights(weights.gate_up, weights.down, MXFP4))
    mixed = (*weights.gate_up[1:], weights.gate_up[0])
    assert "as prepare_experts lays them out" in refusal(ExpertWeights(mixed, weights.down))
    fp8, _ = experts(FP8_BLOCK, None, 128, 64)
    assert "needs weights of one kind, got mxfp4 and fp8_block" in refusal(ExpertWeights(weights.gate_up, fp8.down))
    assert "as allocate_experts makes them" in prepare_experts.explain(plain.gate_up)["triton"]
    made = prepare_experts.reference(plain.gate_up)  # then each is laid out by itself
    assert torch.equal(made[1].dequantize(), plain.gate_up[1].dequantize())
