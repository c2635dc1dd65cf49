"""Products of few rows with a plain weight: as fast as the weight comes from memory.

A program multiplies a strip of the weight with all rows. The weight is the left operand of the tensor core's product,
so that its 16 rows are all of use, and a program is a single warp: many fit on a multiprocessor, and their loads
overlap.

Each output is one float32 sum over K, in order, 16 columns after 16. That is what every product of the tensor cores
does that does not split K, whatever its tile; cuBLAS's are the same to the bit (`ops/vendor/linear.py`).
"""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, let_next_kernel_start, wait_only
from rorqual.ops.triton._interpreter import bound, dot
from rorqual.ops.triton._number_formats import round_to, rounded

FEW_ROWS = 16
"""Rows that one program takes at most where it streams a strip of the weight."""
MOST_ROWS = 128
"""Rows from which on other products are ahead of wide weights in any case."""
NARROW, MOST_ROWS_OF_NARROW = 512, 512
"""Outputs that larger tiles would share among too few programs, and the rows up to which that counts: routers."""


class PlainTile(NamedTuple):
    """What one program computes, with how many warps, and the stages of its loop."""

    block_n: int
    block_m: int
    block_k: int
    warps: int
    stages: int


def tile_of_plain(rows: int, features: int | None = None) -> PlainTile:
    """What a program computes, for a number of rows and outputs; None are many."""
    if rows <= FEW_ROWS or (features is not None and features <= NARROW):
        return PlainTile(16, 8 if rows <= 8 else 16, 256, 1, 4)
    return PlainTile(64, 32, 128, 4, 4)


@triton.jit
def _load_x(x, m, k, rows, columns, x_row, EVEN: tl.constexpr):
    """x's tile, transposed: [BLOCK_K, BLOCK_M]."""
    mask = m[None, :] < rows
    if not EVEN:
        mask &= k[:, None] < columns
    return tl.load(x + m.to(tl.int64)[None, :] * x_row + k[:, None], mask=mask, other=0.0)


@triton.jit
def _load_weight(weight, n, k, features, columns, weight_row, EVEN: tl.constexpr):
    mask = n[:, None] < features
    if not EVEN:
        mask &= k[None, :] < columns
    at = weight + n.to(tl.int64)[:, None] * weight_row + k[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    features,
    columns,
    x_row,
    weight_row,
    out_row,
    GATED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[m, n] for a strip of n: x W^T + bias (+ out), or the gate over the rows n and n + features of W."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype: tl.constexpr = x.dtype.element_ty
    wait_only()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, bound(columns), BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        w = _load_weight(weight, n, k, features, columns, weight_row, EVEN)
        rows_of_x = _load_x(x, m, k, rows, columns, x_row, EVEN)
        acc = dot(w, rows_of_x, acc)
        if GATED:
            w = _load_weight(weight + features * weight_row, n, k, features, columns, weight_row, EVEN)
            up = dot(w, rows_of_x, up)
    # The next kernel's programs take their places while these write: earlier, they would lie unevenly.
    let_next_kernel_start()
    if bias is not None:
        acc += tl.load(bias + n, mask=n < features, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if bias is not None:
            up += tl.load(bias + features + n, mask=n < features, other=0.0).to(tl.float32)[:, None]
        gate = rounded(acc, dtype)
        acc = rounded(gate / (1.0 + tl.exp(-gate)), dtype) * rounded(up, dtype)
    to = out + m.to(tl.int64)[None, :] * out_row + n[:, None]
    mask = (m[None, :] < rows) & (n[:, None] < features)
    if ACCUMULATE:
        acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=mask)


def refuse_plain(x: torch.Tensor, weight: torch.Tensor, *, most_rows: int) -> str | None:
    """Why x [..., in_features] times a plain weight [..., in_features] is not for these kernels, or None."""
    if weight.dim() != 2 or x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return f"multiplies matrices of bfloat16 or float16, got {x.dtype} and {weight.dtype}"
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        return f"needs as many columns as the weight has, got {list(x.shape)} and {list(weight.shape)}"
    if x.numel() > most_rows * x.shape[-1]:
        return f"is for up to {most_rows} rows, got {list(x.shape)}"
    if weight.stride(1) != 1 and weight.shape[1] > 1:
        return "needs rows of the weight without gaps"
    return None


def multiply_plain(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
    gated: bool = False,
) -> None:
    """x [rows, columns] times a weight of its dtype into out [rows, features]; x's rows have no gaps."""
    rows, features = out.shape
    tile = tile_of_plain(rows, features)
    product_kernel[(triton.cdiv(features, tile.block_n), triton.cdiv(rows, tile.block_m))](
        x,
        weight,
        bias,
        out,
        rows,
        features,
        x.shape[1],
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        GATED=gated,
        ACCUMULATE=accumulate,
        EVEN=x.shape[1] % tile.block_k == 0,
        BLOCK_N=tile.block_n,
        BLOCK_M=tile.block_m,
        BLOCK_K=tile.block_k,
        STAGES=tile.stages,
        num_warps=tile.warps,
        launch_pdl=DEPENDENT_LAUNCH,
    )
