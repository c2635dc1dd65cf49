"""The halves of a decoder layer: equal to the bit to their single kernels, and near to formulas in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rorqual.batch import Batch, CacheView
from rorqual.ops.decoder_blocks import (
    AttentionBlock,
    DecoderLayers,
    GatedMLPBlock,
    Norm,
    Product,
    Rotation,
    attention_block,
    decoder_layers,
    gated_mlp_block,
)
from rorqual.ops.linear import prepare_weight
from rorqual.ops.native.library import usable_isas, using
from rorqual.ops.registry import load_backends
from rorqual.ops.rms_norm import rms_norm
from rorqual.ops.store_kvcache import LayerKV, allocate_kvcache
from rorqual.quantization.integer import Q4_1, Q8_0, IntegerStack, IntegerWeight
from tests.ops.cases import normal
from tests.ops.paged_cases import make_batch

load_backends("native", "cpu")
BF16 = torch.bfloat16
ISAS = pytest.mark.parametrize("isa", usable_isas())
HIDDEN, HEADS, KV_HEADS, DIM, INNER, SIZE = 128, 6, 2, 32, 192, 16
ROWS = (HEADS + 2 * KV_HEADS) * DIM
BATCHES = {
    "one": ([1], [1]),
    "long": ([1], [1500]),
    "prompt": ([33], [33]),
    "mixed": ([1, 1, 5], [40, 7, 20]),
    "many": ([1] * 19, list(range(3, 60, 3))),
}


def matrix(kind: str, rows: int, columns: int, seed: int) -> torch.Tensor | IntegerWeight | IntegerStack:
    plain = normal(rows, columns, seed=seed, dtype=BF16) * columns**-0.5
    if kind == "bfloat16":
        return plain
    if kind == "stacked":  # as where a checkpoint keeps values more finely than queries and keys
        cut = rows // 32 * 16
        return IntegerStack(
            (IntegerWeight.quantize(plain[:cut], Q4_1), IntegerWeight.quantize(plain[cut:], Q8_0)),
        )
    return IntegerWeight.quantize(
        plain, {"q4_1": Q4_1, "q8_0": Q8_0, "weight_only": Q8_0}[kind], dynamic=kind[0] == "q"
    )


def norm(size: int, seed: int) -> Norm:
    return Norm((1 + normal(size, seed=seed) / 10).to(BF16), 1e-5)


def attention(kind: str = "bfloat16", *, head_norms: bool = False, bias: bool = False, **options) -> AttentionBlock:
    table = normal(4096, DIM, seed=40)
    defaults = {
        "norm": norm(HIDDEN, 1),
        "qkv": Product(
            prepare_weight(matrix(kind, ROWS, HIDDEN, 2)), normal(ROWS, seed=3, dtype=BF16) if bias else None
        ),
        "out": Product(prepare_weight(matrix(kind, HIDDEN, HEADS * DIM, 4))),
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "rotation": Rotation(table, False, 0),
        "query_norm": norm(DIM, 5) if head_norms else None,
        "key_norm": norm(DIM, 6) if head_norms else None,
        "scale": DIM**-0.5,
        "sliding_window": None,
    }
    return AttentionBlock(**(defaults | options))


def gated_mlp(kind: str = "bfloat16", *, bias: bool = False, **options) -> GatedMLPBlock:
    defaults = {
        "norm": norm(HIDDEN, 7),
        "gate_up": Product(
            prepare_weight(matrix(kind, 2 * INNER, HIDDEN, 8)),
            normal(2 * INNER, seed=9, dtype=BF16) if bias else None,
        ),
        "down": Product(prepare_weight(matrix(kind, HIDDEN, INNER, 10))),
    }
    return GatedMLPBlock(**(defaults | options))


def step(lengths: Sequence[int], contexts: Sequence[int]) -> Batch:
    counts = [-(-context // SIZE) for context in contexts]
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    first = 0
    for row, count in zip(tables, counts, strict=True):
        row[:count] = torch.arange(first, first + count)
        first += count
    positions = torch.cat([torch.arange(c - n, c) for n, c in zip(lengths, contexts, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slots = tables[owner, positions // SIZE].long() * SIZE + positions % SIZE
    return dataclasses.replace(make_batch(lengths, contexts, (CacheView(slots, tables),)), positions=positions)


def cache_for(batch: Batch) -> LayerKV:
    """Keys and values of every earlier token."""
    blocks = int(batch.caches[0].block_tables.max()) + 1
    made = LayerKV(0, *allocate_kvcache(blocks, SIZE, KV_HEADS, DIM, dtype=BF16, device=torch.device("cpu")))
    made.key.copy_(normal(*made.key.shape, seed=50))
    made.value.copy_(normal(*made.value.shape, seed=51))
    return made


def in_two_groups(batch: Batch) -> Batch:
    return dataclasses.replace(batch, caches=(batch.caches[0], batch.caches[0]))


def caches_for(batch: Batch, count: int, *, group: int) -> tuple[LayerKV, ...]:
    return tuple(cache_for(batch)._replace(group=group) for _ in range(count))


def stream(batch: Batch, residual: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = normal(batch.num_tokens, HIDDEN, seed=60, dtype=BF16)
    return x, normal(batch.num_tokens, HIDDEN, seed=61, dtype=BF16) if residual else None


@ISAS
@pytest.mark.parametrize("kind", ["bfloat16", "q4_1", "q8_0", "stacked", "weight_only"])
@pytest.mark.parametrize("head_norms", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_attention_equals_its_single_kernels(isa, kind, head_norms, name):
    batch = step(*BATCHES[name])
    with using(isa):
        for bias, residual, window in ((False, True, None), (True, False, 20)):
            block = attention(kind, head_norms=head_norms, bias=bias, sliding_window=window)
            ours, theirs = cache_for(batch), cache_for(batch)
            x = stream(batch, residual)
            assert attention_block.explain(*x, block, batch, ours)["native"] == "ok"
            want = attention_block.reference(*x, block, step(*BATCHES[name]), theirs)
            got = attention_block(*x, block, batch, ours)
            for a, b in zip((*got, ours.key, ours.value), (*want, theirs.key, theirs.value), strict=True):
                assert torch.equal(a, b)


@ISAS
@pytest.mark.parametrize("kind", ["bfloat16", "q4_1", "q8_0", "stacked", "weight_only"])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 100])
def test_gated_mlp_equals_its_single_kernels(isa, kind, rows):
    with using(isa):
        for bias, residual in ((False, True), (True, False)):
            block = gated_mlp(kind, bias=bias)
            x = stream(step([rows], [rows]), residual)
            assert gated_mlp_block.explain(*x, block)["native"] == "ok"
            for a, b in zip(gated_mlp_block(*x, block), gated_mlp_block.reference(*x, block), strict=True):
                assert torch.equal(a, b)


def layers_of(kind: str, count: int, **last: Any) -> DecoderLayers:
    """Layers with other norms each; the last one's attention may have other options."""
    return DecoderLayers(
        tuple(
            (
                attention(kind, norm=norm(HIDDEN, 20 + i), **(last if i == count - 1 else {})),
                gated_mlp(kind, norm=norm(HIDDEN, 30 + i)),
            )
            for i in range(count)
        ),
        norm(HIDDEN, 40),
    )


