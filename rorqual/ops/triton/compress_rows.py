"""The compressor in two launches: state written and windows pooled, then entries normalised, rotated and stored.

A window's tokens of this batch are pooled from the projection itself, so that nothing has to wait for the state that
the same launch writes; where a sequence is in several parts, one launch writes and another pools. A program pools some
channels of one token's window: the softmax is channel by channel, and one that pooled all channels of 128 rows would
take longer than everything else. Programs of tokens that complete nothing end at once.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.batch import Batch
from rorqual.ops.compress_rows import Compression, compress_rows
from rorqual.ops.kv_transform import RopeStage
from rorqual.ops.row_attention import seq_of_token
from rorqual.ops.row_cache import RowCache
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import round_to
from rorqual.ops.triton.kv_transform import refuse_stages
from rorqual.ops.triton.launch import refuses
from rorqual.ops.triton.row_cache import launch_store, refuse_cache

_TILE = 4096
"""Values and as many gates that a program pools at once."""
_COPY = 1024
"""Numbers of a row of state that a program writes at once."""
_FEW = 256
"""Tokens up to which a program takes one."""
_TOGETHER = 16
"""Tokens that a program takes otherwise, at most."""


@triton.jit
def _pool(projected, states, bias, positions, seqs, starts, tables, pooled, token, chunk, projected_row, state_block,
          table_row, STATE_ROW: tl.constexpr, STATE_ROWS: tl.constexpr, WIDTH: tl.constexpr, RATIO: tl.constexpr,
          SPANS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Some channels of the entry that a token completes."""
    GATE: tl.constexpr = SPANS * WIDTH
    last = tl.load(positions + token).to(tl.int32)
    seq = tl.load(seqs + token)
    start = tl.load(starts + seq)
    i = tl.arange(0, ROWS)
    at = last - SPANS * RATIO + 1 + i
    real = (i < SPANS * RATIO) & (at >= 0)
    at = tl.maximum(at, 0)
    own = token - (last - at)
    here = own >= start
    block = tl.load(tables + seq.to(tl.int64) * table_row + at // STATE_ROWS, mask=real & (own < start), other=0)
    kept = states + block.to(tl.int64) * state_block + (at % STATE_ROWS) * STATE_ROW
    row = tl.where(here, projected + own.to(tl.int64) * projected_row, kept)
    part = tl.where(i < RATIO, 0, WIDTH) if SPANS == 2 else tl.zeros_like(i)
    channel = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = channel < WIDTH
    mask = real[:, None] & inside[None, :]
    offset = part[:, None] + channel[None, :]
    values = tl.load(row[:, None] + offset, mask=mask, other=0.0)
    gates = tl.load(row[:, None] + GATE + offset, mask=mask, other=float("-inf"))
    added = bias + (at % RATIO)[:, None] * GATE + offset
    gates += tl.load(added, mask=mask & here[:, None], other=0.0)
    weights = tl.exp(gates - tl.max(tl.where(inside[None, :], gates, 0.0), axis=0)[None, :])
    entry = tl.sum(weights * values, axis=0) / tl.sum(weights, axis=0)
    tl.store(pooled + token.to(tl.int64) * WIDTH + channel, round_to(entry, pooled.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "first_part"])
def _compress_kernel(
    projected,
    states,
    bias,
    positions,
    seqs,
    starts,
    tables,
    state_slots,
    entry_slots,
    pooled,
    num_tokens,
    first_part,
    projected_row,
    state_block,
    table_row,
    STATE_ROW: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    RATIO: tl.constexpr,
    SPANS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    COPY: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Programs (tokens, part) pool a chunk of channels each, those behind the last chunk write state."""
    first = tl.program_id(0) * TOGETHER
    part = tl.program_id(1) + first_part
    several = first + tl.arange(0, TOGETHER)
    wait_for_earlier_kernels()
    if part < CHUNKS:
        slots = tl.load(entry_slots + several, mask=several < num_tokens, other=-1)
        if tl.max(slots, axis=0) >= 0:
            for i in range(TOGETHER):
                token = first + i
                slot = tl.load(entry_slots + token, mask=token < num_tokens, other=-1)
                if slot >= 0:
                    _pool(projected, states, bias, positions, seqs, starts, tables, pooled, token, part, projected_row,
                          state_block, table_row, STATE_ROW, STATE_ROWS, WIDTH, RATIO, SPANS, ROWS, CHUNK)  # fmt: skip
    else:
        GATE: tl.constexpr = SPANS * WIDTH
        d = (part - CHUNKS) * COPY + tl.arange(0, COPY)
        for i in range(TOGETHER):
            token = first + i
            slot = tl.load(state_slots + token, mask=token < num_tokens, other=-1).to(tl.int64)
            if slot >= 0:
                place = tl.load(positions + token).to(tl.int32) % RATIO
                numbers = tl.load(projected + token.to(tl.int64) * projected_row + d, mask=d < 2 * GATE, other=0.0)
                numbers += tl.load(bias + place * GATE + d - GATE, mask=(d >= GATE) & (d < 2 * GATE), other=0.0)
                to = states + slot // STATE_ROWS * state_block + slot % STATE_ROWS * STATE_ROW
                tl.store(to + d, numbers, mask=d < 2 * GATE)


def _refuse(
    projected: torch.Tensor,
    states: RowCache,
    entries: RowCache,
    batch: Batch,
    compression: Compression,
    *,
    dtype: torch.dtype,
) -> str | None:
    width = compression.norm.weight.shape[0]
    spans = 2 if compression.overlap else 1
    if reason := refuses(projected, states.data, compression.position_bias):
        return reason
    if states.record is not None or states.data.dtype != torch.float32 or states.data.shape[-1] != 2 * spans * width:
        return f"needs rows of state of {2 * spans * width} float32, got {states.data.dtype} {list(states.data.shape)}"
    if projected.dtype != torch.float32 or projected.stride(-1) != 1 or states.data.stride(-1) != 1:
        return "needs float32 projections and state without gaps between numbers"
    if not compression.position_bias.is_contiguous() or spans * compression.ratio > _TILE // 16:
        return f"needs a contiguous position bias, and windows of up to {_TILE // 16} rows"
    pooled = torch.empty((0, width), dtype=dtype, device=projected.device)
    positions = batch.positions
    if reason := refuse_stages(pooled, compression.norm, RopeStage(positions, compression.cos_sin, interleaved=True)):
        return reason
    return refuse_cache(entries, width)


@compress_rows.impl("triton", refuse=_refuse)
def compress_rows_triton(
    projected: torch.Tensor,
    states: RowCache,
    entries: RowCache,
    batch: Batch,
    compression: Compression,
    *,
    dtype: torch.dtype,
) -> None:
    """Two launches; three where a sequence is in several parts."""
    num_tokens = projected.shape[0]
    if num_tokens == 0:
        return
    ratio, width = compression.ratio, compression.norm.weight.shape[0]
    spans = 2 if compression.overlap else 1
    written, made = batch.caches[states.group], batch.caches[entries.group]
    rows = triton.next_power_of_2(spans * ratio)
    chunk = min(128, _TILE // rows, triton.next_power_of_2(width))
    chunks = triton.cdiv(width, chunk)
    together = 1 if num_tokens <= _FEW else min(_TOGETHER, triton.next_power_of_2(ratio))
    pooled = torch.empty((num_tokens, width), dtype=dtype, device=projected.device)
    copies = triton.cdiv(2 * spans * width, _COPY)
    launches = [(chunks, copies), (0, chunks)] if batch.splits_sequences else [(0, chunks + copies)]
    for first_part, parts in launches:
        _compress_kernel[(triton.cdiv(num_tokens, together), parts)](
            projected,
            states.data,
            compression.position_bias,
            batch.positions,
            seq_of_token(batch),
            batch.cu_seqlens_q,
            written.block_tables,
            written.slot_mapping,
            made.slot_mapping,
            pooled,
            num_tokens,
            first_part,
            projected.stride(0),
            states.data.stride(0),
            written.block_tables.stride(0),
            STATE_ROW=states.data.stride(1),
            STATE_ROWS=states.rows_per_block,
            WIDTH=width,
            RATIO=ratio,
            SPANS=spans,
            ROWS=rows,
            CHUNK=chunk,
            CHUNKS=chunks,
            COPY=_COPY,
            TOGETHER=together,
            num_warps=4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    rope = RopeStage(batch.positions, compression.cos_sin, interleaved=True)
    launch_store(
        pooled,
        entries,
        made.slot_mapping,
        compression.norm,
        rope,
        compression.hadamard,
        shift=ratio - 1,
        skip=True,
    )
