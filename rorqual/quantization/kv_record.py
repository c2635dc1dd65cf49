"""KVRecord: the bytes that a cache keeps for one token, and where they lie in a block.

A cache of records is a uint8 tensor [num_blocks, block_size, 1, bytes]. The records of DeepSeek-V4's and V4.1's main
and window caches are whole: [values | plain numbers | scales] token by token. Those of their index caches are laid out
over the block: the values of all tokens, then the scales of all tokens. Source: DeepInfer 0.1.0's cache formats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch

from rorqual.quantization.formats import FP4_E4M3, FP8_64, FP8_ROW, MXFP4, MXFP8, QuantFormat
from rorqual.quantization.qtensor import QTensor

_ALIGNMENT = 32
"""Blocks begin at multiples of so many bytes."""
_SCALE_DTYPES = {"float32": torch.float32, "ue8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}


class RecordViews(NamedTuple):
    """A cache's bytes as numbers; both parts write through."""

    values: torch.Tensor
    """[num_blocks, block_size, n]: n = dims of float8_e4m3fn or bfloat16, or dims / 2 of int8 (two e2m1 codes each)."""
    scales: torch.Tensor | None
    """[num_blocks, block_size, dims / group]: uint8 (UE8M0), float8_e4m3fn or float32; None for bfloat16."""
    plain: torch.Tensor | None = None
    """[num_blocks, block_size, plain_dims] of bfloat16; None where there are none."""


