"""The references of ops over cached rows, against plain loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rorqual.batch import Batch
from rorqual.ops.kv_transform import HadamardStage, NormStage, RopeStage
from rorqual.ops.latent_attention import latent_attention
from rorqual.ops.row_attention import RowList, RowRange, RowSource, row_attention
from rorqual.ops.row_cache import RowCache, allocate_rows, read_rows, store_rows
from rorqual.ops.select_rows import select_rows
from rorqual.quantization.kv_record import index_record
from tests.ops.latent_cases import LATENT_CASES
from tests.ops.row_attention_cases import ROW_ATTENTION_CASES
from tests.ops.select_cases import SELECT_CASES
from tests.ops.values import normal

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def seqs_of(batch: Batch) -> list[int]:
    return [seq for seq, length in enumerate(batch.query_lens) for _ in range(length)]


def row_at(cache: RowCache, slot: int) -> np.ndarray:
    return read_rows(cache, torch.tensor([slot]))[0].double().numpy()


def slots_seen(source: RowSource, token: int, seq: int) -> list[int]:
    """One by one, from the block table or the list."""
    which = source.rows
    if isinstance(which, RowList):
        return [slot for slot in which.slots[token].tolist() if slot >= 0]
    assert isinstance(which, RowRange)
    size, first = source.cache.rows_per_block, 0 if which.first is None else int(which.first[token])
    return [
        int(which.block_tables[seq, row // size]) * size + row % size for row in range(first, int(which.stop[token]))
    ]


def plain_softmax(scores: list[float], sink: float | None) -> np.ndarray:
    every = np.array(scores if sink is None else [*scores, sink])
    weights = np.exp(every - every.max()) if len(every) else every
    return (weights / weights.sum())[: len(scores)]


def near(got: torch.Tensor, want: np.ndarray, *, steps: float = 1) -> None:
    rtol = {torch.float32: 2e-6, BF16: 2.0**-8}[got.dtype]
    np.testing.assert_allclose(got.double().numpy(), want, rtol=steps * rtol, atol=steps * rtol)


@pytest.mark.parametrize("name", [name for name in ROW_ATTENTION_CASES if "long" not in name and "v4" not in name])
def test_row_attention_is_softmax_over_the_rows_of_all_sources(name):
    (query, sources, batch), options = ROW_ATTENTION_CASES[name]()
    got = row_attention.reference(query, sources, batch, **options)
    value_dim, sinks = options["value_dim"], options.get("sinks")
    want = np.zeros((*query.shape[:2], value_dim))
    for token, seq in enumerate(seqs_of(batch)):
        rows = [row_at(source.cache, slot) for source in sources for slot in slots_seen(source, token, seq)]
        for head in range(query.shape[1]):
            scores = [float(row @ query[token, head].double().numpy()) * options["scale"] for row in rows]
            weights = plain_softmax(scores, None if sinks is None else float(sinks[head]))
            for weight, row in zip(weights, rows, strict=True):
                want[token, head] += weight * row[:value_dim]
    near(got, want, steps=4 if query.dtype == torch.float32 else 1)


@pytest.mark.parametrize("name", [name for name in LATENT_CASES if "published" not in name])
def test_latent_attention_is_attention_over_expanded_keys_and_values(name):
    (query, source, up, batch), options = LATENT_CASES[name]()
    got = latent_attention.reference(query, source, up, batch, **options)
    rank, make_key, make_value = up.key.shape[1], up.key.double().numpy(), up.value.double().numpy()
    want = np.zeros(got.shape)
    for token, seq in enumerate(seqs_of(batch)):
        rows = [row_at(source.cache, slot) for slot in slots_seen(source, token, seq)]
        for head in range(query.shape[1]):
            q = query[token, head].double().numpy()
            keys = [np.concatenate((row[:rank] @ make_key[head], row[rank:])) for row in rows]
            weights = plain_softmax([float(key @ q) * options["scale"] for key in keys], None)
            for weight, row in zip(weights, rows, strict=True):
                want[token, head] += weight * (make_value[head] @ row[:rank])
    near(got, want, steps=4 if query.dtype == torch.float32 else 6)  # bfloat16 is rounded on the way


@pytest.mark.parametrize("name", [name for name in SELECT_CASES if "zeros" not in name and "released" not in name])
def test_select_rows_are_those_of_the_highest_scores_the_lower_one_of_equals(name):
    (query, weights, keys, rows, batch), options = SELECT_CASES[name]()
    got = select_rows.reference(query, weights, keys, rows, batch, **options)
    for token, seq in enumerate(seqs_of(batch)):
        slots = slots_seen(RowSource(keys, rows), token, seq)
        scores = []
        for slot in slots:
            key = row_at(keys, slot)
            by_head = [max(0.0, float(q.double().numpy() @ key)) for q in query[token]]
            scores.append(sum(float(w) * s for w, s in zip(weights[token], by_head, strict=True)))
        best = sorted(range(len(slots)), key=lambda row: (-scores[row], row))[: options["top_k"]]
        want = [slots[row] for row in sorted(best)] + [-1] * (options["top_k"] - len(best))
        assert got[token].tolist() == want


# --- writing


def test_stored_rows_are_normalised_in_front_and_rotated_behind():
    """DeepSeek's latents: the norm covers the first numbers, pairs (2i, 2i + 1) of the others turn."""
    x, cache = normal(5, 10), allocate_rows(3, 4, 10, group=0, dtype=torch.float32, record=None, device=CPU)
    cache.data.fill_(float("nan"))
    slots, positions, weight = torch.tensor([7, -1, 0, 11, 3]), torch.tensor([4, 0, 1, 2, 3]), normal(6, seed=1)
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
    rope = RopeStage(positions, torch.cat((angles.cos(), angles.sin()), dim=-1), interleaved=True)
    store_rows.reference(x, cache, slots, norm=NormStage(weight, 1e-6), rope=rope)
    flat = cache.data.flatten(0, 1)
    assert flat.isnan().all(1).nonzero().flatten().tolist() == [1, 2, 4, 5, 6, 8, 9, 10]
    for i in (0, 2, 3, 4):
        row = x[i].double()
        front = row[:6] / math.sqrt(float(row[:6].square().mean()) + 1e-6) * weight.double()
        turned = []
        for pair, speed in ((row[6:8], 1.0), (row[8:10], 0.1)):
            c, s = math.cos(float(positions[i]) * speed), math.sin(float(positions[i]) * speed)
            turned += [float(pair[0]) * c - float(pair[1]) * s, float(pair[1]) * c + float(pair[0]) * s]
        near(flat[slots[i]], np.array([*front.tolist(), *turned]), steps=2)


