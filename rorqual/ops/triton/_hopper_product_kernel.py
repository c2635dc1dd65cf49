"""Products of some rows with a plain weight on Hopper, made for steps of which each product takes a few microseconds.

A program asks for the first steps of its weight as soon as it has a place on a multiprocessor, which is while earlier
kernels still run; only then it waits for them, and asks for x. TMA brings both, so that a single thread's word is
enough, and the tensor cores read both from shared memory.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def _ask_for_weight(w, ready, lines, line, second, step, slot, pred, GATED: gl.constexpr, STEP: gl.constexpr):
    if GATED:
        tma.async_copy_global_to_shared(w, [line, step * STEP], ready.index(slot), lines.index(2 * slot), pred=pred)
        tma.async_copy_global_to_shared(
            w, [second, step * STEP], ready.index(slot), lines.index(2 * slot + 1), pred=pred
        )
    else:
        tma.async_copy_global_to_shared(w, [line, step * STEP], ready.index(slot), lines.index(slot), pred=pred)


@gluon.jit(do_not_specialize=["rows"])
def hopper_product_kernel(
    x,
    w,
    out,
    rows,
    features,
    K,
    out_row,
    GATED: gl.constexpr,
    LINES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):
    """out[m, n] = x W^T, or the gate over the lines n and n + features of W: BLOCK_M rows and LINES features.

    x and w are descriptors of [rows, K] and [features or twice as many, K] with boxes of BLOCK_M or LINES, and STEP.
    The lines are the tensor cores' rows, 16 to a warp. EARLY: the next kernel may start at once, if it finds room. K is
    added up in order.
    """
    # A box lies in shared memory 64 columns after 64, all of its lines each time: wider ones of the gate and of what it
    # gates, one behind the other, would not be one box of twice as many lines.
    gl.static_assert(not GATED or STEP == 64, "gated products take steps of 64 columns")
    HEIGHT: gl.constexpr = 2 * LINES if GATED else LINES
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BLOCK_M, 16])
    WRITE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // LINES, LINES // 8], [gl.num_warps(), 1], [1, 0])
    BYTES: gl.constexpr = (HEIGHT + BLOCK_M) * STEP * 2
    dtype: gl.constexpr = out.dtype.element_ty
    if EARLY:
        gdc_launch_dependents()
    lines = gl.allocate_shared_memory(w.dtype, [STAGES * (HEIGHT // LINES), LINES, STEP], w.layout)
    rows_of_x = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, STEP], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    fence_async_shared()
    gl.thread_barrier()

    blocks = gl.cdiv(rows, BLOCK_M)  # those of the same lines run side by side
    first, line = gl.program_id(0) % blocks * BLOCK_M, gl.program_id(0) // blocks * LINES
    steps = gl.cdiv(K, STEP)
    for slot in gl.static_range(STAGES):
        mbarrier.expect(ready.index(slot), BYTES, pred=slot < steps)
        _ask_for_weight(w, ready, lines, line, line + features, slot, slot, slot < steps, GATED, STEP)
    gdc_wait()
    for slot in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(
            x, [first, slot * STEP], ready.index(slot), rows_of_x.index(slot), pred=slot < steps
        )

    both = lines._reinterpret(w.dtype, [STAGES, HEIGHT, STEP], w.layout)
    acc = gl.zeros([HEIGHT, BLOCK_M], gl.float32, SUM)
    for step in range(0, steps):
        held = step % STAGES
        mbarrier.wait(ready.index(held), (step // STAGES) & 1)
        acc = warpgroup_mma(both.index(held), rows_of_x.index(held).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        # The step before has been multiplied by all warps: its place is free.
        gl.thread_barrier()
        ahead, freed = step + STAGES - 1, (step + STAGES - 1) % STAGES
        more = (step > 0) & (ahead < steps)
        mbarrier.expect(ready.index(freed), BYTES, pred=more)
        _ask_for_weight(w, ready, lines, line, line + features, ahead, freed, more, GATED, STEP)
        tma.async_copy_global_to_shared(x, [first, ahead * STEP], ready.index(freed), rows_of_x.index(freed), pred=more)
    acc = warpgroup_mma_wait(0, deps=[acc])
    if not EARLY:
        gdc_launch_dependents()

    answer = acc.to(dtype)
    if GATED:
        gate, up = answer.reshape([2, LINES, BLOCK_M]).permute((1, 2, 0)).split()
        gate = gate.to(gl.float32)
        activated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        answer = (activated * up.to(gl.float32)).to(dtype)
    answer = gl.convert_layout(answer.permute((1, 0)), WRITE)
    m = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, WRITE))
    n = line + gl.arange(0, LINES, layout=gl.SliceLayout(0, WRITE))
    at = out + m.to(gl.int64)[:, None] * out_row + n[None, :]
    gl.store(at, answer, mask=(m < rows)[:, None] & (n < features)[None, :])
