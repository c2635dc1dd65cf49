"""A weight stacked from parts of the checkpoint's matrices, plain or quantised: loaded, laid out, given to `linear`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from rorqual.loader.layer import Layer, WantedTensor, copy_into, weight_parameter
from rorqual.loader.quantization_config import IntegerParts
from rorqual.ops.linear import Weight, prepare_weight
from rorqual.ops.split_blocks import split_blocks
from rorqual.quantization import QTensor, QuantFormat
from rorqual.quantization.gguf_blocks import BlockMatrix
from rorqual.quantization.integer import IntegerFormat, IntegerStack, IntegerWeight

SCALE_NAMES = ("weight_scale_inv", "scale", "weight_scale")
"""What checkpoints call the scales beside "weight". All of them multiply, whatever the first one's name says."""


class Part(NamedTuple):
    """One checkpoint matrix inside a merged weight."""

    name: str | None
    """Name of the checkpoint's module beside the layer; None if the layer stands for it alone."""
    out_features: int
    """Rows in the checkpoint."""
    rows: slice
    """The rows of the checkpoint's matrix that this rank keeps."""

    @property
    def some(self) -> slice | None:
        """Those rows where they are not all, as `WantedTensor.rows` has them."""
        return None if self.rows == slice(0, self.out_features) else self.rows


