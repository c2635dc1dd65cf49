"""Attention over rows that are keys and values at once, on NVIDIA GPUs."""

# mypy: ignore-errors

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import triton.language as tl

from rorqual.batch import Batch
from rorqual.ops._hopper_tiles import is_hopper
from rorqual.ops.row_attention import RowList, RowSource, row_attention, seq_of_token
from rorqual.ops.row_cache import RowCache
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._row_attention_kernel import merge_kernel, rows_kernel
from rorqual.ops.triton.launch import refuses

SPAN, WHOLE, LONG, MOST_SPANS = 512, 640, 4096, 64
"""Rows of a softmax of its own, and twice as many from LONG rows on, where what spans write weighs more than what they
let run side by side; with up to WHOLE rows a token has one for all. There are at most MOST_SPANS, which then get longer
still. Sums depend on these, and on nothing else but the token's own rows."""
_PROGRAMS = 264
"""How many programs there should be at least: two for each multiprocessor."""
_WORKSPACE = 512 << 20
"""Bytes of spans that wait to be merged, at most, unless a single token has more: tokens beyond take another launch."""
_LARGEST_VALUE, _LARGEST_REST = 512, 128
_MOST_TOKENS = 1 << 15
_OF_RECORDS = (1, 2)
"""Of a source's six tensors, those that only the Triton kernel's records have."""
HOPPER_TILE, HOPPER_HEADS = {"BN": 64, "STAGES": 2, "NOTES": 1, "num_warps": 4}, 64
"""Hopper's own kernel: rows of a tile, how many tiles and how many tiles' weights there are at a time, and heads of a
program."""
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _refuse_cache(cache: RowCache, width: int, query_dtype: torch.dtype) -> str | None:
    record, data = cache.record, cache.data
    if record is None:
        if data.dtype != query_dtype:
            return f"needs rows of the query's dtype {query_dtype}, got {data.dtype}"
        if data.stride(-1) != 1:
            return "needs rows without gaps"
        return None
    form = record.format
    if form is None or (form.element, form.scale) != ("e4m3", "ue8m0") or not record.interleaved or record.bytes % 2:
        return f"does not know records {record.name}"
    if query_dtype != torch.bfloat16:
        return f"needs queries of bfloat16 beside records, got {query_dtype}"
    return None


def _refuse(
    query: torch.Tensor,
    sources: Sequence[RowSource],
    batch: Batch,
    *,
    scale: float,
    value_dim: int,
    sinks: torch.Tensor | None = None,
) -> str | None:
    tensors = [t for cache, which in sources for t in (cache.data, *which)]
    if refusal := refuses(query, sinks, *(t for t in tensors if isinstance(t, torch.Tensor))):
        return refusal
    width = query.shape[-1]
    if not 1 <= len(sources) <= 2 or len({cache.record for cache, _ in sources}) > 1:
        return "needs one source, or two of the same kind of rows"
    if query.dtype not in _DTYPES or query.stride(-1) != 1:
        return f"needs queries of a float dtype, without gaps, got {query.dtype}"
    rest = width - min(width, _block(value_dim))
    if value_dim > _LARGEST_VALUE or rest > _LARGEST_REST:
        most = f"needs values of up to {_LARGEST_VALUE} numbers and {_LARGEST_REST} beside them"
        return f"{most}, got {value_dim} of {width}"
    if sinks is not None and (sinks.dtype != torch.float32 or sinks.stride(-1) != 1):
        return f"needs sinks of float32, without gaps, got {sinks.dtype}"
    for cache, which in sources:
        if refusal := _refuse_cache(cache, width, query.dtype):
            return refusal
        if cache.record is not None and rest:
            return f"needs records that are values throughout, got {value_dim} of {width}"
        if which[0].stride(-1) != 1 or not all(t is None or t.is_contiguous() for t in which[1:3]):
            return "needs block tables, slots and bounds without gaps"
    return None


