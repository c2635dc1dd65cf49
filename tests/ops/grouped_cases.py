"""Cases of products in groups: plain weights in one tensor or several, and FP8 weights in blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rorqual.quantization import FP8_BLOCK, FP8_BLOCK_UE8M0, FP8_ROW, QTensor, QuantFormat
from tests.ops.values import Call, every_other, normal, rows_apart

BF16 = torch.bfloat16


def _plain(
    rows: int, groups: int, columns: int, features: int, *, dtype: torch.dtype = BF16, view=lambda x: x, one=True
) -> Callable[[], Call]:
    def make() -> Call:
        x = view(normal(rows, groups, columns, dtype=dtype))
        weights = normal(groups, features, columns, dtype=dtype, seed=1) * columns**-0.5
        return (x, weights if one else tuple(weights)), {}

    return make


def _fp8(
    rows: int,
    groups: int,
    columns: int,
    features: int,
    *,
    activation: QuantFormat | None = None,
    format: QuantFormat = FP8_BLOCK,
    view=rows_apart,
) -> Callable[[], Call]:
    def make() -> Call:
        weights = tuple(
            QTensor.quantize(normal(features, columns, seed=10 + i) * columns**-0.5, format) for i in range(groups)
        )
        options = {} if activation is None else {"activation": activation}
        return (view(normal(rows, groups, columns, dtype=BF16)), weights), options

    return make


GROUPED_CASES: dict[str, Callable[[], Call]] = {
    "plain": _plain(5, 3, 64, 40),
    "plain_of_slices": _plain(3, 4, 48, 20, view=rows_apart),
    "plain_transposed": _plain(3, 2, 32, 16, view=lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "plain_some_rows": _plain(19, 2, 64, 32),
    "plain_many_rows": _plain(130, 2, 40, 24),
    "plain_many_groups": _plain(2, 70, 16, 8),
    "plain_none": _plain(0, 2, 32, 16),
    "plain_float32": _plain(4, 2, 24, 12, dtype=torch.float32),
    "plain_apart": _plain(4, 2, 24, 12, one=False),
    "plain_strided": _plain(4, 2, 24, 12, view=every_other),
    "fp8": _fp8(5, 3, 256, 128),
    "fp8_in_shares": _fp8(2, 2, 1024, 64),
    "fp8_some_rows": _fp8(20, 2, 200, 130),
    "fp8_many_rows": _fp8(67, 2, 256, 128),
    "fp8_none": _fp8(0, 2, 128, 64),
    "fp8_rounded_x": _fp8(5, 2, 256, 128, activation=FP8_ROW),
    "fp8_rounded_x_in_shares": _fp8(3, 2, 1024, 64, activation=FP8_ROW),
    "fp8_rounded_x_many_rows": _fp8(67, 2, 256, 130, activation=FP8_ROW),
    "fp8_not_laid_out": _fp8(3, 2, 128, 128, format=FP8_BLOCK_UE8M0),
}
GROUPED_REFUSED = {"plain_float32", "plain_apart", "plain_strided", "fp8_not_laid_out"}
"""By Triton."""
FOR_CUBLAS = {"plain_some_rows", "plain_many_rows"}
"""Which alone are taken by cuBLAS."""
