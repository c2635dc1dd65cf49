"""The kernels of mHC: streams merged and projected in one pass over them, then mixed, normalised and weighed.

The projection's float32 matrix is split into three bfloat16 parts, high to low, which hold all 24 bits of a number;
products with bfloat16 streams are then exact, and the tensor cores add them up in float32. Streams of another dtype are
multiplied in float32.

Which channels are added to which does not depend on the number of tokens: a step of 32 channels of every stream has a
sum of its own, eight steps are added in order to a share, and the shares in the order of a tree. With few tokens a
program takes one step, with many it takes a share; the product's instruction (mma.sync) is one for all tiles.
"""

# mypy: ignore-errors
# ruff: noqa: RUF005 - Triton has no unpacking

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._dependent_launch import wait_for_earlier_kernels
from rorqual.ops.triton._interpreter import dot
from rorqual.ops.triton._number_formats import round_to, rounded

STEP = tl.constexpr(32)
"""Channels of every stream whose products are one sum."""
STEPS = tl.constexpr(8)
"""Steps of a share."""
LINES = tl.constexpr(32)
"""Numbers of a token that lie together: its products, and behind them the sum of the squares."""


@triton.jit
def _merged(output, streams, post, comb, K: tl.constexpr, N: tl.constexpr):
    """Stream K behind a sublayer, float32 [TOKENS, STEP]; streams: a tuple of N tiles, post and comb: of columns."""
    total = streams[0].to(tl.float32) * comb[K][:, None]
    for j in tl.static_range(1, N):
        total += streams[j].to(tl.float32) * comb[j * N + K][:, None]
    return total + output * post[K][:, None]


@triton.jit
def _parts_of(x):
    """float32 as three bfloat16 that add up to it."""
    high = rounded(x, tl.bfloat16)
    rest = x - high
    middle = rounded(rest, tl.bfloat16)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def _multiply(x, fn, acc):
    """acc + x fn^T: x [TOKENS, STEP] of the streams' dtype, fn float32 [LINES, STEP]."""
    turned = tl.trans(fn)
    if x.dtype == tl.bfloat16:
        high, middle, low = _parts_of(turned)
        acc = dot(x, low, acc)
        acc = dot(x, middle, acc)
        acc = dot(x, high, acc)
    else:
        acc = dot(x.to(tl.float32), turned, acc, PRECISION="ieee")
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def project_kernel(
    output,
    streams,
    post,
    comb,
    fn,
    merged,
    partial,
    num_tokens,
    D,
    output_row,
    streams_row,
    streams_step,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    MERGE: tl.constexpr,
    TOGETHER: tl.constexpr,
    EVEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """partial float32 [steps / TOGETHER, num_tokens, LINES]: fn [ROWS, N D] times the streams, and their squares.

    With MERGE the streams are those that a sublayer's output makes, which are also written to `merged`.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    far = token.to(tl.int64)
    line = tl.arange(0, LINES)
    dtype: tl.constexpr = streams.dtype.element_ty
    wait_for_earlier_kernels()
    if MERGE:
        posts = ()
        combs = ()
        for k in tl.static_range(N):
            posts = posts + (tl.load(post + far * N + k, mask=there, other=0.0),)
        for k in tl.static_range(N * N):
            combs = combs + (tl.load(comb + far * (N * N) + k, mask=there, other=0.0),)
    total = tl.zeros((TOKENS, LINES), tl.float32)
    for part in tl.range(0, TOGETHER, num_stages=1):
        d = (tl.program_id(1) * TOGETHER + part) * STEP + tl.arange(0, STEP)
        inside = there[:, None] & (d < D)[None, :]
        if EVEN:
            inside = there[:, None] & (d >= 0)[None, :]
        tiles = ()
        for k in tl.static_range(N):
            at = streams + far[:, None] * streams_row + k * streams_step + d[None, :]
            tiles = tiles + (tl.load(at, mask=inside, other=0.0),)
        if MERGE:
            y = tl.load(output + far[:, None] * output_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
        acc = tl.zeros((TOKENS, LINES), tl.float32)
        squares = tl.zeros((TOKENS,), tl.float32)
        for k in tl.static_range(N):
            if MERGE:
                x = round_to(_merged(y, tiles, posts, combs, k, N), dtype)
                tl.store(merged + far[:, None] * (N * D) + k * D + d[None, :], x, mask=inside)
            else:
                x = tiles[k]
            row = line[:, None] < ROWS
            if not EVEN:
                row &= (d < D)[None, :]
            weights = tl.load(fn + line[:, None] * (N * D) + k * D + d[None, :], mask=row, other=0.0)
            acc = _multiply(x, weights, acc)
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
        acc += tl.where(line[None, :] == ROWS, squares[:, None], 0.0)
        total += acc
    at = partial + (tl.program_id(1).to(tl.int64) * num_tokens + far[:, None]) * LINES + line[None, :]
    tl.store(at, total, mask=there[:, None])


@triton.jit
def _summed(partial, token, there, num_tokens, SHARES, APART: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [LINES] of a token: each share's steps in order, then all shares."""
    share = tl.arange(0, BLOCK)
    line = tl.arange(0, LINES)
    mask = (share < SHARES)[:, None] & there
    total = tl.zeros((BLOCK, LINES), tl.float32)
    for part in tl.static_range(APART):
        row = (share * APART + part).to(tl.int64) * num_tokens + token
        loaded = tl.load(partial + row[:, None] * LINES + line[None, :], mask=mask, other=0.0)
        total = loaded if part == 0 else total + loaded
    return tl.sum(total, axis=0)


@triton.jit
def _pick(numbers, AT: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, LINES) == AT, numbers, 0.0), axis=0)


