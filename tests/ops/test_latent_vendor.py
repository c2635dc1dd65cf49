"""Prompts over latents whose keys and values are made first, as on a GPU; on the CPU with a plain attention inside."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
import torch

from rorqual.ops.latent_attention import LatentUp, latent_attention
from rorqual.ops.registry import load_backends
from rorqual.ops.row_attention import RowRange, RowSource
from tests.ops.latent_cases import LATENT_CASES, latent_case
from tests.ops.paged_cases import make_batch
from tests.ops.row_attention_cases import Rows
from tests.ops.test_parity import TOLERANCES, moved
from tests.ops.values import Call, normal

BF16 = torch.bfloat16
MODULE = "rorqual.ops.vendor.latent_attention"
EXPANDED = [name for name in LATENT_CASES if "listed" not in name and "wide_values" not in name]


def plain_attention(query, keys, values, ends, *, scale):
    """In place of the GPU's: each query sees the keys up to its own place from the end."""
    assert [end.tolist() for end in ends] == [[0, len(query)], [0, len(keys)]]
    assert keys.shape == values.shape
    assert keys.shape[1:] == query.shape[1:]
    scores = torch.einsum("thd,nhd->htn", query.double(), keys.double()) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(keys) - len(query) + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("htn,nhd->thd", weights, values.double()).to(query.dtype)


@pytest.fixture
def vendor(monkeypatch):
    """The module with `plain_attention`, and no trace of it afterwards where it was not loaded before."""
    loaded, before = MODULE in sys.modules, list(latent_attention.impls)
    module = importlib.import_module(MODULE)
    monkeypatch.setattr(module, "flash", plain_attention)
    yield module
    if not loaded:
        latent_attention.impls[:] = before
        del sys.modules[MODULE]


def near(got: torch.Tensor, want: torch.Tensor, *, times: float = 1.0) -> None:
    rtol, atol = TOLERANCES["latent_attention"][want.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=times * atol)


@pytest.mark.parametrize("heads_at_once", [1, 2, 100])
@pytest.mark.parametrize("name", [name for name in EXPANDED if name != "none"])
def test_it_equals_the_reference(name, heads_at_once, vendor, monkeypatch):
    args, options = LATENT_CASES[name]()
    query, _, _, batch = args
    per_head = (2 * max(batch.context_lens_host) + max(batch.query_lens)) * query.shape[2] * query.element_size()
    monkeypatch.setattr(vendor, "_WORKSPACE", heads_at_once * per_head)
    near(vendor.latent_attention_vendor(*args, **options), latent_attention.reference(*args, **options))


@pytest.mark.parametrize("rows_per_block", [1, 3, 16, 64])
def test_contexts_lie_in_blocks_of_any_size(rows_per_block, vendor):
    contexts, dtype = [40, 5, 64, 65], torch.float32
    rows, batch = (
        Rows(contexts, 30, rows_per_block=rows_per_block, extra_columns=2),
        make_batch([4, 5, 60, 1], contexts),
    )
    source = RowSource(rows.cache, RowRange(rows.block_tables, None, (batch.positions + 1).int()))
    up = LatentUp(normal(3, 24, 10, dtype=dtype, seed=2) / 5, normal(3, 8, 24, dtype=dtype, seed=3) / 5)
    args = normal(len(batch.positions), 3, 16, dtype=dtype), source, up, batch
    near(vendor.latent_attention_vendor(*args, scale=0.3), latent_attention.reference(*args, scale=0.3))


def chunk(whole: Call, start: int, stop: int) -> Call:
    """Some tokens of the one prompt of a call, as a step of their own."""
    (query, (cache, rows), up, batch), options = whole
    before = batch.context_lens_host[0] - batch.query_lens[0]
    part = replace(make_batch([stop - start], [before + stop]), num_answer_tokens=0)
    rows = RowRange(rows.block_tables, None, rows.stop[start:stop])
    return (query[start:stop].clone(), RowSource(cache, rows), up, part), options


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("size", [1, 7, 25, 64])
def test_a_prompt_cut_into_chunks_gets_the_same_numbers(size, dtype, vendor):
    """A chunk of one token too; the CPU's products may add up in another order for other numbers of rows."""
    whole = latent_case([70], [90], dtype=dtype)
    want = vendor.latent_attention_vendor(*whole[0], **whole[1])
    calls = [chunk(whole, start, min(start + size, 70)) for start in range(0, 70, size)]
    got = torch.cat([vendor.latent_attention_vendor(*args, **options) for args, options in calls])
    tolerance = {torch.float32: 2e-6, BF16: 2**-8}[dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_answers_are_the_references_to_the_bit_and_every_other_token_is_expanded(vendor, monkeypatch):
    args, options = latent_case([1, 1, 1, 5, 1], [4, 30, 17, 9, 20], dtype=BF16)
    seen = []

    def counting(query, *others, scale):
        seen.append(len(query))
        return plain_attention(query, *others, scale=scale)

    monkeypatch.setattr(vendor, "flash", counting)
    for answers, prompts in ((3, [5, 1]), (2, [1, 5, 1]), (0, [1, 1, 1, 5, 1])):
        batch = replace(args[3], num_answer_tokens=answers, scratch={})
        seen.clear()
        got = vendor.latent_attention_vendor(*args[:3], batch, **options)
        want = latent_attention.reference(*args[:3], batch, **options)
        assert seen == prompts
        assert torch.equal(got[:answers], want[:answers])
        near(got, want)


def test_layers_share_what_belongs_to_the_batch(vendor):
    args, options = LATENT_CASES["mixed"]()
    vendor.latent_attention_vendor(*args, **options)
    names = set(args[3].scratch)
    other = (-args[0], *args[1:])
    got = vendor.latent_attention_vendor(*other, **options)
    assert set(args[3].scratch) == names
    near(got, latent_attention.reference(*other, **options))


def test_what_is_not_for_it_is_refused_by_name(vendor):
    def refusal(name):
        args, options = LATENT_CASES[name]()
        return latent_attention.explain(*args, **options)["vendor"]

    assert refusal("answers") == refusal("none") == "is for prompts, of which there is none"
    assert "rows that were chosen" in refusal("mixed_listed_bfloat16")
    assert refusal("mixed_bfloat16").startswith("needs tensors on cuda, got cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "length", "before"), [(128, 700, 0), (16, 300, 1100)])
def test_on_a_gpu_bits_do_not_depend_on_how_a_prompt_is_cut(heads, length, before):
    """Dims as published; also where flash attention of equal sequences would split the keys among programs."""
    load_backends("vendor", "triton")
    published = {"heads": heads, "rank": 512, "nope": 128, "rope": 64, "value_dim": 128}
    made = latent_case([length], [before + length], dtype=BF16, **published)
    whole = moved(made, "cuda")
    assert latent_attention.explain(*whole[0], **whole[1])["vendor"] == "ok"
    want = latent_attention(*whole[0], **whole[1])
    near(want, latent_attention.reference(*whole[0], **whole[1]), times=2)  # the largest of ten million differences
    for size in (1, 64, 129, 512):
        first = length - 3 if size == 1 else 0
        calls = [moved(chunk(made, start, min(start + size, length)), "cuda") for start in range(first, length, size)]
        got = torch.cat([latent_attention(*args, **options) for args, options in calls])
        assert torch.equal(got, want[first:]), size
