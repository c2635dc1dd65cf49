"""The kernels of a mixture of experts: equal to the bit to the single kernels that they stand for, whatever a token's
company is, and near to formulas in float64.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from rorqual.ops.decoder_blocks import Norm, Product
from rorqual.ops.linear import linear, prepare_weight
from rorqual.ops.moe import (
    ExpertWeights,
    Routing,
    SparseMoEBlock,
    fused_experts,
    route_scores,
    route_softmax,
    sparse_moe_block,
)
from rorqual.ops.native.library import usable_isas, using
from rorqual.ops.registry import load_backends, watch
from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.quantization import FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_ROW_UE8M0, MXFP4, QTensor, QuantFormat
from rorqual.quantization.integer import Q4_1, Q8_0, IntegerStack, IntegerWeight
from tests.ops.cases import normal
from tests.ops.values import every_other

load_backends("native", "cpu")
BF16 = torch.bfloat16
ISAS = pytest.mark.parametrize("isa", usable_isas())
KINDS = pytest.mark.parametrize("kind", ["bfloat16", "q4_1", "q8_0", "stacked", "weight_only", "unlike"])
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 128, 96, 9, 3


def matrix(kind: str, rows: int, columns: int, seed: int):
    plain = normal(rows, columns, seed=seed, dtype=BF16) * columns**-0.5
    if kind == "unlike":  # experts of all kinds beside each other
        kind = ["bfloat16", "q4_1", "q8_0", "stacked", "weight_only"][seed % 5]
    if kind == "bfloat16":
        return prepare_weight(plain)
    if kind == "stacked":
        cut = rows // 32 * 16
        parts = (IntegerWeight.quantize(plain[:cut], Q4_1), IntegerWeight.quantize(plain[cut:], Q8_0))
        return prepare_weight(IntegerStack(parts))
    format = Q4_1 if kind == "q4_1" else Q8_0
    return prepare_weight(IntegerWeight.quantize(plain, format, dynamic=kind != "weight_only"))


def weights(kind: str, num_experts: int = NUM_EXPERTS) -> ExpertWeights:
    return ExpertWeights(
        tuple(matrix(kind, 2 * INNER, HIDDEN, e) for e in range(num_experts)),
        tuple(matrix(kind, HIDDEN, INNER, 100 + e) for e in range(num_experts)),
    )


def routing(num_tokens: int, *, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K, seed: int = 3) -> Routing:
    """Each token's experts in an order of its own."""
    scores = normal(num_tokens, num_experts, seed=seed)
    return Routing(scores.argsort(1)[:, :top_k], normal(num_tokens, top_k, seed=seed + 1).softmax(1).to(BF16))


def inputs(num_tokens: int) -> torch.Tensor:
    return normal(num_tokens, HIDDEN, seed=7, dtype=BF16)


def assert_native(x: torch.Tensor, experts: ExpertWeights, chosen: Routing) -> None:
    assert fused_experts.explain(x, experts, chosen)["native"] == "ok"


@ISAS
@KINDS
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 40, 100])
def test_equals_its_single_kernels(isa, kind, num_tokens):
    with using(isa):
        x, experts, chosen = inputs(num_tokens), weights(kind), routing(num_tokens)
        assert_native(x, experts, chosen)
        assert torch.equal(fused_experts(x, experts, chosen), fused_experts.reference(x, experts, chosen))


def wide(chosen: Routing) -> Routing:
    """With weights that bfloat16 does not have."""
    return Routing(chosen.expert_ids, chosen.weights.float() * 1.2345678)


@ISAS
@KINDS
def test_float32_weights_are_fused_with_the_sum(isa, kind):
    with using(isa):
        x, experts, chosen = inputs(40), weights(kind), wide(routing(40))
        assert_native(x, experts, chosen)
        want = fused_experts.reference(x, experts, chosen).float()
        got = fused_experts(x, experts, chosen).float()
        assert torch.equal(got, want) or (got - want).abs().max() < 2**-8 * want.abs().max()
        rounded = fused_experts(x, experts, Routing(chosen.expert_ids, chosen.weights.bfloat16())).float()
        exact = sum(chosen.weights[:, i, None].double() * each_answer(x, experts, chosen, i) for i in range(TOP_K))
        assert (got - exact).abs().mean() < (rounded - exact).abs().mean() * 0.95


