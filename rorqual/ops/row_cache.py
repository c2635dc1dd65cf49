"""Caches of rows: one vector per token, or per several tokens, that keys and values share. Allocated, written, read."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rorqual.ops.kv_transform import HadamardStage, NormStage, RopeStage, hadamard_transform
from rorqual.ops.registry import op
from rorqual.ops.rms_norm import rms_norm
from rorqual.ops.rope import rotary_embedding
from rorqual.quantization.kv_record import KVRecord


class RowCache(NamedTuple):
    """One part of a cache, and the group whose block tables address it."""

    group: int
    data: torch.Tensor
    """[num_blocks, rows, width] of a float dtype; with a record uint8 [num_blocks, rows, 1, record.bytes]."""
    record: KVRecord | None = None

    @property
    def rows_per_block(self) -> int:
        """Rows of one block: the row of a slot is [slot // rows_per_block, slot % rows_per_block]."""
        return self.data.shape[1]


def allocate_rows(
    num_blocks: int,
    rows_per_block: int,
    width: int,
    *,
    group: int,
    dtype: torch.dtype,
    record: KVRecord | None,
    device: torch.device,
) -> RowCache:
    """Memory that is not zeroed; see `allocate_kvcache`."""
    if record is not None:
        return RowCache(group, record.allocate(num_blocks, rows_per_block, device), record)
    return RowCache(group, torch.empty((num_blocks, rows_per_block, width), dtype=dtype, device=device))


@op
def store_rows(
    x: torch.Tensor,
    cache: RowCache,
    slot_mapping: torch.Tensor,
    *,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
) -> None:
    """norm, then rope, then Hadamard of each row, rounded to what the cache keeps, written at its slot.

    Args:
        x: [num_tokens, width], any strides.
        cache: written in place.
        slot_mapping: [num_tokens] int32 or int64; slots below 0 write nothing. No two tokens name one slot.
        norm: RMSNorm of the first len(norm.weight) numbers; the others are left alone.
        rope, hadamard: as `transform_kv` has them. Without an offset the last channels are rotated.

    Between two stages values are rounded to x's dtype.
    """
    rows = prepare_rows(x, norm=norm, rope=rope, hadamard=hadamard)
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    write_rows(cache, slot_mapping[kept].long(), rows[kept])


def prepare_rows(
    x: torch.Tensor, *, norm: NormStage | None, rope: RopeStage | None, hadamard: HadamardStage | None
) -> torch.Tensor:
    """What `store_rows` writes, before it is rounded to the cache's numbers."""
    if norm is not None:
        width = norm.weight.shape[0]
        normed = rms_norm.reference(x[..., :width], norm.weight, eps=norm.eps).out
        assert isinstance(normed, torch.Tensor)
        x = normed if width == x.shape[-1] else torch.cat((normed, x[..., width:]), dim=-1)
    if rope is not None:
        x = rotary_embedding.reference(
            x.unsqueeze(1),
            rope.positions,
            rope.cos_sin,
            interleaved=rope.interleaved,
            offset=rope.first_channel(x.shape[-1]),
            conjugate=rope.conjugate,
        ).query.squeeze(1)
    return x if hadamard is None else hadamard_transform(x, scale=hadamard.scale)


def write_rows(cache: RowCache, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """rows [n, width] at slots [n] int64, rounded to what the cache keeps."""
    where = slots // cache.rows_per_block, slots % cache.rows_per_block
    if cache.record is None:
        cache.data[where] = rows.to(cache.data.dtype)
        return
    for view, made in zip(cache.record.split(cache.data), cache.record.encode(rows), strict=True):
        if view is not None and made is not None:
            seen, written = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (view, made))
            seen[where] = written


def read_rows(cache: RowCache, slots: torch.Tensor) -> torch.Tensor:
    """float32 [..., width] of the rows at slots [...]; those below 0 read as some row."""
    slots = slots.long().clamp(min=0)
    where = slots // cache.rows_per_block, slots % cache.rows_per_block
    if cache.record is None:
        return cache.data[where].float()
    return cache.record.decode(cache.data, where)
