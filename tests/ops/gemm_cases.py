"""More cases of `linear` with quantised weights: where GPU kernels split K, change tiles, or decode a weight first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from rorqual.quantization import FP8_ROW, FP8_ROW_UE8M0, MXFP8, QTensor, ScaleLayout
from tests.ops.linear_cases import FORMATS, PLAIN, QUANTIZED, WEIGHT_CASES, Cases, accumulator
from tests.ops.values import Call, normal

FP32, FP16 = torch.float32, torch.float16


def _product(
    name: str, rows: int, columns: int, features: int, *, dynamic: bool, bias: bool = False, **options: Any
) -> Call:
    """Outputs around one."""
    format, activation = FORMATS[name]
    weight = QTensor.quantize(normal(features, columns, seed=1) * columns**-0.5, format)
    x = normal(rows, columns).to(torch.bfloat16)
    added = {"bias": normal(features, seed=2)} if bias else {}
    return (x, weight), ({"activation": activation} if dynamic else {}) | added | options


def _of_format(name: str) -> Iterator[tuple[str, Callable[[], Call]]]:
    for dynamic, kind in ((True, "dynamic"), (False, "weight_only")):
        stem = f"gemm_{name}_{kind}"
        yield f"{stem}_shares", lambda d=dynamic: _product(name, 3, 1024, 70, dynamic=d)
        yield f"{stem}_uneven_shares", lambda d=dynamic: _product(name, 17, 1100, 24, dynamic=d, bias=True)
        yield f"{stem}_wider", lambda d=dynamic: _product(name, 65, 160, 136, dynamic=d)
    yield f"gemm_{name}_float16", lambda: _product(name, 5, 128, 40, dynamic=True, bias=True, out_dtype=FP16)
    yield (
        f"gemm_{name}_shares_accumulated",
        lambda: _product(name, 2, 1024, 40, dynamic=False, bias=True, out_acc=accumulator(2, 40)),
    )


def _expanded(name: str, **options: Any) -> Call:
    return _product(name, 515, 96, 40, **options)


def _kept(layout: ScaleLayout, *, scale: str) -> Call:
    """A quantised x whose values are a slice of something wider."""
    (x, weight), _ = _product("fp8_block", 9, 384, 40, dynamic=True)
    wide = QTensor.quantize(torch.cat((x, x), 1), FP8_ROW if scale == "float32" else FP8_ROW_UE8M0)
    return (wide.slice_columns(slice(0, 384)).to_layout(layout), weight), {}


def _nan_in_x(name: str, *, dynamic: bool) -> Call:
    (x, weight), options = _product(name, 4, 256, 40, dynamic=dynamic)
    x[2, 130] = float("nan")
    return (x, weight), options


GEMM_CASES: Cases = {case: make for name in FORMATS for case, make in _of_format(name)} | {
    "gemm_mxfp8_expanded": lambda: _expanded("mxfp8", dynamic=True),
    "gemm_mxfp8_tile_expanded_bias": lambda: _expanded("mxfp8_tile", dynamic=False, bias=True),
    "gemm_mxfp4_expanded_bias": lambda: _expanded("mxfp4", dynamic=True, bias=True),
    "gemm_mxfp4_expanded_float32": lambda: _expanded("mxfp4", dynamic=False, out_dtype=FP32),
    "gemm_mxfp4_expanded_accumulated": lambda: _expanded("mxfp4", dynamic=False, out_acc=accumulator(515, 40)),
    "gemm_fp8_block_of_a_slice": lambda: _kept(ScaleLayout.ROW, scale="float32"),
    "gemm_fp8_block_of_a_slice_column": lambda: _kept(ScaleLayout.COLUMN, scale="ue8m0"),
    "gemm_mxfp4_of_words": lambda: _of_words("mxfp4"),
    "gemm_mxfp8_tile_of_words_batched": lambda: _of_words("mxfp8_tile", batch=(2,)),
    "gemm_nan_fp8_block": lambda: _nan_in_x("fp8_block", dynamic=True),
    "gemm_nan_mxfp8": lambda: _nan_in_x("mxfp8", dynamic=True),
    "gemm_nan_mxfp4": lambda: _nan_in_x("mxfp4", dynamic=True),
    "gemm_nan_mxfp4_weight_only": lambda: _nan_in_x("mxfp4", dynamic=False),
    "gemm_fp8_block_for_cublas": lambda: _product("fp8_block", 130, 640, 256, dynamic=True),
    "gemm_fp8_block_for_cublas_padded_bias": lambda: _product("fp8_block", 131, 512, 256, dynamic=True, bias=True),
    "gemm_fp8_block_ue8m0_for_cublas_float32": lambda: _product(
        "fp8_block_ue8m0", 129, 384, 128, dynamic=True, out_dtype=FP32
    ),
}


def _of_words(name: str, batch: tuple[int, ...] = ()) -> Call:
    (x, weight), _ = _product(name, 6, 256, 40, dynamic=True)
    return (QTensor.quantize(x.view(*batch, -1, 256) if batch else x, MXFP8, ScaleLayout.COLUMN_PACKED), weight), {}


def _is_not_for_onednn(case: str) -> bool:
    other = any(word in case for word in ("accumulated", "float32", "float16", "uneven", "bias"))
    return other or ("fp8_block" in case and "wider" in case)


GEMM_NOT_FOR_ONEDNN = {case for case in GEMM_CASES if _is_not_for_onednn(case)}
"""Refused on CPU: other outputs, a float32 bias, blocks of 128 columns that end within a row."""

_ANOTHER_DTYPE = "weight_only_float32"
_MORE_ROWS = {"native_seventeen", "native_forty", "native_forty_to_float32"}
_OF_16_BITS = {case for case, make in PLAIN.items() if make()[0][0].dtype.itemsize == 2}
_MANY_ROWS = {"many_rows", "native_many"}
FEW_ROWS = _OF_16_BITS - _MORE_ROWS - _MANY_ROWS
"""Plain weights of 16 bits beside few rows, which Triton's kernels take before cuBLAS may."""
NOT_FOR_TRITON = {
    *(PLAIN.keys() - _OF_16_BITS),
    *_MANY_ROWS,
    *(f"{name}_{_ANOTHER_DTYPE}" for name in FORMATS),
    "mxfp8_tile_slice",
}
"""Plain weights in float32 or beside many rows, float32 beside a decoded weight, and blocks of 16 columns."""

WEIGHTS_NOT_FOR_TRITON = {case for case in WEIGHT_CASES if not case.startswith(tuple(FORMATS))}
"""Plain ones."""
WEIGHTS_TRITON_LEAVES_AS_THEY_ARE = WEIGHTS_NOT_FOR_TRITON | {"fp8_block", "fp8_block_ragged"}
TAKEN_BY_CUBLASLT = {
    "fp8_block_dynamic_130",
    "fp8_block_ue8m0_dynamic_130",
    "gemm_fp8_block_for_cublas",
    "gemm_fp8_block_for_cublas_padded_bias",
    "gemm_fp8_block_ue8m0_for_cublas_float32",
}
"""Quantised weights in whole blocks of 128 x 128, for more than a few rows; all others are refused."""
TAKEN_BY_HOPPER_TILES = {"native_forty"}
"""More rows, nothing to add, and addresses that TMA can have: not for cuBLAS where there is a Hopper."""
NOT_FOR_CUBLASLT = FEW_ROWS | {case for case in (QUANTIZED | GEMM_CASES) if case not in TAKEN_BY_CUBLASLT}
