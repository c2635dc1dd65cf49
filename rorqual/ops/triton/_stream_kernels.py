"""The kernels of mHC: streams merged and projected in one pass over them, then mixed, normalised and weighed.

The projection's float32 matrix is split into three bfloat16 parts, high to low, which hold all 24 bits of a number;
products with bfloat16 streams are then exact, and the tensor cores add them up in float32. Streams of another dtype are
multiplied in float32. The matrix is laid out for this at load time (`lay_out` in hyper_connection.py): a step of 32
channels of every stream is one product, with the streams of a channel side by side as its columns.

Which channels are added to which does not depend on the number of tokens: a step has a sum of its own, eight steps are
added in order to a share, and the shares in the order of a tree. With few tokens a program takes one step, with many it
takes a share. A step's product is the same to the bit from every instruction of the tensor cores, and squares are added
in pairs, whose order is no matter.
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
TALL = tl.constexpr(64)
"""Rows of the first operand of wgmma: fewer tokens are the second, and the matrix, filled up with zeros, the first."""


@triton.jit
def _like(x, tile):
    """A column for every column of a tile."""
    return tl.broadcast_to(x[:, None], tile.shape)


@triton.jit
def _merged(output, streams, post, comb, K: tl.constexpr, N: tl.constexpr):
    """Stream K behind a sublayer, float32 [TOKENS, STEP]; streams: a tuple of N tiles, post and comb: of columns.

    What is rounded together is said (fma): the compiler would choose otherwise from kernel to kernel.
    """
    total = streams[0].to(tl.float32) * comb[K][:, None]
    for j in tl.static_range(1, N):
        total = tl.fma(streams[j].to(tl.float32), _like(comb[j * N + K], total), total)
    return tl.fma(output, _like(post[K], total), total)


@triton.jit
def _side_by_side(tiles, N: tl.constexpr, TOKENS: tl.constexpr):
    """N tiles [TOKENS, STEP] as one [TOKENS, STEP * N], the streams of a channel next to each other."""
    if N == 2:  # noqa: SIM108 - Triton compiles both sides of an expression
        both = tl.join(tiles[0], tiles[1])
    else:
        both = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
    return tl.reshape(both, (TOKENS, STEP * N))


@triton.jit
def _pairs_added(x, TOKENS: tl.constexpr):
    """The sum of each row of [TOKENS, STEP]: neighbours first, so that it is one for all layouts of registers."""
    width: tl.constexpr = STEP.value
    x = tl.sum(tl.reshape(x, (TOKENS, width // 2, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (TOKENS, width // 4, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (TOKENS, width // 8, 2)), axis=2)
    x = tl.sum(tl.reshape(x, (TOKENS, width // 16, 2)), axis=2)
    return tl.sum(x, axis=1)


@triton.jit
def _load_part(weights, step, PART: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, N: tl.constexpr,
               HEIGHT: tl.constexpr):  # fmt: skip
    """One part of a step's rows, [HEIGHT, STEP * N], zero behind ROWS."""
    line = tl.arange(0, HEIGHT)
    at = (step * PARTS + PART) * (ROWS * STEP * N) + line[:, None] * (STEP * N) + tl.arange(0, STEP * N)[None, :]
    return tl.load(weights + at, mask=line[:, None] < ROWS, other=0.0)


@triton.jit
def _product(x, weights, TOKENS: tl.constexpr, HEIGHT: tl.constexpr, PRECISION: tl.constexpr = None):
    """x weights^T, [TOKENS, HEIGHT]; of few tokens the other way round."""
    if TOKENS < TALL:
        return dot(weights, tl.trans(x), tl.zeros((HEIGHT, TOKENS), tl.float32), PRECISION=PRECISION)
    else:  # noqa: RET505 - Triton compiles what is behind an if
        return dot(x, tl.trans(weights), tl.zeros((TOKENS, HEIGHT), tl.float32), PRECISION=PRECISION)


