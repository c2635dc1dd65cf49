"""The references, which define every op, against independent formulas: plain loops and float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from rorqual.ops.attention import paged_attention
from rorqual.ops.linear import prepare_weight
from rorqual.ops.moe import ExpertWeights, Routing, fused_experts, route_scores, route_softmax
from rorqual.ops.rope import rotary_embedding
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.ops.store_kvcache import store_kvcache
from rorqual.ops.sum_in_order import sum_in_order
from tests.ops.cases import CASES, normal
from tests.ops.paged_cases import ATTENTION_CASES, STORE_CASES, PagedCase, make_caches

BF16 = torch.bfloat16
ONE_ROUNDING = {torch.float32: 2e-6, BF16: 2**-8, torch.float16: 2**-11}
"""Relative error of a value that was rounded once, with room for a float32 sum."""


def array(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def assert_near(got: torch.Tensor, want: np.ndarray, *, atol: float = 1e-6) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(array(got), want, rtol=ONE_ROUNDING[got.dtype], atol=atol)


# --- attention


def plain_attention(case: PagedCase) -> np.ndarray:
    """One query, one head at a time; a key is seen if it is not later, and fewer than `window` tokens back."""
    window = case.options.get("sliding_window", math.inf)
    cap, sinks = case.options.get("soft_cap"), case.options.get("sinks")
    out, row = np.zeros(case.query.shape), 0
    for keys, values, length in zip(case.keys, case.values, case.batch.query_lens, strict=True):
        keys, values = (array(x.to(case.key_cache.dtype)) for x in (keys, values))  # noqa: PLW2901
        for position in range(len(keys) - length, len(keys)):
            seen = [i for i in range(len(keys)) if i <= position and position - i < window]
            for head in range(case.query.shape[1]):
                kv_head = head * keys.shape[1] // case.query.shape[1]
                scores = keys[seen, kv_head] @ array(case.query[row, head]) * case.options["scale"]
                scores = scores if cap is None else cap * np.tanh(scores / cap)
                weights = np.exp(scores)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head].item()))
                out[row, head] = weights / total @ values[seen, kv_head]
            row += 1
    return out


@pytest.mark.parametrize("name", [name for name in ATTENTION_CASES if "spread" not in name and "beyond" not in name])
def test_paged_attention_is_softmax_over_what_each_token_sees(name):
    case = ATTENTION_CASES[name]()
    got = paged_attention.reference(*case.args, **case.options)
    assert got.dtype == case.query.dtype
    assert_near(got, plain_attention(case), atol=1e-5)


def test_ro6_window_counts_the_query_itself():
    """Window 4 sees keys q-3 to q: with equal scores, the mean of their values."""
    for context in (3, 4, 5, 8):
        case = ATTENTION_CASES["window_edge"]()
        values = torch.arange(float(context)).view(-1, 1, 1)
        value_cache = make_caches(3, 4, 1, 1, layout="heads", dtype=torch.float32)[0]
        value_cache.view(-1)[:context] = values.view(-1)
        batch = type(case.batch)(**{**_fields(case.batch), "query_lens": (1,), "context_lens_host": (context,)})
        table = torch.arange(3, dtype=torch.int32)[None]
        out = paged_attention.reference(
            torch.zeros(1, 1, 1), torch.zeros(3, 4, 1, 1), value_cache, batch, table, scale=1.0, sliding_window=4
        )
        assert out.item() == pytest.approx(values[-4:].mean().item())


def _fields(batch):
    return {name: getattr(batch, name) for name in batch.__dataclass_fields__}


# --- storing keys and values


@pytest.mark.parametrize("name", STORE_CASES)
def test_mo5_store_writes_owned_slots_and_nothing_else(name):
    (key, value, key_cache, value_cache, slots), _ = STORE_CASES[name]()
    for cache in (key_cache, value_cache):
        cache.copy_(normal(*cache.shape, seed=8))
    before = [array(cache).copy() for cache in (key_cache, value_cache)]
    block_size = key_cache.shape[1]
    assert store_kvcache.reference(key, value, key_cache, value_cache, slots) is None
    for rows, cache, want in zip((key, value), (key_cache, value_cache), before, strict=True):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                want[slot // block_size, slot % block_size] = array(rows[token].to(cache.dtype))
        np.testing.assert_array_equal(array(cache), want)


def test_mo5_a_padded_row_of_nan_reaches_nothing():
    key = torch.full((3, 1, 2), float("nan"))
    key[1] = 1.0
    cache = torch.zeros(2, 4, 1, 2)
    store_kvcache.reference(key, key, cache, cache.clone(), torch.tensor([-1, 6, -1]))
    assert cache.sum() == 2
    assert cache[1, 2].tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("store", [store_kvcache.reference, store_kvcache])
def test_an_fp8_cache_saturates_and_keeps_nan(store, layout):
    row = [448.0, 449.0, 1e30, float("inf"), -500.0, float("-inf"), float("nan"), 2.0**-10, -(2.0**-10), 17.0, 19.0]
    want = np.array([448, 448, 448, 448, -448, -448, np.nan, 0.0, -0.0, 16, 20])  # ties to even
    caches = make_caches(2, 4, 1, len(row), layout=layout, dtype=torch.float8_e4m3fn)
    store(torch.tensor([[row]]), -torch.tensor([[row]]), *caches, torch.tensor([5]))
    for cache, sign in zip(caches, (1, -1), strict=True):
        got = array(cache.float())
        np.testing.assert_array_equal(got[1, 1, 0], sign * want)
        numbers = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(got[1, 1, 0])[numbers], np.signbit(sign * want)[numbers])
        assert np.isnan(got).sum() == 7 * len(row) + 1  # the other slots are as they were


# --- gate, rotation, products


@pytest.mark.parametrize("name", CASES["silu_and_mul"])
def test_silu_and_mul_is_its_formula(name):
    (gate_up,), options = CASES["silu_and_mul"][name]()
    limit = options.get("limit", np.inf)
    gate, up = np.split(array(gate_up), 2, axis=-1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    want = gate / (1 + np.exp(-gate)) * up
    got = silu_and_mul.reference(gate_up, **options)
    np.testing.assert_allclose(array(got), want, rtol=2 * ONE_ROUNDING[got.dtype], atol=1e-5)


@pytest.mark.parametrize("name", CASES["rotary_embedding"])
def test_rotary_embedding_multiplies_complex_numbers(name):
    """A pair of channels is a complex number, the table's entry another."""
    (query, positions, cos_sin), options = CASES["rotary_embedding"][name]()
    half, offset, key = cos_sin.shape[1] // 2, options.get("offset", 0), options.get("key")
    wants = []
    for given in (query, key):
        if given is None:
            continue
        want = array(given).copy()
        for token, position in enumerate(positions.tolist()):
            for pair in range(half):
                at = (2 * pair, 2 * pair + 1) if options.get("interleaved") else (pair, pair + half)
                first, second = (want[token, :, offset + channel].copy() for channel in at)
                turn = complex(float(cos_sin[position, pair]), float(cos_sin[position, pair + half]))
                turned = (first + 1j * second) * (turn.conjugate() if options.get("conjugate") else turn)
                want[token, :, offset + at[0]], want[token, :, offset + at[1]] = turned.real, turned.imag
        wants.append((given, want))
    got = [x for x in rotary_embedding.reference(query, positions, cos_sin, **options) if x is not None]
    assert len(got) == len(wants)
    for ours, (given, want) in zip(got, wants, strict=True):
        assert ours.dtype == given.dtype
        assert (ours is given) == options.get("inplace", False)
        assert_near(ours, want)