def each_answer(x: torch.Tensor, experts: ExpertWeights, chosen: Routing, choice: int) -> torch.Tensor:
    """What each token's expert of that choice answers."""
    one = Routing(chosen.expert_ids[:, choice : choice + 1], torch.ones(len(x), 1, dtype=BF16))
    return fused_experts.reference(x, experts, one).double()


@ISAS
@KINDS
@pytest.mark.parametrize("limit", [0.5, 0.3])
def test_the_limit_is_that_of_the_single_kernels(isa, kind, limit):
    with using(isa):
        x, experts, chosen = inputs(40), weights(kind), routing(40)
        limited = ExpertWeights(experts.gate_up, experts.down, None, limit)
        assert_native(x, limited, chosen)
        got = fused_experts(x, limited, chosen)
        assert torch.equal(got, fused_experts.reference(x, limited, chosen))
        assert not torch.equal(got, fused_experts(x, experts, chosen))


@ISAS
@KINDS
@pytest.mark.parametrize("with_weights", [lambda it: it, wide], ids=["bfloat16", "float32"])
def test_a_token_gets_the_same_alone(isa, kind, with_weights):
    with using(isa):
        x, experts, chosen = inputs(70), weights(kind), with_weights(routing(70))
        together = fused_experts(x, experts, chosen)
        for i in range(70):
            alone = Routing(chosen.expert_ids[i : i + 1], chosen.weights[i : i + 1])
            assert torch.equal(fused_experts(x[i : i + 1], experts, alone)[0], together[i])


@ISAS
def test_router_logits_in_float32_do_not_depend_on_a_tokens_company(isa):
    with using(isa):
        x, weight = inputs(70), matrix("bfloat16", 32, HIDDEN, 5)
        assert linear.explain(x, weight, out_dtype=torch.float32)["native"] == "ok"
        together = linear(x, weight, out_dtype=torch.float32)
        assert torch.equal(together, torch.cat([linear(row[None], weight, out_dtype=torch.float32) for row in x]))
        assert torch.equal(together.bfloat16(), linear(x, weight))


@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "stacked"])
def test_integers_are_the_same_wherever_multiply_and_add_are_fused(kind):
    x, experts, chosen = inputs(70), weights(kind), routing(70)
    found = []
    for isa in usable_isas():
        if isa != "generic":
            with using(isa):
                found.append(fused_experts(x, experts, chosen))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("num_tokens", [1, 50])
def test_threads_change_nothing(threads, num_tokens):
    x, experts, chosen, before = inputs(num_tokens), weights("q4_1"), routing(num_tokens), torch.get_num_threads()
    want = fused_experts.reference(x, experts, chosen)
    torch.set_num_threads(threads)
    try:
        got = fused_experts(x, experts, chosen)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (2, 2), (5, 5), (130, 1)])
def test_any_number_of_experts(num_experts, top_k):
    x, experts = inputs(20), weights("q8_0", num_experts)
    chosen = routing(20, num_experts=num_experts, top_k=top_k)
    assert_native(x, experts, chosen)
    assert torch.equal(fused_experts(x, experts, chosen), fused_experts.reference(x, experts, chosen))


@pytest.mark.parametrize("kind", ["bfloat16", "q4_1"])
def test_one_expert_for_all_and_more_tokens_than_are_taken_at_once(kind):
    x, experts = inputs(2100), weights(kind, 2)
    ids = torch.ones(2100, 1, dtype=torch.int64)
    ids[::100] = 0
    chosen = Routing(ids, normal(2100, 1, dtype=BF16))
    assert_native(x, experts, chosen)
    assert torch.equal(fused_experts(x, experts, chosen), fused_experts.reference(x, experts, chosen))


def test_rows_apart_and_columns_apart():
    experts, chosen = weights("q4_1"), routing(9)
    wide = normal(9, 2 * HIDDEN, seed=7, dtype=BF16)
    for x in (wide[:, :HIDDEN], wide[:, ::2], every_other(inputs(9))):
        assert torch.equal(fused_experts(x, experts, chosen), fused_experts.reference(x, experts, chosen))