@dataclass(frozen=True)
class KVRecord:
    """One token's bytes: `dims` values, and one scale per `format.block[1]` of them; behind the values, perhaps,
    `plain_dims` more numbers in bfloat16."""

    name: str
    dims: int
    format: QuantFormat | None
    """None keeps bfloat16."""
    interleaved: bool = True
    """[values | plain | scales | padding] per token; False: per block, all values and then all scales."""
    plain_dims: int = 0
    """Numbers behind the values that stay bfloat16: the rotated channels of DeepSeek-V4's entries."""
    padding: int = 0
    """Bytes behind the scales that nobody reads."""

    def __post_init__(self) -> None:
        rows, columns = (1, 1) if self.format is None else self.format.block
        if rows != 1 or self.dims < 1 or self.dims % columns:
            raise ValueError(
                f"record {self.name} must have a multiple of {columns} values and scales of its own per token, got "
                f"{self.dims} values and blocks of {rows} x {columns}"
            )
        if (self.plain_dims or self.padding) and (self.format is None or not self.interleaved):
            raise ValueError(f"record {self.name}: only quantised records of whole tokens have numbers beside them")
        if self.plain_dims and (self.value_bytes % 2 or self.bytes % 2):
            raise ValueError(
                f"record {self.name}: bfloat16 numbers begin at even bytes, got {self.value_bytes} bytes of values in "
                f"{self.bytes}: choose another padding"
            )

    @cached_property
    def num_scales(self) -> int:
        """Scales per token."""
        return 0 if self.format is None else self.dims // self.format.block[1]

    @cached_property
    def value_dtype(self) -> torch.dtype:
        """Dtype of the values as `split` gives them."""
        if self.format is None:
            return torch.bfloat16
        return torch.float8_e4m3fn if self.format.element == "e4m3" else torch.int8

    @cached_property
    def scale_dtype(self) -> torch.dtype | None:
        """Dtype of the scales as `split` gives them."""
        return None if self.format is None else _SCALE_DTYPES[self.format.scale]

    @cached_property
    def value_bytes(self) -> int:
        """Bytes of a token's values."""
        if self.format is None:
            return 2 * self.dims
        return self.dims if self.format.element == "e4m3" else self.dims // 2

    @cached_property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales."""
        return 0 if self.scale_dtype is None else self.num_scales * self.scale_dtype.itemsize

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.dims + self.plain_dims

    @cached_property
    def bytes(self) -> int:
        """Bytes of a token."""
        return self.value_bytes + 2 * self.plain_dims + self.scale_bytes + self.padding

    def allocate(self, num_blocks: int, block_size: int, device: torch.device | None = None) -> torch.Tensor:
        """uint8 [num_blocks, block_size, 1, bytes], not initialised.

        The stride between blocks is rounded up to the least common multiple of 32 and the record's bytes where records
        are whole, so that a block also begins at a whole record; to 32 where they are laid out over the block.
        """
        step = math.lcm(_ALIGNMENT, self.bytes) if self.interleaved else _ALIGNMENT
        stride = -(-block_size * self.bytes // step) * step
        memory = torch.empty(num_blocks * stride, dtype=torch.uint8, device=device)
        return memory.as_strided((num_blocks, block_size, 1, self.bytes), (stride, self.bytes, self.bytes, 1))

    def check(self, cache: torch.Tensor) -> None:
        """Raise ValueError unless the tensor can hold these records."""
        if cache.dtype != torch.uint8 or cache.dim() != 4 or cache.shape[2:] != (1, self.bytes):
            raise ValueError(
                f"a cache of {self.name} records must be uint8 [num_blocks, block_size, 1, {self.bytes}], got "
                f"{cache.dtype} {list(cache.shape)}: KVRecord.allocate makes one"
            )
        block, token, _, byte = cache.stride()
        wanted = math.gcd(_ALIGNMENT, self.bytes)
        if byte != 1 or token % wanted or token < self.bytes or (cache.shape[0] > 1 and block % _ALIGNMENT):
            raise ValueError(
                f"a cache of {self.name} records needs strides of a multiple of {_ALIGNMENT} between blocks, of "
                f"{wanted} between tokens and of 1 within, got {cache.stride()}: KVRecord.allocate makes one"
            )
        if not self.interleaved and token != self.bytes:
            raise ValueError(
                f"a cache of {self.name} records needs blocks without gaps between tokens, got a stride of {token} "
                f"bytes for records of {self.bytes}: KVRecord.allocate makes one"
            )

    def split(self, cache: torch.Tensor) -> RecordViews:
        """The values and the scales of every slot, as views of the cache. Raises ValueError as `check`."""
        self.check(cache)
        records = cache[:, :, 0]
        plain = None
        if self.interleaved:
            values, scales_at = records[..., : self.value_bytes], self.value_bytes + 2 * self.plain_dims
            scales = records[..., scales_at : scales_at + self.scale_bytes]
            if self.plain_dims:
                plain = records[..., self.value_bytes : scales_at].view(torch.bfloat16)
        else:
            (num_blocks, block_size, _), stride = records.shape, cache.stride(0)
            start = cache.storage_offset() + block_size * self.value_bytes
            values = records.as_strided((num_blocks, block_size, self.value_bytes), (stride, self.value_bytes, 1))
            scales = records.as_strided(
                (num_blocks, block_size, self.scale_bytes), (stride, self.scale_bytes, 1), start
            )
        if self.scale_dtype is None:
            return RecordViews(values.view(self.value_dtype), None)
        return RecordViews(values.view(self.value_dtype), scales.view(self.scale_dtype), plain)

    def encode(self, rows: torch.Tensor) -> RecordViews:
        """Rows [n, width] of a float dtype as the numbers that records hold: [n, ...] each, as `split` names them."""
        if self.format is None:
            return RecordViews(rows.to(torch.bfloat16), None)
        made = QTensor.quantize(rows[:, : self.dims].contiguous(), self.format)
        return RecordViews(
            made.values, made.scales, rows[:, self.dims :].to(torch.bfloat16) if self.plain_dims else None
        )

    def decode(self, cache: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """float32 [..., width] of the records at (block [...], offset [...]): value * scale."""

        def taken(view: torch.Tensor) -> torch.Tensor:
            # As bytes where a dtype has no indexed read on every device.
            return view.view(torch.uint8)[where].view(view.dtype) if view.itemsize == 1 else view[where]

        values, scales, plain = self.split(cache)
        if self.format is None or scales is None:
            return taken(values).float()
        found = QTensor(taken(values), taken(scales), self.format).dequantize()
        return found if plain is None else torch.cat((found, taken(plain).float()), dim=-1)


V41 = KVRecord("V41", 512, MXFP8)
"""528 bytes: sliding windows, and the main cache where it is not FP4."""
V41_FP4 = KVRecord("V41_FP4", 512, FP4_E4M3)
"""288 bytes: the compressed main cache."""
INDEX_FP4 = KVRecord("INDEX_FP4", 128, MXFP4, interleaved=False)
"""68 bytes: the keys of the indexer."""
INDEX_FP8 = KVRecord("INDEX_FP8", 128, FP8_ROW, interleaved=False)
"""132 bytes, float32 scale."""
INDEX_MXFP8 = KVRecord("INDEX_MXFP8", 128, MXFP8, interleaved=False)
"""132 bytes, UE8M0 scales."""
V4 = KVRecord("V4", 448, FP8_64, plain_dims=64, padding=1)
"""584 bytes: DeepSeek-V4's windows and compressed entries."""
RECORDS = (V41, V41_FP4, INDEX_FP4, INDEX_FP8, INDEX_MXFP8)
"""The records that have a name of their own, and no numbers beside their values."""


