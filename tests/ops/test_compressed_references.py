"""The references that DeepSeek-V4's layers are made of, against loops over numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from rorqual.batch import Batch, CacheView
from rorqual.cache.paging import Paging
from rorqual.ops.compress_rows import Compression, compress_rows
from rorqual.ops.grouped_linear import grouped_linear
from rorqual.ops.hyper_connection import (
    StreamMix,
    collapse_streams,
    merge_and_mix_streams,
    merge_streams,
    mix_streams,
)
from rorqual.ops.kv_transform import HadamardStage, NormStage
from rorqual.ops.linear import linear
from rorqual.ops.row_cache import RowCache, allocate_rows, read_rows
from rorqual.quantization import FP8_BLOCK, FP8_ROW, QTensor
from tests.ops.paged_cases import make_batch
from tests.ops.values import normal

CPU = torch.device("cpu")
Row = list[float]


def rms_norm(row: Row, weight: Row, eps: float) -> Row:
    scale = (sum(x * x for x in row) / len(row) + eps) ** -0.5
    return [x * scale * w for x, w in zip(row, weight, strict=True)]


def softmax(row: Row) -> Row:
    exps = [math.exp(x - max(row)) for x in row]
    return [x / sum(exps) for x in exps]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# --- entries


WIDTH, THETA, EPS = 8, 50.0, 1e-3


def wanted_entry(values: list[Row], gates: list[Row], bias: list[Row], weight: Row, j: int, ratio: int, overlap: bool):
    """Entry j of a text whose tokens have these values and gates: [c * WIDTH] each."""
    pooled = []
    for channel in range(WIDTH):
        v, g = [], []
        if overlap and j > 0:  # the first part of the tokens of the window before
            for i in range((j - 1) * ratio, j * ratio):
                v.append(values[i][channel])
                g.append(gates[i][channel] + bias[i % ratio][channel])
        for i in range(j * ratio, (j + 1) * ratio):
            at = channel + (WIDTH if overlap else 0)
            v.append(values[i][at])
            g.append(gates[i][at] + bias[i % ratio][at])
        pooled.append(sum(w * x for w, x in zip(softmax(g), v, strict=True)))
    made = rms_norm(pooled, weight, EPS)
    for pair in range(2):  # the last four channels
        angle = j * ratio * THETA ** (-pair / 2)  # of the window's first token
        a, b = made[4 + 2 * pair], made[5 + 2 * pair]
        made[4 + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        made[5 + 2 * pair] = b * math.cos(angle) + a * math.sin(angle)
    return made


def hadamard(row: Row) -> Row:
    """Rows and columns of Sylvester's matrix agree in sign by the parity of their common bits."""
    size = len(row)
    return [sum(x * (-1) ** (i & k).bit_count() for k, x in enumerate(row)) / size**0.5 for i in range(size)]


