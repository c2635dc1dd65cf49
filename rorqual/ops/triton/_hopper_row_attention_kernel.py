"""The kernel of attention over rows on Hopper: four warps copy rows, four score them, two times four add up values.

Tiles, spans and the order of sums are those of `_row_attention_kernel`, whose arguments it takes; 64 heads of one token
make a program. A tile lies in shared memory in three parts: the left and the right half of the values, and what is
beside them. The scoring warps hand weights over, and what earlier sums shrink by; each adding group has half of the
columns, and frees its part of a tile as soon as it is done with it, so that the next tile's comes early. Of records
the copying warps make bfloat16 in registers: those are 8 bytes aligned, too little for copies of 16, and shared memory
has no room for them beside their numbers.

Written in Gluon, where warps and memory are the kernel's own business; it has no interpreter.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rorqual.ops.triton._hopper_attention_kernel import _bfloat16

# Four e4m3 codes to bfloat16, times a power of two: the seven bits below the sign, moved to bits 10-4, are the value
# times 2^-120. Exact, but NaN codes are +-480.
_DECODE_E4M3 = gl.constexpr("""{
.reg .b32 t, u, c;
mov.b32 c, 0x7B807B80;
prmt.b32 t, $2, 0, 0x1404;
prmt.b32 u, $2, 0, 0x3424;
and.b32 $0, t, 0x80008000;
shr.u32 t, t, 4;
lop3.b32 $0, t, 0x07F007F0, $0, 0xEA;
and.b32 $1, u, 0x80008000;
shr.u32 u, u, 4;
lop3.b32 $1, u, 0x07F007F0, $1, 0xEA;
mul.rn.bf16x2 $0, $0, c;
mul.rn.bf16x2 $1, $1, c;
mul.rn.bf16x2 $0, $0, $3;
mul.rn.bf16x2 $1, $1, $3;
}""")


@gluon.jit
def _rows_seen(
    which,
    first,
    stop,
    token,
    which_row,
    LIST: gl.constexpr,
    LENGTH: gl.constexpr,
    WIDTH: gl.constexpr,
    FIRST: gl.constexpr,
):
    """(first row, how many) of one source; of a list, up to its last slot."""
    if LIST:
        LINE: gl.constexpr = gl.BlockedLayout([WIDTH // 128], [32], [4], [0])
        n = gl.arange(0, WIDTH, layout=LINE)
        slots = gl.load(which + token * which_row + n, mask=n < LENGTH, other=-1)
        return 0, gl.max(gl.where(slots >= 0, n + 1, 0), 0)
    begin = 0
    if FIRST:
        begin = gl.load(first + token).to(gl.int32)
    return begin, gl.maximum(gl.load(stop + token).to(gl.int32) - begin, 0)


@gluon.jit
def _slots(which, owner, which_row, begin, n, there, LIST: gl.constexpr, ROWS: gl.constexpr):
    """Block, and row in it, of a source's rows n; block -1 where there is none."""
    if LIST:
        slot = gl.load(which + owner * which_row + n, mask=there, other=-1)
        return gl.where(slot >= 0, slot // ROWS, -1), slot % ROWS
    at = begin + n
    block = gl.load(which + owner * which_row + at // ROWS, mask=there, other=-1)
    return block, at % ROWS


@gluon.jit
def _find(tile, tiles0, where0, where1, LAYOUT: gl.constexpr, BN: gl.constexpr, TWO: gl.constexpr, LIST0: gl.constexpr,
          LIST1: gl.constexpr, ROWS0: gl.constexpr, ROWS1: gl.constexpr):  # fmt: skip
    """Where the rows of a tile begin in their cache, and which of them there are."""
    which0, owner0, which0_row, begin0, count0, block0, row0 = where0
    i = gl.arange(0, BN, layout=LAYOUT)
    if TWO:
        which1, owner1, which1_row, begin1, count1, block1, row1 = where1
        of_first = tile < tiles0
        n = gl.where(of_first, tile, tile - tiles0) * BN + i
        block, inner = _slots(which0, owner0, which0_row, begin0, n, of_first & (n < count0), LIST0, ROWS0)
        block_, inner_ = _slots(which1, owner1, which1_row, begin1, n, (tile >= tiles0) & (n < count1), LIST1, ROWS1)
        first_at = block.to(gl.int64) * block0 + inner * row0
        at = gl.where(block >= 0, first_at, block_.to(gl.int64) * block1 + inner_ * row1)
        return at, (block >= 0) | (block_ >= 0)
    block, inner = _slots(which0, owner0, which0_row, begin0, tile * BN + i, tile * BN + i < count0, LIST0, ROWS0)
    return block.to(gl.int64) * block0 + inner * row0, block >= 0


@gluon.jit
def _copy(part, ready, free, slot, phase, at, there, FIRST: gl.constexpr, COLUMNS: gl.constexpr, LINES: gl.constexpr):
    """Some columns of a tile's rows into a slot, once it is free; zeros for rows that are not there."""
    mbarrier.wait(free.index(slot), phase ^ 1)
    d = FIRST + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LINES))
    async_copy.async_copy_global_to_shared(part.index(slot), at[:, None] + d[None, :], mask=there[:, None])
    async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)


