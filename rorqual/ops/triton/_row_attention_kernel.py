"""The kernels of attention over rows that are keys and values at once: one token's heads against the rows it sees.

A program has some heads of one token, and reads each row once for all of them: a tile of rows lies in shared memory as
the keys of one product and the values of the next. The rows of all sources follow one another in tiles of BN, a
source's last tile is filled up with nothing.

A token with many rows has them cut in spans, each with a softmax of its own, which a second kernel merges in ascending
order. How they are cut depends on the number of the token's own rows and on nothing else, and how many programs share
the spans does not matter to the result.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._dependent_launch import wait_for_earlier_kernels
from rorqual.ops.triton._interpreter import bound, dot
from rorqual.ops.triton._number_formats import e4m3_value, round_to, ue8m0_value


@triton.jit
def _rows_seen(which, first, stop, token, which_row, LIST: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
               FIRST: tl.constexpr):  # fmt: skip
    """(first row, how many) of one source; of a list, up to its last slot."""
    if LIST:
        n = tl.arange(0, WIDTH)
        slots = tl.load(which + token * which_row + n, mask=n < LENGTH, other=-1)
        return 0, tl.max(tl.where(slots >= 0, n + 1, 0), 0)
    begin = 0
    if FIRST:
        begin = tl.load(first + token).to(tl.int32)
    return begin, tl.maximum(tl.load(stop + token).to(tl.int32) - begin, 0)


@triton.jit
def _slots(which, owner, which_row, begin, n, there, LIST: tl.constexpr, ROWS: tl.constexpr):
    """Block, and row in it, of a source's rows n; block -1 where there is none."""
    if LIST:
        slot = tl.load(which + owner * which_row + n, mask=there, other=-1)
        return tl.where(slot >= 0, slot // ROWS, -1), slot % ROWS
    at = begin + n
    block = tl.load(which + owner * which_row + at // ROWS, mask=there, other=-1)
    return block, at % ROWS


@triton.jit
def _load_records(values, scales, plain, at, there, BN: tl.constexpr, BLOCK_V: tl.constexpr, DIMS: tl.constexpr,
                  WIDTH: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """[BN, BLOCK_V] of records that begin at these bytes: e4m3 times a power of two, behind them plain numbers."""
    GROUPS: tl.constexpr = BLOCK_V // GROUP
    group = tl.arange(0, GROUPS)
    d = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = there[:, None]
    codes = tl.load(values + at[:, None, None] + d[None], mask=there[:, :, None] & (d < DIMS)[None], other=0)
    scale = tl.load(scales + at[:, None] + group[None, :], mask=there & (group < DIMS // GROUP)[None, :], other=127)
    rows = tl.reshape((e4m3_value(codes) * ue8m0_value(scale)[:, :, None]).to(tl.float32), [BN, BLOCK_V])
    rows = round_to(rows, COMPUTE)
    if WIDTH == DIMS:
        return rows
    column = tl.arange(0, BLOCK_V)
    beside = (column >= DIMS) & (column < WIDTH)
    tail = tl.load(plain + (at // 2)[:, None] + (column - DIMS)[None, :], mask=there & beside[None, :], other=0.0)
    return tl.where(beside[None, :], tail.to(COMPUTE), rows)


@triton.jit
def _store_whole(out, token, heads, num_heads, total, acc, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """A softmax that is all of a token's."""
    d = tl.arange(0, BLOCK_V)
    acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    at = out + (token * num_heads + heads)[:, None] * V + d[None, :]
    tl.store(at, round_to(acc, out.dtype.element_ty), mask=(heads < num_heads)[:, None] & (d < V)[None, :])


@triton.jit
def _attend(
    q,
    q_rest,
    most,
    total,
    acc,
    low,
    high,
    tiles0,
    values0,
    scales0,
    plain0,
    which0,
    owner0,
    begin0,
    count0,
    block0,
    row0,
    which0_row,
    values1,
    scales1,
    plain1,
    which1,
    owner1,
    begin1,
    count1,
    block1,
    row1,
    which1_row,
    scale,
    W: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BN: tl.constexpr,
    TWO: tl.constexpr,
    LIST0: tl.constexpr,
    LIST1: tl.constexpr,
    ROWS0: tl.constexpr,
    ROWS1: tl.constexpr,
    DIMS: tl.constexpr,
    GROUP: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The tiles low .. high added to the softmax (most, total, acc) of each head so far."""
    MAIN: tl.constexpr = min(W, BLOCK_V)
    REST: tl.constexpr = W - MAIN
    d = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    for tile in tl.range(bound(low), bound(high), num_stages=STAGES):
        if TWO:
            of_first = tile < tiles0
            n = tl.where(of_first, tile, tile - tiles0) * BN + tl.arange(0, BN)
            block, inner = _slots(which0, owner0, which0_row, begin0, n, of_first & (n < count0), LIST0, ROWS0)
            block1_, inner1 = _slots(
                which1, owner1, which1_row, begin1, n, (tile >= tiles0) & (n < count1), LIST1, ROWS1
            )
            there = tl.where(of_first, block >= 0, block1_ >= 0)
            at = tl.where(
                of_first,
                block.to(tl.int64) * block0 + inner * row0,
                block1_.to(tl.int64) * block1 + inner1 * row1,
            )
            values = tl.where(of_first, values0, values1)
            scales = tl.where(of_first, scales0, scales1)
            plain = tl.where(of_first, plain0, plain1)
        else:
            n = tile * BN + tl.arange(0, BN)
            block, inner = _slots(which0, owner0, which0_row, begin0, n, n < count0, LIST0, ROWS0)
            there = block >= 0
            at = block.to(tl.int64) * block0 + inner * row0
            values = values0
            scales = scales0
            plain = plain0
        if DIMS > 0:
            k = _load_records(values, scales, plain, at, there, BN, BLOCK_V, DIMS, W, GROUP, COMPUTE)
        elif MAIN == BLOCK_V:
            k = tl.load(values + at[:, None] + d[None, :], mask=there[:, None], other=0.0).to(COMPUTE)
        else:
            k = tl.load(values + at[:, None] + d[None, :], mask=there[:, None] & (d < MAIN)[None, :], other=0.0)
            k = k.to(COMPUTE)
        scores = dot(q, tl.trans(k), tl.zeros([BLOCK_H, BN], tl.float32), PRECISION)
        if REST > 0:
            beside = there[:, None] & (r < REST)[None, :]
            k_rest = tl.load(values + at[:, None] + (MAIN + r)[None, :], mask=beside, other=0.0).to(COMPUTE)
            scores = dot(q_rest, tl.trans(k_rest), scores, PRECISION)
        scores = tl.where(there[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # holes alone so far
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(most - base)
        total = total * shrink + tl.sum(weights, 1)
        acc = dot(round_to(weights, COMPUTE), k, acc * shrink[:, None], PRECISION)
        most = higher
    return most, total, acc


@triton.jit
def _softmax_of_sinks(sinks, heads, num_heads, wanted, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
                      SINKS: tl.constexpr):  # fmt: skip
    """A softmax (most, total, acc) of no rows: of nothing, or of each head's sink where it is wanted."""
    most = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    if SINKS:
        LOG2_E: tl.constexpr = 1.4426950408889634
        most = tl.load(sinks + heads, mask=(heads < num_heads) & wanted, other=float("-inf")) * LOG2_E
        total += tl.where(wanted, 1.0, 0.0)
    return most, total, tl.zeros([BLOCK_H, BLOCK_V], tl.float32)


@triton.jit(
    do_not_specialize=["which0_row", "which1_row", "first_token", "num_heads", "most_spans", "whole", "span", "long"]
)
def rows_kernel(
    query,
    owners,
    sinks,
    out,
    partial,
    stats,
    spans_of_token,
    values0,
    scales0,
    plain0,
    which0,
    first0,
    stop0,
    values1,
    scales1,
    plain1,
    which1,
    first1,
    stop1,
    query_token,
    query_head,
    block0,
    row0,
    which0_row,
    block1,
    row1,
    which1_row,
    first_token,
    num_heads,
    most_spans,
    whole,
    span,
    long,
    scale,
    W: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BN: tl.constexpr,
    TWO: tl.constexpr,
    LIST0: tl.constexpr,
    LIST1: tl.constexpr,
    LENGTH0: tl.constexpr,
    LENGTH1: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    FIRST0: tl.constexpr,
    FIRST1: tl.constexpr,
    ROWS0: tl.constexpr,
    ROWS1: tl.constexpr,
    DIMS: tl.constexpr,
    GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: blocks of heads, tokens from first_token on, programs that share a token's spans.

    With SPLIT: partial float32 [tokens, most_spans, num_heads, BLOCK_V], stats float32 [tokens, most_spans, num_heads,
    2] of maxima (powers of two) and totals, spans_of_token int32 [tokens].
    """
    MAIN: tl.constexpr = min(W, BLOCK_V)
    REST: tl.constexpr = W - MAIN
    BLOCK_R: tl.constexpr = max(16, triton.next_power_of_2(REST))
    wait_for_earlier_kernels()
    index = tl.program_id(1).to(tl.int64)
    token = first_token + index
    begin0, count0 = _rows_seen(which0, first0, stop0, token, which0_row, LIST0, LENGTH0, WIDTH0, FIRST0)
    tiles0 = (count0 + BN - 1) // BN
    tiles = tiles0
    begin1 = begin0
    count1 = count0
    if TWO:
        begin1, count1 = _rows_seen(which1, first1, stop1, token, which1_row, LIST1, LENGTH1, WIDTH1, FIRST1)
        tiles += (count1 + BN - 1) // BN
    if SPLIT:
        rows = tiles * BN
        each = tl.where(rows < long, span, 2 * span)
        wanted = tl.where(rows <= whole, 1, tl.minimum(most_spans, (rows + each - 1) // each))
        length = tl.maximum((tiles + wanted - 1) // wanted, 1)  # in tiles
        spans = tl.maximum((tiles + length - 1) // length, 1)
        share = (spans + tl.num_programs(2) - 1) // tl.num_programs(2)
        first_span = tl.program_id(2) * share
        last_span = tl.minimum(first_span + share, spans)
        if (tl.program_id(2) == 0) & (tl.program_id(0) == 0):
            tl.store(spans_of_token + index, spans)
        if first_span >= last_span:
            return

    heads = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_V)
    r = tl.arange(0, BLOCK_R)
    asked = query + token * query_token + heads[:, None] * query_head
    q = tl.load(asked + d[None, :], mask=(heads < num_heads)[:, None] & (d < MAIN)[None, :], other=0.0).to(COMPUTE)
    beside = (heads < num_heads)[:, None] & (r < REST)[None, :]
    q_rest = tl.load(asked + MAIN + r[None, :], mask=beside, other=0.0).to(COMPUTE)
    owner0 = token
    owner1 = token
    if not LIST0:
        owner0 = tl.load(owners + token).to(tl.int64)
    if not LIST1:
        owner1 = tl.load(owners + token).to(tl.int64)

    out += first_token * num_heads * V
    if SPLIT:
        for number in tl.range(bound(first_span), bound(last_span), num_stages=1):
            low = number * length
            most, total, acc = _softmax_of_sinks(sinks, heads, num_heads, number == 0, BLOCK_H, BLOCK_V, SINKS)
            most, total, acc = _attend(
                q, q_rest, most, total, acc, low, tl.minimum(low + length, tiles), tiles0,
                values0, scales0, plain0, which0, owner0, begin0, count0, block0, row0, which0_row,
                values1, scales1, plain1, which1, owner1, begin1, count1, block1, row1, which1_row, scale,
                W, BLOCK_V, BLOCK_R, BLOCK_H, BN, TWO, LIST0, LIST1, ROWS0, ROWS1, DIMS, GROUP, COMPUTE, PRECISION,
                STAGES,
            )  # fmt: skip
            if spans == 1:
                _store_whole(out, index, heads, num_heads, total, acc, V, BLOCK_V)
            else:
                row = (index * most_spans + number) * num_heads + heads
                held = heads < num_heads
                tl.store(partial + row[:, None] * BLOCK_V + d[None, :], acc, mask=held[:, None] & (d < V)[None, :])
                tl.store(stats + 2 * row, most, mask=held)
                tl.store(stats + 2 * row + 1, total, mask=held)
    else:
        most, total, acc = _softmax_of_sinks(sinks, heads, num_heads, True, BLOCK_H, BLOCK_V, SINKS)
        most, total, acc = _attend(
            q, q_rest, most, total, acc, 0, tiles, tiles0,
            values0, scales0, plain0, which0, owner0, begin0, count0, block0, row0, which0_row,
            values1, scales1, plain1, which1, owner1, begin1, count1, block1, row1, which1_row, scale,
            W, BLOCK_V, BLOCK_R, BLOCK_H, BN, TWO, LIST0, LIST1, ROWS0, ROWS1, DIMS, GROUP, COMPUTE, PRECISION, STAGES,
        )  # fmt: skip
        _store_whole(out, index, heads, num_heads, total, acc, V, BLOCK_V)


@triton.jit(do_not_specialize=["first_token", "most_spans"])
def merge_kernel(partial, stats, spans_of_token, out, first_token, most_spans, V: tl.constexpr, BLOCK_V: tl.constexpr,
                 AT_ONCE: tl.constexpr):  # fmt: skip
    """Grid: heads, tokens. The spans of every token that has several; see `rows_kernel`."""
    wait_for_earlier_kernels()
    num_heads = tl.num_programs(0)
    index = tl.program_id(1).to(tl.int64)
    spans = tl.load(spans_of_token + index)
    if spans <= 1:
        return
    d = tl.arange(0, BLOCK_V)
    row = index * most_spans * num_heads + tl.program_id(0)
    most = tl.full([AT_ONCE], float("-inf"), tl.float32)
    for start in tl.range(0, bound(spans), AT_ONCE):
        span = start + tl.arange(0, AT_ONCE)
        found = tl.load(stats + 2 * (row + span * num_heads), mask=span < spans, other=float("-inf"))
        most = tl.maximum(most, found)
    base = tl.max(most, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = 0.0
    acc = tl.zeros([BLOCK_V], tl.float32)
    for start in tl.range(0, bound(spans), AT_ONCE):
        span = start + tl.arange(0, AT_ONCE)
        at = row + span * num_heads
        there = span < spans
        weights = tl.exp2(tl.load(stats + 2 * at, mask=there, other=float("-inf")) - base)
        total += tl.sum(weights * tl.load(stats + 2 * at + 1, mask=there, other=0.0), 0)
        part = tl.load(partial + at[:, None] * BLOCK_V + d[None, :], mask=there[:, None] & (d < V)[None, :], other=0.0)
        acc += tl.sum(weights[:, None] * part, 0)
    acc = acc * (1.0 / tl.where(total > 0.0, total, 1.0))
    at = out + ((first_token + index) * num_heads + tl.program_id(0)) * V + d
    tl.store(at, round_to(acc, out.dtype.element_ty), mask=d < V)