def paged(paging: Paging, lengths: Sequence[int], starts: Sequence[int], rng: random.Random) -> tuple[CacheView, int]:
    """Where the tokens from the starts on lie in blocks scattered over a cache; how many blocks it has."""
    counts = [paging.blocks_for(length) for length in lengths]
    blocks = rng.sample(range(2 * sum(counts)), sum(counts))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    slots, used = [], 0
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor(blocks[used : used + count])
        used += count
        for position in range(starts[row], lengths[row]):
            block = int(tables[row, position // paging.block_tokens])
            inside = position % paging.block_tokens
            whole = (inside + 1) % paging.tokens_per_row == 0
            slots.append(block * paging.rows + inside // paging.tokens_per_row if whole else -1)
    return CacheView(torch.tensor(slots, dtype=torch.int64), tables), 2 * sum(counts)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (4, False), (1, True), (6, False)])
def test_entries_are_those_of_a_loop(ratio, overlap, turned):
    """Three texts at once, in steps of uneven lengths; rows of state come from earlier steps."""
    rng, part = random.Random(ratio), WIDTH * (2 if overlap else 1)
    lengths = [1, 3 * ratio + 1, 4 * ratio]
    projected = [normal(n, 2 * part, seed=10 + n) for n in lengths]
    bias, weight = normal(ratio, part, seed=1), normal(WIDTH, seed=2) * 0.1 + 1
    angles = torch.outer(torch.arange(64.0), THETA ** -(torch.arange(2) / 2))
    compression = Compression(
        ratio,
        overlap,
        bias,
        NormStage(weight, EPS),
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        HadamardStage(WIDTH**-0.5) if turned else None,
    )
    state_paging, entry_paging = Paging(2), Paging(2 * ratio, ratio)
    seed = rng.random()
    states = entries = None
    done = [0, 0, 0]
    while done != lengths:
        stops = [
            min(length, at + rng.choice([1, 2, ratio, 2 * ratio])) for at, length in zip(done, lengths, strict=True)
        ]
        active = [i for i in range(3) if stops[i] > done[i]]
        views = []
        for paging in (state_paging, entry_paging):  # the same blocks in every step
            view, blocks = paged(paging, lengths, [0, 0, 0], random.Random(seed))
            first = [sum(lengths[:i]) for i in range(3)]
            mine = torch.cat([view.slot_mapping[first[i] + done[i] : first[i] + stops[i]] for i in active])
            views.append((CacheView(mine, view.block_tables[active]), blocks, paging.rows))
        if states is None or entries is None:
            (_, blocks, rows), (_, entry_blocks, entry_rows) = views
            made = {"record": None, "dtype": torch.float32, "device": CPU}
            states = allocate_rows(blocks, rows, 2 * part, group=0, **made)
            entries = allocate_rows(entry_blocks, entry_rows, WIDTH, group=1, **made)
            states.data.fill_(float("nan"))
            entries.data.fill_(float("nan"))
        batch: Batch = make_batch(
            [stops[i] - done[i] for i in active], [stops[i] for i in active], (views[0][0], views[1][0])
        )
        rows = torch.cat([projected[i][done[i] : stops[i]] for i in active])
        compress_rows.reference(rows, states, entries, batch, compression, dtype=torch.float32)
        done = stops
    view, _ = paged(entry_paging, lengths, [0, 0, 0], random.Random(seed))
    written = 0
    for i, length in enumerate(lengths):
        values, gates = projected[i][:, :part].tolist(), projected[i][:, part:].tolist()
        for j in range(length // ratio):
            want = wanted_entry(values, gates, bias.tolist(), weight.tolist(), j, ratio, overlap)
            block = int(view.block_tables[i, j // entry_paging.rows])
            got = entries.data[block, j % entry_paging.rows]
            torch.testing.assert_close(got, torch.tensor(hadamard(want) if turned else want), rtol=1e-5, atol=1e-5)
            written += 1
    assert int((~entries.data.isnan().any(-1)).sum()) == written  # and nothing else


def test_states_are_the_projections_with_their_bias():
    """K, and Z with the bias of the position in its window."""
    bias = normal(4, 2 * WIDTH, seed=1)
    compression = Compression(4, True, bias, NormStage(torch.ones(WIDTH), EPS), torch.ones(16, 4))
    states = RowCache(0, torch.zeros(2, 8, 4 * WIDTH))
    entries = RowCache(1, torch.zeros(2, 2, WIDTH))
    projected = normal(3, 4 * WIDTH)
    views = (
        CacheView(torch.tensor([13, 14, -1]), torch.tensor([[1]])),
        CacheView(torch.tensor([-1, -1, -1]), torch.tensor([[1]])),
    )
    compress_rows.reference(projected, states, entries, make_batch([3], [8], views), compression, dtype=torch.float32)
    got = read_rows(states, torch.tensor([13, 14]))
    torch.testing.assert_close(got[:, : 2 * WIDTH], projected[:2, : 2 * WIDTH])
    torch.testing.assert_close(got[:, 2 * WIDTH :], projected[:2, 2 * WIDTH :] + bias[[1, 2]])  # positions 5 and 6
    assert int(states.data.count_nonzero()) == 2 * 4 * WIDTH
    assert not entries.data.any()


# --- streams


COUNT, SIZE = 3, 5


def parameters(*, head: bool = False) -> StreamMix:
    rows = COUNT if head else (2 + COUNT) * COUNT
    return StreamMix(
        normal(rows, COUNT * SIZE, seed=1), normal(rows, seed=2), normal(1 if head else 3, seed=3), 1e-3, 1e-2, 4
    )


def wanted_mix(streams: list[Row], mix: StreamMix) -> tuple[Row, Row, list[Row]]:
    """The sum before its norm, post and comb of one token, in double precision."""
    fn, base, scale = mix.fn.tolist(), mix.base.tolist(), mix.scale.tolist()
    flat = [x for stream in streams for x in stream]
    rms = (sum(x * x for x in flat) / len(flat) + mix.norm_eps) ** 0.5
    m = [sum(w * x for w, x in zip(row, flat, strict=True)) / rms for row in fn]
    pre = [sigmoid(m[s] * scale[0] + base[s]) + mix.eps for s in range(COUNT)]
    mixed = [sum(pre[s] * streams[s][d] for s in range(COUNT)) for d in range(SIZE)]
    if len(fn) == COUNT:
        return mixed, [], []
    post = [2 * sigmoid(m[COUNT + s] * scale[1] + base[COUNT + s]) for s in range(COUNT)]
    comb = []
    for j in range(COUNT):
        at = 2 * COUNT + j * COUNT
        comb.append([x + mix.eps for x in softmax([m[at + k] * scale[2] + base[at + k] for k in range(COUNT)])])
    for turn in range(mix.iterations):
        if turn:
            comb = [[x / (sum(row) + mix.eps) for x in row] for row in comb]
        sums = [sum(comb[j][k] for j in range(COUNT)) + mix.eps for k in range(COUNT)]
        comb = [[comb[j][k] / sums[k] for k in range(COUNT)] for j in range(COUNT)]
    return mixed, post, comb


def assert_near(got: torch.Tensor, want: object) -> None:
    torch.testing.assert_close(got, torch.tensor(want), rtol=2e-5, atol=2e-5)


def test_mixed_streams_are_those_of_a_loop():
    streams, mix, weight = normal(4, COUNT, SIZE), parameters(), normal(SIZE, seed=8)
    got = mix_streams.reference(streams, mix, NormStage(weight, EPS))
    for t, token in enumerate(streams.tolist()):
        mixed, post, comb = wanted_mix(token, mix)
        assert_near(got.hidden[t], rms_norm(mixed, weight.tolist(), EPS))
        assert_near(got.post[t], post)
        assert_near(got.comb[t], comb)


def test_the_mixing_matrix_is_nearly_doubly_stochastic():
    mix = parameters()._replace(iterations=20, eps=1e-6)
    comb = mix_streams.reference(normal(9, COUNT, SIZE), mix, NormStage(torch.ones(SIZE), EPS)).comb
    torch.testing.assert_close(comb.sum(1), torch.ones(9, COUNT), rtol=0, atol=1e-4)
    torch.testing.assert_close(comb.sum(2), torch.ones(9, COUNT), rtol=0, atol=1e-3)
    assert not torch.allclose(comb, comb.transpose(1, 2), atol=1e-2)  # so which index is summed can be told


def test_merged_streams_sum_over_the_first_index():
    output, streams = normal(4, SIZE, seed=1), normal(4, COUNT, SIZE, seed=2)
    post, comb = normal(4, COUNT, seed=3), normal(4, COUNT, COUNT, seed=4)
    got = merge_streams.reference(output, streams, post, comb)
    for t in range(4):
        for k in range(COUNT):
            want = [
                float(post[t, k] * output[t, d]) + sum(float(comb[t, j, k] * streams[t, j, d]) for j in range(COUNT))
                for d in range(SIZE)
            ]
            assert_near(got[t, k], want)


def test_collapsed_streams_are_those_of_a_loop():
    streams, mix, weight = normal(4, COUNT, SIZE), parameters(head=True), normal(SIZE, seed=8)
    got = collapse_streams.reference(streams, mix, NormStage(weight, EPS))
    for t, token in enumerate(streams.tolist()):
        assert_near(got[t], rms_norm(wanted_mix(token, mix)[0], weight.tolist(), EPS))


def test_merging_and_mixing_is_one_after_the_other():
    output, streams = normal(4, SIZE, seed=1).bfloat16(), normal(4, COUNT, SIZE, seed=2).bfloat16()
    post, comb = normal(4, COUNT, seed=3), normal(4, COUNT, COUNT, seed=4)
    mix, norm = parameters(), NormStage(normal(SIZE, seed=5).bfloat16(), EPS)
    merged, mixed = merge_and_mix_streams.reference(output, streams, post, comb, mix, norm)
    assert merged.dtype == mixed.hidden.dtype == torch.bfloat16
    assert mixed.post.dtype == mixed.comb.dtype == torch.float32
    want = merge_streams.reference(output, streams, post, comb)
    assert torch.equal(merged, want)
    for ours, theirs in zip(mixed, mix_streams.reference(want, mix, norm), strict=True):
        assert torch.equal(ours, theirs)


# --- products in groups


def test_each_group_has_its_own_weight():
    x, weights = normal(3, 2, 5), normal(2, 4, 5, seed=1)
    want = [
        [
            [sum(float(x[t, g, i] * weights[g, o, i]) for i in range(5)) for o in range(4)]
            for g in range(2)
        ]
        for t in range(3)
    ]  # fmt: skip
    assert_near(grouped_linear.reference(x, weights), want)
    assert_near(grouped_linear.reference(x, tuple(weights)), want)


def test_groups_of_quantised_weights_are_products_of_their_own():
    x = normal(3, 2, 200)
    weights = tuple(QTensor.quantize(normal(40, 200, seed=g), FP8_BLOCK) for g in range(2))
    got = grouped_linear.reference(x, weights, activation=FP8_ROW)
    for g, weight in enumerate(weights):
        assert torch.equal(got[:, g], linear.reference(x[:, g], weight, activation=FP8_ROW))
