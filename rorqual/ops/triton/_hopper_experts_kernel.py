"""Experts' products of prompts on Hopper: warps that copy ahead, and two groups of four that multiply.

A program goes from tile to tile: while its groups still write one, the next one's weights are under way. Weights come
by TMA, and so do rows that lie one after the other; those of tokens, which do not, come 16 bytes at a time.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_ROWS = gl.constexpr(64)
"""Of a multiplying group."""
_LINES = gl.constexpr(128)
"""Lines of the weight that are copied at once; a tile has twice as many."""
_STEP = gl.constexpr(64)
"""Columns: 128 bytes, the widest that the shared memory's swizzle has."""


@gluon.jit
def _item(round, parts, tiles, max_tiles):
    """(expert, first row, last row + 1, part) of this program's item in a round; an expert of -1 has nothing to do.

    Parts of a tile after each other: those that run at one time then share rows and, with the tiles beside, weights.
    """
    item = round * gl.num_programs(0) + gl.program_id(0)
    tile = item // parts
    expert = gl.load(tiles + tile)
    first = gl.load(tiles + max_tiles + tile)
    last = gl.load(tiles + 2 * max_tiles + tile)
    there = expert >= 0  # what the table says of tiles that are not needed is undefined
    return expert, gl.where(there, first, 0), gl.where(there, last, 1), item % parts