def test_an_expert_chosen_twice_counts_twice():
    x, experts = inputs(1), weights("bfloat16")
    chosen = Routing(torch.tensor([[4, 4]]), torch.tensor([[0.25, 0.75]], dtype=BF16))
    assert torch.equal(fused_experts(x, experts, chosen), fused_experts.reference(x, experts, chosen))


@pytest.mark.parametrize("wrong", [-1, NUM_EXPERTS])
def test_an_expert_that_is_not_there_is_an_error(wrong):
    chosen = routing(4)
    chosen.expert_ids[2, 1] = wrong
    with pytest.raises(IndexError, match="experts are numbered from 0 to 8, got"):
        fused_experts(inputs(4), weights("bfloat16"), chosen)


@ISAS
@KINDS
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 40])
def test_choices_that_are_elsewhere_are_skipped(isa, kind, num_tokens):
    """As if they had no weight; experts 2, 3 and 4 are here, whose numbers begin with 0."""
    with using(isa):
        x, experts, chosen = inputs(num_tokens), weights(kind), routing(num_tokens)
        here = (chosen.expert_ids >= 2) & (chosen.expert_ids < 5)
        want = fused_experts(x, experts, Routing(chosen.expert_ids, chosen.weights * here))
        some = ExpertWeights(experts.gate_up[2:5], experts.down[2:5], num_everywhere=NUM_EXPERTS)
        shifted = Routing(chosen.expert_ids - 2, chosen.weights)
        assert_native(x, some, shifted)
        for run in (fused_experts, fused_experts.reference):
            assert torch.equal(run(x, some, shifted), want)


@pytest.mark.parametrize("kind", ["bfloat16", "q8_0"])
def test_no_choice_is_here(kind):
    experts = weights(kind, 2)
    some, chosen = ExpertWeights(experts.gate_up, experts.down, num_everywhere=9), routing(1100)
    chosen = Routing(torch.where(chosen.expert_ids < 4, chosen.expert_ids - 1000, 2), chosen.weights)
    for run in (fused_experts, fused_experts.reference):
        assert not run(inputs(1100), some, chosen).any()


def test_what_the_kernel_does_not_take():
    x, experts, chosen = inputs(4), weights("bfloat16"), routing(4)

    def refusal(x=x, experts=experts, chosen=chosen) -> str:
        return fused_experts.explain(x, experts, chosen)["native"]

    plain = ExpertWeights((normal(2 * INNER, HIDDEN, dtype=BF16),), (normal(HIDDEN, INNER, dtype=BF16),))
    assert "not laid out" in refusal(experts=plain)
    assert "does not quantise" in refusal(experts=ExpertWeights(experts.gate_up, experts.down, FP8_BLOCK))
    others = (*experts.gate_up[:-1], matrix("bfloat16", 4 * INNER, HIDDEN, 1))
    assert "of one shape, got [(192, 128), (384, 128)]" in refusal(experts=ExpertWeights(others, experts.down))
    assert "needs bfloat16 on the CPU" in refusal(x=x.float())
    assert "needs rows of 128 values" in refusal(x=x[:, :64])
    assert "needs rows of 128 values, one for each token" in refusal(x=x[:3])
    assert "or float32 weights, got" in refusal(chosen=Routing(chosen.expert_ids, chosen.weights.double()))
    with using(None):
        assert "switched off" in refusal()


# --- experts in FP8 and FP4


PACKED = pytest.mark.parametrize("format", [MXFP4, FP8_BLOCK_UE8M0, FP8_BLOCK], ids=lambda format: format.name)


def packed(format: QuantFormat, activation: QuantFormat | None = None) -> tuple[ExpertWeights, ExpertWeights]:
    """Experts that are kept in a format, and the same ones dequantised to bfloat16."""
    made = [
        [QTensor.quantize(normal(rows, columns, seed=50 + e) * columns**-0.5, format) for e in range(NUM_EXPERTS)]
        for rows, columns in ((256, 256), (256, 128))
    ]
    kept, plain = (
        [tuple(prepare_weight(each(weight)) for weight in weights) for weights in made]
        for each in (lambda weight: weight, lambda weight: weight.dequantize(BF16))
    )
    return ExpertWeights(*kept, activation, 1.5), ExpertWeights(*plain, None, 1.5)