@ISAS
@pytest.mark.parametrize("kind", ["bfloat16", "q4_1"])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("count", [1, 3])
def test_layers_equal_their_halves(isa, kind, name, count):
    """The last one has a cache group and a window of its own."""
    batch, again = (in_two_groups(step(*BATCHES[name])) for _ in "12")
    with using(isa):
        layers = layers_of(kind, count, sliding_window=20)
        ours, theirs = (caches_for(batch, count - 1, group=0) + caches_for(batch, 1, group=1) for _ in "12")
        x, _ = stream(batch, False)
        before = x.clone()
        assert decoder_layers.explain(x, layers, batch, ours)["native"] == "ok"
        want = decoder_layers.reference(x, layers, again, theirs)
        got = decoder_layers(x, layers, batch, ours)
        assert torch.equal(x, before)
        assert torch.equal(got, want)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.key, b.key)
            assert torch.equal(a.value, b.value)


def test_layers_that_their_kernel_does_not_take_run_one_by_one():
    batch = step(*BATCHES["mixed"])
    layers = layers_of("bfloat16", 2, out=Product(matrix("bfloat16", HIDDEN, HEADS * DIM, 4)))
    x, _ = stream(batch, False)
    caches = caches_for(batch, 2, group=0)
    reason = decoder_layers.explain(x, layers, batch, caches)["native"]
    assert reason == "a layer is not for it: its weights are not laid out for it"
    got = decoder_layers(x, layers, batch, caches)
    want = decoder_layers.reference(x, layers, batch, caches_for(batch, 2, group=0))
    assert torch.equal(got, want)


