"""The fused write of a token's cache record: norm, rotary embedding, Hadamard, cast, store.

Every stage is optional and their order is fixed. What lies between two stages is rounded to x's dtype, so that a fused
kernel and separate ones agree. Its inverse is `rorqual.ops.load_kv`. Source: DeepInfer 0.1.0's fused transform.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from rorqual.ops.registry import op
from rorqual.ops.rms_norm import rms_norm
from rorqual.ops.rope import check as check_rope
from rorqual.ops.rope import rotary_embedding
from rorqual.quantization.formats import QuantFormat
from rorqual.quantization.kv_record import KVRecord
from rorqual.quantization.qtensor import QTensor

Keep = Literal["norm", "transform", "cast_back"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (16, 32, 64, 128)
"""Values that may share a scale."""


class NormStage(NamedTuple):
    """RMSNorm over each head, as the op `rms_norm`."""

    weight: torch.Tensor
    """[D]."""
    eps: float


class RopeStage(NamedTuple):
    """Rotation of R channels of each head, as the op `rotary_embedding`."""

    positions: torch.Tensor
    """[num_tokens] int32 or int64."""
    cos_sin: torch.Tensor
    """[max_position, R] float32."""
    interleaved: bool = False
    offset: int | None = None
    """First rotated channel; None rotates the last R."""
    conjugate: bool = False

    def first_channel(self, dims: int) -> int:
        """The offset, worked out for heads of so many channels."""
        return dims - self.cos_sin.shape[1] if self.offset is None else self.offset


class HadamardStage(NamedTuple):
    """Multiplication of each head with the Hadamard matrix of its size, times scale; D^-0.5 keeps lengths."""

    scale: float = 1.0


class CastStage(NamedTuple):
    """Quantisation of each head, and back again if only the rounding is wanted."""

    format: QuantFormat
    cast_back: bool = False


# ---- the pieces that have no op of their own


def hadamard_transform(x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """scale * x H over the last dimension, H being Sylvester's matrix of +1 and -1 whose H H^T is D times the identity.

    Butterflies (a, b) -> (a + b, a - b) at distances 1, 2, 4, ... in float32, rounded once to x's dtype. Raises
    ValueError unless the last dimension is a power of two.
    """
    dims = x.shape[-1]
    _check_power_of_two(dims)
    wide, distance = x.float(), 1
    while distance < dims:
        first, second = wide.reshape(*x.shape[:-1], dims // (2 * distance), 2, distance).unbind(-2)
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        distance *= 2
    return (wide * scale).to(x.dtype)


# ---- the ops


@op
def transform_kv(
    x: torch.Tensor,
    *,
    norm: NormStage | None = None,
    rope: RopeStage | None = None,
    hadamard: HadamardStage | None = None,
    cast: CastStage | None = None,
) -> torch.Tensor | QTensor:
    """norm, then rope, then Hadamard, then cast, of every head; what is None is left out.

    Args:
        x: [num_tokens, D] or [num_tokens, num_heads, D], bfloat16, float16 or float32, any strides.
        norm, rope, hadamard: what to compute in float32 and round to x's dtype, one after the other. Hadamard needs D
            to be a power of two.
        cast: format with rows of their own: e4m3 with UE8M0 or float32 scales, e2m1 with UE8M0 or e4m3 scales, for
            groups of 16, 32, 64 or 128 values that divide D. The arithmetic is that of `QTensor.quantize`.

    Returns: a new contiguous tensor like x; with a cast a QTensor whose values and scales have x's leading dimensions,
    or with `cast_back` x's own dtype again, rounded to what the codes hold.

    Raises: ValueError for shapes, dtypes and formats that do not fit together.
    """
    check_stages(x, norm, rope, hadamard, cast)
    _, turned = _transform(x, norm, rope, hadamard)
    if cast is None:
        return turned.clone() if turned is x else turned
    made = QTensor.quantize(turned, cast.format)
    return made.dequantize(x.dtype) if cast.cast_back else made


@op
def transform_and_store_kv(
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
    """`transform_kv` with the record's cast, written into the cache: cache[slot // block_size, slot % block_size].

    Args:
        x: [num_tokens, D] or [num_tokens, 1, D], D being the record's dims; see `transform_kv`.
        cache: uint8 [num_blocks, block_size, 1, record.bytes], written in place; see `KVRecord.split`.
        slot_mapping: [num_tokens] int32 or int64. Slots below 0 or beyond the cache write nothing. If two tokens name
            one slot, its record is not specified afterwards.
        norm, rope, hadamard: see `transform_kv`.
        keep: which stage to return: "norm" (before the rotation), "transform" (before the cast) or "cast_back" (what
            the record holds, read back); also for tokens without a slot.

    Returns: x's shape and dtype, contiguous; None without `keep`.

    Raises: ValueError for shapes, dtypes and stages that do not fit together.
    """
    check_store(x, cache, slot_mapping, record, norm, rope, hadamard, keep)
    views = record.split(cache)
    normed, turned = _transform(x, norm, rope, hadamard)
    stored: tuple[torch.Tensor, ...]
    if record.format is None:
        back = turned.to(torch.bfloat16)
        stored = (back,)
    else:
        made = QTensor.quantize(turned, record.format)
        back, stored = made.dequantize(x.dtype), (made.values, made.scales)
    block_size, capacity = cache.shape[1], cache.shape[0] * cache.shape[1]
    kept = ((slot_mapping >= 0) & (slot_mapping < capacity)).nonzero().squeeze(1)
    slots = slot_mapping[kept].long()
    for view, rows in zip(views, stored, strict=False):
        assert view is not None
        # As bytes where a dtype has no indexed write on every device.
        seen, written = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (view, rows))
        seen[slots // block_size, slots % block_size] = written.reshape(len(x), seen.shape[-1])[kept]
    if keep is None:
        return None
    kept_stage = {"norm": normed, "transform": turned, "cast_back": back.to(x.dtype)}[keep]
    return kept_stage.clone(memory_format=torch.contiguous_format)


# ---- what is allowed


def check_format(format: QuantFormat, dims: int) -> None:
    """Raise ValueError unless a cast to this format is defined for rows of so many values."""
    rows, columns = format.block
    if rows != 1 or columns not in GROUPS or dims % columns or (format.element, format.scale) == ("e4m3", "e4m3"):
        raise ValueError(
            f"a cast of {dims} values needs blocks of 1 x 16, 32, 64 or 128 that divide them, and e4m3 scales beside "
            f"e2m1 alone, got {format.name} ({format.element}, {format.scale} scales, blocks of {rows} x {columns})"
        )


def check_stages(
    x: torch.Tensor,
    norm: NormStage | None,
    rope: RopeStage | None,
    hadamard: HadamardStage | None,
    cast: CastStage | None = None,
) -> None:
    """Raise ValueError for arguments of `transform_kv` that do not fit together."""
    if x.dim() not in (2, 3) or x.dtype not in DTYPES:
        raise ValueError(
            "x must be bfloat16, float16 or float32 of shape [num_tokens, D] or [num_tokens, num_heads, D], "
            f"got {x.dtype} {list(x.shape)}"
        )
    if norm is not None and norm.weight.shape != x.shape[-1:]:
        raise ValueError(
            f"the norm's weight must have shape [{x.shape[-1]}] like x's rows, got {list(norm.weight.shape)}"
        )
    if rope is not None:
        heads = x if x.dim() == 3 else x.unsqueeze(1)
        check_rope(heads, rope.positions, rope.cos_sin, None, rope.first_channel(x.shape[-1]))
    if hadamard is not None:
        _check_power_of_two(x.shape[-1])
    if cast is not None:
        check_format(cast.format, x.shape[-1])


def check_store(
    x: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    record: KVRecord,
    norm: NormStage | None,
    rope: RopeStage | None,
    hadamard: HadamardStage | None,
    keep: str | None,
) -> None:
    """Raise ValueError for arguments of `transform_and_store_kv` that do not fit together."""
    cast = None if record.format is None else CastStage(record.format)
    check_stages(x, norm, rope, hadamard, cast)
    record.check(cache)
    if x.shape[-1] != record.dims or (x.dim() == 3 and x.shape[1] != 1):
        raise ValueError(
            f"records of {record.name} take one head of {record.dims} values per token, got x of shape {list(x.shape)}"
        )
    if slot_mapping.shape != x.shape[:1] or slot_mapping.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"slot_mapping must be int32 or int64 of shape [{len(x)}], one slot per token, "
            f"got {slot_mapping.dtype} {list(slot_mapping.shape)}"
        )
    if keep not in (None, "norm", "transform", "cast_back"):
        raise ValueError(f"keep must be None, 'norm', 'transform' or 'cast_back', got {keep!r}")
    if keep == "norm" and norm is None:
        raise ValueError("keep='norm' needs a norm stage, got none: keep='transform' returns what is stored")


def _check_power_of_two(dims: int) -> None:
    if dims < 1 or dims & (dims - 1):
        raise ValueError(f"a Hadamard matrix needs a power of two of channels, got {dims}: pad them or leave it away")


def _transform(
    x: torch.Tensor, norm: NormStage | None, rope: RopeStage | None, hadamard: HadamardStage | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The values behind the norm, and those behind all three stages; x itself where there is none."""
    normed = x
    if norm is not None:
        made = rms_norm.reference(x, norm.weight, eps=norm.eps).out
        assert isinstance(made, torch.Tensor)
        normed = made
    turned = normed
    if rope is not None:
        heads = normed if x.dim() == 3 else normed.unsqueeze(1)
        turned = rotary_embedding.reference(
            heads,
            rope.positions,
            rope.cos_sin,
            interleaved=rope.interleaved,
            offset=rope.first_channel(x.shape[-1]),
            conjugate=rope.conjugate,
        ).query.view(x.shape)
    if hadamard is not None:
        turned = hadamard_transform(turned, scale=hadamard.scale)
    return normed, turned
