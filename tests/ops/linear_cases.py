"""Cases of `linear`, `prepare_weight` and `unpack_weight`: plain weights and every format of quantised ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rorqual.ops.linear import allocate_output
from rorqual.quantization import (
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_ROW,
    FP8_ROW_UE8M0,
    MXFP4,
    MXFP8,
    MXFP8_TILE,
    QTensor,
    QuantFormat,
    ScaleLayout,
)
from tests.ops.values import Call, every_other, normal, rows_apart

BF16, FP32 = torch.bfloat16, torch.float32
Cases = dict[str, Callable[[], Call]]

FORMATS: dict[str, tuple[QuantFormat, QuantFormat]] = {
    "fp8_block": (FP8_BLOCK, FP8_ROW),
    "fp8_block_ue8m0": (FP8_BLOCK_UE8M0, FP8_ROW_UE8M0),
    "mxfp8_tile": (MXFP8_TILE, MXFP8),
    "mxfp8": (MXFP8, MXFP8),
    "mxfp4": (MXFP4, MXFP8),
}
"""The formats of weights in use, and what activations become beside them."""
ROWS = (0, 1, 7, 16, 33, 130)


def _plain(
    rows: int, columns: int, features: int, *, bias: bool = False, dtype: torch.dtype = BF16, view=lambda x: x
) -> Call:
    x, weight = view(normal(rows, columns, dtype=dtype)), normal(features, columns, dtype=dtype, seed=1)
    return (x, weight, normal(features, dtype=dtype, seed=2)) if bias else (x, weight), {}


def accumulator(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Values in rows that are a multiple of 32 bytes apart."""
    return allocate_output(shape, dtype, torch.device("cpu")).copy_(normal(*shape, seed=3))


PLAIN: Cases = {
    "none": lambda: _plain(0, 16, 24),
    "one": lambda: _plain(1, 16, 24),
    "odd": lambda: _plain(7, 13, 11),
    "odd_bias": lambda: _plain(7, 13, 11, bias=True),
    "many_rows": lambda: _plain(700, 24, 40),
    "wide": lambda: _plain(2, 1000, 3),
    "one_feature": lambda: _plain(5, 64, 1, bias=True),
    "strided": lambda: _plain(5, 12, 8, view=every_other),
    "rows_apart": lambda: _plain(5, 12, 8, bias=True, view=rows_apart),
    "transposed": lambda: _plain(6, 10, 8, view=lambda x: x.t().contiguous().t()),
    "single_row_1d": lambda: _plain(1, 32, 24, bias=True, view=lambda x: x[0]),
    "batched_3d": lambda: _plain(6, 32, 20, view=lambda x: x.view(2, 3, 32)),
    "batched_4d": lambda: _plain(12, 32, 20, bias=True, view=lambda x: x.view(2, 3, 2, 32).transpose(0, 1)),
    "float32": lambda: _plain(3, 16, 24, dtype=FP32),
    "float32_bias": lambda: _plain(3, 16, 24, bias=True, dtype=FP32),
    "float32_odd": lambda: _plain(7, 13, 33, bias=True, dtype=FP32),
    "float32_accumulated": lambda: (_plain(7, 16, 24, dtype=FP32)[0], {"out_acc": accumulator(7, 24, dtype=FP32)}),
    "native_to_float32": lambda: (_plain(5, 64, 48, bias=True)[0], {"out_dtype": FP32}),
    "to_float32_odd": lambda: (_plain(5, 64, 9)[0], {"out_dtype": FP32}),
    "accumulated": lambda: (_plain(5, 64, 48)[0], {"out_acc": accumulator(5, 48)}),
    "accumulated_one": lambda: (_plain(1, 64, 1)[0], {"out_acc": accumulator(1, 1)}),
    "accumulated_bias": lambda: (_plain(33, 64, 20, bias=True)[0], {"out_acc": accumulator(33, 20)}),
    "accumulated_none": lambda: (_plain(0, 64, 20)[0], {"out_acc": accumulator(0, 20)}),
    "accumulated_3d": lambda: (
        _plain(6, 64, 20, view=lambda x: x.view(2, 3, 64))[0],
        {"out_acc": accumulator(2, 3, 20)},
    ),
    "accumulated_to_float32": lambda: (
        _plain(5, 64, 20, bias=True)[0],
        {"out_acc": accumulator(5, 20, dtype=FP32), "out_dtype": FP32},
    ),
    "native_none": lambda: _plain(0, 64, 48),
    "native_one": lambda: _plain(1, 64, 48),
    "native_one_block": lambda: _plain(3, 32, 16, bias=True),
    "native_seven": lambda: _plain(7, 96, 80, bias=True),
    "native_sixteen": lambda: _plain(16, 96, 80),
    "native_seventeen": lambda: _plain(17, 64, 48, bias=True),
    "native_forty": lambda: _plain(40, 64, 112),
    "native_many": lambda: _plain(700, 1056, 48),
    "native_one_to_float32": lambda: (_plain(1, 64, 48)[0], {"out_dtype": FP32}),
    "native_forty_to_float32": lambda: (_plain(40, 96, 80, bias=True)[0], {"out_dtype": FP32}),
    "native_wider_than_a_panel": lambda: _plain(90, 16992, 32),
    "native_strided": lambda: _plain(5, 64, 32, view=every_other),
    "native_rows_apart": lambda: _plain(37, 64, 32, bias=True, view=rows_apart),
    "native_1d": lambda: _plain(1, 64, 32, bias=True, view=lambda x: x[0]),
    "native_3d": lambda: _plain(6, 64, 32, view=lambda x: x.view(2, 3, 64)),
    "native_3d_none": lambda: _plain(0, 64, 32, view=lambda x: x.view(2, 0, 64)),
    "native_3d_transposed": lambda: _plain(6, 64, 32, view=lambda x: x.view(2, 3, 64).transpose(0, 1)),
}


