"""What the indexer's Triton kernels choose: by score, whatever the company, the chunks and the slabs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rorqual.ops.registry import load_backends
from rorqual.ops.row_attention import RowRange, range_slots, seq_of_token
from rorqual.ops.row_cache import RowCache, read_rows
from rorqual.ops.select_rows import select_rows as op
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization.kv_record import INDEX_FP4, INDEX_FP8, INDEX_MXFP8
from tests.ops.paged_cases import make_batch
from tests.ops.select_cases import select_case
from tests.ops.test_parity import moved

if not available():
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)
load_backends("triton")
from rorqual.ops.triton import select_rows  # noqa: E402

pytestmark = [] if INTERPRETING else [pytest.mark.gpu]
DEVICE = "cpu" if INTERPRETING else "cuda"
RECORDS = {"bfloat16": None, "fp8": INDEX_FP8, "fp4": INDEX_FP4}


def case(*args: Any, **options: Any) -> Any:
    """Arguments where kernels take them."""
    return moved(select_case(*args, **options), DEVICE)


def part_of(args: Any, tokens: slice, seqs: slice, query_lens: list[int], answers: int | None = None) -> Any:
    """Some tokens of a case as a batch of their own."""
    query, weights, keys, rows, _ = args
    alone = dataclasses.replace(
        make_batch(query_lens, [length + 1 for length in query_lens]), num_answer_tokens=answers
    )
    alone = dataclasses.replace(alone, cu_seqlens_q=alone.cu_seqlens_q.to(DEVICE))
    return (
        query[tokens], weights[tokens], keys, RowRange(rows.block_tables[seqs], None, rows.stop[tokens]), alone,
    )  # fmt: skip


@pytest.mark.parametrize("record", RECORDS)
def test_chosen_rows_score_as_high_as_those_of_the_reference(record):
    args, options = case(
        [1, 6], [300, 150], top_k=24, heads=16, dim=128, rows_per_block=16, record=RECORDS[record], exact=False
    )
    query, weights, keys, rows, batch = args
    got = op(*args, **options)
    slots = range_slots(rows, seq_of_token(batch), keys.rows_per_block, slice(None))
    scores = torch.einsum("thd,tnd->thn", query.float(), read_rows(keys, slots)).relu()
    scores = torch.einsum("thn,th->tn", scores, weights).masked_fill(slots < 0, -torch.inf)
    for ours, all_slots, score in zip(got, slots, scores, strict=True):
        at = (all_slots[None] == ours[:, None]).int().argmax(1)
        assert torch.equal(all_slots[at], ours)
        assert bool((at.diff() > 0).all())
        assert bool((score[at] >= score.topk(options["top_k"]).values[-1] - 1e-3).all())


@pytest.mark.parametrize("record", RECORDS)
def test_a_token_gets_the_same_alone_and_in_company(record):
    args, options = case([1, 1, 19], [90, 200, 150], top_k=16, heads=16, dim=128, record=RECORDS[record], exact=False)
    together = op(*args, **options)
    for token, seq in ((0, 0), (1, 1), (20, 2)):
        for answers in (1, 0):  # as an answer's token and as a prompt's
            alone = part_of(args, slice(token, token + 1), slice(seq, seq + 1), [1], answers)
            assert torch.equal(op(*alone, **options)[0], together[token])
    for cut in (3, 17):  # a prompt in two chunks
        for tokens in (slice(2, 2 + cut), slice(2 + cut, 21)):
            chunk = part_of(args, tokens, slice(2, 3), [tokens.stop - tokens.start], 0)
            assert torch.equal(op(*chunk, **options), together[tokens])


def test_a_buffer_for_few_tokens_gives_the_same(monkeypatch):
    args, options = case([1, 1, 9, 2], [90, 200, 70, 40], top_k=16)
    together = op(*args, **options)
    for tokens in (1, 4):
        monkeypatch.setattr(select_rows, "_BUFFER", 208 * tokens)
        assert torch.equal(op(*args, **options), together)


@pytest.mark.parametrize("top_k", [1, 5, 32])
def test_chunks_of_chunks_choose_the_same(top_k, monkeypatch):
    """Five levels, rows of all lengths about the chunks' edges, and equals across them."""
    stops = [0, 1, 5, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 150, 400]
    args, _ = case([1] * len(stops), stops, top_k=top_k, seldom=7)
    want = op.reference(*args, top_k=top_k)
    assert torch.equal(op(*args, top_k=top_k), want)
    monkeypatch.setattr(select_rows, "_CHUNK", 64)
    assert torch.equal(op(*args, top_k=top_k), want)


@pytest.mark.parametrize("top_k", [1, 3, 40])
def test_scores_without_a_number_do_no_harm(top_k):
    """Rows whose score is not a number are above all others, in their own order; none is lost, none comes twice."""
    args, _ = case([1], [50], top_k=top_k, heads=1, rows_per_block=1)
    keys: RowCache = args[2]
    slots = args[3].block_tables[0]
    for row, value in ((7, torch.nan), (9, torch.inf), (30, torch.nan), (41, -torch.inf)):
        keys.data[slots[row].long()] = value
    args[0][:] = 1
    args[1][:] = 1
    want = {1: [7], 3: [7, 9, 30]}
    got = op(*args, top_k=top_k)[0].tolist()
    assert got == sorted(got, key=slots.tolist().index)
    assert slots[[7, 9, 30][:top_k]].tolist() == [slot for slot in got if slot in slots[[7, 9, 30]].tolist()]
    assert top_k == 40 or got == slots[want[top_k]].tolist()


def test_what_kernels_cannot_read_is_refused():
    args, options = case([1], [40], top_k=4, dim=128, record=INDEX_FP8)
    query, weights, keys, rows, batch = args
    told = op.explain(query, weights, keys, rows._replace(first=rows.stop), batch, **options)["triton"]
    assert "begin at row 0" in told
    told = op.explain(query, weights, keys._replace(record=INDEX_MXFP8), rows, batch, **options)["triton"]
    assert "INDEX_MXFP8" in told
    assert "8192" in op.explain(*args, top_k=10_000)["triton"]
    assert "float64" in op.explain(query.double(), *args[1:], **options)["triton"]