@triton.jit
def _weigh(partial, scale, base, post, comb, token, num_tokens, width, SHARES, norm_eps, eps, ITERATIONS: tl.constexpr,
           N: tl.constexpr, APART: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """post and comb of a token. Its LINES are seen as rows of N: pre, post, the N rows of comb, and what is left."""
    sums = _summed(partial, token, token < num_tokens, num_tokens, SHARES, APART, BLOCK)
    rstd = tl.rsqrt(_pick(sums, N * (N + 2)) / width + norm_eps)
    line = tl.arange(0, LINES)
    kind = tl.minimum(line // N, 2)
    known = line < N * (N + 2)
    m = sums * rstd * tl.load(scale + kind) + tl.load(base + line, mask=known, other=0.0)
    is_post = (line >= N) & (line < 2 * N)
    tl.store(post + token.to(tl.int64) * N + line - N, 2.0 * tl.sigmoid(m), mask=is_post)
    is_comb = tl.reshape((line >= 2 * N) & known, (LINES // N, N))
    m = tl.reshape(m, (LINES // N, N))
    weight = tl.exp(m - tl.max(m, axis=1)[:, None])
    c = tl.where(is_comb, weight / tl.sum(weight, axis=1)[:, None] + eps, 0.0)
    c = c / (tl.sum(c, axis=0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + eps)
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
    to = comb + token.to(tl.int64) * (N * N) + tl.reshape(line, (LINES // N, N)) - 2 * N
    tl.store(to, c, mask=is_comb)


@triton.jit(do_not_specialize=["num_tokens"])
def finish_kernel(
    partial,
    streams,
    scale,
    base,
    weight,
    hidden,
    post,
    comb,
    num_tokens,
    D,
    streams_row,
    streams_step,
    shares,
    norm_eps,
    eps,
    weight_eps,
    ROWS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    N: tl.constexpr,
    APART: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHERS: tl.constexpr,
):
    """The first WEIGHERS programs per token make post and comb, whose many steps take as long as all that the others
    do: sum the streams by pre, and normalise."""
    wait_for_earlier_kernels()
    if tl.program_id(0) < WEIGHERS * num_tokens:
        token = tl.program_id(0)
        _weigh(partial, scale, base, post, comb, token, num_tokens, N * D, shares, norm_eps, eps, ITERATIONS, N,
               APART, BLOCK)  # fmt: skip
    else:
        token = tl.program_id(0) - WEIGHERS * num_tokens
        far = token.to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        inside = d < D
        tiles = ()
        for k in tl.static_range(N):
            tiles = tiles + (tl.load(streams + far * streams_row + k * streams_step + d, mask=inside, other=0.0),)
        w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
        sums = _summed(partial, token, True, num_tokens, shares, APART, BLOCK)
        rstd = tl.rsqrt(_pick(sums, ROWS) / (N * D) + norm_eps)
        line = tl.arange(0, LINES)
        pre = tl.sigmoid(sums * rstd * tl.load(scale) + tl.load(base + line, mask=line < N, other=0.0)) + eps
        total = tiles[0].to(tl.float32) * _pick(pre, 0)
        for k in tl.static_range(1, N):
            total += tiles[k].to(tl.float32) * _pick(pre, k)
        v = rounded(total, streams.dtype.element_ty)
        y = v * tl.rsqrt(tl.sum(v * v, axis=0) / D + weight_eps) * w
        tl.store(hidden + far * D + d, round_to(y, hidden.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_kernel(
    output,
    streams,
    post,
    comb,
    merged,
    num_tokens,
    D,
    output_row,
    streams_row,
    streams_step,
    N: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a sublayer's output makes of the streams."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    far, there = token.to(tl.int64), token < num_tokens
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = there[:, None] & (d < D)[None, :]
    wait_for_earlier_kernels()
    tiles = ()
    combs = ()
    posts = ()
    for k in tl.static_range(N):
        at = streams + far[:, None] * streams_row + k * streams_step + d[None, :]
        tiles = tiles + (tl.load(at, mask=inside, other=0.0),)
        posts = posts + (tl.load(post + far * N + k, mask=there, other=0.0),)
    for k in tl.static_range(N * N):
        combs = combs + (tl.load(comb + far * (N * N) + k, mask=there, other=0.0),)
    y = tl.load(output + far[:, None] * output_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(N):
        x = _merged(y, tiles, posts, combs, k, N)
        tl.store(merged + far[:, None] * (N * D) + k * D + d[None, :], round_to(x, merged.dtype.element_ty), inside)
