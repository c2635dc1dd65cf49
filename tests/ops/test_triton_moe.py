"""Mixture of experts by the Triton kernels: what the reference says, whatever the shapes, and the same for a token
whatever its company.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from rorqual.layers.moe import Experts
from rorqual.loader.weights import prepare_weights
from rorqual.ops.linear import linear
from rorqual.ops.moe import ExpertWeights, Routing, allocate_experts, fused_experts, route_softmax
from rorqual.ops.registry import load_backends
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization import FP8_ROW
from rorqual.quantization.integer import Q8_0, IntegerWeight
from tests.ops.cases import normal
from tests.ops.values import every_other

if not available():
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)
load_backends("triton")
from rorqual.ops.triton import moe  # noqa: E402

pytestmark = [] if INTERPRETING else [pytest.mark.gpu]
DEVICE = torch.device("cpu" if INTERPRETING else "cuda")
BF16 = torch.bfloat16
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 128, 72, 5, 3


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """Full tiles, which small products would not have: the interpreter runs one program after the other."""
    if INTERPRETING:
        monkeypatch.setattr(moe, "_PROGRAMS", 1)


@pytest.fixture
def spoilt_memory():
    """Memory that was not written is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def filled(count: int, rows: int, columns: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    made = allocate_experts(count, rows, columns, dtype=dtype, device=DEVICE)
    for number, weight in enumerate(made):
        weight.copy_(normal(rows, columns, seed=seed + number) * columns**-0.5)
    return made


def experts(count: int = NUM_EXPERTS, hidden: int = HIDDEN, inner: int = INNER, dtype=BF16) -> ExpertWeights:
    return ExpertWeights(filled(count, 2 * inner, hidden, 0, dtype), filled(count, hidden, inner, 1000, dtype))


def routing(num_tokens: int, count: int = NUM_EXPERTS, top_k: int = TOP_K, dtype=BF16) -> Routing:
    """Each token's experts in an order of its own."""
    ids = normal(num_tokens, count, seed=3).argsort(1)[:, :top_k]
    return Routing(ids.to(DEVICE), normal(num_tokens, top_k, seed=4).softmax(1).to(DEVICE, dtype))


def inputs(num_tokens: int, hidden: int = HIDDEN, dtype=BF16) -> torch.Tensor:
    return normal(num_tokens, hidden, seed=7).to(DEVICE, dtype)


def run(x: torch.Tensor, weights: ExpertWeights, chosen: Routing) -> torch.Tensor:
    assert fused_experts.explain(x, weights, chosen)["triton"] == "ok"
    return fused_experts(x, weights, chosen)


def expected(x: torch.Tensor, weights: ExpertWeights, chosen: Routing) -> torch.Tensor:
    """The reference in float64, which no kernel is for, rounded where an answer in x's dtype would be."""
    wide = [tuple(w.cpu().double() for w in part) for part in (weights.gate_up, weights.down)]
    rows = []
    for values, ids, shares in zip(x.cpu(), chosen.expert_ids.tolist(), chosen.weights.cpu().double(), strict=True):
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for expert, share in zip(ids, shares, strict=True):
            both = linear.reference(values.double(), wide[0][expert]).to(x.dtype)
            total += share * linear.reference(silu_and_mul.reference(both).double(), wide[1][expert])
        rows.append(total)
    return torch.stack(rows) if rows else x.cpu().double()


def assert_right(x: torch.Tensor, weights: ExpertWeights, chosen: Routing) -> None:
    got, want = run(x, weights, chosen), expected(x, weights, chosen)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    step = {BF16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[x.dtype]
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=step, atol=step * (want.abs().max().item() if len(x) else 0)
    )


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 37])
def test_triton_experts_are_right(num_tokens, dtype):
    assert_right(inputs(num_tokens, dtype=dtype), experts(dtype=dtype), routing(num_tokens, dtype=dtype))


@pytest.mark.parametrize(
    ("count", "top_k", "hidden", "inner"), [(1, 1, 64, 32), (5, 5, 10, 6), (130, 2, 72, 40), (4, 3, 200, 33)]
)
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_triton_experts_of_any_number_and_size(num_tokens, count, top_k, hidden, inner):
    assert_right(inputs(num_tokens, hidden), experts(count, hidden, inner), routing(num_tokens, count, top_k))