@row_attention.impl("triton", refuse=_refuse)
def row_attention_triton(
    query: torch.Tensor,
    sources: Sequence[RowSource],
    batch: Batch,
    *,
    scale: float,
    value_dim: int,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """A token is a row of the grid, alone or in a prompt; tokens with many rows get their spans merged behind it."""
    num_tokens, num_heads, width = query.shape
    out = torch.empty((num_tokens, num_heads, value_dim), dtype=query.dtype, device=query.device)
    block_v, record = _block(value_dim), sources[0].cache.record
    on_hopper = takes_rows(query, sources, value_dim)
    tile = HOPPER_TILE if on_hopper else _tile(block_v, query.dtype.itemsize, num_heads)
    rows = sum(-(-_most_rows(source) // tile["BN"]) * tile["BN"] for source in sources)
    most_spans = _most_spans(rows)
    bytes_per_token = 4 * most_spans * num_heads * (block_v + 2)
    at_once = max(1, min(_MOST_TOKENS, _WORKSPACE // bytes_per_token)) if most_spans > 1 else _MOST_TOKENS
    owners = query  # an address that nobody reads
    if not all(isinstance(which, RowList) for _, which in sources):
        owners = seq_of_token(batch)
    arguments, strides, constants = _arguments(sources, on_hopper)
    constants |= {
        "W": width,
        "V": value_dim,
        "BLOCK_V": block_v,
        "SINKS": sinks is not None,
        "SPLIT": most_spans > 1,
    }
    if on_hopper:
        from rorqual.ops.triton._hopper_row_attention_kernel import hopper_rows_kernel as kernel

        arguments = [t for number, t in enumerate(arguments) if number % 6 not in _OF_RECORDS]
        constants["RECORDS"] = record is not None
    else:
        kernel = rows_kernel
        constants |= {
            "DIMS": 0 if record is None else record.dims,
            "GROUP": 1 if record is None else record.format.block[1],
            "COMPUTE": _DTYPES[query.dtype],
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
            "launch_pdl": DEPENDENT_LAUNCH,
        }
    head_blocks = -(-num_heads // (HOPPER_HEADS if on_hopper else tile["BLOCK_H"]))
    partial = stats = spans_of_token = query
    for first in range(0, num_tokens, at_once):
        tokens = min(at_once, num_tokens - first)
        if most_spans > 1:
            partial = torch.empty(tokens * most_spans * num_heads * block_v, dtype=torch.float32, device=query.device)
            stats = torch.empty(tokens * most_spans * num_heads * 2, dtype=torch.float32, device=query.device)
            spans_of_token = torch.empty(tokens, dtype=torch.int32, device=query.device)
        splits = max(1, min(most_spans, -(-_PROGRAMS // (tokens * head_blocks))))
        kernel[(head_blocks, tokens, splits)](
            query,
            owners,
            query if sinks is None else sinks,
            out,
            partial,
            stats,
            spans_of_token,
            *arguments,
            *query.stride()[:2],
            *strides,
            first,
            num_heads,
            most_spans,
            WHOLE,
            SPAN,
            LONG,
            scale * math.log2(math.e),
            **tile,
            **constants,
        )
        if most_spans > 1:
            merge_kernel[(num_heads, tokens)](
                partial,
                stats,
                spans_of_token,
                out,
                first,
                most_spans,
                V=value_dim,
                BLOCK_V=block_v,
                AT_ONCE=8,
                num_warps=4,
                launch_pdl=DEPENDENT_LAUNCH,
            )
    return out


def takes_rows(query: torch.Tensor, sources: Sequence[RowSource], value_dim: int) -> bool:
    """Whether Hopper's own kernel is for these. It does not depend on the batch but on what is the same for all of a
    layer, as its sums are not those of the other kernel to the bit."""
    return (
        query.dtype == torch.bfloat16
        and value_dim == _LARGEST_VALUE
        and query.shape[2] in (value_dim, value_dim + 64)
        and all(_hopper_knows(cache) for cache, _ in sources)
        and is_hopper(query.device)
    )


def _hopper_knows(cache: RowCache) -> bool:
    """Whether rows begin where Hopper's kernel reads 16 bytes at once, or 8 of records."""
    aligned = 16
    if cache.record is not None:
        record, aligned = cache.record, 8  # whose scales are a word: seven, and padding
        if (record.dims, record.plain_dims, record.bytes % aligned) != (448, 64, 0):
            return False
    data = cache.data
    return data.data_ptr() % 16 == 0 and all(step % aligned == 0 for step in data.stride()[:2])


def _most_spans(rows: int) -> int:
    """How many spans a token with at most so many rows has at most."""
    if rows <= WHOLE:
        return 1
    below, beyond = -(-min(rows, LONG - 1) // SPAN), -(-rows // (2 * SPAN))
    return min(MOST_SPANS, below if rows < LONG else max(below, beyond))


def _most_rows(source: RowSource) -> int:
    """How many rows a token may see, by what the host knows."""
    cache, which = source
    if isinstance(which, RowList):
        return which.slots.shape[1]
    rows = which.block_tables.shape[1] * cache.rows_per_block
    return rows if which.most is None else min(rows, which.most)


def _arguments(sources: Sequence[RowSource], on_hopper: bool) -> tuple[list[torch.Tensor], list[int], dict[str, int]]:
    """Of one or two sources: tensors, strides and constants, in the kernel's order; of a missing one the first's."""
    tensors, strides, constants = [], [], {"TWO": len(sources) > 1}
    for number in range(2):
        cache, which = sources[min(number, len(sources) - 1)]
        values, scales, plain, steps = cache.data, cache.data, cache.data, cache.data.stride()[:2]
        if cache.record is not None:
            values, scales, plain = cache.record.split(cache.data)
            values, scales = values.view(torch.uint8), scales.view(torch.uint8)
            plain = values if plain is None else plain
            if on_hopper:
                values, steps = cache.data.view(torch.int32), [step // 8 for step in steps]
        listed = isinstance(which, RowList)
        first = None if listed else which.first
        tensors += [values, scales, plain, which[0]]
        tensors += [which[0] if first is None else first, which[0] if listed else which.stop]
        strides += [*steps, which[0].stride(0)]
        constants |= {
            f"LIST{number}": listed,
            f"LENGTH{number}": which.slots.shape[1] if listed else 0,
            f"FIRST{number}": first is not None,
            f"ROWS{number}": cache.rows_per_block,
            f"WIDTH{number}": max(128, 1 << (which.slots.shape[1] - 1).bit_length()) if listed else 128,
        }
    return tensors, strides, constants


def _block(value_dim: int) -> int:
    """Columns of the tile that is keys and values."""
    return max(16, 1 << (value_dim - 1).bit_length())


@functools.cache
def _tile(block_v: int, itemsize: int, num_heads: int) -> dict[str, int]:
    """The tile of rows depends on what is the same for all of a layer, so that a token's sums do as well."""
    block_h = max(16, 1 << (num_heads - 1).bit_length())
    if itemsize > 2:
        return {"BLOCK_H": min(16, block_h), "BN": 16, "STAGES": 1, "num_warps": 4}
    if block_v <= 128:
        return {"BLOCK_H": min(64, block_h), "BN": 64, "STAGES": 2, "num_warps": 4}
    return {"BLOCK_H": min(64, block_h), "BN": 64, "STAGES": 2, "num_warps": 8}
