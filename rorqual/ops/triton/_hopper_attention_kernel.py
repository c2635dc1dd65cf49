"""The kernel of paged attention for chunks on Hopper: one warp copies keys and values, two groups of four multiply.

Tiles, blocks of keys and the order of sums are those of `_attention_kernel`: what a query gets does not depend on which
chunk or tile it is in. A program takes one tile after another, each time the first that no program has; while a tile
is stored, the next one's queries and first keys are multiplied. Each multiplying group has half of a tile's rows to
itself; while it computes the weights of a block of keys, its product with the values of the block before is under way.

Written in Gluon, where warps and memory are the kernel's own business; it has no interpreter.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _tile_of(item, num_kv_heads, tiles, cu_seqlens, context_lens):
    """(sequence, head, first row's query, first token, length, context)."""
    tile, head = item // num_kv_heads, item % num_kv_heads  # heads of one tile together: their cost is the same
    seq = gl.load(tiles + 2 * tile)
    first = gl.load(tiles + 2 * tile + 1)
    begin = gl.load(cu_seqlens + seq)
    length = gl.load(cu_seqlens + seq + 1) - begin
    context = gl.load(context_lens + seq)
    return seq, head, first, begin, length, context


@gluon.jit
def _blocks_of(first, length, context, BM: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr):
    """A tile's blocks of keys that all its rows see whole, and all that any of them sees."""
    nearest = context - length + first
    return (nearest + 1) // BN, (gl.minimum(nearest + BM // GROUP, context) + BN - 1) // BN


@gluon.jit
def _announce(numbers, ready, round, tile):
    """Say what the tile behind a round's is: its head, or -1 for none, first query, first token, length and context."""
    SLOTS: gl.constexpr = ready.shape[0]
    NUMBERS: gl.constexpr = numbers.shape[0] // SLOTS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    for i in gl.static_range(NUMBERS):
        numbers.index(round % SLOTS * NUMBERS + i).store(gl.full([1], tile[i], gl.int32, ONE))
    mbarrier.arrive(ready.index(round % SLOTS))


@gluon.jit
def _announced(numbers, ready, round, WARPS: gl.constexpr):
    """What `_announce` said."""
    SLOTS: gl.constexpr = ready.shape[0]
    NUMBERS: gl.constexpr = numbers.shape[0] // SLOTS
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(ready.index(round % SLOTS), (round // SLOTS) & 1)
    found = ()
    for i in gl.static_range(NUMBERS):
        found = found + (gl.sum(numbers.index(round % SLOTS * NUMBERS + i).load(ONE), 0),)  # noqa: RUF005
    return found


@gluon.jit
def _copy(cache, pieces, ready, slot, ids, head, num_kv_heads, BN: gl.constexpr, D: gl.constexpr,
          BLOCK_SIZE: gl.constexpr):  # fmt: skip
    """A block of BN rows, which lie in BN // BLOCK_SIZE places, into the slot's pieces of 64 columns."""
    PIECES: gl.constexpr = BN // BLOCK_SIZE
    HALVES: gl.constexpr = D // 64
    mbarrier.expect(ready.index(slot), BN * D * 2)
    for piece in gl.static_range(PIECES):
        row = (ids[piece] * num_kv_heads + head) * BLOCK_SIZE
        for half in gl.static_range(HALVES):
            to = pieces.index((slot * HALVES + half) * PIECES + piece)
            tma.async_copy_global_to_shared(cache, [row, half * 64], ready.index(slot), to)


@gluon.jit
def _produce(key_cache, value_cache, block_tables, context_lens, cu_seqlens, tiles, counters, num_tiles, num_kv_heads,
             table_row, keys, values, numbers, k_ready, k_free, v_ready, v_free, announced, BM: gl.constexpr,
             BN: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr,
             STAGES: gl.constexpr):  # fmt: skip
    """Keys and values of every tile of this program, block by block, into slots as they become free.

    It also says what the next tile is, in one of STAGES + 2 slots: when it comes to a tile, all have begun the third
    one before it, whose blocks have given their places. Behind the last tile comes one block of keys more, of any: the
    groups multiply a next tile's first ones in any case.
    """
    PIECES: gl.constexpr = BN // BLOCK_SIZE
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_pieces = keys._reinterpret(keys.dtype, [STAGES * PIECES * (D // 64), BLOCK_SIZE, 64], LAYOUT)
    v_pieces = values._reinterpret(values.dtype, [STAGES * PIECES * (D // 64), BLOCK_SIZE, 64], LAYOUT)
    items = num_tiles * num_kv_heads
    count = 0
    round = 0
    item = gl.program_id(0)
    seq, head, first, _begin, length, context = _tile_of(item, num_kv_heads, tiles, cu_seqlens, context_lens)
    left = 1
    while left > 0:
        left = (item < items).to(gl.int32)
        item = gl.num_programs(0) + gl.atomic_add(counters, 1, sem="relaxed")
        next_seq, next_head, next_first, next_begin, next_length, next_context = _tile_of(
            gl.minimum(item, items - 1), num_kv_heads, tiles, cu_seqlens, context_lens
        )
        if left > 0:
            told = gl.where(item < items, next_head, -1), next_first, next_begin, next_length, next_context
            _announce(numbers, announced, round, told)
        _seen_by_all, blocks = _blocks_of(first, length, context, BM, BN, GROUP)
        blocks = gl.where(left > 0, blocks, 1)
        table = block_tables + seq.to(gl.int64) * table_row
        last = (context - 1) // BLOCK_SIZE
        for j in range(0, blocks):
            ids = ()
            for piece in gl.static_range(PIECES):
                ids = ids + (gl.load(table + gl.minimum(j * PIECES + piece, last)),)  # noqa: RUF005
            slot = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_free.index(slot), phase ^ 1)
            _copy(key_cache, k_pieces, k_ready, slot, ids, head, num_kv_heads, BN, D, BLOCK_SIZE)
            if left > 0:
                mbarrier.wait(v_free.index(slot), phase ^ 1)
                _copy(value_cache, v_pieces, v_ready, slot, ids, head, num_kv_heads, BN, D, BLOCK_SIZE)
            count += 1
        seq, head, first, length, context = next_seq, next_head, next_first, next_length, next_context
        round += 1


@gluon.jit
def _bfloat16(x):
    """Two at a time: left to itself, the compiler converts these one by one."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def _lines(tensor, first, begin, head, length, token_step, head_step, LINES: gl.constexpr, PART: gl.constexpr,
           ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Pointers [ROWS, D] to a part's rows, behind the chunk's end to its last token's, and which there are."""
    lines = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LINES))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, LINES))
    index = lines // GROUP
    # From the tile's own first row on 32 bits are enough.
    start = tensor + (begin + first).to(gl.int64) * token_step + head * GROUP * head_step
    row = gl.minimum(index, length - 1 - first) * token_step + lines % GROUP * head_step
    return start + (row[:, None] + d[None, :]), (index < length - first)[:, None] & (d >= 0)[None, :]


@gluon.jit
def _copy_queries(query, to, first, begin, head, length, token_step, head_step, LINES: gl.constexpr,
                  PART: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr):  # fmt: skip
    """Start to copy a part's rows."""
    at, _mask = _lines(query, first, begin, head, length, token_step, head_step, LINES, PART, ROWS, GROUP, D)
    async_copy.async_copy_global_to_shared(to, at)
    async_copy.commit_group()


@gluon.jit
def _queries_of(queries, turn, PART: gl.constexpr):
    """A part's queries of an even or odd round, for one loop.

    Said anew for each: where a product's operand lies is worked out ahead of the first loop that has it, and Triton 3.6
    takes that for known in the second, also when the first had no turn.
    """
    turn = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)
    return queries.index(2 * PART + turn)


@gluon.jit
def _queries_are_there():
    """Wait for `_copy_queries`, and let products see what it copied."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _weigh(scores, most, total, scale, cap, start, position, rows_layout: gl.constexpr, MASKED: gl.constexpr,
           CAPPED: gl.constexpr):  # fmt: skip
    """Scores of BN keys to weights; the softmax's maxima and totals with them; what earlier sums shrink by."""
    BN: gl.constexpr = scores.shape[1]
    factor = scale
    if CAPPED:
        scores = cap - 2 * cap / (gl.exp2(scores * scale) + 1.0)
        factor = 1.0
    if MASKED:
        n = start + gl.arange(0, BN, layout=gl.SliceLayout(0, rows_layout))
        scores = gl.where(n[None, :] <= position[:, None], scores, float("-inf"))
    higher = gl.maximum(most, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - higher[:, None])
    shrink = gl.exp2(most - higher)
    total = total * shrink + gl.sum(weights, 1)
    return weights, higher, total, shrink


@gluon.jit
def _block(q, keys, values, k_ready, k_free, v_ready, v_free, count, weights, most, total, acc, scale, cap,
           start, position, S: gl.constexpr, A: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
           MASKED: gl.constexpr, CAPPED: gl.constexpr):  # fmt: skip
    """Scores and weights of block `count`, and the values of the one before it."""
    ROWS: gl.constexpr = q.shape[0]
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    slot = count % STAGES
    phase = (count // STAGES) & 1
    before = (count - 1) % STAGES
    phase_before = ((count - 1) // STAGES) & 1
    mbarrier.wait(k_ready.index(slot), phase)
    scores = warpgroup_mma(q, keys.index(slot).permute((1, 0)), gl.zeros([ROWS, BN], gl.float32, S), use_acc=False,
                           is_async=True)  # fmt: skip
    mbarrier.wait(v_ready.index(before), phase_before)
    acc = warpgroup_mma(weights, values.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(slot))
    next, most, total, shrink = _weigh(scores, most, total, scale, cap, start, position, S, MASKED, CAPPED)
    # Long there; but a wait for memory is a loop, before which the assembler leaves the weights' computation. The
    # wait for products alone would be moved before it.
    mbarrier.wait(v_ready.index(before), phase_before)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(v_free.index(before))
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, A))[:, None]
    return gl.convert_layout(_bfloat16(next), P), most, total, acc


@gluon.jit
def _consume(query, sinks, out, out_tiles, context_lens, cu_seqlens, tiles, num_kv_heads, query_token, query_head,
             out_token, scale, cap, queries, keys, values, numbers, k_ready, k_free, v_ready, v_free, announced,
             PART: gl.constexpr, BM: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr, GROUP: gl.constexpr,
             D: gl.constexpr, BLOCK_SIZE: gl.constexpr, STAGES: gl.constexpr, CAPPED: gl.constexpr,
             SINKS: gl.constexpr):  # fmt: skip
    """Rows PART * ROWS .. of every tile of this program."""
    WARPS: gl.constexpr = ROWS // 16
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    PIECES: gl.constexpr = BN // BLOCK_SIZE
    PIECE_LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    tiles_of_out = queries._reinterpret(out.dtype.element_ty, [4, ROWS // GROUP, GROUP, D], out_tiles.layout)
    count = 0
    round = 0
    turn = 0
    _seq, head, first, begin, length, context = _tile_of(
        gl.program_id(0), num_kv_heads, tiles, cu_seqlens, context_lens
    )
    _copy_queries(query, queries.index(2 * PART), first, begin, head, length, query_token, query_head, LINES, PART,
                  ROWS, GROUP, D)  # fmt: skip
    _queries_are_there()
    mbarrier.wait(k_ready.index(0), 0)
    scores = warpgroup_mma(queries.index(2 * PART), keys.index(0).permute((1, 0)),
                           gl.zeros([ROWS, BN], gl.float32, S), use_acc=False, is_async=True)  # fmt: skip
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(0))
    while head >= 0:
        next_head, next_first, next_begin, next_length, next_context = _announced(numbers, announced, round, WARPS)
        round += 1
        # Not carried on from the tile before: Triton 3.6 takes such a variable for a constant of the loop.
        seen_by_all, blocks = _blocks_of(first, length, context, BM, BN, GROUP)
        rows = PART * ROWS + gl.arange(0, ROWS, layout=ROW)
        position = context - length + first + rows // GROUP
        if SINKS:
            most = gl.load(sinks + head * GROUP + rows % GROUP) * 1.4426950408889634
            total = gl.full([ROWS], 1.0, gl.float32, ROW)
        else:
            most = gl.full([ROWS], float("-inf"), gl.float32, ROW)
            total = gl.full([ROWS], 0.0, gl.float32, ROW)
        acc = gl.zeros([ROWS, D], gl.float32, A)

        # The first block, before which there are no values, and whose scores are there; every row sees key 0.
        weights, most, total, _shrink = _weigh(scores, most, total, scale, cap, 0, position, S, True, CAPPED)
        weights = gl.convert_layout(_bfloat16(weights), P)
        count += 1
        # Under way long before they are needed; behind the last tile, any tile's. They come to where the answer of the
        # tile before was, which TMA has long read.
        tma.store_wait(0)
        gl.thread_barrier()
        _copy_queries(query, queries.index(2 * PART + 1 - turn), next_first, next_begin, gl.maximum(next_head, 0),
                      next_length, query_token, query_head, LINES, PART, ROWS, GROUP, D)  # fmt: skip
        q = _queries_of(queries, turn, PART)
        for _ in range(1, seen_by_all):
            weights, most, total, acc = _block(
                q, keys, values, k_ready, k_free, v_ready, v_free, count, weights, most, total, acc,
                scale, cap, 0, position, S, A, BN, STAGES, False, CAPPED,
            )  # fmt: skip
            count += 1
        q = _queries_of(queries, turn, PART)
        for j in range(gl.maximum(1, seen_by_all), blocks):
            weights, most, total, acc = _block(
                q, keys, values, k_ready, k_free, v_ready, v_free, count, weights, most, total, acc,
                scale, cap, j * BN, position, S, A, BN, STAGES, True, CAPPED,
            )  # fmt: skip
            count += 1
        slot = (count - 1) % STAGES
        mbarrier.wait(v_ready.index(slot), ((count - 1) // STAGES) & 1)
        held = context - (blocks - 1) * BN
        if held < BN:  # behind the context there may be NaN, of which a weight of zero makes NaN
            pieces = values._reinterpret(values.dtype, [STAGES * PIECES * (D // 64), BLOCK_SIZE, 64], LAYOUT)
            inner = gl.arange(0, BLOCK_SIZE, layout=gl.SliceLayout(1, PIECE_LINES))
            for piece in range(held // BLOCK_SIZE, PIECES):
                for half in gl.static_range(D // 64):
                    here = pieces.index((slot * (D // 64) + half) * PIECES + piece)
                    kept = here.load(PIECE_LINES)
                    here.store(gl.where((piece * BLOCK_SIZE + inner < held)[:, None], kept, 0.0))
            fence_async_shared()
            gl.thread_barrier()
        # The last values' product, and behind it the next tile's first scores, which come while this tile is stored.
        _queries_are_there()
        acc = warpgroup_mma(weights, values.index(slot), acc, is_async=True)
        k_slot = count % STAGES
        mbarrier.wait(k_ready.index(k_slot), (count // STAGES) & 1)
        scores = warpgroup_mma(_queries_of(queries, 1 - turn, PART), keys.index(k_slot).permute((1, 0)),
                               gl.zeros([ROWS, BN], gl.float32, S), use_acc=False, is_async=True)  # fmt: skip
        acc, weights = warpgroup_mma_wait(1, deps=[acc, weights])
        mbarrier.arrive(v_free.index(slot))

        inverse = gl.convert_layout(1.0 / gl.where(total > 0.0, total, 1.0), gl.SliceLayout(1, A))
        staged = queries.index(2 * PART + turn)
        staged.store(_bfloat16(acc * inverse[:, None]))
        if first + BM // GROUP <= length:  # all rows are there
            fence_async_shared()
            gl.thread_barrier()
            token = begin + first + PART * (ROWS // GROUP)
            tma.async_copy_shared_to_global(out_tiles, [token, head * GROUP, 0], tiles_of_out.index(2 * PART + turn))
        else:
            at, mask = _lines(out, first, begin, head, length, out_token, D, LINES, PART, ROWS, GROUP, D)
            gl.store(at, staged.load(LINES), mask=mask)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(k_slot))
        head, first, begin, length, context = next_head, next_first, next_begin, next_length, next_context
        turn = 1 - turn
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["table_row", "num_tiles", "num_kv_heads"])
def hopper_chunk_kernel(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    sinks,
    cu_seqlens,
    tiles,
    counters,
    out,
    out_tiles,
    num_tiles,
    num_kv_heads,
    query_token,
    query_head,
    table_row,
    out_token,
    scale,
    cap,
    GROUP: gl.constexpr,
    D: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    STAGES: gl.constexpr,
    CAPPED: gl.constexpr,
    SINKS: gl.constexpr,
):
    """tiles int32 [num_tiles, 2]: sequence, and the tile's first query counted in its chunk. As many programs as fit.

    counters int32 [2 or more]: the tiles taken beyond each program's first, and the programs that are done; zero before
    and after the launch.

    key_cache, value_cache: descriptors of [rows, D], boxes of [BLOCK_SIZE, 64]; a block's head is BLOCK_SIZE rows.
    out_tiles: one of out [tokens, heads, D], boxes of the rows of half a tile: [BM / 2 / GROUP, GROUP, D].
    """
    ROWS: gl.constexpr = BM // 2
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS, D], LAYOUT)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], LAYOUT)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, D], LAYOUT)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(slot), count=1)
        mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(k_free.index(slot), count=2)
        mbarrier.init(v_free.index(slot), count=2)
    numbers = gl.allocate_shared_memory(gl.int32, [(STAGES + 2) * 5, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [STAGES + 2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES + 2):
        mbarrier.init(announced.index(slot), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_consume, (query, sinks, out, out_tiles, context_lens, cu_seqlens, tiles, num_kv_heads, query_token,
                        query_head, out_token, scale, cap, queries, keys, values, numbers, k_ready, k_free, v_ready,
                        v_free, announced, 0, BM, ROWS, BN, GROUP, D, BLOCK_SIZE, STAGES, CAPPED, SINKS)),
            (_consume, (query, sinks, out, out_tiles, context_lens, cu_seqlens, tiles, num_kv_heads, query_token,
                        query_head, out_token, scale, cap, queries, keys, values, numbers, k_ready, k_free, v_ready,
                        v_free, announced, 1, BM, ROWS, BN, GROUP, D, BLOCK_SIZE, STAGES, CAPPED, SINKS)),
            (_produce, (key_cache, value_cache, block_tables, context_lens, cu_seqlens, tiles, counters, num_tiles,
                        num_kv_heads, table_row, keys, values, numbers, k_ready, k_free, v_ready, v_free, announced,
                        BM, BN, GROUP, D, BLOCK_SIZE, STAGES)),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
    # The last program leaves the counters as it found them.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)