@ISAS
@PACKED
@pytest.mark.parametrize("num_tokens", [1, 4, 60])
def test_packed_experts_are_the_dequantised_ones_to_the_bit(isa, format, num_tokens):
    x = normal(num_tokens, 256, seed=7, dtype=BF16)
    with using(isa):
        experts, plain = packed(format)
        assert torch.equal(fused_experts(x, experts, routing(num_tokens)), fused_experts(x, plain, routing(num_tokens)))


@ISAS
@PACKED
def test_a_token_gets_the_same_of_packed_experts_alone(isa, format):
    x, chosen = normal(40, 256, seed=7, dtype=BF16), wide(routing(40))
    with using(isa):
        experts, _ = packed(format, FP8_ROW_UE8M0)
        together = fused_experts(x, experts, chosen)
        for i in range(40):
            alone = Routing(*(part[i : i + 1] for part in chosen))
            assert torch.equal(fused_experts(x[i : i + 1], experts, alone)[0], together[i])


@pytest.mark.parametrize("how", ["native", "cpu", "reference"])
@PACKED
def test_inputs_of_packed_experts_are_rounded_before_each_product(how, format):
    x, chosen = normal(9, 256, seed=7, dtype=BF16), routing(9, top_k=1)
    ones = Routing(chosen.expert_ids, torch.ones(9, 1))
    with nullcontext() if how == "native" else using(None):
        experts, plain = packed(format, FP8_ROW_UE8M0)
        got = (fused_experts.reference if how == "reference" else fused_experts)(x, experts, ones)

        def rounded(values: torch.Tensor) -> torch.Tensor:
            return QTensor.quantize(values, FP8_ROW_UE8M0).dequantize(BF16)

        for i, expert in enumerate(chosen.expert_ids[:, 0].tolist()):
            hidden = silu_and_mul(linear(rounded(x[i : i + 1]), plain.gate_up[expert]), limit=1.5)
            want = linear(rounded(hidden), plain.down[expert])[0]
            assert (got[i] - want).abs().max() < 2**-5 * want.abs().max()


@PACKED
def test_only_experts_that_are_hit_are_computed_and_each_once(format):
    experts, _ = packed(format)
    ids = torch.tensor([[4, 2], [2, 7], [4, 7], [7, 2]])
    calls = []
    with watch(lambda op, _backend, _verdicts: calls.append(op.name)):
        fused_experts(normal(4, 256, dtype=BF16), experts, Routing(ids, torch.ones(4, 2)))
    assert calls.count("linear") == 2 * 3
    nan = torch.full((256, 256), float("nan"), dtype=BF16)
    spoilt = tuple(weight if e in (2, 4, 7) else nan for e, weight in enumerate(experts.gate_up))
    chosen = Routing(ids, torch.ones(4, 2))
    assert fused_experts(normal(4, 256, dtype=BF16), ExpertWeights(spoilt, experts.down), chosen).isfinite().all()


# --- with norm and router


def block(kind: str = "bfloat16", num_experts: int = 16, **options) -> SparseMoEBlock:
    defaults = {
        "norm": Norm((1 + normal(HIDDEN, seed=20) / 10).to(BF16), 1e-5),
        "router": Product(prepare_weight(normal(num_experts, HIDDEN, seed=21, dtype=BF16) * HIDDEN**-0.5)),
        "top_k": TOP_K,
        "renormalize": True,
        "experts": weights(kind, num_experts),
    }
    return SparseMoEBlock(**(defaults | options))


