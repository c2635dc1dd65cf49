"""Integer weights for the compiled kernels: blocks of 16 by 32 features, as kernels/integer.h reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from rorqual.ops.native.library import Operand, kernels, missing
from rorqual.quantization.integer import IntegerFormat, IntegerStack, IntegerWeight

_ROWS = 16
_COLUMNS = 32
_DYNAMIC, _WEIGHT_ONLY = 1, 2


class PackedIntegers(IntegerStack):
    """A weight as the kernels read it: only `linear` and `unpack_weight` know what it holds.

    As a tuple, it holds the weight's parts on the device meta: their shapes and formats, without their values.
    """

    blocks: list[torch.Tensor]
    """Of each part: uint8 [rows / 16, columns / 32, bytes of a block]."""
    stacked: bool
    """Whether it was an IntegerStack."""
    operands: list[Operand]
    """Of each part, chained in this order."""
    bias: int | None
    """Address of the bias that the operands have."""
    out_features: int
    in_features: int

    @classmethod
    def of(cls, parts: Sequence[IntegerWeight], blocks: list[torch.Tensor], *, stacked: bool) -> PackedIntegers:
        """Take what `pack` has laid out."""
        made = cls(parts)
        made.blocks, made.stacked, made.bias = blocks, stacked, None
        made.out_features, made.in_features = made.shape
        made.operands = [_operand(part, data) for part, data in zip(parts, blocks, strict=True)]
        for before, after in zip(made.operands, made.operands[1:], strict=False):
            before.next = after.address
        return made

    def bind(self, bias: torch.Tensor | None) -> Operand:
        """The first operand, with this bias.

        It is one for all calls: two threads must not multiply by the same weight with different biases at once.
        """
        address = None if bias is None else bias.data_ptr()
        if address != self.bias:
            start = address
            for operand in self.operands:
                operand.bias = start
                start = None if start is None else start + 2 * operand.out_features
            self.bias = address
        return self.operands[0]

    def __deepcopy__(self, memo: dict[int, object]) -> PackedIntegers:
        """A copy with memory of its own."""
        return PackedIntegers.of(self, [data.clone() for data in self.blocks], stacked=self.stacked)

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.blocks[0].device

    @property
    def nbytes(self) -> int:
        """Memory of the blocks in bytes."""
        return sum(data.nbytes for data in self.blocks)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, columns], as the weight before dequantises itself."""
        return unpack(self).dequantize(dtype)

    def slice_rows(self, rows: slice) -> IntegerStack:
        """Some rows, as copies."""
        found = unpack(self)
        return (found if isinstance(found, IntegerStack) else IntegerStack((found,))).slice_rows(rows)


def refuse_blocks(weight: IntegerWeight | IntegerStack) -> str | None:
    """Why a weight cannot become PackedIntegers, or None. Reads all of it, so for load time."""
    if isinstance(weight, PackedIntegers):
        return "the weight is laid out already"
    for part in (weight,) if isinstance(weight, IntegerWeight) else weight:
        if reason := _refuse_part(part):
            return reason
    return missing()


def _refuse_part(weight: IntegerWeight) -> str | None:
    if weight.device.type != "cpu":
        return f"needs a CPU tensor, got one on {weight.device.type}"
    format, (rows, columns) = weight.format, weight.shape
    if rows % _ROWS or columns % _COLUMNS or rows * columns == 0:
        return f"needs multiples of 16 output and 32 input features, got {[rows, columns]}"
    if not _has_kernel(format):
        return f"has no kernel for {format.bits} bits in groups of {format.group} as in {format.name}"
    if format.bits == 8 and int(weight.codes.max()) - format.offset > 127:
        return f"needs codes up to {127 + format.offset} in {format.name}, got {int(weight.codes.max())}"
    factors = (weight.scales,) if weight.minima is None else (weight.scales, weight.minima)
    if not all(math.isfinite(bound) for each in factors for bound in each.aminmax()):  # a NaN is both bounds
        return "needs finite scales and minima"
    return None


