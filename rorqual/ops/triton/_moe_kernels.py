"""Mixture of experts: the kernels behind ops/triton/moe.py.

A pair is a (token, choice), numbered token * top_k + choice. Pairs are put in the order of their experts, and within an
expert in their own; tiles of up to BLOCK_M rows cover that order, and none spans two experts. Nothing here knows on the
host how many rows an expert has.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._dependent_launch import let_next_kernel_start, wait_for_earlier_kernels, wait_only
from rorqual.ops.triton._interpreter import bound, dot
from rorqual.ops.triton._number_formats import round_to

_FEW = tl.constexpr(32)
"""Entries of the table of tiles that are written at once."""
_AHEAD = tl.constexpr(8)
"""Choices whose answers are read before the first is added."""


@triton.jit
def _experts_of(expert_ids, pair, num_pairs, num_experts):
    """(ids as int32, whether they are experts) of some pairs."""
    ids = tl.load(expert_ids + pair, mask=pair < num_pairs, other=-1)
    return ids.to(tl.int32), (ids >= 0) & (ids < num_experts)


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(expert_ids, counts, num_pairs, num_experts, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """counts int32 [chunks, BINS]: how many of a chunk's pairs each expert has."""
    wait_for_earlier_kernels()
    chunk = tl.program_id(0)
    ids, known = _experts_of(expert_ids, chunk * CHUNK + tl.arange(0, CHUNK), num_pairs, num_experts)
    bins = tl.arange(0, BINS)
    tl.store(counts + chunk * BINS + bins, tl.histogram(tl.where(known, ids, 0), BINS, mask=known))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles", "num_chunks"])