@gluon.jit
def _rounds(parts, max_tiles):
    return (parts * max_tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _produce(
    x,
    w,
    order,
    tiles,
    rows,
    lines,
    ready,
    free,
    features,
    parts,
    K,
    x_row,
    top_k,
    max_tiles,
    GATED: gl.constexpr,
    GATHER: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Steps of rows and lines into the slots that are free."""
    SPREAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BYTES: gl.constexpr = (2 * _LINES + (0 if GATHER else 2 * _ROWS)) * _STEP * 2
    count = 0
    for round in range(0, _rounds(parts, max_tiles)):
        expert, first, last, part = _item(round, parts, tiles, max_tiles)
        steps = gl.where(expert >= 0, K // _STEP, 0)
        if GATED:
            line = expert * 2 * features + part * _LINES
            second = line + features
        else:
            line = expert * features + part * 2 * _LINES
            second = line + _LINES
        if GATHER:
            row = gl.minimum(first + gl.arange(0, 2 * _ROWS, layout=gl.SliceLayout(1, SPREAD)), last - 1)
            source = (gl.load(order + row) // top_k).to(gl.int64)
            column = gl.arange(0, _STEP, layout=gl.SliceLayout(0, SPREAD))
            at = x + source[:, None] * x_row + column[None, :]
        for step in range(0, steps):
            slot = count % STAGES
            mbarrier.wait(free.index(slot), (count // STAGES) & 1 ^ 1)
            mbarrier.expect(ready.index(slot), BYTES)
            tma.async_copy_global_to_shared(w, [line, step * _STEP], ready.index(slot), lines.index(2 * slot))
            tma.async_copy_global_to_shared(w, [second, step * _STEP], ready.index(slot), lines.index(2 * slot + 1))
            if GATHER:
                async_copy.async_copy_global_to_shared(rows.index(slot), at + step * _STEP)
                async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [first, step * _STEP], ready.index(slot), rows.index(slot))
            count += 1


@gluon.jit
def _bfloat16(x):
    """Two at a time: left to itself, the compiler converts these one by one."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _write(answer, staging, out, far, here, n, features, LINES: gl.constexpr):
    """A group's [_ROWS, _LINES] to rows at `far`, columns from n; by way of shared memory, so that 256 bytes of a row
    are written at once."""
    staging.store(answer)
    column = n + gl.arange(0, _LINES, layout=gl.SliceLayout(0, LINES))
    gl.store(
        out + far[:, None] + column[None, :], staging.load(LINES), mask=here[:, None] & (column < features)[None, :]
    )


@gluon.jit
def _step(rows, lines, ready, free, acc, count, step, PART: gl.constexpr, GATHER: gl.constexpr, STAGES: gl.constexpr):
    """One more step of a tile's sums; the product is still under way, the one before it is done."""
    slot = count % STAGES
    mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
    if GATHER:
        fence_async_shared()  # the rows were not written by TMA
    acc = warpgroup_mma(rows.index(2 * slot + PART), lines.index(slot).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
    return acc


@gluon.jit
def _consume(
    out,
    order,
    tiles,
    rows,
    lines,
    staged,
    ready,
    free,
    started,
    features,
    parts,
    K,
    max_tiles,
    PART: gl.constexpr,
    GATED: gl.constexpr,
    GATHER: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
):
    """_ROWS of every tile of this program. The first group starts LEAD steps before the second and stays ahead, so that
    one multiplies while the other writes."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * _LINES, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _LINES, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = rows._reinterpret(rows.dtype, [2 * STAGES, _ROWS, _STEP], LAYOUT)
    lines = lines._reinterpret(lines.dtype, [STAGES, 2 * _LINES, _STEP], LAYOUT)
    staging = staged.index(PART)
    count = 0
    for round in range(0, _rounds(parts, max_tiles)):
        expert, first, last, part = _item(round, parts, tiles, max_tiles)
        first += PART * _ROWS
        steps = gl.where(expert >= 0, K // _STEP, 0)
        busy = gl.where(first < last, steps, 0)
        row = first + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LINES))
        here = row < last
        target = row if GATED else gl.load(order + row, mask=here, other=0)
        acc = gl.zeros([_ROWS, 2 * _LINES], gl.float32, SUM)
        ahead = 0
        if LEAD > 0:
            if PART == 0:
                ahead = gl.where(round == 0, gl.minimum(LEAD, busy), 0)
                for step in range(0, ahead):
                    acc = _step(rows, lines, ready, free, acc, count, step, PART, GATHER, STAGES)
                    count += 1
                mbarrier.arrive(started, pred=round == 0)
            else:
                mbarrier.wait(started, 0)
        for step in range(ahead, busy):
            acc = _step(rows, lines, ready, free, acc, count, step, PART, GATHER, STAGES)
            count += 1
        for _ in range(busy, steps):  # rows that are not there
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), (count // STAGES) & 1)
            mbarrier.arrive(free.index(slot))
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        if busy > 0:
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
            far = target.to(gl.int64) * features
            left, right = acc.reshape([_ROWS, 2, _LINES]).permute((0, 2, 1)).split()
            left, right = gl.convert_layout(left, HALF), gl.convert_layout(right, HALF)
            if GATED:
                gate = _bfloat16(left).to(gl.float32)
                activated = _bfloat16(gate / (1.0 + gl.exp(-gate))).to(gl.float32)
                answer = _bfloat16(activated * _bfloat16(right).to(gl.float32))
                _write(answer, staging, out, far, here, part * _LINES, features, LINES)
            else:
                _write(_bfloat16(left), staging, out, far, here, part * 2 * _LINES, features, LINES)
                _write(_bfloat16(right), staging, out, far, here, part * 2 * _LINES + _LINES, features, LINES)


@gluon.jit(do_not_specialize=["parts", "top_k", "max_tiles"])
def hopper_experts_kernel(
    x,
    w,
    out,
    order,
    tiles,
    features,
    parts,
    K,
    x_row,
    top_k,
    max_tiles,
    GATED: gl.constexpr,
    GATHER: gl.constexpr,
    STAGES: gl.constexpr,
    LEAD: gl.constexpr,
    REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """What `experts_kernel` computes of bfloat16, to the bit, with tiles of 128 rows; any number of programs.

    GATHER: x is [num_tokens, K], whose rows start at multiples of 16 bytes; else its rows are in `order`, and x is a
    descriptor with boxes of 128 rows and 64 columns. w is one of [num_experts * lines of an expert, K], with boxes of
    128 lines and 64 columns. K is a multiple of 64; `parts` of 128 features if GATED, else of 256, cover the features;
    STAGES steps of 64 columns are held at a time; LEAD is less.
    """
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * _ROWS, _STEP], LAYOUT)
    lines = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, _LINES, _STEP], LAYOUT)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, _LINES], LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    started = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(started, count=1)
    for slot in gl.static_range(STAGES):
        # TMA's bytes, and each thread that copies rows itself.
        mbarrier.init(ready.index(slot), count=129 if GATHER else 1)
        mbarrier.init(free.index(slot), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_consume, (out, order, tiles, rows, lines, staged, ready, free, started, features, parts, K, max_tiles, 0,
                        GATED, GATHER, STAGES, LEAD)),
            (_consume, (out, order, tiles, rows, lines, staged, ready, free, started, features, parts, K, max_tiles, 1,
                        GATED, GATHER, STAGES, LEAD)),
            (_produce, (x, w, order, tiles, rows, lines, ready, free, features, parts, K, x_row, top_k, max_tiles,
                        GATED, GATHER, STAGES)),
        ],
        [4, 4 if GATHER else 1],
        [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
