"""Products in groups in one launch: plain weights in one tensor, and FP8 weights in blocks wherever they lie.

A row's result does not depend on the number of rows, as far as `linear`'s does not: see ops/triton/linear.py.
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
import triton

from rorqual.ops.grouped_linear import grouped_linear
from rorqual.ops.linear import Weight
from rorqual.ops.quantize import quantize
from rorqual.ops.triton import _grouped_kernels
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._linear_launch import MOST_TILES, SKINNY, Tile, arrivals, shares, tile_of
from rorqual.ops.triton._plain_product import PlainTile, tile_of_plain
from rorqual.ops.triton._prepared_weight import PreparedWeight
from rorqual.ops.triton.launch import refuses
from rorqual.quantization import FP8_ROW, FP8_ROW_UE8M0, QTensor, QuantFormat, ScaleLayout

_MOST_GROUPS = 32
"""Quantised weights whose addresses a kernel takes."""
_WIDTH = 128
_MIDDLE_ROWS = 256
"""Rows up to which tiles are smaller, as there would not be one for each multiprocessor."""
_MIDDLE = Tile(64, 128, 4, 3)
"""Of the same instruction (wgmma) as the tile for more rows, so that the results are the same."""

_FEW_PROGRAMS = 100
"""Fewer leave multiprocessors without work."""


def _plain_tile(rows: int, groups: int) -> PlainTile:
    """Groups fill the multiprocessors where rows do not."""
    if rows > _MIDDLE_ROWS:
        return PlainTile(128, 128, 64, 8, 4)
    if rows > 16:
        return PlainTile(64, 64, 128, 4, 3)
    return tile_of_plain(rows) if groups < 64 else PlainTile(64, 8 if rows <= 8 else 16, 128, 4, 3)


def _refuse(
    x: torch.Tensor, weights: tuple[Weight, ...] | torch.Tensor, *, activation: QuantFormat | None = None, **others: Any
) -> str | None:
    if others:
        return f"takes no {', '.join(others)}"
    if not isinstance(x, torch.Tensor) or x.dim() != 3 or x.stride(2) != 1:
        return "needs x [num_tokens, num_groups, in_features] without gaps between features"
    if isinstance(weights, torch.Tensor):
        if reason := refuses(x, weights):
            return reason
        if activation is not None or x.dtype != weights.dtype or x.dtype not in (torch.bfloat16, torch.float16):
            return f"multiplies plain bfloat16 and float16, got {x.dtype} and {weights.dtype}"
        return None if weights.stride(2) == 1 else "needs rows of the weights without gaps"
    if not weights or len(weights) > _MOST_GROUPS or not all(_is_blocks(weight) for weight in weights):
        return f"needs up to {_MOST_GROUPS} FP8 weights in blocks, or plain ones in one tensor"
    first = weights[0]
    if any(
        (w.shape, w.format, w.values.stride(), w.scales.stride())
        != (first.shape, first.format, first.values.stride(), first.scales.stride())
        for w in weights
    ):
        return "needs weights of one shape and format"
    if reason := refuses(x, first.values):
        return reason
    if activation not in (None, FP8_ROW, FP8_ROW_UE8M0):
        return f"needs x in {FP8_ROW.name} or {FP8_ROW_UE8M0.name}, got {activation.name}"
    if x.dtype != torch.bfloat16:
        return f"needs x in bfloat16, got {x.dtype}"
    return None


def _is_blocks(weight: Weight) -> bool:
    if isinstance(weight, PreparedWeight):
        return weight.kind == "blocks"
    return (
        type(weight) is QTensor
        and (weight.format.element, weight.format.scale) == ("e4m3", "float32")
        and weight.layout is ScaleLayout.ROW
        and weight.format.block[1] in (32, 64, 128)
    )


@grouped_linear.impl("triton", refuse=_refuse)
def grouped_linear_triton(
    x: torch.Tensor, weights: tuple[Weight, ...] | torch.Tensor, *, activation: QuantFormat | None = None
) -> torch.Tensor:
    """One launch, and one before for an x that is to be quantised."""
    rows, groups, columns = x.shape
    features = weights[0].shape[0]
    if len(weights) != groups or weights[0].shape[1] != columns:
        raise ValueError(
            f"grouped_linear needs a weight of {columns} columns for each of {groups} groups, got {len(weights)} of "
            f"{weights[0].shape[1]}"
        )
    out = torch.empty((rows, groups, features), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if isinstance(weights, torch.Tensor):
        _multiply_plain(x, weights, out)
    else:
        _multiply_blocks(x, weights, out, activation)
    return out


def _multiply_plain(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, tile: PlainTile | None = None) -> None:
    rows, groups, features = out.shape
    tile = tile or _plain_tile(rows, groups)
    grid = (triton.cdiv(features, tile.block_n), triton.cdiv(rows, tile.block_m), groups)
    _grouped_kernels.grouped_plain_kernel[grid](
        x,
        weights,
        out,
        rows,
        features,
        x.shape[2],
        x.stride(0),
        x.stride(1),
        weights.stride(1),
        weights.stride(0),
        out.stride(0),
        out.stride(1),
        EVEN=x.shape[2] % tile.block_k == 0,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
        launch_pdl=DEPENDENT_LAUNCH,
    )


def _multiply_blocks(
    x: torch.Tensor, weights: tuple[QTensor, ...], out: torch.Tensor, activation: QuantFormat | None
) -> None:
    rows, groups, features = out.shape
    columns, first = x.shape[2], weights[0]
    family = "fp8_weight" if activation is None else "fp8"
    tile = tile_of(family, rows)
    few = triton.cdiv(rows, tile.block_m) * triton.cdiv(features, tile.block_n) * groups < _FEW_PROGRAMS
    if SKINNY < rows <= _MIDDLE_ROWS and (activation is None or few):
        tile = _MIDDLE if activation is None else _MIDDLE._replace(stages=4)
    tiles = triton.cdiv(rows, tile.block_m) * triton.cdiv(features, tile.block_n)
    split = shares(family, rows, groups * features, columns)
    if tiles * groups > MOST_TILES:
        split = 1
    partial = counters = None
    if split > 1:
        partial = torch.empty((groups, split, rows, features), dtype=torch.float32, device=x.device)
        counters = arrivals(x.device)
    block_rows, width = first.format.block
    scales = tuple(weight.scales for weight in weights)
    sizes = (first.values.stride(0), first.scales.stride(0), first.scales.stride(1), out.stride(0), out.stride(1))
    options = {
        "COUNT": groups,
        "W_GROUP": width,
        "EVEN": columns % _WIDTH == 0,
        "SPLIT": split,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    grid = (tiles, split, groups)
    if activation is None:
        _grouped_kernels.grouped_weight_only_kernel[grid](
            x,
            tuple(weight.values.view(torch.uint8) for weight in weights),
            scales,
            out,
            partial,
            counters,
            rows,
            features,
            columns,
            x.stride(0),
            x.stride(1),
            *sizes,
            block_rows,
            **options,
        )
        return
    quantized = quantize(x.reshape(rows * groups, columns), format=activation, layout=ScaleLayout.COLUMN)
    _grouped_kernels.grouped_scaled_kernel[grid](
        quantized.values,
        quantized.scales,
        tuple(weight.values for weight in weights),
        scales,
        out,
        partial,
        counters,
        rows,
        features,
        columns,
        groups * quantized.values.stride(0),
        quantized.values.stride(0),
        groups * quantized.scales.stride(0),
        quantized.scales.stride(0),
        quantized.scales.stride(1),
        *sizes,
        block_rows,
        X_GROUP=activation.block[1],
        STEP=min(width, activation.block[1]),
        ONE_BLOCK=block_rows % tile.block_n == 0,
        WEIGHT_FIRST=rows <= SKINNY,
        **options,
    )
