"""Products in groups: those of `_plain_product` and `_linear_kernels`, one group after the other along the grid."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._linear_kernels import block_scaled_kernel, weight_only_kernel
from rorqual.ops.triton._plain_product import product_kernel


@triton.jit
def _chosen(of_groups, group, COUNT: tl.constexpr):
    """The pointer of this group, of a tuple."""
    found = of_groups[0]
    for i in tl.static_range(1, COUNT):
        found = tl.where(group == i, of_groups[i], found)
    return found


@triton.jit(do_not_specialize=["rows"])
def grouped_plain_kernel(
    x,
    weight,
    out,
    rows,
    features,
    columns,
    x_row,
    x_group,
    weight_row,
    weight_group,
    out_row,
    out_group,
    EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """out[:, g] = x[:, g] weight[g]^T of plain numbers."""
    group = tl.program_id(2).to(tl.int64)
    product_kernel(x + group * x_group, weight + group * weight_group, None, out + group * out_group, rows, features,
                   columns, x_row, weight_row, out_row, False, False, EVEN, BLOCK_N, BLOCK_M, BLOCK_K,
                   STAGES)  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def grouped_weight_only_kernel(
    x,
    weights,
    scales,
    out,
    partial,
    arrivals,
    M,
    N,
    K,
    x_row,
    x_group,
    w_row,
    w_scale_row,
    w_scale_group,
    out_row,
    out_group,
    w_block_rows,
    COUNT: tl.constexpr,
    W_GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """See `weight_only_kernel`; weights and scales are tuples of COUNT, partial [COUNT, SPLIT, M, N]."""
    group = tl.program_id(2)
    far = group.to(tl.int64)
    if SPLIT > 1:
        partial = partial + far * SPLIT * M * N
        arrivals = arrivals + group * tl.num_programs(0)
    w, s = _chosen(weights, group, COUNT), _chosen(scales, group, COUNT)
    weight_only_kernel(x + far * x_group, w, s, None, out + far * out_group, partial, arrivals, M, N, K, x_row, w_row,
                       w_scale_row, w_scale_group, out_row, w_block_rows, "e4m3", False, W_GROUP, W_GROUP, EVEN, False,
                       SPLIT, BLOCK_M, BLOCK_N, STAGES)  # fmt: skip


@triton.jit(do_not_specialize=["M", "x_scale_row", "x_scale_group", "x_scale_column"])
def grouped_scaled_kernel(
    x,
    x_scales,
    weights,
    scales,
    out,
    partial,
    arrivals,
    M,
    N,
    K,
    x_row,
    x_group,
    x_scale_row,
    x_scale_group,
    x_scale_column,
    w_row,
    w_scale_row,
    w_scale_group,
    out_row,
    out_group,
    w_block_rows,
    COUNT: tl.constexpr,
    X_GROUP: tl.constexpr,
    W_GROUP: tl.constexpr,
    STEP: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """See `block_scaled_kernel`; as above, and x_scale_group is the step from group to group of x."""
    group = tl.program_id(2)
    far = group.to(tl.int64)
    if SPLIT > 1:
        partial = partial + far * SPLIT * M * N
        arrivals = arrivals + group * tl.num_programs(0)
    w, s = _chosen(weights, group, COUNT), _chosen(scales, group, COUNT)
    block_scaled_kernel(x + far * x_group, x_scales + far * x_scale_group, w, s, None, out + far * out_group, partial,
                        arrivals, M, N, K, x_row, x_scale_row, x_scale_column, w_row, w_scale_row, w_scale_group,
                        out_row, w_block_rows, X_GROUP, W_GROUP, STEP, False, ONE_BLOCK, EVEN, False, WEIGHT_FIRST,
                        SPLIT, BLOCK_M, BLOCK_N, STAGES)  # fmt: skip
