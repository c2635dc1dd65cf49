"""Launches of the product kernels: which tile, how many shares of K, and the counters by which shares are added up."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rorqual.ops.triton import _decode_kernels, _linear_kernels
from rorqual.ops.triton._prepared_weight import GROUP, WIDTH, PreparedWeight
from rorqual.quantization import QTensor, ScaleLayout

SKINNY = 64
"""Rows up to which a product is bound by reading its weight: K is split, in a way that is one for all of them."""
_SHORTEST_SHARE = 4
"""Steps of WIDTH columns that a share of K has at least."""


class Tile(NamedTuple):
    """What one program computes, with how many warps, and the stages of its loop: it loads one step less ahead."""

    block_n: int
    block_m: int
    warps: int
    stages: int


TILES: dict[str, dict[int, Tile]] = {
    # Family -> the most rows that a tile is taken for; the last is for all above. Within SKINNY rows, the tiles of a
    # family must all have four warps and 64 features or more (wgmma), or all less (mma): the two may round differently.
    "fp8": {16: Tile(64, 16, 4, 5), 32: Tile(64, 32, 4, 5), 64: Tile(64, 64, 4, 4), 128: Tile(128, 128, 8, 3)},
    "mxfp8": {16: Tile(64, 16, 4, 5), 32: Tile(64, 32, 4, 5), 64: Tile(64, 64, 4, 4)},
    "fp8_weight": {16: Tile(64, 16, 2, 4), 32: Tile(64, 32, 2, 4), 64: Tile(64, 64, 2, 3), 128: Tile(128, 128, 8, 3)},
    "mxfp8_weight": {16: Tile(64, 16, 2, 3), 32: Tile(64, 32, 2, 4), 64: Tile(64, 64, 2, 3), 128: Tile(128, 128, 8, 3)},
    "mxfp4_weight": {
        8: Tile(64, 8, 2, 3),
        16: Tile(64, 16, 2, 3),
        32: Tile(64, 32, 2, 4),
        64: Tile(64, 64, 2, 3),
        128: Tile(128, 128, 8, 3),
    },
}
"""Tiles by family and number of rows: fp8 and mxfp8 multiply FP8 by FP8 with float32 and UE8M0 scales, *_weight decode
a weight beside bfloat16. Chosen by `benchmarks/gemm_sweep.py` on an H200."""

PROGRAMS = {"fp8": 384, "mxfp8": 384, "fp8_weight": 768, "mxfp8_weight": 768, "mxfp4_weight": 768}
"""How many programs a skinny product of a family should have. Of four warps that only wait for memory about three fit
on a multiprocessor, of two that decode about six."""


def tile_of(family: str, rows: int) -> Tile:
    """The entry of TILES for a number of rows."""
    entries = TILES[family]
    return next((tile for most, tile in entries.items() if rows <= most), entries[max(entries)])


def shares(family: str, rows: int, features: int, columns: int) -> int:
    """How many programs share a tile's columns of K: a power of two, the same for all numbers of rows up to SKINNY."""
    if rows > SKINNY:
        return 1
    steps, tiles, count = -(-columns // WIDTH), -(-features // 64), 1
    while count < 8 and tiles * count < PROGRAMS[family] and steps >= 2 * count * _SHORTEST_SHARE:
        count *= 2
    return count


_STREAMS, MOST_TILES = 16, 1 << 16
_counters: dict[torch.device, torch.Tensor] = {}
_streams: dict[tuple[torch.device, int], int] = {}


def arrivals(device: torch.device) -> torch.Tensor:
    """int32 counters of finished shares, one per tile, zero between launches, of the current stream.

    Streams have counters of their own, since products may run on several at once: on 16, of those that ever asked. A
    captured graph counts with those of the stream that captured it, and must not run beside other products there.
    """
    if device not in _counters:
        _counters[device] = torch.zeros((_STREAMS, MOST_TILES), dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    number = _streams.setdefault((device, stream), len(_streams))
    return _counters[device][number % _STREAMS]


def _launch_options(
    family: str, out: torch.Tensor, columns: int, tile: Tile | None, split: int | None
) -> tuple[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor | None], dict[str, Any]]:
    """The grid, where shares are kept and counted, and what all kernels are compiled for."""
    rows, features = out.shape
    tile = tile or tile_of(family, rows)
    split = split or shares(family, rows, features, columns)
    tiles = -(-rows // tile.block_m) * -(-features // tile.block_n)
    options = {
        "EVEN": columns % WIDTH == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if split == 1 or tiles > MOST_TILES:
        return (tiles, 1), (None, None), options | {"SPLIT": 1}
    partial = torch.empty((split, rows, features), dtype=torch.float32, device=out.device)
    return (tiles, split), (partial, arrivals(out.device)), options | {"SPLIT": split}


def multiply_scaled(
    x: QTensor,
    weight: QTensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool,
    tile: Tile | None = None,
    split: int | None = None,
) -> None:
    """e4m3 x [M, K], scales in layout COLUMN (or ROW) or COLUMN_PACKED, times a weight in blocks or words, into out."""
    rows, columns = x.shape
    words = x.layout is ScaleLayout.COLUMN_PACKED
    grid, shared, options = _launch_options("mxfp8" if words else "fp8", out, columns, tile, split)
    block_rows, width = weight.format.block
    _linear_kernels.block_scaled_kernel[grid](
        x.values,
        x.scales,
        weight.values,
        weight.scales,
        bias,
        out,
        *shared,
        rows,
        out.shape[1],
        columns,
        x.values.stride(0),
        x.scales.stride(0),
        x.scales.stride(1),
        weight.values.stride(0),
        weight.scales.stride(0),
        weight.scales.stride(1),
        out.stride(0),
        block_rows,
        X_GROUP=x.format.block[1],
        W_GROUP=width,
        STEP=GROUP if words else min(width, x.format.block[1]),
        WORDS=words,
        ONE_BLOCK=block_rows % options["BLOCK_N"] == 0,
        ACCUMULATE=accumulate,
        WEIGHT_FIRST=rows <= SKINNY,
        **options,
    )


def multiply_weight_only(
    x: torch.Tensor,
    weight: QTensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool,
    tile: Tile | None = None,
    split: int | None = None,
) -> None:
    """bfloat16 x [M, K] times a weight in any layout, into out."""
    rows, columns = x.shape
    words = isinstance(weight, PreparedWeight) and weight.kind != "blocks"
    planes = weight.format.element == "e2m1"
    family = "mxfp4_weight" if planes else "mxfp8_weight" if words else "fp8_weight"
    grid, shared, options = _launch_options(family, out, columns, tile, split)
    block_rows, width = weight.format.block
    _linear_kernels.weight_only_kernel[grid](
        x,
        weight.values if planes else weight.values.view(torch.uint8),
        weight.scales,
        bias,
        out,
        *shared,
        rows,
        out.shape[1],
        columns,
        x.stride(0),
        weight.values.stride(0),
        weight.scales.stride(0),
        weight.scales.stride(1),
        out.stride(0),
        block_rows,
        ELEMENT=weight.format.element,
        WORDS=words,
        W_GROUP=width,
        STEP=width,
        ACCUMULATE=accumulate,
        **options,
    )


def expand(x: QTensor) -> torch.Tensor:
    """A QTensor in layout COLUMN_PACKED, or a weight in words or planes, as bfloat16 [rows, columns]. Exact."""
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=x.device)
    element, block = x.format.element, 16
    _decode_kernels.expand_kernel[-(-rows // block), -(-columns // WIDTH)](
        x.values if element == "e2m1" else x.values.view(torch.uint8),
        x.scales,
        out,
        rows,
        columns,
        x.values.stride(0),
        x.scales.stride(0),
        x.scales.stride(1),
        out.stride(0),
        x.format.block[0],
        ELEMENT=element,
        BLOCK=block,
        num_warps=4,
    )
    return out