@triton.jit(do_not_specialize=["num_tokens"])
def project_kernel(
    output,
    streams,
    post,
    comb,
    weights,
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
    STAGES: tl.constexpr,
):
    """partial float32 [steps / TOGETHER, num_tokens, LINES]: fn [ROWS, N D] times the streams, and their squares.

    weights [steps, parts, ROWS, STEP N]: fn as `lay_out` makes it. With MERGE the streams are those that a sublayer's
    output makes, which are also written to `merged`.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    far = token.to(tl.int64)
    TURNED: tl.constexpr = TOKENS < TALL
    HEIGHT: tl.constexpr = TALL if TURNED else LINES
    line = tl.arange(0, HEIGHT)
    dtype: tl.constexpr = streams.dtype.element_ty
    PARTS: tl.constexpr = 3 if dtype == tl.bfloat16 else 1
    first = tl.program_id(1) * TOGETHER
    if TOGETHER == 1:  # weights are asked for before the kernels ahead have ended
        high = _load_part(weights, first, 0, PARTS, ROWS, N, HEIGHT)
        if PARTS == 3:
            middle = _load_part(weights, first, 1, PARTS, ROWS, N, HEIGHT)
            low = _load_part(weights, first, 2, PARTS, ROWS, N, HEIGHT)
    wait_for_earlier_kernels()
    if MERGE:
        posts = ()
        combs = ()
        for k in tl.static_range(N):
            posts = posts + (tl.load(post + far * N + k, mask=there, other=0.0),)
        for k in tl.static_range(N * N):
            combs = combs + (tl.load(comb + far * (N * N) + k, mask=there, other=0.0),)
    total = tl.zeros((HEIGHT, TOKENS) if TURNED else (TOKENS, HEIGHT), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    for part in tl.range(0, TOGETHER, num_stages=STAGES):
        step = first + part
        d = step * STEP + tl.arange(0, STEP)
        inside = there[:, None] & (d < D)[None, :]
        if EVEN:
            inside = there[:, None] & (d >= 0)[None, :]
        tiles = ()
        for k in tl.static_range(N):
            at = streams + far[:, None] * streams_row + k * streams_step + d[None, :]
            tiles = tiles + (tl.load(at, mask=inside, other=0.0),)
        if MERGE:
            y = tl.load(output + far[:, None] * output_row + d[None, :], mask=inside, other=0.0).to(tl.float32)
            made = ()
            for k in tl.static_range(N):
                x = round_to(_merged(y, tiles, posts, combs, k, N), dtype)
                tl.store(merged + far[:, None] * (N * D) + k * D + d[None, :], x, mask=inside)
                made = made + (x,)
            tiles = made
        square = tl.zeros((TOKENS, STEP), tl.float32)
        for k in tl.static_range(N):
            wide = tiles[k].to(tl.float32)
            square = tl.fma(wide, wide, square)
        squares += _pairs_added(square, TOKENS)
        x = _side_by_side(tiles, N, TOKENS)
        if TOGETHER > 1:
            high = _load_part(weights, step, 0, PARTS, ROWS, N, HEIGHT)
        if PARTS == 3:
            if TOGETHER > 1:
                middle = _load_part(weights, step, 1, PARTS, ROWS, N, HEIGHT)
                low = _load_part(weights, step, 2, PARTS, ROWS, N, HEIGHT)
            # Three sums that do not wait for each other.
            lowest, between = _product(x, low, TOKENS, HEIGHT), _product(x, middle, TOKENS, HEIGHT)
            total += lowest + between + _product(x, high, TOKENS, HEIGHT)
        else:
            total += _product(x.to(tl.float32), high, TOKENS, HEIGHT, "ieee")
    at = partial + (tl.program_id(1).to(tl.int64) * num_tokens + far) * LINES
    kept = (line < LINES) & (line != ROWS)
    if TURNED:
        tl.store(at[None, :] + line[:, None], total, mask=there[None, :] & kept[:, None])
    else:
        tl.store(at[:, None] + line[None, :], total, mask=there[:, None] & kept[None, :])
    tl.store(at + ROWS, squares, mask=there)


@triton.jit
def _summed(partial, token, num_tokens, SHARES, APART: tl.constexpr, BLOCK: tl.constexpr):
    """float32 [LINES] of a token: each share's steps in order, then all shares."""
    share = tl.arange(0, BLOCK)
    line = tl.arange(0, LINES)
    mask = (share < SHARES)[:, None] & (line >= 0)[None, :]
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
    line = tl.arange(0, LINES)
    kind = tl.minimum(line // N, 2)
    known = line < N * (N + 2)
    factor, added = tl.load(scale + kind), tl.load(base + line, mask=known, other=0.0)
    wait_for_earlier_kernels()
    sums = _summed(partial, token, num_tokens, SHARES, APART, BLOCK)
    rstd = tl.rsqrt(_pick(sums, N * (N + 2)) / width + norm_eps)
    m = sums * rstd * factor + added
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
    if tl.program_id(0) < WEIGHERS * num_tokens:
        token = tl.program_id(0)
        _weigh(partial, scale, base, post, comb, token, num_tokens, N * D, shares, norm_eps, eps, ITERATIONS, N,
               APART, BLOCK)  # fmt: skip
    else:
        token = tl.program_id(0) - WEIGHERS * num_tokens
        far = token.to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        inside = d < D
        line = tl.arange(0, LINES)
        w = tl.load(weight + d, mask=inside, other=0.0)
        factor, added = tl.load(scale), tl.load(base + line, mask=line < N, other=0.0)
        wait_for_earlier_kernels()
        tiles = ()
        for k in tl.static_range(N):
            tiles = tiles + (tl.load(streams + far * streams_row + k * streams_step + d, mask=inside, other=0.0),)
        sums = _summed(partial, token, num_tokens, shares, APART, BLOCK)
        rstd = tl.rsqrt(_pick(sums, ROWS) / (N * D) + norm_eps)
        pre = tl.sigmoid(sums * rstd * factor + added) + eps
        total = tiles[0].to(tl.float32) * _pick(pre, 0)
        for k in tl.static_range(1, N):
            total += tiles[k].to(tl.float32) * _pick(pre, k)
        v = rounded(total, streams.dtype.element_ty)
        y = v * tl.rsqrt(tl.sum(v * v, axis=0) / D + weight_eps) * w.to(tl.float32)
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