def _quantized(
    name: str, rows: int, columns: int, features: int, *, dynamic: bool, bias: bool = False, dtype: torch.dtype = BF16
) -> Call:
    """Outputs around one, made of blocks of which some are several times larger than others."""
    format, activation = FORMATS[name]
    groups = torch.tensor([1.0, 0.5, 2.0, 0.25, 1.0, 4.0]).repeat_interleave(32).repeat(columns // 192 + 1)[:columns]
    x = normal(rows, columns) * torch.linspace(0.5, 1, max(rows, 1))[:rows, None] * groups.flip(0) ** 0.5
    weight = normal(features, columns, seed=1) * columns**-0.5 * torch.linspace(1, 0.5, features)[:, None] / groups
    args: tuple[Any, ...] = (x.to(dtype), QTensor.quantize(weight, format))
    if bias:
        args = (*args, normal(features, dtype=dtype, seed=2))
    return args, {"activation": activation} if dynamic else {}


def _of_format(name: str) -> Iterator[tuple[str, Callable[[], Call]]]:
    """A product of whole blocks for every number of rows; then sizes that end within a block."""
    for dynamic, kind in ((True, "dynamic"), (False, "weight_only")):
        for rows in ROWS:
            yield f"{name}_{kind}_{rows}", lambda r=rows, d=dynamic: _quantized(name, r, 256, 384, dynamic=d)
        sizes = {
            "few_features": (7, 256, 20),
            "odd_features": (33, 128, 201),
            "one_feature": (5, 256, 1),
            "ragged": (7, 200, 80),
        }
        if FORMATS[name][0].block[1] == 32:  # whole blocks of 32, and not of 128
            sizes["narrow"] = (7, 96, 80)
        for label, size in sizes.items():
            yield f"{name}_{kind}_{label}", lambda s=size, d=dynamic: _quantized(name, *s, dynamic=d)
        yield f"{name}_{kind}_bias", lambda d=dynamic: _quantized(name, 7, 256, 80, dynamic=d, bias=True)
    yield f"{name}_float32", lambda: _quantized(name, 7, 256, 80, dynamic=True, dtype=FP32)
    yield f"{name}_weight_only_float32", lambda: _quantized(name, 7, 256, 80, dynamic=False, bias=True, dtype=FP32)
    yield f"{name}_accumulated", lambda: _with(_quantized(name, 7, 256, 80, dynamic=True, bias=True), 7, 80)
    yield f"{name}_weight_only_accumulated", lambda: _with(_quantized(name, 1, 256, 20, dynamic=False), 1, 20)
    yield f"{name}_to_float32", lambda: _with(_quantized(name, 16, 256, 80, dynamic=True), out_dtype=FP32)


def _with(call: Call, *acc: int, **options: Any) -> Call:
    args, given = call
    return args, given | options | ({"out_acc": accumulator(*acc)} if acc else {})


def _quantized_input(name: str, layout: ScaleLayout, *, told: bool = False, batched: bool = False) -> Call:
    """x as a norm hands it over: quantised, its scales in some layout."""
    (x, weight), options = _quantized(name, 6, 512, 80, dynamic=True)
    format = options["activation"]
    if batched:
        x = x.view(2, 3, 512)
    return (QTensor.quantize(x, format, layout), weight), options if told else {}


QUANTIZED: Cases = {case: make for name in FORMATS for case, make in _of_format(name)} | {
    "fp8_block_of_quantized_x": lambda: _quantized_input("fp8_block", ScaleLayout.ROW, told=True),
    "fp8_block_of_quantized_x_column": lambda: _quantized_input("fp8_block", ScaleLayout.COLUMN),
    "fp8_block_of_quantized_x_batched": lambda: _quantized_input("fp8_block", ScaleLayout.ROW, batched=True),
    "fp8_block_ue8m0_of_quantized_x": lambda: _quantized_input("fp8_block_ue8m0", ScaleLayout.COLUMN_PACKED),
    "mxfp8_tile_of_quantized_x": lambda: _quantized_input("mxfp8_tile", ScaleLayout.COLUMN_PACKED, told=True),
    "mxfp8_of_quantized_x": lambda: _quantized_input("mxfp8", ScaleLayout.ROW_PACKED),
    "mxfp4_of_quantized_x": lambda: _quantized_input("mxfp4", ScaleLayout.ROW),
    "fp8_block_strided": lambda: _strided("fp8_block", every_other),
    "mxfp8_rows_apart": lambda: _strided("mxfp8", rows_apart),
    "mxfp4_batched": lambda: _strided("mxfp4", lambda x: x.view(2, 3, 256)),
    "fp8_block_1d": lambda: _strided("fp8_block", lambda x: x[0]),
    "fp8_block_slice_of_rows": lambda: _reblocked("fp8_block", rows=slice(48, 304)),
    "fp8_block_slice_of_columns": lambda: _reblocked("fp8_block", columns=slice(64, 256)),
    "mxfp8_tile_slice": lambda: _reblocked("mxfp8_tile", rows=slice(7, 300), columns=slice(16, 256)),
}


def _strided(name: str, view: Callable[[torch.Tensor], torch.Tensor]) -> Call:
    (x, *others), options = _quantized(name, 6, 256, 80, dynamic=True)
    return (view(x), *others), options


def _reblocked(name: str, *, rows: slice = slice(None), columns: slice = slice(None)) -> Call:
    """A rank's share of a weight, whose edges are none of the blocks'."""
    (x, weight), options = _quantized(name, 7, 256, 384, dynamic=True)
    return (x[:, columns], weight.slice_rows(rows).slice_columns(columns)), options


LINEAR_CASES: Cases = PLAIN | QUANTIZED

WEIGHT_CASES: Cases = {
    "even": lambda: ((normal(24, 16, dtype=BF16),), {}),
    "odd": lambda: ((normal(11, 13, dtype=BF16),), {}),
    "one_row": lambda: ((normal(1, 40, dtype=BF16),), {}),
    "slice_of_columns": lambda: ((normal(8, 20, dtype=BF16)[:, 5:15],), {}),
    "float32": lambda: ((normal(24, 16),), {}),
    "native_one_block": lambda: ((normal(16, 32, dtype=BF16),), {}),
    "native_blocks": lambda: ((normal(48, 96, dtype=BF16),), {}),
    "native_slice_of_columns": lambda: ((normal(32, 100, dtype=BF16)[:, 3:67],), {}),
    **{name: lambda f=f: ((QTensor.quantize(normal(80, 256), f),), {}) for name, (f, _) in FORMATS.items()},
    **{f"{name}_ragged": lambda f=f: ((QTensor.quantize(normal(9, 200), f),), {}) for name, (f, _) in FORMATS.items()},
}


def _says(case: str, *words: str) -> bool:
    return any(word in case for word in words)


NOT_FOR_ONEDNN = {case for case in LINEAR_CASES if _says(case, "float32", "accumulated", "ragged")}
"""Refused on CPU by the products in torch's own parts: new bfloat16 outputs only, and whole blocks of columns."""
WEIGHTS_NOT_FOR_ONEDNN = {case for case in WEIGHT_CASES if _says(case, "float32", "ragged")}

_FOR_NATIVE = "native_"
NOT_FOR_NATIVE = {case for case in PLAIN if not case.startswith(_FOR_NATIVE)} | {
    case
    for case in QUANTIZED
    if _says(case, "float32", "accumulated", "ragged", "_features", "one_feature") or case == "mxfp8_tile_slice"
}
"""Refused by the compiled kernels, too: other sizes than multiples of 16 outputs and 32 inputs. Plain cases that fit
are named after the kernels, quantised ones that do not fit after what they are about."""
WEIGHTS_NOT_FOR_NATIVE = {
    case for case in WEIGHT_CASES if not case.startswith((_FOR_NATIVE, *FORMATS)) or _says(case, "ragged")
}