def stream(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs(num_tokens), normal(num_tokens, HIDDEN, seed=8, dtype=BF16)


@ISAS
@KINDS
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33, 100])
def test_the_block_equals_its_single_kernels(isa, kind, num_tokens):
    with using(isa):
        x, residual = stream(num_tokens)
        for made, added in ((block(kind), residual), (block(kind, renormalize=False, top_k=16), None)):
            assert sparse_moe_block.explain(x, added, made)["native"] == "ok"
            want = sparse_moe_block.reference(x, added, made)
            for a, b in zip(sparse_moe_block(x, added, made), want, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing_in_the_block(threads):
    x, residual, made, before = *stream(50), block("q4_1"), torch.get_num_threads()
    want = sparse_moe_block.reference(x, residual, made)
    torch.set_num_threads(threads)
    try:
        got = sparse_moe_block(x, residual, made)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@ISAS
def test_the_block_takes_more_tokens_than_are_taken_at_once(isa):
    with using(isa):
        x, residual = stream(1500)
        made = block("q8_0")
        for added in (residual, None):
            want = sparse_moe_block.reference(x, added, made)
            for a, b in zip(sparse_moe_block(x, added, made), want, strict=True):
                assert torch.equal(a, b)


@ISAS
def test_the_block_is_what_the_formulas_say(isa):
    num_experts, plain = 16, [normal(rows, HIDDEN if rows > HIDDEN else INNER, seed=e, dtype=BF16) / 10
                              for rows in (2 * INNER, HIDDEN) for e in range(16)]  # fmt: skip
    made = block(
        experts=ExpertWeights(
            tuple(prepare_weight(w) for w in plain[:num_experts]), tuple(prepare_weight(w) for w in plain[num_experts:])
        )
    )
    x, residual = stream(6)
    with using(isa):
        got, sums = sparse_moe_block(x, residual, made)
        total = (x + residual).double()
        normed = total / (total.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * made.norm.weight.double()
        shares = (normed @ (normal(num_experts, HIDDEN, seed=21, dtype=BF16) * HIDDEN**-0.5).double().t()).softmax(-1)
    best = shares.topk(TOP_K)
    want = torch.zeros_like(total)
    for token in range(6):
        for expert, share in zip(
            best.indices[token].tolist(), best.values[token] / best.values[token].sum(), strict=True
        ):
            gate, up = (plain[expert].double() @ normed[token]).chunk(2)
            want[token] += share * (plain[num_experts + expert].double() @ (gate * gate.sigmoid() * up))
    torch.testing.assert_close(sums.double(), total)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


def test_what_the_block_kernel_does_not_take():
    x, residual = stream(4)

    def refusal(**options) -> str:
        return sparse_moe_block.explain(x, residual, block(**options))["native"]

    assert "router is not laid out" in refusal(num_experts=9)
    assert "needs a router to 16 experts that chooses some of them, got (32, 128), 3" in refusal(
        router=Product(prepare_weight(normal(32, HIDDEN, dtype=BF16)))
    )
    assert "chooses some of them" in refusal(top_k=17)
    assert "has a bias or options" in refusal(
        router=Product(prepare_weight(normal(16, HIDDEN, dtype=BF16)), normal(16, dtype=BF16))
    )
    assert "needs bfloat16 norms" in refusal(norm=Norm(torch.ones(HIDDEN), 1e-5))
    assert "does not quantise" in refusal(
        experts=ExpertWeights(weights("bfloat16").gate_up, weights("bfloat16").down, FP8_BLOCK)
    )
    assert "rows without gaps" in sparse_moe_block.explain(x[::2], residual[::2], block())["native"]
    # Then the experts alone are one call, and the rest runs op by op.
    chosen = route_softmax(normal(4, 9, dtype=BF16), top_k=3, renormalize=True)
    assert_native(x, weights("bfloat16"), chosen)


# --- routing by scores


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("num_experts", "num_groups"), [(160, 8), (256, 8), (256, 1), (384, 1)])
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrtsoftplus"])
def test_scores_do_not_depend_on_a_tokens_company(threads, num_experts, num_groups, scoring):
    logits, bias = normal(301, num_experts) * 2, normal(num_experts, seed=1) / 5
    options = {"scoring": scoring, "top_k": 6, "renormalize": True, "bias": bias, "num_groups": num_groups}
    if num_groups > 1:
        options["top_groups"] = 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = route_scores(logits, **options)
        for i in range(0, 301, 10):
            for ours, theirs in zip(route_scores(logits[i : i + 1], **options), together, strict=True):
                assert torch.equal(ours[0], theirs[i])
    finally:
        torch.set_num_threads(before)