@pytest.mark.parametrize("num_tokens", [17, 150])
def test_triton_one_expert_for_all(num_tokens):
    """Whole tiles, and a last one that is more or less than half full."""
    x, weights, chosen = inputs(num_tokens), experts(), routing(num_tokens, top_k=1)
    chosen.expert_ids.fill_(NUM_EXPERTS - 1)
    assert_right(x, weights, chosen)
    plan = moe._plan_of(weights)
    few, many = (moe.multiply_experts(x, plan.gate_up, plan.down, chosen, moe.TILES[most]) for most in (4, 128))
    assert torch.equal(few, many)


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_triton_gate_and_up_keep_within_the_limit(num_tokens):
    plain, x, chosen = experts(), 3 * inputs(num_tokens), routing(num_tokens)
    limited = ExpertWeights(plain.gate_up, plain.down, swiglu_limit=0.5)
    got, want = run(x, limited, chosen), fused_experts.reference(x, limited, chosen)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * want.abs().max().item())
    assert not torch.allclose(got, run(x, plain, chosen), rtol=0.1)


def test_triton_an_expert_chosen_twice_counts_twice():
    ids = torch.tensor([[4, 4], [0, 4]], device=DEVICE)
    shares = torch.tensor([[0.25, 0.75], [0.5, 0.5]], dtype=BF16, device=DEVICE)
    assert_right(inputs(2), experts(), Routing(ids, shares))
    assert_right(inputs(1), experts(), Routing(ids[:1], shares[:1]))


def test_triton_experts_take_rows_and_columns_apart():
    wide, weights, chosen = inputs(9, 2 * HIDDEN), experts(), routing(9)
    spread = Routing(every_other(chosen.expert_ids), every_other(chosen.weights))
    for x in (wide[:, :HIDDEN], wide[:, ::2], every_other(inputs(9))):
        assert torch.equal(run(x, weights, spread), run(x.contiguous(), weights, chosen))


@pytest.mark.parametrize("tiles", moe.TILES.values(), ids=[f"up_to_{most}" for most in moe.TILES])
def test_triton_a_token_gets_the_same_alone_and_from_every_tile(tiles, monkeypatch):
    """The tiles of few and of many rows, whole and partly used; a token's own tile is the first when it is alone."""
    x, weights, chosen = inputs(30), experts(), routing(30)
    plan = moe._plan_of(weights)
    together = moe.multiply_experts(x, plan.gate_up, plan.down, chosen, tiles)
    for i in range(0, 30, 4):
        alone = Routing(chosen.expert_ids[i : i + 1], chosen.weights[i : i + 1])
        assert torch.equal(run(x[i : i + 1], weights, alone)[0], together[i])
    monkeypatch.setattr(moe, "_PROGRAMS", 1000)
    company = torch.arange(29, -1, -3, device=DEVICE)
    some = run(x[company], weights, Routing(*(part[company] for part in chosen)))
    assert torch.equal(some, together[company])