class StackedWeight(Layer):
    """A weight [rows of all parts, columns] whose parts lie one below the other, each cut by rows, all by columns.

    With a format it is kept as values (`weight`) and block scales (`weight_scale_inv`), as the checkpoint has them.
    Where a part does not start or end on an edge of the format's blocks, all blocks of the weight become smaller
    (`format` says how small) and scales are repeated: nothing is rounded.

    With integer formats nothing is allocated: every part is kept as it comes, or rounded on its way in. Where a part
    has no such format, or its columns are not cut at edges of its groups, the whole weight is plain.

    A weight is kept in `memory` [rows, columns] if that is given, which is of `kept_format` then.

    It wants no tensors by itself: the layer that owns it, or is it, knows their names; see `wanted_parts`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Sequence[Part],
        *,
        columns: slice | None = None,
        format: QuantFormat | IntegerParts | None = None,
        dtype: torch.dtype,
        device: torch.device,
        memory: Weight | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self._parts = tuple(parts)
        self._columns = columns or slice(0, in_features)
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + part.rows.stop - part.rows.start)
        self._into = [slice(*edges) for edges in itertools.pairwise(starts)]
        self.num_rows = starts[-1]
        self.integers: tuple[IntegerFormat, ...] = ()
        """Format of every part that is kept as integers: all of them or none."""
        self._kept: list[IntegerWeight | None] = []
        self._dynamic = self.left_plain = False
        if isinstance(format, IntegerParts):
            self.integers, self._dynamic = _kept_formats(format, in_features, self._columns), format.dynamic
            self._kept, format, self.left_plain = [None] * len(self.integers), None, not self.integers
        self._stored, self.format = format, format
        shape = (self.num_rows, self._columns.stop - self._columns.start)
        if self.integers:
            self._integer_bytes = sum(
                kind.num_bytes((into.stop - into.start) * shape[1])
                for kind, into in zip(self.integers, self._into, strict=True)
            )
        elif format is None and memory is not None:
            assert isinstance(memory, torch.Tensor)
            assert memory.shape == shape
            self.weight = nn.Parameter(memory, requires_grad=False)
        elif format is None:
            self.weight = weight_parameter(*shape, dtype=dtype, device=device)
        else:
            self.format = kept_format(format, parts, self._columns)
            kept = QTensor.empty(shape, self.format, device) if memory is None else memory
            assert isinstance(kept, QTensor)
            assert (kept.shape, kept.format) == (shape, self.format)
            self.weight = nn.Parameter(kept.values, requires_grad=False)
            self.weight_scale_inv = nn.Parameter(kept.scales, requires_grad=False)
        self._operand: Weight | None = None

    @property
    def operand(self) -> Weight:
        """What `linear` takes as the weight."""
        return self._loaded() if self._operand is None else self._operand

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """Nothing; see the class."""
        return iter(())

    def wanted_parts(self, names: Sequence[str]) -> Iterator[WantedTensor]:
        """The weight, and the scales if there are any, of every part; `names` are the parts' modules there."""
        for i, (name, part, into) in enumerate(zip(names, self._parts, self._into, strict=True)):
            if self.integers:
                yield self._wanted_integers(f"{name}.weight", part, i)
            elif self._stored is None:
                yield self._wanted_plain(f"{name}.weight", part, into)
            else:
                yield from self._wanted_quantized(name, part, into, self._stored)

    def _wanted_plain(self, name: str, part: Part, into: slice) -> WantedTensor:
        def copy_rows(some: torch.Tensor, first: int) -> None:
            start, stop = max(first, part.rows.start), min(first + len(some), part.rows.stop)
            if start < stop:
                at = into.start + start - part.rows.start
                copy_into(self.weight[at : at + stop - start], some[start - first : stop - first, self._columns])

        def copy(whole: torch.Tensor) -> None:
            copy_rows(whole, 0)

        return WantedTensor(name, (part.out_features, self.in_features), copy, copy_rows, rows=part.some)

    def _wanted_integers(self, name: str, part: Part, index: int) -> WantedTensor:
        format, dynamic = self.integers[index], self._dynamic

        def keep(rows: IntegerWeight, columns: slice = self._columns) -> None:
            cut = rows.slice_columns(columns)
            if cut.shape[1] != rows.shape[1]:
                cut = IntegerWeight.cat_rows([cut])  # a copy, so that the rest can go
            self._kept[index] = replace(cut, dynamic=dynamic)

        def keep_blocks(rows: BlockMatrix) -> None:
            start, stop, size = self._columns.start, self._columns.stop, rows.block_size
            first = start // size * size
            blocks = rows.slice_columns(slice(first, -(-stop // size) * size))
            keep(split_blocks(blocks), slice(start - first, stop - first))

        def copy(whole: torch.Tensor) -> None:
            self._kept[index] = IntegerWeight.quantize(whole[part.rows, self._columns], format, dynamic=dynamic)

        return WantedTensor(
            name,
            (part.out_features, self.in_features),
            copy,
            rows=part.some,
            format=format,
            keep=keep,
            keep_blocks=None if self._columns == slice(0, self.in_features) else keep_blocks,
        )

    def _wanted_quantized(self, name: str, part: Part, into: slice, stored: QuantFormat) -> Iterator[WantedTensor]:
        """Values and scales come one by one, so each is cut beside a stand-in for the other that holds nothing."""
        assert self.format is not None
        rows, width = self.format.block
        whole_part = QTensor.empty((part.out_features, self.in_features), stored, "meta")
        values, scales = whole_part.values, whole_part.scales

        def cut(whole: QTensor) -> QTensor:
            return whole.slice_rows(part.rows).slice_columns(self._columns).reblock(rows, width)

        def copy_values(loaded: torch.Tensor) -> None:
            kept = cut(QTensor.from_checkpoint(loaded, scales, stored)).values
            self.weight.view(torch.uint8)[into].copy_(kept.view(torch.uint8))

        def copy_scales(loaded: torch.Tensor) -> None:
            kept = cut(QTensor.from_checkpoint(values, loaded, stored)).row_scales()
            first = into.start // rows
            self.weight_scale_inv[first : first + kept.shape[0]].copy_(kept)

        first, *others = (f"{name}.{scale}" for scale in SCALE_NAMES)
        yield WantedTensor(f"{name}.weight", tuple(values.shape), copy_values, rows=part.some)
        yield WantedTensor(first, tuple(scales.shape), copy_scales, aliases=tuple(others))

    def quantized(self) -> Iterator[tuple[str, QTensor]]:
        """The weight, if it is quantised."""
        if self.format is not None:
            loaded = self._loaded()
            assert isinstance(loaded, QTensor)
            yield "weight", loaded

    def integer_bytes(self) -> int:
        """Memory of the parts that are kept as integers."""
        return self._integer_bytes if self.integers else 0

    def format_sizes(self) -> dict[str, int]:
        """Values by the name of the number format that they are held in."""
        width = self._columns.stop - self._columns.start
        if not self.integers:
            name = self.format.name if self.format else str(self.weight.dtype).removeprefix("torch.")
            return {name: self.num_rows * width}
        sizes = dict.fromkeys((format.name for format in self.integers), 0)
        for format, into in zip(self.integers, self._into, strict=True):
            sizes[format.name] += (into.stop - into.start) * width
        return sizes

    def _loaded(self) -> Weight:
        """The weight as it was loaded; of integers, parts of one format are joined."""
        if self.integers:
            kept = [part for part in self._kept if part is not None]
            assert len(kept) == len(self.integers), "not loaded"
            runs = [list(run) for _, run in itertools.groupby(kept, key=lambda part: part.format)]
            joined = [run[0] if len(run) == 1 else IntegerWeight.cat_rows(run) for run in runs]
            return joined[0] if len(joined) == 1 else IntegerStack(joined)
        if self.format is None:
            return self.weight.data
        return QTensor(self.weight.data, self.weight_scale_inv.data, self.format)

    def prepare(self) -> None:
        """Lay the weight out for the linear kernel, if nobody else has."""
        if self._operand is None:
            self.keep(prepare_weight(self._loaded()))

    def keep(self, operand: Weight) -> None:
        """Take the weight as it was laid out, in place of what was loaded."""
        self._operand = operand
        if self.integers:
            self._kept = [None] * len(self.integers)
        elif isinstance(self._operand, QTensor):
            self.weight = nn.Parameter(self._operand.values, requires_grad=False)
            self.weight_scale_inv = nn.Parameter(self._operand.scales, requires_grad=False)
        else:
            assert isinstance(self._operand, torch.Tensor)
            self.weight = nn.Parameter(self._operand, requires_grad=False)


def kept_format(format: QuantFormat, parts: Sequence[Part], columns: slice) -> QuantFormat:
    """The format that a weight of these parts is kept in: blocks end where parts and ranks' columns begin.

    Raises ValueError for columns that do not fill their bytes.
    """
    _check_columns(format, columns)
    rows, width = format.block
    edge, edges = 0, []
    for part in parts:
        edges += [edge, part.rows.start]
        edge += part.rows.stop - part.rows.start
    return format.with_block(math.gcd(rows, *edges), math.gcd(width, columns.start))


def _kept_formats(parts: IntegerParts, in_features: int, columns: slice) -> tuple[IntegerFormat, ...]:
    """The formats of all parts if every one has one that can be cut there; else none."""
    kept = tuple(format for format in parts.formats if format is not None)
    edges = (in_features, columns.start, columns.stop)
    fits = all(edge % format.group == 0 for format in kept for edge in edges)
    return kept if fits and len(kept) == len(parts.formats) else ()


def _check_columns(format: QuantFormat, columns: slice) -> None:
    if format.element == "e2m1" and (columns.start % 2 or columns.stop % 2):
        raise ValueError(
            f"a rank's input features must be even in format {format.name}, which keeps two per byte, got "
            f"{columns.start} to {columns.stop}: use another tensor_parallel_size"
        )
