"""Rows of caches: norm, rotation, Hadamard, rounding and store in one launch, by the kernel of the records' write."""

# mypy: ignore-errors

from __future__ import annotations

import torch

from rorqual.ops.kv_transform import GROUPS, HadamardStage, NormStage, RopeStage
from rorqual.ops.row_cache import RowCache, store_rows
from rorqual.ops.triton.kv_transform import kind_of, launch_transform, refuse_stages, steps_of
from rorqual.ops.triton.launch import refuses


def refuse_cache(cache: RowCache, width: int) -> str | None:
    """Why rows of so many numbers cannot be written to a cache, or None."""
    if reason := refuses(cache.data):
        return reason
    if cache.record is None:
        if cache.data.shape[-1] != width or cache.data.stride(-1) != 1:
            return f"needs a cache of {width} numbers side by side, got {list(cache.data.shape)}"
        return None
    if cache.record.width != width:
        return f"needs records of {width} numbers, got {cache.record.width}"
    if cache.record.format is not None and cache.record.format.block[1] not in GROUPS:
        return f"needs groups of {GROUPS} values, got {cache.record.format.block[1]}"
    return None


def _refuse(
    x: torch.Tensor,
    cache: RowCache,
    slot_mapping: torch.Tensor,
    *,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
) -> str | None:
    if reason := refuses(slot_mapping) or refuse_stages(x, norm, rope):
        return reason
    if slot_mapping.dim() != 1 or slot_mapping.stride(0) != 1:
        return "needs slots without gaps"
    if hadamard is not None and x.shape[-1] & (x.shape[-1] - 1):
        return f"multiplies with Hadamard matrices of powers of two, got {x.shape[-1]}"
    return refuse_cache(cache, x.shape[-1])


def launch_store(
    x: torch.Tensor,
    cache: RowCache,
    slot_mapping: torch.Tensor,
    norm: NormStage | None,
    rope: RopeStage | None,
    hadamard: HadamardStage | None,
    *,
    shift: int = 0,
    skip: bool = False,
) -> None:
    """`store_rows`; shift is taken from each position, and with `skip` programs without a slot end at once."""
    data, record = cache.data, cache.record
    steps = (data.stride(1), 0, 0) if record is None else steps_of(data, record)
    launch_transform(
        x,
        norm,
        rope,
        hadamard,
        kind_of(None if record is None else record.format),
        slots=slot_mapping,
        values=data,
        num_slots=data.shape[0] * data.shape[1],
        steps=(data.stride(0), *steps),
        block_size=data.shape[1],
        num_values=None if record is None or record.format is None else record.dims,
        shift=shift,
        skip=skip,
    )


@store_rows.impl("triton", refuse=_refuse)
def store_rows_triton(
    x: torch.Tensor,
    cache: RowCache,
    slot_mapping: torch.Tensor,
    *,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
) -> None:
    """One launch."""
    launch_store(x, cache, slot_mapping, norm, rope, hadamard)