def bf16_record(dims: int) -> KVRecord:
    """A record of `dims` bfloat16 values without scales."""
    return KVRecord(f"BF16_{dims}", dims, None)


def entry_record(dims: int, plain_dims: int) -> KVRecord:
    """V4 for `dims` channels in e4m3 and `plain_dims` rotated ones in bfloat16, padded to a multiple of 8 bytes.

    Raises ValueError unless dims is a multiple of 64.
    """
    if (dims, plain_dims) == (V4.dims, V4.plain_dims):
        return V4
    group = FP8_64.block[1]
    return KVRecord(
        f"V4_{dims}_{plain_dims}",
        dims,
        FP8_64,
        plain_dims=plain_dims,
        padding=-(dims + 2 * plain_dims + dims // group) % 8,
    )


def index_record(dims: int, kind: Literal["fp8", "fp4"]) -> KVRecord:
    """INDEX_FP8 or INDEX_FP4 for keys of `dims` values; FP8 has a scale for 128 of them, or for all where they are
    fewer. Raises ValueError where blocks of 128 or 32 do not divide them."""
    known = INDEX_FP8 if kind == "fp8" else INDEX_FP4
    if dims == known.dims:
        return known
    format = FP8_ROW.with_block(1, min(dims, FP8_ROW.block[1])) if kind == "fp8" else MXFP4
    return KVRecord(f"{known.name}_{dims}", dims, format, interleaved=False)


def record_of(num_bytes: int, scale: str | None = None) -> KVRecord:
    """The named record of so many bytes, and of this kind of scale ("ue8m0", "e4m3", "float32") if several have them.

    Raises ValueError where none or several fit. Records of bfloat16 have no name: see `bf16_record`.
    """
    found = [r for r in RECORDS if r.bytes == num_bytes]
    fitting = [r for r in found if scale is None or (r.format is not None and r.format.scale == scale)]
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        names = " or ".join(f"{r.format.scale} ({r.name})" for r in fitting if r.format is not None)
        raise ValueError(f"records of {num_bytes} bytes differ in their scales: say scale={names}")
    known = ", ".join(f"{r.bytes} ({r.name}, {r.format.scale})" for r in RECORDS if r.format is not None)
    wanted = f"{num_bytes} bytes" if scale is None else f"{num_bytes} bytes with {scale} scales"
    raise ValueError(f"no record has {wanted}; known are {known}, and bf16_record(dims) for bfloat16")
