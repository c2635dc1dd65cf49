"""Routing to experts in one launch: the kernels behind `route_softmax` and `route_scores` in ops/triton/moe.py."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._dependent_launch import wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import round_to

_NOBODY = tl.constexpr(-(1 << 63))
"""Below every key."""
_LOW = tl.constexpr(0x7FFFFFFF)
_SMALLEST_SUM = tl.constexpr(1e-20)


@triton.jit
def _key(value, number, there):
    """Integers in the order of (float32 value, then the lower number): NaN above all, as torch sorts, -0 equal to 0."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value != value, _LOW, bits)
    ordered = bits ^ ((bits >> 31) & _LOW)
    return tl.where(there, (ordered.to(tl.int64) << 32) | (number ^ _LOW).to(tl.int64), _NOBODY)


@triton.jit
def _number(key):
    """What stands behind the value in a key."""
    return (key & _LOW) ^ _LOW


@triton.jit
def _value(key):
    """The value in a key."""
    found = (key >> 32).to(tl.int32)
    return (found ^ ((found >> 31) & _LOW)).to(tl.float32, bitcast=True)


@triton.jit
def route_softmax_kernel(
    logits,
    expert_ids,
    weights,
    num_experts,
    row_stride,
    column_stride,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_EXPERTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One token: the softmax, and its largest TOP_K one after the other. Both outputs [num_tokens, TOP_K]."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED_EXPERTS)
    there = expert < num_experts
    wait_for_earlier_kernels()
    at = logits + row * row_stride + expert * column_stride
    logit = tl.load(at, mask=there, other=float("-inf")).to(tl.float32)
    top = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - top), 0)
    key = _key(logit, expert, there)
    choice = tl.arange(0, PADDED_K)
    ids = tl.zeros((PADDED_K,), tl.int64)
    shares = tl.zeros((PADDED_K,), tl.float32)
    for i in range(TOP_K):
        best = tl.max(key, 0)
        key = tl.where(key == best, _NOBODY, key)
        ids = tl.where(choice == i, _number(best), ids)
        shares = tl.where(choice == i, tl.exp(_value(best) - top) / total, shares)
    if RENORMALIZE:
        shares = shares / tl.sum(shares, 0)
    tl.store(expert_ids + row * TOP_K + choice, ids, mask=choice < TOP_K)
    tl.store(weights + row * TOP_K + choice, round_to(shares, weights.dtype.element_ty), mask=choice < TOP_K)


@triton.jit
def _score(logit, SIGMOID: tl.constexpr):
    """1 / (1 + exp(-x)), or sqrt(log(1 + exp(x)))."""
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        # log(1 + u) for a u that may be far below 1's last bit; above 20 the logarithm is x itself, as in torch.
        u = tl.exp(tl.minimum(logit, 20.0, propagate_nan=tl.PropagateNan.ALL))
        whole = 1.0 + u
        log = tl.where(whole == 1.0, u, tl.log(whole) * (u / tl.where(whole == 1.0, 1.0, whole - 1.0)))
        score = tl.sqrt_rn(tl.where(logit > 20.0, logit, log))
    return score


@triton.jit
def route_scores_kernel(
    logits,
    bias,
    table,
    token_ids,
    expert_ids,
    weights,
    num_experts,
    group_size,
    num_groups,
    row_stride,
    column_stride,
    table_row,
    scale,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    TABLE: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
):
    """One token: its TOP_K largest scores + bias, out of the TOP_GROUPS best groups if that is not 0; or, with TABLE,
    the experts that the table has for it. Both outputs [num_tokens, TOP_K]."""
    row = tl.program_id(0).to(tl.int64)
    choice = tl.arange(0, PADDED_K)
    here = choice < TOP_K
    wait_for_earlier_kernels()
    logits += row * row_stride
    if TABLE:
        token = tl.load(token_ids + row).to(tl.int64)
        ids = tl.load(table + token * table_row + choice, mask=here, other=0).to(tl.int64)
        known = here & (ids >= 0) & (ids < num_experts)
        logit = tl.load(logits + ids * column_stride, mask=known, other=0.0).to(tl.float32)
        shares = tl.where(here, _score(logit, SIGMOID), 0.0)
    else:
        group = tl.arange(0, PADDED_GROUPS)
        within = tl.arange(0, PADDED_SIZE)
        expert = group[:, None] * group_size + within[None, :]
        there = (group < num_groups)[:, None] & (within < group_size)[None, :]
        logit = tl.load(logits + expert * column_stride, mask=there, other=0.0).to(tl.float32)
        score = _score(logit, SIGMOID)
        value = score
        if BIASED:
            value += tl.load(bias + expert, mask=there, other=0.0)
        key = _key(value, expert, there)
        if TOP_GROUPS:
            first = tl.max(key, 1)
            second = tl.max(tl.where(key == first[:, None], _NOBODY, key), 1)
            groups = _key(_value(first) + _value(second), group, group < num_groups)
            kept = group < 0
            for _ in tl.static_range(TOP_GROUPS):
                found = groups == tl.max(groups, 0)
                kept |= found
                groups = tl.where(found, _NOBODY, groups)
            excluded = _key(tl.full((PADDED_GROUPS, PADDED_SIZE), float("-inf"), tl.float32), expert, there)
            key = tl.where(kept[:, None], key, excluded)
        ids = tl.zeros((PADDED_K,), tl.int64)
        shares = tl.zeros((PADDED_K,), tl.float32)
        for i in range(TOP_K):
            best = tl.max(tl.max(key, 1), 0)
            chosen = key == best
            ids = tl.where(choice == i, _number(best), ids)
            shares = tl.where(choice == i, tl.sum(tl.sum(tl.where(chosen, score, 0.0), 1), 0), shares)
            key = tl.where(chosen, _NOBODY, key)
    if RENORMALIZE:
        shares = shares / (tl.sum(shares, 0) + _SMALLEST_SUM)
    tl.store(expert_ids + row * TOP_K + choice, ids, mask=here)
    tl.store(weights + row * TOP_K + choice, shares * scale, mask=here)