@pytest.mark.parametrize(
    ("num_tokens", "count", "top_k", "hidden", "inner"),
    [(40, 3, 2, 128, 192), (9, 4, 1, 64, 64)]
    if INTERPRETING
    else [(700, 3, 2, 320, 192), (3000, 5, 1, 64, 64), (900, 128, 8, 512, 128), (2500, 7, 3, 576, 256)],
)
@pytest.mark.parametrize("uneven", [False, True])
def test_triton_specialised_warps_give_the_bits_of_every_tile(num_tokens, count, top_k, hidden, inner, uneven):
    """Where the kernel cannot be, other tiles stand in for it."""
    x, weights = inputs(num_tokens, hidden), experts(count, hidden, inner)
    chosen = routing(num_tokens, count, top_k)
    if uneven:
        chosen.expert_ids[: num_tokens // 2] = torch.arange(count - top_k, count, device=DEVICE)
    plan = moe._plan_of(weights)
    hopper = not INTERPRETING and torch.cuda.get_device_capability() == (9, 0)
    assert moe._hopper_experts.takes_product(x, plan.gate_up) is hopper
    got = moe.multiply_experts(x, plan.gate_up, plan.down, chosen, moe.SPECIALIZED)
    for most in (4, 128):
        assert torch.equal(got, moe.multiply_experts(x, plan.gate_up, plan.down, chosen, moe.TILES[most]))


def test_triton_an_id_that_is_no_experts_spoils_its_own_token_only():
    x, weights, chosen = inputs(7), experts(), routing(7)
    want = run(x, weights, chosen)
    for wrong in (-1, NUM_EXPERTS, 1 << 20):
        chosen.expert_ids[5, 1] = wrong
        got = run(x, weights, chosen)
        others = [i for i in range(7) if i != 5]
        assert torch.equal(got[others], want[others])
        run(x[5:6], weights, Routing(*(part[5:6] for part in chosen)))  # reads no memory that is not there


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_triton_choices_that_are_elsewhere_are_skipped(num_tokens, spoilt_memory):
    """As if they had no weight; experts 1, 2 and 3 are here, whose numbers begin with 0."""
    x, weights, chosen = inputs(num_tokens), experts(), routing(num_tokens)
    here = (chosen.expert_ids >= 1) & (chosen.expert_ids < 4)
    want = run(x, weights, Routing(chosen.expert_ids, chosen.weights * here))
    some = ExpertWeights(weights.gate_up[1:4], weights.down[1:4], num_everywhere=NUM_EXPERTS)
    assert torch.equal(run(x, some, Routing(chosen.expert_ids - 1, chosen.weights)), want)
    nobody = Routing(torch.where(here, -1, 1 << 20), chosen.weights)
    assert not run(x, some, nobody).any()


@pytest.mark.skipif(INTERPRETING, reason="the interpreter records nothing")
@pytest.mark.parametrize("num_tokens", [1, 9, 2000])
def test_triton_a_recorded_graph_routes_anew_and_the_host_never_waits(num_tokens):
    weights, logits = experts(), normal(num_tokens, NUM_EXPERTS, seed=1).to(DEVICE, BF16)
    x = inputs(num_tokens)

    def step() -> torch.Tensor:
        return run(x, weights, route_softmax(logits, top_k=TOP_K, renormalize=True))

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for seed in (1, 2, 3):
        logits.copy_(normal(num_tokens, NUM_EXPERTS, seed=seed))
        x.copy_(normal(num_tokens, HIDDEN, seed=seed + 10))
        graph.replay()
        assert torch.equal(recorded, step())


# --- the order of pairs


def cover(table: torch.Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of every tile that is needed; those that are not come last."""
    tiles = [tuple(tile) for tile in table.t().tolist()]
    needed = [tile for tile in tiles if tile[0] >= 0]
    assert all(tile[0] == -1 for tile in tiles[len(needed) :])
    return needed


@pytest.mark.parametrize(("chunks", "together"), [((128,), 1), ((128,), 4), (moe._CHUNKS, 1)])
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "count", "top_k"),
    [(2, 4, 2), (33, 7, 3), (150, 6, 3), (150, 16, 4), (30, 140, 5), (64, 3, 3), (50, 1, 1)],
)
def test_triton_order_is_stable_by_expert_and_tiles_cover_it(
    num_tokens, count, top_k, block_m, chunks, together, monkeypatch
):
    monkeypatch.setattr(moe, "_CHUNKS", chunks)
    monkeypatch.setattr(moe, "_EXPERTS_TOGETHER", together)
    ids = normal(num_tokens, count, seed=5).argsort(1)[:, :top_k]
    if count > 2:
        ids[ids == 1] = 2  # nobody chooses it
    order, table = moe._order(ids.contiguous().to(DEVICE), count, block_m)
    flat = ids.flatten()
    assert torch.equal(order.cpu().long(), flat.argsort(stable=True))
    want, start = [], 0
    for expert, rows in enumerate(flat.bincount(minlength=count).tolist()):
        want += [(expert, start + i, start + min(i + block_m, rows)) for i in range(0, rows, block_m)]
        start += rows
    assert cover(table) == want


def test_triton_most_tiles_is_the_least_bound():
    for num_pairs in range(1, 12):
        for num_experts in range(1, 5):
            for block_m in (1, 2, 4):
                found = max(sum(-(-n // block_m) for n in counts) for counts in splits(num_pairs, num_experts))
                assert moe.most_tiles(num_pairs, num_experts, block_m) == found


def splits(total: int, parts: int) -> list[tuple[int, ...]]:
    if parts == 1:
        return [(total,)]
    return [(first, *rest) for first in range(total + 1) for rest in splits(total - first, parts - 1)]


# --- routing


def test_triton_routing_knows_equal_logits_both_zeros_and_what_is_excluded():
    logits = torch.tensor(
        [[0.0, -0.0, 1.0, 1.0], [-0.0, 0.0, -0.0, -1.0], [3.0, float("-inf"), float("-inf"), 3.0], [-2.0] * 4]
    ).to(DEVICE)
    for dtype in (torch.float32, BF16):
        got = route_softmax(logits.to(dtype), top_k=4, renormalize=True)
        assert route_softmax.explain(logits.to(dtype), top_k=4, renormalize=True)["triton"] == "ok"
        assert got.expert_ids.tolist() == [[2, 3, 0, 1], [0, 1, 2, 3], [0, 3, 1, 2], [0, 1, 2, 3]]
        torch.testing.assert_close(got.weights.sum(1).float(), torch.ones(4, device=DEVICE), rtol=2**-7, atol=0)


def test_triton_routing_of_logits_that_are_not_numbers_is_the_references():
    logits = torch.tensor([[1.0, float("nan"), 2.0, float("inf")]], device=DEVICE)
    got, want = (run(logits, top_k=3, renormalize=False) for run in (route_softmax, route_softmax.reference))
    assert torch.equal(got.expert_ids, want.expert_ids)
    assert got.weights.isnan().all()


def test_triton_routing_refuses_what_it_does_not_take():
    def refusal(logits: torch.Tensor, top_k: int) -> str:
        return route_softmax.explain(logits.to(DEVICE), top_k=top_k, renormalize=True)["triton"]

    assert "chooses 1 to 4 experts, got 5" in refusal(torch.zeros(2, 4), 5)
    assert "got torch.float64 for 4" in refusal(torch.zeros(2, 4, dtype=torch.float64), 1)
    assert "up to 1024 experts" in refusal(torch.zeros(2, 2000), 1)


# --- weights


def test_triton_experts_refuse_what_they_do_not_take():
    x, weights, chosen = inputs(4), experts(), routing(4)

    def refusal(x=x, weights=weights, chosen=chosen) -> str:
        return fused_experts.explain(x, weights, chosen)["triton"]

    def both(**changes: Any) -> ExpertWeights:
        return ExpertWeights(**({"gate_up": weights.gate_up, "down": weights.down} | changes))

    apart = tuple(w.clone() for w in weights.gate_up)
    assert "lie one after the other, as allocate_experts makes them" in refusal(weights=both(gate_up=apart))
    assert "lie one after the other" in refusal(weights=both(down=weights.down[::-1]))
    integers = tuple(IntegerWeight.quantize(w.float(), Q8_0) for w in weights.gate_up)
    assert "plain weights, FP8 and MXFP4, got IntegerWeight" in refusal(weights=both(gate_up=integers))
    assert "does not quantise its inputs to fp8_row" in refusal(weights=both(activation=FP8_ROW))
    other = filled(NUM_EXPERTS, HIDDEN, 2 * INNER, 0, BF16)
    assert "needs gate_up [2 n, m] and down [m, n], got [144, 128] and [128, 144]" in refusal(weights=both(down=other))
    assert "needs x in torch.bfloat16 beside these weights" in refusal(x=x.float())
    assert "needs rows of 128 values" in refusal(x=x[:, :64])
    assert "one for each token that is routed" in refusal(x=x[:3])
    assert "needs int64 ids" in refusal(chosen=Routing(chosen.expert_ids.int(), chosen.weights))
    for refused in (both(gate_up=apart), both(down=weights.down[::-1])):  # and then the reference takes it
        assert fused_experts(x, refused, chosen).shape == x.shape


def test_triton_a_layers_experts_lie_in_one_piece_of_memory():
    layer = Experts(4, 64, 32, mesh=Mesh.single(), dtype=BF16, device=DEVICE)
    for name, parameter in layer.named_parameters():
        parameter.data.copy_(normal(*parameter.shape, seed=len(name) + int(name.split(".")[1])))
    before = layer.weights()
    prepare_weights(layer)
    after, chosen = layer.weights(), routing(5, 4, 2)
    if not INTERPRETING:  # a CPU's own kernels may have laid them out anew
        assert [w.data_ptr() for w in after.gate_up] == [w.data_ptr() for w in before.gate_up]
    for weights in (before.gate_up, before.down):
        memory = {weight.untyped_storage().data_ptr() for weight in weights}
        assert len(memory) == 1
        assert weights[0].untyped_storage().nbytes() == sum(w.nbytes for w in weights)
    assert_right(inputs(5, 64), before, chosen)
