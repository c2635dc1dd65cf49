"""What calls of the ops over caches of rows, and over several streams, must move and compute at least.

Rows that several tokens of a sequence see are counted once, since they can be read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from rorqual.batch import Batch
from rorqual.engine.roofline import Work
from rorqual.ops.row_attention import RowList, RowRange, RowSource
from rorqual.ops.row_cache import RowCache

Arguments = Mapping[str, Any]


class _Seen(NamedTuple):
    """Rows that a batch's tokens see of one cache."""

    pairs: int
    """Of a token and a row."""
    rows: int
    """Different ones of a sequence."""
    prompt_pairs: int = 0
    """Those of sequences with more than one token."""


def _row_bytes(cache: RowCache) -> int:
    return cache.data[0, 0].numel() * cache.data.element_size()


def _seqs(batch: Batch) -> Iterator[slice]:
    """The tokens of each sequence."""
    start = 0
    for length in batch.query_lens:
        yield slice(start, start + length)
        start += length


def _seen(rows: RowRange | RowList, batch: Batch) -> _Seen:
    pairs = different = of_prompts = 0
    if isinstance(rows, RowList):
        slots = rows.slots.cpu()
        for part in _seqs(batch):
            found = slots[part][slots[part] >= 0]
            pairs, different = pairs + found.numel(), different + torch.unique(found).numel()
            of_prompts += found.numel() if part.stop - part.start > 1 else 0
        return _Seen(pairs, different, of_prompts)
    stop = rows.stop.cpu()
    first = torch.zeros_like(stop) if rows.first is None else rows.first.cpu()
    for part in _seqs(batch):
        count = int((stop[part] - first[part]).sum())
        pairs, different = pairs + count, different + int(stop[part].max() - first[part].min())
        of_prompts += count if part.stop - part.start > 1 else 0
    return _Seen(pairs, different, of_prompts)


def _looked_up(rows: RowRange | RowList) -> int:
    """Bytes of the list itself, which a kernel reads."""
    return rows.slots.nbytes if isinstance(rows, RowList) else 0


def _row_attention(given: Arguments, result: torch.Tensor) -> Work:
    query, num_bytes, flops = given["query"], given["query"].nbytes + result.nbytes, 0
    for cache, rows in given["sources"]:
        seen = _seen(rows, given["batch"])
        num_bytes += seen.rows * _row_bytes(cache) + _looked_up(rows)
        flops += 2 * query.shape[1] * (query.shape[2] + given["value_dim"]) * seen.pairs
    return Work(num_bytes, flops)


def _latent_attention(given: Arguments, result: torch.Tensor) -> Work:
    """Answers' tokens absorbed; a prompt's pairs as few operations as its expanded keys and values take."""
    query, up, source = given["query"], given["up"], given["source"]
    assert isinstance(source, RowSource)
    _, rank, nope = up.key.shape
    rope, value = query.shape[2] - nope, result.shape[2]
    seen = _seen(source.rows, given["batch"])
    absorbed, expanded = 2 * rank + rope, nope + rope + value
    pairs = absorbed * (seen.pairs - seen.prompt_pairs) + min(absorbed, expanded) * seen.prompt_pairs
    products = query.shape[0] * rank * (nope + value)
    num_bytes = query.nbytes + result.nbytes + up.key.nbytes + up.value.nbytes + _looked_up(source.rows)
    return Work(num_bytes + seen.rows * _row_bytes(source.cache), 2 * query.shape[1] * (pairs + products))


def _select_rows(given: Arguments, result: torch.Tensor) -> Work:
    query, seen = given["query"], _seen(given["rows"], given["batch"])
    num_bytes = query.nbytes + given["weights"].nbytes + result.nbytes + seen.rows * _row_bytes(given["keys"])
    return Work(num_bytes, 2 * query.shape[1] * (query.shape[2] + 1) * seen.pairs)


def _store_rows(given: Arguments, _result: Any) -> Work:
    x, slots = given["x"], given["slot_mapping"]
    return Work(x.nbytes + slots.nbytes + int((slots >= 0).sum()) * _row_bytes(given["cache"]), 0)


