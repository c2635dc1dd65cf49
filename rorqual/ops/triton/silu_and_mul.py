"""The gate of a SwiGLU feed-forward block in one pass: reads gate and up, writes their product."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rorqual.ops.silu_and_mul import silu_and_mul
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH, wait_for_earlier_kernels
from rorqual.ops.triton._number_formats import round_to
from rorqual.ops.triton.launch import refuses

_TILE = 2048
"""Values that a program writes, of one row or of several: of either half, each thread reads 16 bytes twice."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["rows"])
def _silu_and_mul_kernel(
    gate_up, out, rows, size, row_stride, limit, LIMITED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    chunks = tl.cdiv(size, BLOCK)
    row = tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < size)[None, :]
    far = row.to(tl.int64)[:, None]  # the tensor may have more than 2^31 values
    at = gate_up + far * row_stride + column[None, :]
    wait_for_earlier_kernels()
    gate = tl.load(at, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
    up = tl.load(at + size, mask=here, other=0.0, eviction_policy="evict_first").to(tl.float32)
    if LIMITED:
        most = round_to(limit + tl.zeros_like(gate), gate_up.dtype.element_ty).to(tl.float32)
        gate = tl.where(gate > most, most, gate)  # so that NaN stays
        up = tl.where(up > most, most, tl.where(up < -most, -most, up))
    # Rounded twice, as the reference does.
    activated = round_to(gate / (1.0 + tl.exp(-gate)), gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + far * size + column[None, :], round_to(activated * up, gate_up.dtype.element_ty), mask=here)


def _refuse(gate_up: torch.Tensor, *, limit: float | None = None) -> str | None:
    if reason := refuses(gate_up):
        return reason
    if gate_up.dtype not in _DTYPES or gate_up.dim() < 1 or gate_up.shape[-1] % 2:
        return f"needs bfloat16, float16 or float32 in two halves, got {gate_up.dtype} {list(gate_up.shape)}"
    return None


@silu_and_mul.impl("triton", refuse=_refuse)
def silu_and_mul_triton(gate_up: torch.Tensor, *, limit: float | None = None) -> torch.Tensor:
    """One launch. An input whose rows have gaps within them, or between them in more than one way, is copied first."""
    *outer, double = gate_up.shape
    size = double // 2
    out = torch.empty((*outer, size), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    flat = gate_up.reshape(-1, double)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    block = min(_TILE, triton.next_power_of_2(size))
    tile_rows = _TILE // block
    rows = flat.shape[0]
    grid = (triton.cdiv(rows, tile_rows) * triton.cdiv(size, block),)
    _silu_and_mul_kernel[grid](
        flat,
        out,
        rows,
        size,
        flat.stride(0),
        float(limit or 0),
        LIMITED=limit is not None,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=4,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    return out
