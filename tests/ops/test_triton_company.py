"""mHC, the compressor and products in groups by the Triton kernels: a token gets the same bits in any company."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from rorqual.batch import Batch, CacheView
from rorqual.ops.compress_rows import compress_rows
from rorqual.ops.grouped_linear import grouped_linear
from rorqual.ops.hyper_connection import merge_and_mix_streams, merge_streams, mix_streams, prepare_mix
from rorqual.ops.kv_transform import NormStage, transform_kv
from rorqual.ops.registry import Op, load_backends
from rorqual.ops.row_cache import RowCache, store_rows
from rorqual.ops.triton.launch import DEVICE, INTERPRETING, available
from tests.ops.grouped_cases import GROUPED_CASES
from tests.ops.paged_cases import make_batch
from tests.ops.row_cases import compress_case
from tests.ops.stream_cases import STREAM_CASES, stream_mix
from tests.ops.test_parity import moved

if not available():
    pytest.skip("needs Triton, and a GPU or its interpreter", allow_module_level=True)
load_backends("triton")
from rorqual.ops.triton import hyper_connection  # noqa: E402

pytestmark = [] if INTERPRETING else [pytest.mark.gpu]


def run(op: Op[..., Any], *args: Any, **options: Any) -> Any:
    """By Triton."""
    impl = next(impl for impl in op.impls if impl.backend == "triton")
    assert impl.refuse(*args, **options) is None
    return impl.fn(*args, **options)


FEW, *_, MANY = hyper_connection.TILES.values()


@pytest.mark.parametrize("tokens", [1, 12])
def test_streams_of_a_token_do_not_depend_on_the_others(tokens, monkeypatch):
    """Nor on whether a program takes one step or a share, few tokens or many."""
    args, _ = moved(STREAM_CASES["merge_and_mix_streams"]["a_tile_and_one"](), DEVICE)
    *per_token, mix, norm = args
    monkeypatch.setattr(hyper_connection, "TILES", {12: FEW, 0: MANY})
    merged, mixed = run(merge_and_mix_streams, *args)
    some = [t[5 : 5 + tokens] for t in per_token]
    some_merged, some_mixed = run(merge_and_mix_streams, *some, mix, norm)
    assert torch.equal(some_merged, merged[5 : 5 + tokens])
    if INTERPRETING:  # whose products of different shapes add up in different orders
        return
    for ours, theirs in zip(some_mixed, mixed, strict=True):
        assert torch.equal(ours, theirs[5 : 5 + tokens])


@pytest.mark.parametrize(("count", "dims"), [(4, 300), (2, 40)])
def test_a_prepared_mix_holds_every_bit_of_it(count, dims):
    """Three parts add up to fn, each step's streams side by side; and the streams come out the same."""
    mix = moved(stream_mix(count, dims), DEVICE)
    prepared = run(prepare_mix, mix, count).prepared
    steps = prepared.shape[0]
    whole = prepared.float().flip(1).sum(1)  # [steps, rows, 32 N]
    back = whole.view(steps, -1, 32, count).permute(1, 3, 0, 2).reshape(-1, count, steps * 32)
    assert torch.equal(back[..., :dims].flatten(1), mix.fn)
    assert not back[..., dims:].any()
    streams = torch.randn(3, count, dims, device=DEVICE).bfloat16()
    norm = NormStage(torch.ones(dims, device=DEVICE, dtype=torch.bfloat16), 1e-6)
    for ours, theirs in zip(
        run(mix_streams, streams, mix._replace(prepared=prepared), norm),
        run(mix_streams, streams, mix, norm),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_streams_are_the_same_merged_and_mixed_at_once_or_one_after_the_other():
    args, _ = moved(STREAM_CASES["merge_and_mix_streams"]["a_tile_and_one"](), DEVICE)
    merged, mixed = run(merge_and_mix_streams, *args)
    assert torch.equal(merged, run(merge_streams, *args[:4]))
    for ours, theirs in zip(mixed, run(mix_streams, merged, *args[4:]), strict=True):
        assert torch.equal(ours, theirs)


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Tokens [start, stop) of a batch of one sequence from its beginning."""
    made = make_batch(
        [stop - start],
        [stop],
        tuple(CacheView(view.slot_mapping[start:stop], view.block_tables) for view in batch.caches),
    )
    return moved(made, DEVICE)


@pytest.mark.parametrize(("ratio", "overlap", "tokens"), [(4, True, 19), (8, False, 21)])
@pytest.mark.parametrize("step", [1, 3, 7])
def test_entries_do_not_depend_on_where_a_prompt_is_cut(ratio, overlap, tokens, step):
    (projected, states, entries, batch, compression), options = moved(
        compress_case([tokens], [tokens], ratio=ratio, overlap=overlap), DEVICE
    )
    cut = [RowCache(cache.group, cache.data.clone()) for cache in (states, entries)]
    run(compress_rows, projected, states, entries, batch, compression, **options)
    for start in range(0, tokens, step):
        stop = min(start + step, tokens)
        run(compress_rows, projected[start:stop], *cut, part_of(batch, start, stop), compression, **options)
    assert torch.equal(cut[0].data.nan_to_num(7), states.data.nan_to_num(7))
    assert torch.equal(cut[1].data, entries.data)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (8, False)])
def test_entries_are_the_same_where_a_sequence_is_in_parts(ratio, overlap):
    """Of an answer that is computed again tokens come first, one by one, and pool those of the prompt behind them."""
    tokens, prompt = 400, 205
    if INTERPRETING:
        tokens, prompt = 40, 21
    (projected, states, entries, batch, compression), options = moved(
        compress_case([tokens], [tokens], ratio=ratio, overlap=overlap), DEVICE
    )
    again = [RowCache(cache.group, cache.data.clone()) for cache in (states, entries)]
    run(compress_rows, projected, states, entries, batch, compression, **options)
    order = torch.tensor([*range(prompt, tokens), *range(prompt)], device=DEVICE)
    num_answers = tokens - prompt
    tables = [view.block_tables.expand(num_answers + 1, -1).contiguous() for view in batch.caches]
    parts = make_batch(
        [1] * num_answers + [prompt],
        [*range(prompt + 1, tokens + 1), prompt],
        tuple(CacheView(view.slot_mapping[order], table) for view, table in zip(batch.caches, tables, strict=True)),
    )
    parts = dataclasses.replace(moved(parts, DEVICE), splits_sequences=True)
    run(compress_rows, projected[order], *again, parts, compression, **options)
    assert torch.equal(again[0].data.nan_to_num(7), states.data.nan_to_num(7))
    assert torch.equal(again[1].data, entries.data)


def test_entries_do_not_depend_on_how_many_tokens_a_program_takes(monkeypatch):
    from rorqual.ops.triton import compress_rows as module

    made = []
    for few in (0, 256):
        monkeypatch.setattr(module, "_FEW", few)
        args, options = moved(compress_case([1, 1, 9, 20], [4, 7, 9, 23], ratio=4, overlap=True), DEVICE)
        run(compress_rows, *args, **options)
        made.append(args[2].data)
    assert torch.equal(*made)


@pytest.mark.parametrize("case", ["plain_some_rows", "fp8_some_rows", "fp8_in_shares", "fp8_rounded_x"])
def test_a_row_of_a_grouped_product_does_not_depend_on_the_others(case):
    (x, weights), options = moved(GROUPED_CASES[case](), DEVICE)
    whole = run(grouped_linear, x, weights, **options)
    for start in (0, len(x) - 1):
        assert torch.equal(run(grouped_linear, x[start : start + 1], weights, **options), whole[start : start + 1])


def test_tokens_beyond_a_sequence_are_left_alone():
    """Padding of a captured graph: no slots, and nothing is written."""
    (projected, states, entries, batch, compression), options = moved(
        compress_case([4, 1], [4, 8], ratio=4, overlap=True), DEVICE
    )
    nothing = tuple(view._replace(slot_mapping=torch.full_like(view.slot_mapping, -1)) for view in batch.caches)
    before = [cache.data.clone() for cache in (states, entries)]
    batch = dataclasses.replace(batch, caches=nothing)
    run(compress_rows, projected, states, entries, batch, compression, **options)
    assert torch.equal(before[0].nan_to_num(7), states.data.nan_to_num(7))
    assert torch.equal(before[1], entries.data)


@pytest.mark.parametrize(("heads", "dims"), [(1, 576), (64, 512)])
def test_a_norm_before_a_cast_or_a_store_does_not_depend_on_the_others(heads, dims):
    """Few tokens and many are cut among programs and warps alike; on a GPU that is the order of a norm's sum."""
    most = 33 if INTERPRETING else 1100
    x = torch.randn(most, heads, dims, device=DEVICE).bfloat16()
    norm = NormStage(torch.randn(512, device=DEVICE).bfloat16(), 1e-6)
    if heads == 1:
        cache = RowCache(0, torch.zeros(1, most, dims, dtype=torch.bfloat16, device=DEVICE))
        run(store_rows, x[:, 0], cache, torch.arange(most, device=DEVICE), norm=norm)
        whole = cache.data[0].clone()
    else:
        whole = run(transform_kv, x, norm=norm)
    for some in (1, 16, 17, 32):
        if heads == 1:
            run(store_rows, x[:some, 0], cache, torch.arange(some, device=DEVICE), norm=norm)
            assert torch.equal(cache.data[0, :some], whole[:some])
        else:
            assert torch.equal(run(transform_kv, x[:some], norm=norm), whole[:some])