def _compress_rows(given: Arguments, _result: Any) -> Work:
    """Every token's state is written; an entry reads those that earlier steps have left."""
    batch, states, entries = given["batch"], given["states"], given["entries"]
    compression = given["compression"]
    spans = (2 if compression.overlap else 1) * compression.ratio
    positions, slots = batch.positions.cpu(), batch.caches[entries.group].slot_mapping.cpu()
    read = made = 0
    for part in _seqs(batch):
        completed = positions[part][slots[part] >= 0].tolist()
        if completed:
            made += len(completed)
            read += max(0, int(positions[part.start]) - max(0, completed[0] + 1 - spans))
    num_bytes = given["projected"].nbytes + (batch.num_tokens + read) * _row_bytes(states)
    width = compression.norm.weight.shape[0]
    return Work(num_bytes + made * _row_bytes(entries), 4 * made * spans * width)


def _stream_product(streams: torch.Tensor, fn: torch.Tensor) -> int:
    """Operations of what the mix is computed from, and of the mix."""
    num_tokens, count, size = streams.shape
    return 2 * num_tokens * count * size * (fn.shape[0] + 1)


def _mix_streams(given: Arguments, result: Any) -> Work:
    """Also what the head does: the result is one tensor then."""
    streams, mix = given["streams"], given["mix"]
    made = result if isinstance(result, tuple) else (result,)
    num_bytes = streams.nbytes + mix.fn.nbytes + given["norm"].weight.nbytes + sum(t.nbytes for t in made)
    return Work(num_bytes, _stream_product(streams, mix.fn))


def _merge_streams(given: Arguments, result: torch.Tensor) -> Work:
    num_bytes = sum(given[name].nbytes for name in ("output", "streams", "post", "comb")) + result.nbytes
    return Work(num_bytes, _merge_flops(given["streams"]))


def _merge_flops(streams: torch.Tensor) -> int:
    num_tokens, count, size = streams.shape
    return 2 * num_tokens * count * (count + 1) * size


def _merge_and_mix_streams(given: Arguments, result: Any) -> Work:
    """Streams are read and written once."""
    merged, mixed = result
    merge = _merge_streams(given, merged)
    mix = given["mix"]
    num_bytes = merge.num_bytes + mix.fn.nbytes + given["norm"].weight.nbytes + sum(t.nbytes for t in mixed)
    return Work(num_bytes, merge.flops + _stream_product(merged, mix.fn))


def _grouped_linear(given: Arguments, result: torch.Tensor) -> Work:
    x, weights = given["x"], given["weights"]
    held = weights.nbytes if isinstance(weights, torch.Tensor) else sum(weight.nbytes for weight in weights)
    num_groups, features = x.shape[1:]
    return Work(x.nbytes + held + result.nbytes, 2 * x.shape[0] * num_groups * features * result.shape[2])


def _transform_kv(given: Arguments, result: Any) -> Work:
    x, norm, rope = given["x"], given["norm"], given["rope"]
    num_bytes = x.nbytes + result.nbytes + (0 if norm is None else norm.weight.nbytes)
    if rope is not None:
        num_bytes += len(x) * rope.cos_sin.shape[1] * rope.cos_sin.element_size() + rope.positions.nbytes
    return Work(num_bytes, 0)


def _route_scores(given: Arguments, result: Any) -> Work:
    """Of a table only the tokens' rows."""
    read = [given["router_logits"], *([] if given["bias"] is None else [given["bias"]])]
    table = given["table"]
    looked_up = 0 if table is None else result.expert_ids.numel() * table.expert_ids.element_size()
    return Work(sum(t.nbytes for t in (*read, *result)) + looked_up, 0)


ROW_COUNTS: dict[str, Callable[[Arguments, Any], Work]] = {
    "collapse_streams": _mix_streams,
    "compress_rows": _compress_rows,
    "grouped_linear": _grouped_linear,
    "latent_attention": _latent_attention,
    "merge_and_mix_streams": _merge_and_mix_streams,
    "merge_streams": _merge_streams,
    "mix_streams": _mix_streams,
    "route_scores": _route_scores,
    "row_attention": _row_attention,
    "select_rows": _select_rows,
    "store_rows": _store_rows,
    "transform_kv": _transform_kv,
}
"""By the name of the op."""