def test_index_keys_are_rotated_in_halves_in_front():
    """Not as the latents: the first channels, and pairs (i, i + R / 2)."""
    x, cache = normal(1, 8), allocate_rows(1, 1, 8, group=0, dtype=torch.float32, record=None, device=CPU)
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    store_rows.reference(x, cache, torch.tensor([0]), rope=RopeStage(torch.tensor([5]), table, offset=0))
    a, b, row = x[0, :2].double(), x[0, 2:4].double(), cache.data[0, 0]
    c, s = (torch.tensor([f(5.0), f(0.5)], dtype=torch.float64) for f in (math.cos, math.sin))
    near(row, torch.cat((a * c - b * s, b * c + a * s, x[0, 4:].double())).numpy(), steps=2)


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 2**-4), ("fp4", 0.25)])
def test_index_keys_in_few_bits_keep_dot_products_behind_a_hadamard_transform(kind, bound):
    """The matrix is orthogonal, so only the rounding remains; without it one large channel would swallow its group."""
    record = index_record(64, kind)
    x = normal(40, 64)
    x[:, 3] *= 30
    cache = allocate_rows(10, 4, 64, group=0, dtype=torch.float32, record=record, device=CPU)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    store_rows.reference(x, cache, slots, hadamard=HadamardStage(64**-0.5))
    back = read_rows(cache, slots)
    matrix = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(64)] for i in range(64)]) / 8
    assert (back - x @ matrix).norm() < bound * x.norm()
    assert (back @ matrix - x).norm() < bound * x.norm()
