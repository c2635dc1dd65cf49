"""The kernels of paged attention: a tile of queries against the keys of their sequence, read through its block table.

Rows of a tile are queries times the heads that share a KV head, so that keys and values are read once for all of them.
Softmax is computed online over blocks of BN keys that begin at multiples of BN, so that what a query gets does not
depend on which chunk or tile it is in.

Sequences with one token have so few rows that it is the reading of keys that takes the time. Their context is cut in
spans of SPAN keys, each with a softmax of its own, merged in ascending order. Which programs compute the spans does not
matter to the result: one for all of them, merging as it goes, or several, of which the last to finish merges.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from rorqual.ops.triton._dependent_launch import wait_for_earlier_kernels
from rorqual.ops.triton._interpreter import bound, dot
from rorqual.ops.triton._number_formats import e4m3_value, round_to


@triton.jit
def _load_rows(cache, block, inner, block_step, token_step, head_offset, d, there, D: tl.constexpr,
               BLOCK_D: tl.constexpr, MASKED: tl.constexpr, E4M3: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """[BN, BLOCK_D] rows of one head, as COMPUTE; zeros where not there, whatever the cache holds."""
    at = cache + block.to(tl.int64)[:, None] * block_step + (inner * token_step + head_offset)[:, None] + d[None, :]
    mask = there[:, None] & (d < D)[None, :]
    rows = tl.load(at, mask=mask, other=0) if MASKED or D != BLOCK_D else tl.load(at)
    if E4M3:
        return e4m3_value(rows).to(COMPUTE)
    return rows.to(COMPUTE)


@triton.jit
def _step(
    q,
    most,
    total,
    acc,
    start,
    low,
    high,
    position,
    key_cache,
    value_cache,
    table,
    key_block,
    key_token,
    key_offset,
    value_block,
    value_token,
    value_offset,
    scale,
    cap,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BN keys from start on added to the softmax (most, total, acc) of each row so far; see `_attend`."""
    d = tl.arange(0, BLOCK_D)
    n = start + tl.arange(0, BN)
    there = (n >= low) & (n < high)  # what nobody sees may be NaN
    block = tl.load(table + n // BLOCK_SIZE, mask=there, other=0) if MASKED else tl.load(table + n // BLOCK_SIZE)
    inner = n % BLOCK_SIZE
    k = _load_rows(key_cache, block, inner, key_block, key_token, key_offset, d, there, D, BLOCK_D, MASKED, E4M3,
                   COMPUTE)  # fmt: skip
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], BN], tl.float32), PRECISION) * scale
    if CAPPED:
        scores = cap - 2 * cap / (tl.exp2(scores) + 1.0)  # cap * tanh(x) of 2**scores = e**(2 x)
    if MASKED:
        visible = (n[None, :] <= position[:, None]) & there[None, :]
        if WINDOW:
            visible &= n[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    # A row that has seen nothing yet stays at sums of zero.
    base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    v = _load_rows(value_cache, block, inner, value_block, value_token, value_offset, d, there, D, BLOCK_D, MASKED,
                   E4M3, COMPUTE)  # fmt: skip
    acc = dot(round_to(weights, COMPUTE), v, acc * shrink[:, None], PRECISION)
    return higher, total, acc


@triton.jit
def _attend(
    q,
    most,
    total,
    acc,
    low,
    high,
    position,
    key_cache,
    value_cache,
    table,
    key_block,
    key_token,
    key_offset,
    value_block,
    value_token,
    value_offset,
    scale,
    cap,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keys low .. high added to the softmax (most, total, acc) of each row so far.

    Without MASKED all rows see them all, and both are multiples of BN.
    """
    for start in tl.range(bound(low // BN * BN), bound(high), BN, num_stages=STAGES):
        most, total, acc = _step(
            q, most, total, acc, start, low, high, position, key_cache, value_cache, table, key_block, key_token,
            key_offset, value_block, value_token, value_offset, scale, cap, window,
            D, BLOCK_D, BLOCK_SIZE, BN, MASKED, WINDOW, CAPPED, E4M3, COMPUTE, PRECISION,
        )  # fmt: skip
    return most, total, acc


@triton.jit
def _merge(most, total, acc, most2, total2, acc2):
    """The softmax of two spans; the second one holds at least one key of every row that counts."""
    higher = tl.maximum(most, most2)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    first, second = tl.exp2(most - base), tl.exp2(most2 - base)
    return higher, total * first + total2 * second, acc * first[:, None] + acc2 * second[:, None]


@triton.jit
def _load_span(slot, span, spans, rows, d, GROUP: tl.constexpr, BLOCK_D: tl.constexpr):
    """What a program has written of a span; of one behind the last, what changes nothing when it is merged."""
    WIDTH: tl.constexpr = BLOCK_D + 2
    at = slot + span * GROUP * WIDTH + rows * WIDTH
    there = (rows < GROUP) & (span < spans)
    acc = tl.load(at[:, None] + d[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg")
    total = tl.load(at + BLOCK_D, mask=there, other=0.0, cache_modifier=".cg")
    most = tl.load(at + BLOCK_D + 1, mask=there, other=float("-inf"), cache_modifier=".cg")
    return most, total, acc


@triton.jit
def _softmax_of_sinks(sinks, heads, there, BM: tl.constexpr, BLOCK_D: tl.constexpr, SINKS: tl.constexpr):
    """A softmax (most, total, acc) of no keys: of nothing, or of each row's sink."""
    most = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if SINKS:
        LOG2_E: tl.constexpr = 1.4426950408889634
        most = tl.load(sinks + heads, mask=there, other=float("-inf")) * LOG2_E
        total += 1.0
    return most, total, tl.zeros([BM, BLOCK_D], tl.float32)


@triton.jit
def _attend_in_spans(
    q,
    most,
    total,
    acc,
    low,
    high,
    position,
    key_cache,
    value_cache,
    table,
    key_block,
    key_token,
    key_offset,
    value_block,
    value_token,
    value_offset,
    scale,
    cap,
    window,
    BM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Keys low .. high, each span's softmax merged into (most, total, acc) where it ends.

    All in one loop, so that loads run ahead across spans.
    """
    span_most = tl.full([BM], float("-inf"), tl.float32)
    span_total = tl.zeros([BM], tl.float32)
    span_acc = tl.zeros([BM, BLOCK_D], tl.float32)
    for start in tl.range(bound(low // BN * BN), bound(high), BN, num_stages=STAGES):
        span_most, span_total, span_acc = _step(
            q, span_most, span_total, span_acc, start, low, high, position, key_cache, value_cache, table, key_block,
            key_token, key_offset, value_block, value_token, value_offset, scale, cap, window,
            D, BLOCK_D, BLOCK_SIZE, BN, True, WINDOW, CAPPED, E4M3, COMPUTE, PRECISION,
        )  # fmt: skip
        if (start + BN) % SPAN == 0:
            most, total, acc = _merge(most, total, acc, span_most, span_total, span_acc)
            span_most = tl.full([BM], float("-inf"), tl.float32)
            span_total = tl.zeros([BM], tl.float32)
            span_acc = tl.zeros([BM, BLOCK_D], tl.float32)
    return _merge(most, total, acc, span_most, span_total, span_acc)


@triton.jit(do_not_specialize=["table_row", "window"])
def chunk_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    sinks,
    cu_seqlens,
    tiles,
    out,
    query_token,
    query_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    table_row,
    out_token,
    scale,
    cap,
    window,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """tiles int32 [grid 0, 2]: sequence, and the tile's first query counted in its chunk. Grid 1 are the KV heads."""
    QUERIES: tl.constexpr = BM // GROUP
    wait_for_earlier_kernels()
    seq = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    head = tl.program_id(1)
    begin = tl.load(cu_seqlens + seq)
    length = tl.load(cu_seqlens + seq + 1) - begin
    context = tl.load(context_lens + seq)

    rows = tl.arange(0, BM)
    index = first + rows // GROUP
    there = (index < length) & (rows < QUERIES * GROUP)
    d = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (d < D)[None, :]
    heads = head * GROUP + rows % GROUP
    tokens = (begin + index).to(tl.int64)
    q = tl.load(query + tokens[:, None] * query_token + heads[:, None] * query_head + d[None, :], mask=mask, other=0.0)
    q = q.to(COMPUTE)

    position = context - length + index
    nearest = context - length + first  # the position of the tile's first query
    high = tl.minimum(nearest + QUERIES, context)
    low = 0
    if WINDOW:
        low = tl.maximum(0, nearest - window + 1)
    most, total, acc = _softmax_of_sinks(sinks, heads, there, BM, BLOCK_D, SINKS)
    table = block_tables + seq.to(tl.int64) * table_row
    seen_by_all = (nearest + 1) // BN * BN
    if not WINDOW:
        most, total, acc = _attend(
            q, most, total, acc, low, seen_by_all, position, key_cache, value_cache, table, key_block,
            key_token, head * key_head, value_block, value_token, head * value_head, scale, cap, window,
            D, BLOCK_D, BLOCK_SIZE, BN, False, False, CAPPED, E4M3, COMPUTE, PRECISION, STAGES,
        )  # fmt: skip
        low = seen_by_all
    most, total, acc = _attend(
        q, most, total, acc, low, high, position, key_cache, value_cache, table, key_block, key_token,
        head * key_head, value_block, value_token, head * value_head, scale, cap, window,
        D, BLOCK_D, BLOCK_SIZE, BN, True, WINDOW, CAPPED, E4M3, COMPUTE, PRECISION, STAGES,
    )  # fmt: skip
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    to = out + tokens[:, None] * out_token + heads[:, None] * D + d[None, :]
    tl.store(to, round_to(acc, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["table_row", "window", "most_spans"])
def single_token_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    sinks,
    out,
    partial,
    arrivals,
    query_token,
    query_head,
    key_block,
    key_token,
    key_head,
    value_block,
    value_token,
    value_head,
    table_row,
    out_token,
    scale,
    cap,
    window,
    most_spans,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    E4M3: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: KV heads, sequences, and programs that share a sequence's spans. Sequence i has the token i.

    With SPLIT, several share them: partial float32 [sequences, KV heads, most_spans, GROUP, BLOCK_D + 2], the spans'
    sums, totals and maxima; arrivals int32 [sequences, KV heads], zero before and after.
    """
    wait_for_earlier_kernels()
    head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(context_lens + seq)
    rows = tl.arange(0, BM)
    d = tl.arange(0, BLOCK_D)
    mask = (rows < GROUP)[:, None] & (d < D)[None, :]
    heads = head * GROUP + rows
    token = seq.to(tl.int64)
    q = tl.load(query + token * query_token + heads[:, None] * query_head + d[None, :], mask=mask, other=0.0)
    q = q.to(COMPUTE)
    position = tl.full([BM], 0, tl.int32) + context - 1
    low = 0
    if WINDOW:
        low = tl.maximum(0, context - window)
    first = low // SPAN
    spans = (context + SPAN - 1) // SPAN - first
    table = block_tables + token * table_row

    most, total, acc = _softmax_of_sinks(sinks, heads, rows < GROUP, BM, BLOCK_D, SINKS)
    if not SPLIT:
        most, total, acc = _attend_in_spans(
            q, most, total, acc, low, context, position, key_cache, value_cache, table, key_block, key_token,
            head * key_head, value_block, value_token, head * value_head, scale, cap, window,
            BM, D, BLOCK_D, BLOCK_SIZE, BN, SPAN, WINDOW, CAPPED, E4M3, COMPUTE, PRECISION, STAGES,
        )  # fmt: skip
    WIDTH: tl.constexpr = BLOCK_D + 2
    slot = partial + (token * tl.num_programs(0) + head) * most_spans * GROUP * WIDTH
    last = True
    if SPLIT:
        for span in tl.range(bound(split), bound(spans), bound(tl.num_programs(2))):
            start = (first + span) * SPAN
            span_most, span_total, span_acc = _softmax_of_sinks(sinks, heads, rows < GROUP, BM, BLOCK_D, False)
            span_most, span_total, span_acc = _attend(
                q, span_most, span_total, span_acc, tl.maximum(start, low), tl.minimum(start + SPAN, context),
                position, key_cache, value_cache, table, key_block, key_token, head * key_head, value_block,
                value_token, head * value_head, scale, cap, window,
                D, BLOCK_D, BLOCK_SIZE, BN, True, WINDOW, CAPPED, E4M3, COMPUTE, PRECISION, STAGES,
            )  # fmt: skip
            to = slot + span * GROUP * WIDTH + rows * WIDTH
            tl.store(to[:, None] + d[None, :], span_acc, mask=(rows < GROUP)[:, None])
            tl.store(to + BLOCK_D, span_total, mask=rows < GROUP)
            tl.store(to + BLOCK_D + 1, span_most, mask=rows < GROUP)
        tl.debug_barrier()  # every thread's spans are written before one of them says so
        counter = arrivals + token * tl.num_programs(0) + head
        last = tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(2) - 1
        if last:
            tl.store(counter, 0)
            for span in tl.range(0, bound(spans), 4):  # four at a time, so that their loads overlap
                most0, total0, acc0 = _load_span(slot, span, spans, rows, d, GROUP, BLOCK_D)
                most1, total1, acc1 = _load_span(slot, span + 1, spans, rows, d, GROUP, BLOCK_D)
                most2, total2, acc2 = _load_span(slot, span + 2, spans, rows, d, GROUP, BLOCK_D)
                most3, total3, acc3 = _load_span(slot, span + 3, spans, rows, d, GROUP, BLOCK_D)
                most, total, acc = _merge(most, total, acc, most0, total0, acc0)
                most, total, acc = _merge(most, total, acc, most1, total1, acc1)
                most, total, acc = _merge(most, total, acc, most2, total2, acc2)
                most, total, acc = _merge(most, total, acc, most3, total3, acc3)
    if last:
        acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        to = out + token * out_token + heads[:, None] * D + d[None, :]
        tl.store(to, round_to(acc, out.dtype.element_ty), mask=mask)