# --- mixture of experts

LOGITS = {
    "random": normal(9, 16),
    "mo3_all_negative": -normal(9, 128).abs(),
    "mo3_far_below_zero": -normal(9, 16).abs() * 50 - 300,
    "mo3_all_equal": torch.full((3, 8), -2.0),
    "mo3_one_extreme": torch.full((2, 8), -1.0).index_fill(1, torch.tensor([5]), 3e38),
    "mo3_lowest_values": torch.full((2, 8), -3e38).index_fill(1, torch.tensor([2, 6]), -1e38),
    "bfloat16": normal(9, 16).to(BF16),
}


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("name", LOGITS)
def test_mo3_routing_takes_the_experts_of_topk_over_softmax(name, renormalize):
    logits, top_k = LOGITS[name], 3
    routing = route_softmax.reference(logits, top_k=top_k, renormalize=renormalize)
    want = logits.float().softmax(-1).sort(descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(routing.expert_ids, want)  # of equal ones, the lowest number first

    wide = array(logits)
    probabilities = np.exp(wide - wide.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    chosen = np.take_along_axis(probabilities, array(routing.expert_ids).astype(int), -1)
    best = -np.sort(-probabilities, axis=-1)[:, :top_k]
    np.testing.assert_allclose(chosen, best, rtol=1e-6)  # no expert left out is better; ties may fall either way
    if renormalize:
        chosen = chosen / chosen.sum(-1, keepdims=True)
    assert routing.weights.dtype == logits.dtype
    assert_near(routing.weights, chosen)
    assert all(len(set(row)) == top_k for row in routing.expert_ids.tolist())


@pytest.mark.parametrize("name", CASES["route_scores"])
def test_routing_by_scores_is_its_formula_token_by_token(name):
    (logits,), options = CASES["route_scores"][name]()
    routing = route_scores.reference(logits, **options)
    assert routing.expert_ids.dtype is torch.int64
    assert routing.weights.dtype is torch.float32
    wide, top_k, bias, table = array(logits), options["top_k"], options.get("bias"), options.get("table")
    num_groups, top_groups = options.get("num_groups", 1), options.get("top_groups", 1)
    scores = 1 / (1 + np.exp(-wide)) if options["scoring"] == "sigmoid" else np.sqrt(np.logaddexp(0, wide))
    num_experts = wide.shape[1]
    for token, row in enumerate(scores):
        if table is not None:
            chosen = table.expert_ids[int(table.token_ids[token])].tolist()
        else:
            # Which of equal ones wins is about float32 numbers, whatever their last bits are.
            single = logits[token].sigmoid() if options["scoring"] == "sigmoid" else F.softplus(logits[token]).sqrt()
            choice = (single if bias is None else single + bias).tolist()
            size = num_experts // num_groups
            groups = [choice[start : start + size] for start in range(0, num_experts, size)]
            kept = range(num_groups)
            if top_groups < num_groups:
                best = [float(np.float32(sum(sorted(group)[-2:]))) for group in groups]
                kept = sorted(range(num_groups), key=lambda group: (-best[group], group))[:top_groups]
            allowed = [e for e in range(num_experts) if e // size in kept]
            chosen = sorted(allowed, key=lambda e: (-choice[e], e))[:top_k]
        assert routing.expert_ids[token].tolist() == chosen
        weights = row[chosen]
        if options["renormalize"]:
            weights = weights / (weights.sum() + 1e-20)
        np.testing.assert_allclose(array(routing.weights[token]), weights * options["scale"], rtol=2e-6, atol=1e-37)


def test_masked_experts_are_never_chosen_where_biases_are_negative():
    """A mask of zeros in place of minus infinity would let them win."""
    logits, bias = torch.zeros(1, 8), torch.tensor([-3.0, -3, -2, -2, -1, -1, -4, -4])
    options = {"scoring": "sigmoid", "renormalize": True, "num_groups": 4, "bias": bias}
    assert route_scores.reference(logits, top_k=2, top_groups=1, **options).expert_ids.tolist() == [[4, 5]]
    assert route_scores.reference(logits, top_k=4, top_groups=2, **options).expert_ids.tolist() == [[4, 5, 2, 3]]


def test_a_group_is_as_good_as_its_two_best_experts():
    """Not as its best one, nor all of them; and the bias counts."""
    bias = torch.tensor([0.9, 0, 0, 0.5, 0.5, 0, 0.4, 0.4, 0.4])
    options = {"scoring": "sigmoid", "renormalize": True, "num_groups": 3, "top_groups": 1, "bias": bias}
    assert route_scores.reference(torch.zeros(1, 9), top_k=3, **options).expert_ids.tolist() == [[3, 4, 5]]


def test_the_bias_chooses_and_has_no_part_in_the_weights():
    bias = torch.tensor([0.0, 5, 0, -5])
    got = route_scores.reference(torch.ones(1, 4), scoring="sigmoid", top_k=2, renormalize=True, scale=3.0, bias=bias)
    assert got.expert_ids.tolist() == [[1, 0]]
    torch.testing.assert_close(got.weights, torch.tensor([[1.5, 1.5]]))


def test_the_limit_is_applied_before_silu():
    """silu(20) clamped would be 10, silu(10) is a little less; and gate has no lower limit, up has one."""
    got = silu_and_mul.reference(torch.tensor([[20.0, -20.0, 1.0, 2.0, 3.0, -20.0]]), limit=10.0)
    silu = [x / (1 + np.exp(-x)) for x in (10.0, -20.0, 1.0)]
    np.testing.assert_allclose(array(got)[0], [silu[0] * 2, silu[1] * 3, silu[2] * -10], rtol=1e-6)
    assert got[0, 0] < 20


@pytest.mark.parametrize("name", CASES["fused_experts"])
def test_fused_experts_is_the_sum_over_each_tokens_experts(name):
    (x, experts, routing), _ = CASES["fused_experts"][name]()
    want = np.zeros(x.shape)
    for token in range(len(x)):
        for expert, weight in zip(routing.expert_ids[token].tolist(), routing.weights[token].tolist(), strict=True):
            gate, up = np.split(array(experts.gate_up[expert]) @ array(x[token]), 2)
            if experts.swiglu_limit is not None:
                gate, up = (
                    np.minimum(gate, experts.swiglu_limit),
                    np.clip(up, -experts.swiglu_limit, experts.swiglu_limit),
                )
            want[token] += weight * (array(experts.down[expert]) @ (gate / (1 + np.exp(-gate)) * up))
    got = fused_experts.reference(x, experts, routing)
    assert got.dtype == x.dtype
    step = 2**-7 if x.dtype == BF16 else 1e-6  # rounded after every product
    np.testing.assert_allclose(array(got), want, rtol=step, atol=3 * step * np.abs(want).max(initial=0))


@pytest.mark.parametrize("name", CASES["sum_in_order"])
def test_sum_in_order_is_its_formula(name):
    (parts,), options = CASES["sum_in_order"][name]()
    got = sum_in_order.reference(parts, **options)
    assert (got.dtype, got.shape) == (parts.dtype, parts.shape[1:])
    exact = array(parts).sum(0)
    steps = torch.finfo(parts.dtype).eps * np.abs(exact) / 2 + 1e-6 * np.abs(array(parts)).sum(0)
    assert (np.abs(array(got) - exact) <= steps).all()


def test_sum_in_order_adds_the_first_first():
    parts = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)]).view(4, 1, 1)
    assert sum_in_order.reference(parts).item() == 0.0
    assert sum_in_order.reference(parts.flip(0)).item() == 2.0


def test_experts_take_prepared_weights():
    (x, experts, routing), _ = CASES["fused_experts"]["bfloat16"]()
    want = fused_experts.reference(x, experts, routing)
    prepared = (tuple(prepare_weight(w) for w in part) for part in (experts.gate_up, experts.down))
    got = fused_experts.reference(x, ExpertWeights(*prepared), routing)
    torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6 * want.abs().max().item())


def test_experts_that_no_token_chose_are_not_computed():
    nan = torch.full((4, 2), float("nan"))
    gate_up, down = (nan, torch.ones(4, 2), nan), (nan.view(2, 4)[:, :2], torch.ones(2, 2), nan.view(2, 4)[:, :2])
    routing = Routing(torch.tensor([[1], [1]]), torch.ones(2, 1))
    out = fused_experts.reference(torch.ones(2, 2), ExpertWeights(gate_up, down), routing)
    assert bool(out.isfinite().all())
