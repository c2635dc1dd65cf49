"""The fused write of cache records, in one launch."""

# mypy: ignore-errors

from __future__ import annotations

import torch

from rorqual.ops.kv_transform import (
    CastStage,
    HadamardStage,
    Keep,
    NormStage,
    RopeStage,
    check_stages,
    check_store,
    transform_and_store_kv,
    transform_kv,
)
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton._kv_transform_kernel import transform_kernel
from rorqual.ops.triton.launch import refuses
from rorqual.quantization import QTensor
from rorqual.quantization.kv_record import KVRecord

_LARGEST_HEAD = 1024
_TILE_OF_FEW = 512
"""Values of one program, of one warp: as many programs as there are, for decode steps."""
_TILE_OF_MANY = 4096
"""Eight heads of 512 in a program of four warps."""
_FEW = 1 << 19
"""Up to so many values a call counts as a decode step's: 1,024 heads of 512."""


def refuse_stages(
    x: torch.Tensor, norm: NormStage | None, rope: RopeStage | None, others: tuple[torch.Tensor | None, ...] = ()
) -> str | None:
    """Why the kernel cannot take these stages, or None; `others` are tensors that it would also get."""
    weight = None if norm is None else norm.weight
    positions, table = (None, None) if rope is None else (rope.positions, rope.cos_sin)
    if refusal := refuses(x, weight, positions, table, *others):
        return refusal
    if not 2 <= x.shape[-1] <= _LARGEST_HEAD:
        return f"needs heads of 2 to {_LARGEST_HEAD} channels, got {x.shape[-1]}"
    if x.stride(-1) != 1:
        return f"needs channels side by side, got a stride of {x.stride(-1)}"
    if any(t is not None and t.stride(-1) != 1 for t in (weight, positions, table)):
        return "needs the norm's weight, positions and angles without gaps"
    if rope is not None:
        width, first = rope.cos_sin.shape[-1], rope.first_channel(x.shape[-1])
        if width & (width - 1) or first % width:
            return (
                f"needs a power of two of rotated channels that begin at a multiple of it, got {width} from {first} on"
            )
    return None


def _refuse_transform(
    x: torch.Tensor,
    *,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
    cast: CastStage | None = None,
) -> str | None:
    return refuse_stages(x, norm, rope)


def _refuse_store(
    x: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    record: KVRecord,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
    keep: Keep | None = None,
) -> str | None:
    if slot_mapping.dim() != 1 or slot_mapping.stride(0) != 1:
        return "needs slots without gaps"
    return refuse_stages(x, norm, rope, (cache, slot_mapping))


def launch_transform(
    x: torch.Tensor,
    norm: NormStage | None,
    rope: RopeStage | None,
    hadamard: HadamardStage | None,
    format: tuple[str, str, int],
    *,
    slots: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    keep: str = "",
    num_slots: int = 0,
    steps: tuple[int, int, int, int] = (0, 0, 0, 0),
    block_size: int = 0,
    num_values: int | None = None,
    shift: int = 0,
    skip: bool = False,
) -> None:
    """See the kernel; format is that of `kind_of`, steps are (block, value, scale, first scale)."""
    dims = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return
    element, scale, group = format
    block_d = max(1 << (dims - 1).bit_length(), group)
    # How a tile lies among the warps is the order in which a norm adds up, which must not follow from the company.
    many = norm is not None or num_rows * block_d > _FEW
    rows = max(1, (_TILE_OF_MANY if many else _TILE_OF_FEW) // block_d)
    transform_kernel[(-(-num_rows // rows),)](
        x,
        x if norm is None else norm.weight,
        x if rope is None else rope.positions,
        x if rope is None else rope.cos_sin,
        x if slots is None else slots,
        x if values is None else values,
        x if scales is None else scales,
        x if kept is None else kept,
        num_rows,
        num_slots,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if rope is None else rope.cos_sin.stride(0),
        steps[0],
        steps[3],
        0.0 if norm is None else norm.eps,
        1.0 if hadamard is None else hadamard.scale,
        HEADS=heads,
        D=dims,
        BLOCK_D=block_d,
        LOG_D=block_d.bit_length() - 1,
        ROWS=rows,
        NORM=0 if norm is None else norm.weight.shape[0],
        VALUES=dims if num_values is None else num_values,
        VALUE_STEP=steps[1],
        SCALE_STEP=steps[2],
        SHIFT=shift,
        SKIP=skip,
        R=0 if rope is None else rope.cos_sin.shape[1],
        OFFSET=0 if rope is None else rope.first_channel(dims),
        INTERLEAVED=rope is not None and rope.interleaved,
        CONJUGATE=rope is not None and rope.conjugate,
        HADAMARD=hadamard is not None,
        ELEMENT=element,
        SCALE=scale,
        GROUP=group,
        BLOCK_SIZE=block_size,
        STORE=values is not None,
        KEEP=keep,
        num_warps=4 if many else 1,
        launch_pdl=DEPENDENT_LAUNCH,
    )


@transform_kv.impl("triton", refuse=_refuse_transform)
def transform_kv_triton(
    x: torch.Tensor,
    *,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
    cast: CastStage | None = None,
) -> torch.Tensor | QTensor:
    """See the reference."""
    check_stages(x, norm, rope, hadamard, cast)
    stages = (x, norm, rope, hadamard)
    if cast is None or cast.cast_back:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if cast is None:
            launch_transform(*stages, ("none", "", 1), values=out, steps=(0, x.shape[-1], 0, 0))
        else:
            launch_transform(*stages, kind_of(cast.format), kept=out, keep="cast_back")
        return out
    made = KVRecord(cast.format.name, x.shape[-1], cast.format)
    values = torch.empty((*x.shape[:-1], made.value_bytes), dtype=made.value_dtype, device=x.device)
    scales = torch.empty((*x.shape[:-1], made.num_scales), dtype=made.scale_dtype, device=x.device)
    as_bytes = values.view(torch.uint8), scales.view(torch.uint8)
    steps = (0, made.value_bytes, made.scale_bytes, 0)
    launch_transform(*stages, kind_of(cast.format), values=as_bytes[0], scales=as_bytes[1], steps=steps)
    return QTensor(values, scales, cast.format)


@transform_and_store_kv.impl("triton", refuse=_refuse_store)
def transform_and_store_kv_triton(
    x: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    record: KVRecord,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
    keep: Keep | None = None,
) -> torch.Tensor | None:
    """See the reference."""
    check_store(x, cache, slot_mapping, record, norm, rope, hadamard, keep)
    kept = None if keep is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch_transform(
        x,
        norm,
        rope,
        hadamard,
        kind_of(record.format),
        slots=slot_mapping,
        values=cache,
        kept=kept,
        keep=keep or "",
        num_slots=cache.shape[0] * cache.shape[1],
        steps=(cache.stride(0), *steps_of(cache, record)),
        block_size=cache.shape[1],
    )
    return kept


def kind_of(format) -> tuple[str, str, int]:
    """(element, scale, group size) for the kernels; no format is bfloat16."""
    return ("none", "", 1) if format is None else (format.element, format.scale, format.block[1])


def steps_of(cache: torch.Tensor, record: KVRecord) -> tuple[int, int, int]:
    """Bytes from token to token of the values and of the scales, and from a block's beginning to its first scale."""
    if record.interleaved:
        return cache.stride(1), cache.stride(1), record.value_bytes + 2 * record.plain_dims
    return record.value_bytes, record.scale_bytes, cache.shape[1] * record.value_bytes