@gluon.jit
def _load(values0, values1, where0, where1, tiles0, here, tile_parts, ready, free, BN: gl.constexpr, HALF: gl.constexpr,
          REST: gl.constexpr, TWO: gl.constexpr, LIST0: gl.constexpr, LIST1: gl.constexpr, ROWS0: gl.constexpr,
          ROWS1: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The tiles of this program's spans, part by part."""
    first_span, last_span, length, tiles, _spans = here
    low, high = first_span * length, gl.minimum(last_span * length, tiles)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LINES)
    next_at, next_there = _find(low, tiles0, where0, where1, ROW, BN, TWO, LIST0, LIST1, ROWS0, ROWS1)
    for tile in range(low, high):
        at, there = next_at, next_there
        next_at, next_there = _find(tile + 1, tiles0, where0, where1, ROW, BN, TWO, LIST0, LIST1, ROWS0, ROWS1)
        values = values0
        if TWO:
            values = gl.where(tile < tiles0, values0, values1)
        slot = (tile - low) % STAGES
        phase = ((tile - low) // STAGES) & 1
        rows = values + at
        if REST > 0:
            _copy(tile_parts[2], ready[2], free[2], slot, phase, rows, there, 2 * HALF, REST, LINES)
        _copy(tile_parts[0], ready[0], free[0], slot, phase, rows, there, 0, HALF, LINES)
        _copy(tile_parts[1], ready[1], free[1], slot, phase, rows, there, HALF, HALF, LINES)


@gluon.jit
def _words(words, at, there, FIRST: gl.constexpr, WORDS: gl.constexpr, LINES: gl.constexpr):
    """Some words of four bytes of each record; records begin at every second word, counted in `at`."""
    word = FIRST + gl.arange(0, WORDS, layout=gl.SliceLayout(0, LINES))
    return gl.load(words + (at * 2)[:, None] + word[None, :], mask=there[:, None], other=0)


@gluon.jit
def _decode(codes, scales, piece, BYTE: gl.constexpr):
    """[BN, 16] words of four codes times a scale, which is a byte of a word, into a piece of a tile."""
    # A power of two from its exponent, twice in a word; 2^-127 is a subnormal.
    power = gl.maximum(((scales >> (8 * BYTE)) & 0xFF) << 7, 1 << 6) * 0x10001
    low, high = gl.inline_asm_elementwise(
        _DECODE_E4M3, "=r,=r,r,r", [codes, power[:, None]], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    piece.store(gl.join(low, high).reshape([codes.shape[0], 32]))


@gluon.jit
def _load_records(records0, records1, where0, where1, tiles0, here, tile_parts, ready, free, BN: gl.constexpr,
                  TWO: gl.constexpr, LIST0: gl.constexpr, LIST1: gl.constexpr, ROWS0: gl.constexpr,
                  ROWS1: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """As `_load`, of records: 448 codes, 64 numbers as they are, and a word of seven scales. What comes next is on its
    way to registers while something else is decoded."""
    first_span, last_span, length, tiles, _spans = here
    low, high = first_span * length, gl.minimum(last_span * length, tiles)
    CODES: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, CODES)
    PIECE: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    left = tile_parts[0]._reinterpret(gl.int32, [STAGES * 4, BN, 32], PIECE)
    right = tile_parts[1]._reinterpret(gl.int32, [STAGES * 4, BN, 32], PIECE)
    next_at, next_there = _find(low, tiles0, where0, where1, ROW, BN, TWO, LIST0, LIST1, ROWS0, ROWS1)
    records = records0
    if TWO:
        records = gl.where(low < tiles0, records0, records1)
    codes0 = _words(records, next_at, next_there, 0, 16, CODES)
    codes1 = _words(records, next_at, next_there, 16, 16, CODES)
    codes2 = _words(records, next_at, next_there, 32, 16, CODES)
    codes3 = _words(records, next_at, next_there, 48, 16, CODES)
    scale0 = gl.load(records + next_at * 2 + 144, mask=next_there, other=0)
    for tile in range(low, high):
        slot = (tile - low) % STAGES
        phase = (((tile - low) // STAGES) & 1) ^ 1
        mbarrier.wait(free[0].index(slot), phase)
        _decode(codes0, scale0, left.index(slot * 4), 0)
        codes4 = _words(records, next_at, next_there, 64, 16, CODES)
        scale1 = gl.load(records + next_at * 2 + 145, mask=next_there, other=0)
        _decode(codes1, scale0, left.index(slot * 4 + 1), 1)
        codes5 = _words(records, next_at, next_there, 80, 16, CODES)
        _decode(codes2, scale0, left.index(slot * 4 + 2), 2)
        codes6 = _words(records, next_at, next_there, 96, 16, CODES)
        _decode(codes3, scale0, left.index(slot * 4 + 3), 3)
        after_at, after_there = _find(tile + 1, tiles0, where0, where1, ROW, BN, TWO, LIST0, LIST1, ROWS0, ROWS1)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready[0].index(slot))
        at = gl.convert_layout(next_at, gl.SliceLayout(1, LINES), assert_trivial=True)
        there = gl.convert_layout(next_there, gl.SliceLayout(1, LINES), assert_trivial=True)
        beside = _words(records, at, there, 112, 32, LINES)
        next_at, next_there = after_at, after_there
        if TWO:
            records = gl.where(tile + 1 < tiles0, records0, records1)
        mbarrier.wait(free[1].index(slot), phase)
        _decode(codes4, scale1, right.index(slot * 4), 0)
        codes0 = _words(records, next_at, next_there, 0, 16, CODES)
        scale0 = gl.load(records + next_at * 2 + 144, mask=next_there, other=0)
        _decode(codes5, scale1, right.index(slot * 4 + 1), 1)
        codes1 = _words(records, next_at, next_there, 16, 16, CODES)
        _decode(codes6, scale1, right.index(slot * 4 + 2), 2)
        codes2 = _words(records, next_at, next_there, 32, 16, CODES)
        right.index(slot * 4 + 3).store(beside)
        codes3 = _words(records, next_at, next_there, 48, 16, CODES)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready[1].index(slot))


@gluon.jit
def _score(where0, where1, tiles0, here, place, stats, sinks, scale, asked, tile_parts, ready, beside_free, talk,
           BN: gl.constexpr, REST: gl.constexpr, TWO: gl.constexpr, LIST0: gl.constexpr, LIST1: gl.constexpr,
           ROWS0: gl.constexpr, ROWS1: gl.constexpr, STAGES: gl.constexpr, NOTES: gl.constexpr,
           SINKS: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Weights of every tile, then one message more with what a span's sums are multiplied by in the end."""
    first_span, last_span, length, tiles, spans = here
    index, most_spans, num_heads, head = place
    left, right, beside = tile_parts
    weights, factors, told, heard = talk
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    heads = head + gl.arange(0, 64, layout=ROW)
    held = heads < num_heads
    count = 0
    message = 0
    for span in range(first_span, last_span):
        low = span * length
        high = gl.minimum(low + length, tiles)
        most = gl.full([64], float("-inf"), gl.float32, ROW)
        total = gl.full([64], 0.0, gl.float32, ROW)
        if SINKS and span == 0:
            most = gl.load(sinks + heads, mask=held, other=float("-inf")) * 1.4426950408889634
            total = gl.full([64], 1.0, gl.float32, ROW)
        for tile in range(low, high):
            _at, there = _find(tile, tiles0, where0, where1, gl.SliceLayout(0, S), BN, TWO, LIST0, LIST1, ROWS0, ROWS1)
            slot = count % STAGES
            phase = (count // STAGES) & 1
            if REST > 0:
                mbarrier.wait(ready[2].index(slot), phase)
            mbarrier.wait(ready[0].index(slot), phase)
            mbarrier.wait(ready[1].index(slot), phase)
            fence_async_shared()
            scores = gl.zeros([64, BN], gl.float32, S)
            scores = warpgroup_mma(asked[0], left.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
            scores = warpgroup_mma(asked[1], right.index(slot).permute((1, 0)), scores, is_async=True)
            if REST > 0:
                scores = warpgroup_mma(asked[2], beside.index(slot).permute((1, 0)), scores, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            if REST > 0:
                gl.thread_barrier()
                mbarrier.arrive(beside_free.index(slot))
            scores = gl.where(there[None, :], scores * scale, float("-inf"))
            higher = gl.maximum(most, gl.max(scores, 1))
            base = gl.where(higher == float("-inf"), 0.0, higher)  # holes alone so far
            scores = gl.exp2(scores - base[:, None])
            shrink = gl.exp2(most - base)
            total = total * shrink + gl.sum(scores, 1)
            most = higher
            note = message % NOTES
            mbarrier.wait(heard.index(note), ((message // NOTES) & 1) ^ 1)
            weights.index(note).store(_bfloat16(scores))
            factors.index(note).store(shrink)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(told.index(note))
            message += 1
            count += 1
        factor = 1.0 / gl.where(total > 0.0, total, 1.0)
        if SPLIT and spans > 1:
            row = (index * most_spans + span) * num_heads + heads
            gl.store(stats + 2 * row, most, mask=held)
            gl.store(stats + 2 * row + 1, total, mask=held)
            factor = gl.full([64], 1.0, gl.float32, ROW)
        note = message % NOTES
        mbarrier.wait(heard.index(note), ((message // NOTES) & 1) ^ 1)
        factors.index(note).store(factor)
        gl.thread_barrier()
        mbarrier.arrive(told.index(note))
        message += 1


@gluon.jit
def _add(here, place, partial, out, part, free, talk, PART: gl.constexpr, V: gl.constexpr, HALF: gl.constexpr,
         STAGES: gl.constexpr, NOTES: gl.constexpr, SPLIT: gl.constexpr):  # fmt: skip
    """Half of the columns of every span's sums."""
    first_span, last_span, length, tiles, spans = here
    index, most_spans, num_heads, head = place
    weights, factors, told, heard = talk
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, A)
    heads = head + gl.arange(0, 64, layout=ROW)
    d = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, A))
    mask = (heads < num_heads)[:, None] & (d >= 0)[None, :]
    acc = gl.zeros([64, HALF], gl.float32, A)
    count = 0
    message = 0
    for span in range(first_span, last_span):
        low = span * length
        high = gl.minimum(low + length, tiles)
        for _ in range(low, high):
            slot = count % STAGES
            note = message % NOTES
            mbarrier.wait(told.index(note), (message // NOTES) & 1)
            fence_async_shared()
            # The first tile of a span shrinks what is left of the span before to nothing.
            acc = acc * factors.index(note).load(ROW)[:, None]
            acc = warpgroup_mma(weights.index(note), part.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(heard.index(note))
            mbarrier.arrive(free.index(slot))
            message += 1
            count += 1
        note = message % NOTES
        mbarrier.wait(told.index(note), (message // NOTES) & 1)
        factor = factors.index(note).load(ROW)
        gl.thread_barrier()
        mbarrier.arrive(heard.index(note))
        message += 1
        acc = acc * factor[:, None]
        if SPLIT and spans > 1:
            row = (index * most_spans + span) * num_heads + heads
            gl.store(partial + row[:, None] * (2 * HALF) + d[None, :], acc, mask=mask)
        else:
            row = index * num_heads + heads
            gl.store(out + row[:, None] * V + d[None, :], _bfloat16(acc), mask=mask)


@gluon.jit(
    do_not_specialize=["which0_row", "which1_row", "first_token", "num_heads", "most_spans", "whole", "span", "long"]
)
def hopper_rows_kernel(
    query,
    owners,
    sinks,
    out,
    partial,
    stats,
    spans_of_token,
    values0,
    which0,
    first0,
    stop0,
    values1,
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
    W: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    NOTES: gl.constexpr,
    TWO: gl.constexpr,
    LIST0: gl.constexpr,
    LIST1: gl.constexpr,
    LENGTH0: gl.constexpr,
    LENGTH1: gl.constexpr,
    WIDTH0: gl.constexpr,
    WIDTH1: gl.constexpr,
    FIRST0: gl.constexpr,
    FIRST1: gl.constexpr,
    ROWS0: gl.constexpr,
    ROWS1: gl.constexpr,
    RECORDS: gl.constexpr,
    SINKS: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Grid and arguments as `rows_kernel` has them; W is BLOCK_V, or BLOCK_V + 64. RECORDS, of 448 codes, 64
    numbers and seven scales, are int32, and their strides are in words of eight bytes."""
    HALF: gl.constexpr = BLOCK_V // 2
    REST: gl.constexpr = W - BLOCK_V
    BESIDE: gl.constexpr = REST if REST > 0 else 64
    index = gl.program_id(1).to(gl.int64)
    token = first_token + index
    begin0, count0 = _rows_seen(which0, first0, stop0, token, which0_row, LIST0, LENGTH0, WIDTH0, FIRST0)
    tiles0 = (count0 + BN - 1) // BN
    tiles = tiles0
    begin1, count1 = begin0, count0
    if TWO:
        begin1, count1 = _rows_seen(which1, first1, stop1, token, which1_row, LIST1, LENGTH1, WIDTH1, FIRST1)
        tiles += (count1 + BN - 1) // BN
    spans = 1
    length = tiles
    first_span = 0
    last_span = 1
    num_asked = num_heads
    if SPLIT:
        rows = tiles * BN
        each = gl.where(rows < long, span, 2 * span)
        wanted = gl.where(rows <= whole, 1, gl.minimum(most_spans, (rows + each - 1) // each))
        length = gl.maximum((tiles + wanted - 1) // wanted, 1)  # in tiles
        spans = gl.maximum((tiles + length - 1) // length, 1)
        share = (spans + gl.num_programs(2) - 1) // gl.num_programs(2)
        first_span = gl.program_id(2) * share
        last_span = gl.minimum(first_span + share, spans)
        if gl.program_id(2) == 0:
            gl.store(spans_of_token + index, spans)
        # A program without a span has nothing to do, and reads nothing.
        num_asked = gl.where(first_span < last_span, num_heads, 0)

    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, HALF], LAYOUT)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, HALF], LAYOUT)
    left = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, HALF], LAYOUT)
    right = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, HALF], LAYOUT)
    q_beside = q_left
    beside = left
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head = gl.program_id(0) * 64
    heads = head + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    asked = query + token * query_token + heads[:, None] * query_head
    d = gl.arange(0, HALF, layout=gl.SliceLayout(0, LINES))
    held = (heads < num_asked)[:, None] & (d >= 0)[None, :]
    q_left.store(gl.load(asked + d[None, :], mask=held, other=0.0))
    q_right.store(gl.load(asked + HALF + d[None, :], mask=held, other=0.0))
    if REST > 0:
        q_beside = gl.allocate_shared_memory(gl.bfloat16, [64, BESIDE], LAYOUT)
        beside = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BESIDE], LAYOUT)
        r = gl.arange(0, BESIDE, layout=gl.SliceLayout(0, LINES))
        held_beside = (heads < num_asked)[:, None] & (r >= 0)[None, :]
        q_beside.store(gl.load(asked + 2 * HALF + r[None, :], mask=held_beside, other=0.0))
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(min(128, 2 * BN), 16, 2)
    weights = gl.allocate_shared_memory(gl.bfloat16, [NOTES, 64, BN], WEIGHTS)
    factors = gl.allocate_shared_memory(gl.float32, [NOTES, 64], LINE)
    left_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    beside_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    beside_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [NOTES, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [NOTES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(left_ready.index(slot), count=1 if RECORDS else 128)  # every copying thread
        mbarrier.init(right_ready.index(slot), count=1 if RECORDS else 128)
        mbarrier.init(beside_ready.index(slot), count=128)
        mbarrier.init(left_free.index(slot), count=1)
        mbarrier.init(right_free.index(slot), count=1)
        mbarrier.init(beside_free.index(slot), count=1)
    for note in gl.static_range(NOTES):
        mbarrier.init(told.index(note), count=1)
        mbarrier.init(heard.index(note), count=2)
    fence_async_shared()
    gl.thread_barrier()

    owner0, owner1 = token, token
    if not LIST0:
        owner0 = gl.load(owners + token).to(gl.int64)
    if not LIST1:
        owner1 = gl.load(owners + token).to(gl.int64)
    where0 = (which0, owner0, which0_row, begin0, count0, block0, row0)
    where1 = (which1, owner1, which1_row, begin1, count1, block1, row1)
    out += first_token.to(gl.int64) * num_heads * V
    here = (first_span, last_span, length, tiles, spans)
    place = (index, most_spans, num_heads, head)
    talk = (weights, factors, told, heard)
    tile_parts = (left, right, beside)
    ready = (left_ready, right_ready, beside_ready)
    free = (left_free, right_free, beside_free)
    if RECORDS:
        gl.warp_specialize(
            [
                (_add, (here, place, partial, out, left, left_free, talk, 0, V, HALF, STAGES, NOTES, SPLIT)),
                (_add, (here, place, partial, out, right, right_free, talk, 1, V, HALF, STAGES, NOTES, SPLIT)),
                (_score, (where0, where1, tiles0, here, place, stats, sinks, scale, (q_left, q_right, q_beside),
                          tile_parts, ready, beside_free, talk, BN, REST, TWO, LIST0, LIST1, ROWS0, ROWS1, STAGES,
                          NOTES, SINKS, SPLIT)),
                (_load_records, (values0, values1, where0, where1, tiles0, here, tile_parts, ready, free, BN, TWO,
                                 LIST0, LIST1, ROWS0, ROWS1, STAGES)),
            ],
            [4, 4, 4],
            [160, 88, 104],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_add, (here, place, partial, out, left, left_free, talk, 0, V, HALF, STAGES, NOTES, SPLIT)),
                (_add, (here, place, partial, out, right, right_free, talk, 1, V, HALF, STAGES, NOTES, SPLIT)),
                (_score, (where0, where1, tiles0, here, place, stats, sinks, scale, (q_left, q_right, q_beside),
                          tile_parts, ready, beside_free, talk, BN, REST, TWO, LIST0, LIST1, ROWS0, ROWS1, STAGES,
                          NOTES, SINKS, SPLIT)),
                (_load, (values0, values1, where0, where1, tiles0, here, tile_parts, ready, free, BN, HALF, REST, TWO,
                         LIST0, LIST1, ROWS0, ROWS1, STAGES)),
            ],
            [4, 4, 4],
            [168, 112, 64],
        )  # fmt: skip
