"""Launch of Hopper's attention kernel for chunks; Gluon, which it is written in, is imported where it is used."""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from rorqual.ops._hopper_tiles import is_hopper
from rorqual.ops.triton._hopper import boxes, num_multiprocessors
from rorqual.ops.triton._linear_launch import arrivals

HOPPER_TILE = {"BM": 128, "BN": 128, "STAGES": 2, "num_warps": 4}
BOX_COLUMNS = 64
"""Columns that one TMA copy writes: 128 bytes, which its swizzle is made of."""


def takes_chunks(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None,
) -> bool:
    """Whether the kernel is for these; arguments as in `paged_attention`.

    It does not depend on the batch but on what is the same for all of a layer, as its sums are not those of other
    kernels to the bit.
    """
    (block_size, num_kv_heads), (num_heads, dims) = key_cache.shape[1:3], query.shape[1:]
    return (
        query.dtype == key_cache.dtype == torch.bfloat16
        and dims in (64, 128)
        and _is_power_of_two(num_heads // num_kv_heads)
        and num_heads // num_kv_heads <= HOPPER_TILE["BM"] // 2
        and _is_power_of_two(block_size)
        and 8 <= block_size <= HOPPER_TILE["BN"]
        and scale > 0
        and sliding_window is None
        and all(cache.transpose(1, 2).is_contiguous() for cache in (key_cache, value_cache))
        and is_hopper(query.device)
    )


def attend_chunks(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor,
    cu_seqlens: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    cap: float,
    constants: dict[str, Any],
) -> None:
    """Fill `out` for the tiles, int32 [num_tiles, 2]. constants: those of `chunk_kernel`, of which it takes its own."""
    from rorqual.ops.triton._hopper_attention_kernel import hopper_chunk_kernel

    block_size, num_kv_heads = key_cache.shape[1:3]
    hopper_chunk_kernel[(min(len(tiles) * num_kv_heads, num_multiprocessors(query.device)),)](
        query,
        _rows(key_cache),
        _rows(value_cache),
        block_tables,
        context_lens,
        sinks,
        cu_seqlens,
        tiles,
        arrivals(query.device),
        out,
        _tiles(out, num_kv_heads),
        len(tiles),
        num_kv_heads,
        *query.stride()[:2],
        block_tables.stride(0),
        out.stride(0),
        scale,
        cap,
        BLOCK_SIZE=block_size,
        **{name: constants[name] for name in ("GROUP", "D", "CAPPED", "SINKS")},
        **HOPPER_TILE,
    )


_described = WeakIdKeyDictionary()
"""Cache -> its descriptor: a layer's is the same from step to step, and takes longer to make than to use."""


def _rows(cache: torch.Tensor) -> Any:
    """A cache [num_blocks, block_size, num_kv_heads, head_dim] as rows: a head's of a block, then the next head's."""
    if cache not in _described:
        # Of a tensor of its own, which shares the memory: the cache itself would be held for ever.
        rows = cache.detach().transpose(1, 2).view(-1, cache.shape[3])
        _described[cache] = boxes(rows, cache.shape[1], BOX_COLUMNS)
    return _described[cache]


def _tiles(out: torch.Tensor, num_kv_heads: int) -> Any:
    """Answers as TMA stores them: half of a tile, which is tokens' heads of one KV head."""
    group = out.shape[1] // num_kv_heads
    return boxes(out, HOPPER_TILE["BM"] // 2 // group, group, out.shape[2])


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