def place_kernel(
    expert_ids,
    counts,
    order,
    tiles,
    num_pairs,
    num_experts,
    max_tiles,
    num_chunks,
    COUNTED: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The pairs that TOGETHER experts (up to 4) have in one chunk to their places in `order` int32 [num_pairs]; the
    first chunks' programs also write the experts' tiles.

    tiles int32 [3, max_tiles]: expert, first row and last row + 1; the expert of tiles that are not needed is -1.
    counts is `count_kernel`'s, and not read if there is one chunk only. Where an id is no expert, rows are left over.
    """
    wait_for_earlier_kernels()
    expert, chunk = tl.program_id(0) * TOGETHER, tl.program_id(1)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    ids, known = _experts_of(expert_ids, pair, num_pairs, num_experts)
    bins = tl.arange(0, BINS)
    if COUNTED:
        chunks = tl.arange(0, PADDED_CHUNKS)
        at = counts + chunks[:, None] * BINS + bins[None, :]
        table = tl.load(at, mask=(chunks < num_chunks)[:, None] & (bins >= 0)[None, :], other=0)
        total = tl.sum(table, 0)
    else:
        total = tl.histogram(tl.where(known, ids, 0), BINS, mask=known)
    which = ids - expert
    mine = known & (which >= 0) & (which < TOGETHER)
    if TOGETHER == 1:
        place = tl.cumsum(mine.to(tl.int32), 0) - 1
    else:  # four counts of 16 bits in one number
        shift = tl.where(mine, which, 0).to(tl.int64) * 16
        one = tl.where(mine, 1, 0).to(tl.int64) << shift
        place = ((tl.cumsum(one, 0) >> shift) & 0xFFFF).to(tl.int32) - 1
    for i in tl.static_range(TOGETHER):
        first = tl.sum(tl.where(bins < expert + i, total, 0), 0)
        if COUNTED:
            at = counts + chunks * BINS + expert + i
            first += tl.sum(tl.load(at, mask=(chunks < chunk) & (expert + i < BINS), other=0), 0)
        place += tl.where(which == i, first, 0)
    tl.store(order + place, pair, mask=mine)
    for i in tl.static_range(TOGETHER):
        if chunk == i % num_chunks:
            _write_tiles(tiles, total, bins, expert + i, num_experts, max_tiles, BLOCK_M)


@triton.jit
def _write_tiles(tiles, total, bins, expert, num_experts, max_tiles, BLOCK_M: tl.constexpr):
    """An expert's tiles, of experts with `total` pairs; behind the last expert's, those that are not needed."""
    first = tl.sum(tl.where(bins < expert, total, 0), 0)
    count = tl.sum(tl.where(bins == expert, total, 0), 0)
    needed = (total + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(bins < expert, needed, 0), 0)
    own = (count + BLOCK_M - 1) // BLOCK_M
    few = tl.arange(0, _FEW)
    for i in range(0, bound(own), _FEW):
        tile, here = i + few, i + few < own
        row = first + tile * BLOCK_M
        tl.store(tiles + start + tile, tl.zeros((_FEW,), tl.int32) + expert, mask=here)
        tl.store(tiles + max_tiles + start + tile, row, mask=here)
        tl.store(tiles + 2 * max_tiles + start + tile, tl.minimum(row + BLOCK_M, first + count), mask=here)
    if expert == num_experts - 1:
        for i in range(bound(start + own), bound(max_tiles), _FEW):
            tl.store(tiles + i + few, tl.zeros((_FEW,), tl.int32) - 1, mask=i + few < max_tiles)


@triton.jit
def lines_of(part, features, GATED: tl.constexpr, BLOCK_N: tl.constexpr, FEATURES: tl.constexpr):
    """(lines of an expert's weight that a program multiplies by, BLOCK_N of them; which of them are there)."""
    line = tl.arange(0, BLOCK_N)
    if GATED:  # eight lines of gate, eight of up: a thread of the tensor cores then has both of a feature
        within = line // 16 * 8 + line % 8
        n = part * FEATURES + within
        lines = line // 8 % 2 * features + n
    else:
        within, n = line, part * FEATURES + line
        lines = n
    return lines, (within < FEATURES) & (n < features)


@triton.jit
def tile_of(tiles, num_experts, features, max_tiles, ONE_TOKEN: tl.constexpr, FEATURES: tl.constexpr):
    """(part of the features, expert or -1, first row and last row + 1) of a program."""
    parts = tl.cdiv(features, FEATURES)
    # All features of a tile after each other, so that the tiles of one expert find its weight in the L2 cache.
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    if ONE_TOKEN:
        chosen = tl.load(tiles + tile)
        expert = tl.where((chosen >= 0) & (chosen < num_experts), chosen, -1).to(tl.int32)
        first, last = tile, tile + 1
    else:
        expert = tl.load(tiles + tile)
        first, last = tl.load(tiles + max_tiles + tile), tl.load(tiles + 2 * max_tiles + tile)
    return part, expert, first, last


@triton.jit
def write_answers(
    acc,
    out,
    target,
    here,
    part,
    features,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Round a program's sums and store them, of gate and up what the gate makes of them, in the rows `target`.

    LIMIT, if there is one: gate is at most that, and up between it and its negative.
    """
    dtype = out.dtype.element_ty
    answer = round_to(acc, dtype)
    if GATED:
        if WEIGHT_FIRST:
            halves = tl.permute(tl.reshape(answer, (BLOCK_N // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
            gate, up = tl.split(halves)
            gate, up = tl.reshape(gate, (BLOCK_N // 2, BLOCK_M)), tl.reshape(up, (BLOCK_N // 2, BLOCK_M))
        else:
            halves = tl.permute(tl.reshape(answer, (BLOCK_M, BLOCK_N // 16, 2, 8)), (0, 1, 3, 2))
            gate, up = tl.split(halves)
            gate, up = tl.reshape(gate, (BLOCK_M, BLOCK_N // 2)), tl.reshape(up, (BLOCK_M, BLOCK_N // 2))
        gate, up = gate.to(tl.float32), up.to(tl.float32)
        if LIMIT is not None:
            gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
            up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        activated = round_to(gate / (1.0 + tl.exp(-gate)), dtype).to(tl.float32)
        answer = round_to(activated * up, dtype)
        line = tl.arange(0, BLOCK_N // 2)
    else:
        line = tl.arange(0, BLOCK_N)
    n = part * FEATURES + line
    live = (line < FEATURES) & (n < features)
    far = target.to(tl.int64) * features
    if WEIGHT_FIRST:
        tl.store(out + far[None, :] + n[:, None], answer, mask=here[None, :] & live[:, None])
    else:
        tl.store(out + far[:, None] + n[None, :], answer, mask=here[:, None] & live[None, :])


@triton.jit
def _multiply_rows(
    x,
    w,
    out,
    order,
    expert,
    first,
    last,
    part,
    features,
    K,
    x_row,
    top_k,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows first .. last - 1 of the order, BLOCK_M at most, times one part of an expert's features."""
    row = first + tl.arange(0, BLOCK_M)
    here = row < last
    pair = row if ONE_TOKEN else tl.load(order + row, mask=here, other=0)

    line, live = lines_of(part, features, GATED, BLOCK_N, FEATURES)
    if GATED:
        source, target, height = pair // top_k, row, 2 * features
    else:
        source, target, height = row, pair, features
    column = tl.arange(0, STEP)
    x_at = x + source.to(tl.int64)[:, None] * x_row + column[None, :]
    w_at = w + (expert.to(tl.int64) * height + line)[:, None] * K + column[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if WEIGHT_FIRST else (BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, bound(K), STEP, num_stages=STAGES):
        if EVEN_K:
            x_tile = tl.load(x_at + k, mask=here[:, None], other=0.0)
            w_tile = tl.load(w_at + k, mask=live[:, None], other=0.0)
        else:
            inside = (column < K - k)[None, :]
            x_tile = tl.load(x_at + k, mask=here[:, None] & inside, other=0.0)
            w_tile = tl.load(w_at + k, mask=live[:, None] & inside, other=0.0)
        if WEIGHT_FIRST:
            acc = dot(w_tile, tl.trans(x_tile), acc, PRECISION)
        else:
            acc = dot(x_tile, tl.trans(w_tile), acc, PRECISION)

    let_next_kernel_start()  # earlier, its programs would lie unevenly between these
    write_answers(acc, out, target, here, part, features, LIMIT, GATED, WEIGHT_FIRST, BLOCK_M, BLOCK_N, FEATURES)


@triton.jit(do_not_specialize=["max_tiles"])
def experts_kernel(
    x,
    w,
    out,
    order,
    tiles,
    num_experts,
    features,
    K,
    x_row,
    top_k,
    max_tiles,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of rows of one expert times FEATURES output features of its weight.

    GATED: x [num_tokens, K], w [num_experts, 2 * features, K] -> silu(gate) * up in out [num_pairs, features], whose
    rows are in `order`; gate and up are rounded first, then kept within LIMIT if that is given, and silu is rounded
    too. Else x is such an out, w [num_experts, features, K], and out [num_pairs, features] has the pairs in their own
    order.

    K is added up from first to last in one float32 accumulator, whatever the tile. FEATURES may be fewer than the
    tile has room for (BLOCK_N, or half of it if GATED): the rest is neither read nor written. ONE_TOKEN: pairs are in
    order as they are, one per tile, and tiles is their expert_ids.
    """
    wait_only()
    part, expert, first, last = tile_of(tiles, num_experts, features, max_tiles, ONE_TOKEN, FEATURES)
    if expert < 0:
        return
    # A tile that is half empty, as an expert's last may be, costs half.
    if BLOCK_M > 64 and last - first <= BLOCK_M // 2:
        _multiply_rows(
            x,
            w,
            out,
            order,
            expert,
            first,
            last,
            part,
            features,
            K,
            x_row,
            top_k,
            LIMIT,
            GATED,
            ONE_TOKEN,
            WEIGHT_FIRST,
            PRECISION,
            EVEN_K,
            BLOCK_M // 2,
            BLOCK_N,
            FEATURES,
            STEP,
            STAGES,
        )
    else:
        _multiply_rows(
            x,
            w,
            out,
            order,
            expert,
            first,
            last,
            part,
            features,
            K,
            x_row,
            top_k,
            LIMIT,
            GATED,
            ONE_TOKEN,
            WEIGHT_FIRST,
            PRECISION,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            FEATURES,
            STEP,
            STAGES,
        )


@triton.jit
def combine_kernel(
    answers,
    weights,
    expert_ids,
    out,
    size,
    weight_row,
    num_experts,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """out [num_tokens, size]: a token's answers [num_tokens * TOP_K, size] times their weights, added up in float32 in
    the order of its choices, and rounded once.

    SOME: answers of choices that are none of the experts are not read and add nothing; else ids are not read.
    """
    wait_for_earlier_kernels()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, TOP_K, _AHEAD):
        for i in tl.static_range(_AHEAD):
            choice = first + i
            weight = tl.load(weights + token * weight_row + choice, mask=choice < TOP_K, other=0.0).to(tl.float32)
            at = answers + (token * TOP_K + choice) * size + column
            there = here & (choice < TOP_K)
            if SOME:
                expert = tl.load(expert_ids + token * TOP_K + choice, mask=choice < TOP_K, other=-1)
                there &= (expert >= 0) & (expert < num_experts)
            total += tl.load(at, mask=there, other=0.0).to(tl.float32) * weight
    tl.store(out + token * size + column, round_to(total, out.dtype.element_ty), mask=here)