def test_layers_whose_last_norm_their_kernel_does_not_take_run_one_by_one():
    batch = step(*BATCHES["mixed"])
    last = Norm(norm(2 * HIDDEN, 40).weight[::2], 1e-5)
    layers = DecoderLayers(layers_of("bfloat16", 2).halves, last)
    x, _ = stream(batch, False)
    caches = caches_for(batch, 2, group=0)
    assert decoder_layers.explain(x, layers, batch, caches)["native"].endswith("[128] of strides [2]")
    want = decoder_layers.reference(x, layers, batch, caches_for(batch, 2, group=0))
    assert torch.equal(decoder_layers(x, layers, batch, caches), want)


def test_no_layers_at_all_are_their_norm():
    batch = step(*BATCHES["mixed"])
    x, _ = stream(batch, False)
    layers = DecoderLayers((), norm(HIDDEN, 40))
    assert decoder_layers.explain(x, layers, batch, ())["native"] == "there are no layers"
    want = rms_norm(x, layers.norm.weight, eps=layers.norm.eps).out
    assert torch.equal(decoder_layers(x, layers, batch, ()), want)


def test_layers_may_meet_several_caches():
    batch = step(*BATCHES["mixed"])
    layers, (x, _) = layers_of("bfloat16", 2), stream(batch, False)
    first, second = (caches_for(batch, 2, group=0) for _ in "12")
    second[1].key.neg_()
    want = decoder_layers.reference(x, layers, batch, (first[0], second[1]))
    for caches in (first, second, first):
        got = decoder_layers(x, layers, batch, caches)
        assert torch.equal(got, want) == (caches is second)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads):
    batch, before = step(*BATCHES["mixed"]), torch.get_num_threads()
    block, mlp, x = attention("q4_1"), gated_mlp("q4_1"), stream(batch, True)
    want = (*attention_block.reference(*x, block, batch, cache_for(batch)), *gated_mlp_block.reference(*x, mlp))
    torch.set_num_threads(threads)
    try:
        again = step(*BATCHES["mixed"])
        got = (*attention_block(*x, block, again, cache_for(again)), *gated_mlp_block(*x, mlp))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def float64_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("residual", [False, True])
def test_both_halves_are_what_the_formulas_say(residual):
    batch = step([4], [4])
    x, r = stream(batch, residual)
    w = {name: matrix("bfloat16", *shape, seed).double()
         for name, shape, seed in (("qkv", (ROWS, HIDDEN), 2), ("out", (HIDDEN, HEADS * DIM), 4),
                                   ("gate_up", (2 * INNER, HIDDEN), 8), ("down", (HIDDEN, INNER), 10))}  # fmt: skip
    block, mlp = attention(), gated_mlp()
    total = x.double() if r is None else (x + r).double()
    q, k, v = (float64_norm(total, block.norm) @ w["qkv"].t()).view(4, -1, DIM).split((HEADS, KV_HEADS, KV_HEADS), 1)
    cos, sin = block.rotation.cos_sin[:4].double().chunk(2, 1)

    def turned(heads: torch.Tensor) -> torch.Tensor:
        a, b = heads.chunk(2, -1)
        return torch.cat((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1)

    k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (turned(k), v))
    scores = torch.einsum("qhd,khd->hqk", turned(q), k) * block.scale
    scores = scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    got, sums = attention_block(x, r, block, batch, cache_for(batch))
    torch.testing.assert_close(sums.double(), total)
    torch.testing.assert_close(got.double(), attended @ w["out"].t(), rtol=2e-2, atol=2e-2)

    gate, up = (float64_norm(total, mlp.norm) @ w["gate_up"].t()).chunk(2, 1)
    got, sums = gated_mlp_block(x, r, mlp)
    torch.testing.assert_close(sums.double(), total)
    torch.testing.assert_close(got.double(), (gate * gate.sigmoid() * up) @ w["down"].t(), rtol=2e-2, atol=2e-2)