def _has_kernel(format: IntegerFormat) -> bool:
    if format.bits not in (4, 8) or format.scale_dtype not in (torch.float16, torch.float32):
        return False
    if format.has_minima and format.offset:
        return False
    return format.group == 32 or (format.group == 16 and format.bits == 8 and not format.has_minima)


def pack(weight: IntegerWeight | IntegerStack) -> PackedIntegers:
    """Lay a weight out; a copy of the same size."""
    stacked = isinstance(weight, IntegerStack)
    parts = weight if isinstance(weight, IntegerStack) else (weight,)
    return PackedIntegers.of([_on_meta(part) for part in parts], [_pack_part(part) for part in parts], stacked=stacked)


def unpack(weight: PackedIntegers) -> IntegerWeight | IntegerStack:
    """The weight before `pack`, as a copy."""
    parts = [_unpack_part(part, data) for part, data in zip(weight, weight.blocks, strict=True)]
    return IntegerStack(parts) if weight.stacked else parts[0]


def _on_meta(weight: IntegerWeight) -> IntegerWeight:
    minima = None if weight.minima is None else weight.minima.to("meta")
    return replace(weight, codes=weight.codes.to("meta"), scales=weight.scales.to("meta"), minima=minima)


def _operand(weight: IntegerWeight, data: torch.Tensor) -> Operand:
    format = weight.format
    return Operand(
        kind=_DYNAMIC if weight.dynamic else _WEIGHT_ONLY,
        out_features=weight.shape[0],
        in_features=weight.shape[1],
        data=data.data_ptr(),
        block_bytes=data.shape[2],
        bits=format.bits,
        group=format.group,
        offset=format.offset,
        has_minima=format.has_minima,
        wide_scales=format.scale_dtype == torch.float32,
    )


def _pack_part(weight: IntegerWeight) -> torch.Tensor:
    found = kernels()
    assert found is not None
    format, (rows, columns) = weight.format, weight.shape
    codes, scales, minima = (
        None if each is None else each if each.stride(1) == 1 else each.contiguous()
        for each in (weight.codes, weight.scales, weight.minima)
    )
    assert codes is not None
    assert scales is not None
    packed = torch.empty(rows // _ROWS, columns // _COLUMNS, format.num_bytes(_ROWS * _COLUMNS), dtype=torch.uint8)
    found.pack_integers(
        codes.data_ptr(),
        codes.stride(0),
        scales.data_ptr(),
        scales.stride(0) * scales.itemsize,
        None if minima is None else minima.data_ptr(),
        0 if minima is None else minima.stride(0) * minima.itemsize,
        rows,
        columns,
        format.bits,
        format.group,
        format.scale_dtype.itemsize,
        packed.data_ptr(),
        torch.get_num_threads(),
    )
    return packed


def _unpack_part(weight: IntegerWeight, data: torch.Tensor) -> IntegerWeight:
    (rows, columns), format = weight.shape, weight.format
    tall, wide = rows // _ROWS, columns // _COLUMNS
    code_bytes, factor_bytes = 64 * format.bits, _ROWS * _COLUMNS // format.group * format.scale_dtype.itemsize

    def factors(start: int) -> torch.Tensor:
        found = data[..., start : start + factor_bytes].contiguous().view(format.scale_dtype)
        return found.view(tall, wide, -1, _ROWS).permute(0, 3, 1, 2).reshape(rows, -1)

    codes = data[..., :code_bytes].view(tall, wide, format.bits, _ROWS, 4).permute(0, 3, 1, 2, 4)
    if format.bits == 4:  # lower halves are 4 columns and upper ones the next 4; a row has them in pairs of neighbours
        both = torch.stack((codes & 15, codes >> 4), -2).reshape(rows, -1)
        codes = both[:, ::2] | both[:, 1::2] << 4
    minima = factors(code_bytes + factor_bytes) if format.has_minima else None
    return replace(weight, codes=codes.reshape(rows, -1), scales=factors(code_bytes), minima=minima)
