"""Integer weights of every format with every code in them, and inputs of every size, for the products with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from rorqual.ops.embedding import Table
from rorqual.quantization import gguf_blocks
from rorqual.quantization.gguf_blocks import BlockMatrix
from rorqual.quantization.integer import INTEGER_FORMATS, Q4_1, Q6_K, Q8_0, IntegerFormat, IntegerStack, IntegerWeight
from tests.ops.values import Call, normal

ALL_FORMATS = tuple(INTEGER_FORMATS.values())


def most_of(format: IntegerFormat) -> int:
    """The largest code that GGML writes in a format."""
    return {"q5_0": 31, "q5_1": 31, "q5_k": 31, "q6_k": 63}.get(format.name, 2**format.bits - 1)


def integers_of(
    format: IntegerFormat, rows: int, columns: int, *, dynamic: bool = True, seed: int = 0
) -> IntegerWeight:
    """Every code many times, beside scales of both signs and several sizes, zero and subnormal ones among them."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.arange(rows * columns).remainder(most_of(format) + 1)[torch.randperm(rows * columns, generator=draw)]
    codes = codes.to(torch.uint8).view(rows, columns)
    if format.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    shape = (rows, columns // format.group)
    scales = torch.randn(shape, generator=draw) * 0.01
    scales[::7] *= 2.0**-12
    scales[3::11, ::2] = 0.0
    # As many bits as GGML's have: K formats multiply float16 by integers of 6 bits, or 8.
    scales = scales.half()
    if format.scale_dtype == torch.float32:
        scales = scales.float() * torch.randint(1, 64, shape, generator=draw)
    minima = (torch.randn(shape, generator=draw) * 0.1).half().to(format.scale_dtype) if format.has_minima else None
    return IntegerWeight(codes.contiguous(), scales, minima, format, dynamic)


def stack_of(names: tuple[str, ...], columns: int, *, dynamic: bool = True) -> IntegerStack:
    """Parts of 48, 64, 80, .. rows in these formats."""
    return IntegerStack(
        integers_of(INTEGER_FORMATS[name], 48 + 16 * i, columns, dynamic=dynamic, seed=i)
        for i, name in enumerate(names)
    )


def inputs(rows: int, columns: int) -> torch.Tensor:
    """bfloat16 of many sizes: rows and groups of zeros, large and tiny ones, ties, single outliers."""
    x = normal(rows, columns)
    x *= torch.exp2(torch.arange(rows).remainder(9) * 3.0 - 12)[:, None]
    x[1::13] = 0.0
    x[2::13, :32] = 0.0
    x[3::13] *= 2.0**100
    x[4::13] *= 2.0**-100
    x[5::13] = torch.arange(columns).remainder(32).sub(16) / 2 + 0.0  # halves, beside a largest that makes ties
    x[5::13, ::32] = 63.5
    x[6::13, 7] = 3000.0
    x[7::13] = 2.0**-130
    return x.bfloat16()


def expected(x: torch.Tensor, weight: IntegerWeight) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64 by NumPy, and the sum of the sizes of what was added, both [num_rows, out_features]."""
    columns, group = weight.shape[1], weight.format.group
    codes = np.empty(tuple(weight.shape))
    if weight.format.bits == 4:
        codes[:, ::2], codes[:, 1::2] = weight.codes.numpy() & 15, weight.codes.numpy() >> 4
    else:
        codes[:] = weight.codes.numpy()
    values = (codes - weight.format.offset) * np.repeat(weight.scales.double().numpy(), group, 1)
    if weight.minima is not None:
        values += np.repeat(weight.minima.double().numpy(), group, 1)
    given = x.float().numpy()
    if weight.dynamic:
        groups = given.reshape(len(given), columns // 32, 32)
        largest = np.abs(groups).max(-1, keepdims=True)
        with np.errstate(divide="ignore", over="ignore"):
            factor = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        factor[np.isinf(factor)] = 0
        integers = np.rint(groups * factor)
        assert np.abs(integers).max(initial=0) <= 127
        given = (integers.astype(np.float64) * (largest / np.float32(127)).astype(np.float64)).reshape(given.shape)
    given = given.astype(np.float64)
    return given @ values.T, np.abs(given) @ np.abs(values).T


def blocks_of(format: IntegerFormat, rows: int, columns: int) -> BlockMatrix:
    """Random bytes, but for scales and minima of ordinary sizes."""
    layout = gguf_blocks._LAYOUTS[format.name]
    draw = np.random.default_rng(rows)
    blocks = draw.integers(0, 256, (rows * columns // layout.size, layout.block.itemsize), np.uint8)
    for name in {"scale", "minimum"} & set(layout.block.names or ()):
        values = draw.standard_normal(len(blocks)) * 2.0 ** draw.integers(-12, 0, len(blocks))
        blocks.view(layout.block)[name][:, 0] = values
    return BlockMatrix(torch.from_numpy(blocks.reshape(rows, -1)), format)


def _looked_up(weight: Table, ids: torch.Tensor, dtype: torch.dtype) -> Call:
    return (ids, weight), {"dtype": dtype}


_IDS = torch.tensor([0, 47, 3, 3, 20])
EMBEDDING_CASES: dict[str, Callable[[], Call]] = {
    "plain": lambda: _looked_up(normal(48, 20), _IDS, torch.bfloat16),
    "int32_ids": lambda: _looked_up(integers_of(Q8_0, 48, 96), _IDS.int(), torch.bfloat16),
    "float32": lambda: _looked_up(integers_of(Q4_1, 48, 96), _IDS, torch.float32),
    "stack": lambda: _looked_up(stack_of(("q4_1", "q6_k"), 96), torch.tensor([100, 47, 48, 0]), torch.bfloat16),
    "rows_with_gaps": lambda: _looked_up(integers_of(Q4_1, 48, 96).slice_columns(slice(32, 96)), _IDS, torch.bfloat16),
    **{
        f"native_{kind.name}": lambda kind=kind: _looked_up(integers_of(kind, 48, 96), _IDS, torch.bfloat16)
        for kind in ALL_FORMATS
    },
    **{
        f"native_blocks_{kind.name}": lambda kind=kind: _looked_up(blocks_of(kind, 48, 512), _IDS, torch.bfloat16)
        for kind in ALL_FORMATS
    },
    "blocks_float32": lambda: _looked_up(blocks_of(Q4_1, 48, 96), _IDS, torch.float32),
    "blocks_with_gaps": lambda: _looked_up(
        dataclasses.replace(gaps := blocks_of(Q8_0, 48, 96), data=gaps.data[:, :68]), _IDS, torch.bfloat16
    ),
    "native_blocks_many": lambda: _looked_up(blocks_of(Q6_K, 48, 512), torch.arange(480) % 48, torch.bfloat16),
    "native_spread_ids": lambda: _looked_up(integers_of(Q6_K, 48, 48), torch.arange(48)[::3], torch.bfloat16),
    "native_many": lambda: _looked_up(integers_of(Q4_1, 48, 1056), torch.arange(480) % 48, torch.bfloat16),
    "native_none": lambda: _looked_up(integers_of(Q8_0, 48, 96), _IDS[:0], torch.bfloat16),
}
SPLIT_CASES: dict[str, Callable[[], Call]] = {
    **{f"native_{kind.name}": lambda kind=kind: ((blocks_of(kind, 48, 512),), {}) for kind in ALL_FORMATS},
    "native_many": lambda: ((blocks_of(Q4_1, 480, 576),), {}),
    "native_none": lambda: ((blocks_of(Q4_1, 48, 96).slice_rows(slice(0, 0)),), {}),
    "gaps": lambda: ((dataclasses.replace(gaps := blocks_of(Q8_0, 48, 96), data=gaps.data[:, :68]),), {}),
}