def test_interleaved_and_partial_rotation():
    batch = step(*BATCHES["mixed"])
    x = stream(batch, True)
    for rotation in (Rotation(normal(64, DIM, seed=41), True, 0), Rotation(normal(64, 16, seed=42), False, 16)):
        block = attention(rotation=rotation)
        assert attention_block.explain(*x, block, batch, cache_for(batch))["native"] == "ok"
        want = attention_block.reference(*x, block, step(*BATCHES["mixed"]), cache_for(batch))
        got = attention_block(*x, block, batch, cache_for(batch))
        assert torch.equal(got[0], want[0])


def test_a_position_outside_the_table_is_an_error_and_writes_nothing():
    batch = step([1], [40])
    cache = cache_for(batch)
    before = cache.key.clone()
    with pytest.raises(IndexError, match=r"must lie in \[0, 20\), the table's rows, got 39 to 39"):
        attention_block(*stream(batch, True), attention(rotation=Rotation(normal(20, DIM), False, 0)), batch, cache)
    with pytest.raises(IndexError, match=r"must lie in \[0, 20\), the table's rows, got 39 to 39"):
        decoder_layers(
            stream(batch, False)[0],
            layers_of("bfloat16", 1, rotation=Rotation(normal(20, DIM), False, 0)),
            batch,
            (cache,),
        )
    assert torch.equal(cache.key, before)


def test_no_tokens():
    empty = torch.empty(0, HIDDEN, dtype=BF16)
    assert [t.shape for t in gated_mlp_block(empty, empty, gated_mlp())] == [(0, HIDDEN)] * 2


def test_one_block_may_meet_several_caches():
    block, batch = attention(), step(*BATCHES["mixed"])
    x = stream(batch, True)
    first, second = cache_for(batch), cache_for(batch)
    second.key.neg_()
    for cache in (first, second, first):
        again = cache_for(batch)
        again.key.copy_(cache.key)
        want = attention_block.reference(*x, block, step(*BATCHES["mixed"]), again)
        assert torch.equal(attention_block(*x, block, batch, cache)[0], want[0])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"out": Product(matrix("bfloat16", HIDDEN, HEADS * DIM, 4))}, "weights are not laid out"),
        ({"norm": Norm(torch.ones(HIDDEN), 1e-5)}, "needs bfloat16 norms of 128 values in a row, got torch.float32"),
        ({"rotation": Rotation(normal(64, DIM, dtype=BF16), False, 0)}, "needs a float32 table"),
        ({"rotation": Rotation(normal(64, DIM), False, 16)}, "needs a float32 table for at most 32 channels"),
    ],
)
def test_what_the_attention_kernel_does_not_take(change, sentence):
    batch = step(*BATCHES["one"])
    verdicts = attention_block.explain(*stream(batch, True), attention(**change), batch, cache_for(batch))
    assert sentence in verdicts["native"]


def test_options_and_gaps_are_refused():
    x, r = stream(step(*BATCHES["prompt"]), True)
    assert r is not None
    block = gated_mlp(down=Product(prepare_weight(matrix("bfloat16", HIDDEN, INNER, 10)), None, {"out_dtype": BF16}))
    assert "take no options, got out_dtype" in gated_mlp_block.explain(x, r, block)["native"]
    assert "rows without gaps" in gated_mlp_block.explain(x[::2], r[::2], gated_mlp())["native"]
    assert "needs bfloat16" in gated_mlp_block.explain(x.float(), r.float(), gated_mlp())["native"]
    with using(None):
        assert "switched off" in gated_mlp_block.explain(x, r, gated_mlp())["native"]
