"""What every RMSNorm is tried on: alone, behind a residual, and with each way of quantising its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rorqual.ops.rms_norm import UtccpTarget
from rorqual.quantization import FP8_ROW, FP8_ROW_UE8M0, MXFP8, ScaleLayout
from tests.ops.values import Call, every_other, normal, rows_apart

Case = Callable[[], Call]
BF16 = torch.bfloat16
UNWRITTEN = 0x55555555


def norm_call(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    view: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    weight_view: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight,
    scale: float = 1.0,
    residual: bool = False,
    **options: Any,
) -> Call:
    """x and a weight around 1, views deciding their strides; every further option is the op's own."""
    x, beside = (view((normal(*shape, seed=i) * scale).to(dtype)) for i in range(2))
    weight = (normal(shape[-1], seed=9) * 0.1 + 1).to(weight_dtype or dtype)
    return (x, weight_view(weight)), {"eps": 1e-6, **({"residual": beside} if residual else {}), **options}


def _case(*shape: int, **options: Any) -> Case:
    return lambda: norm_call(*shape, **options)


def _plain(*, residual: bool) -> dict[str, Case]:
    def case(*shape: int, **options: Any) -> Case:
        return _case(*shape, residual=residual, **options)

    return {
        "none": case(0, 16),
        "one": case(1, 16),
        "odd": case(7, 13),
        "long": case(3, 2049),
        "heads": case(5, 3, 8),
        "heads_of_a_merged_product": case(5, 3, 8, view=rows_apart),
        "vector": case(24),
        "strided": case(4, 12, view=every_other),
        "transposed": case(6, 5, view=lambda x: x.t().contiguous().t()),
        "bfloat16": case(7, 64, dtype=BF16),
        "bfloat16_strided": case(4, 12, dtype=BF16, view=every_other),
        "bfloat16_none": case(0, 16, dtype=BF16),
        "bfloat16_odd": case(5, 77, dtype=BF16),
        "bfloat16_many": case(200, 576, dtype=BF16),
        "bfloat16_rows_apart": case(5, 40, dtype=BF16, view=rows_apart),
        "bfloat16_heads": case(5, 3, 40, dtype=BF16, view=rows_apart),
        "bfloat16_vector": case(40, dtype=BF16),
        "bfloat16_weight_apart": case(3, 40, dtype=BF16, weight_view=every_other),
        "bfloat16_wide": case(2, 7168, dtype=BF16),
        "float16": case(3, 40, dtype=torch.float16),
        "one_value": case(3, 1),
        "tiny_values": case(2, 16, scale=1e-5),  # eps decides
        "huge_values": case(2, 16, scale=1e15),
        "zeros": case(2, 16, scale=0.0),
    }


_PLAIN = _plain(residual=False) | {f"residual_{name}": case for name, case in _plain(residual=True).items()}


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def utccp_target(rows: int, size: int, block_m: int, *, exact: bool = False) -> UtccpTarget:
    """Space for the scales of `rows` rows; `exact` shapes it by rows and not by capacity, as callers may."""
    padded = -(-block_m // 128) * 128
    capacity = -(-rows // block_m) * padded + 4
    whole = torch.full((size // 128, capacity), UNWRITTEN, dtype=torch.int32).t()
    return UtccpTarget(whole[:rows] if exact else whole, block_m)


_OPTIONS: dict[str, Case] = {
    "scaled": _case(3, 40, out_scale=1.7),
    "scaled_bfloat16": _case(3, 40, dtype=BF16, out_scale=0.3, residual=True),
    "weight_of_another_dtype": _case(3, 40, dtype=BF16, weight_dtype=torch.float32),
    "unrounded_sum": _case(7, 40, residual=True, unrounded_sum=True),
    "unrounded_sum_bfloat16": _case(7, 600, dtype=BF16, residual=True, unrounded_sum=True),
    "unrounded_sum_of_nothing": _case(3, 40, dtype=BF16, unrounded_sum=True),
    "out": lambda: norm_call(3, 40, out=_empty(3, 40)),
    "out_rows_apart": lambda: norm_call(3, 40, residual=True, view=rows_apart, out=rows_apart(_empty(3, 40))),
    "out_heads": lambda: norm_call(3, 4, 40, dtype=BF16, out=_empty(3, 5, 40, dtype=BF16)[:, 1:]),
    "out_vector": lambda: norm_call(40, dtype=BF16, out=_empty(40, dtype=BF16)),
}
"""Beyond the plain norm, and not quantised."""

_FORMATS = (FP8_ROW, FP8_ROW_UE8M0, MXFP8)


def _layouts(*shape: int, even: bool, **options: Any) -> dict[str, Case]:
    """Every format in every layout that it has; ROW_PACKED only where four scales always fill a word."""
    return {
        f"{format.name}_{layout.value}": _case(*shape, format=format, layout=layout, **options)
        for format in _FORMATS
        for layout in ScaleLayout
        if (not layout.packed or format.scale == "ue8m0") and (even or layout is not ScaleLayout.ROW_PACKED)
    }


def _nan(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1, 3] = float("nan")
    return x


def _with_weight(call: Call, **values: float) -> Call:
    (x, weight), options = call
    weight[5], weight[70] = values["first"], values["second"]
    return (x, weight), options


_QUANTISED: dict[str, Case] = {
    **{f"rows_{name}": case for name, case in _layouts(5, 512, even=True, dtype=BF16).items()},
    **{f"empty_{name}": case for name, case in _layouts(0, 512, even=True, dtype=BF16).items()},
    **{f"odd_{name}": case for name, case in _layouts(7, 333, even=False, dtype=BF16, view=rows_apart).items()},
    **{f"batch_{name}": case for name, case in _layouts(2, 3, 512, even=True, dtype=BF16, view=rows_apart).items()},
    **{f"float32_{name}": case for name, case in _layouts(6, 640, even=False, residual=True, copy=True).items()},
    **{
        f"copy_{name}": case
        for name, case in _layouts(
            6, 1024, even=True, dtype=BF16, residual=True, copy=True, view=rows_apart, out_scale=2.5
        ).items()
    },
    "wide_fp8_row": _case(2, 7168, dtype=BF16, residual=True, format=FP8_ROW),
    "wide_mxfp8": _case(2, 7168, dtype=BF16, residual=True, format=MXFP8, layout=ScaleLayout.COLUMN_PACKED, copy=True),
    "float16_fp8_row": _case(3, 256, dtype=torch.float16, format=FP8_ROW, copy=True),
    "narrow_mxfp8": _case(3, 20, dtype=BF16, format=MXFP8, layout=ScaleLayout.COLUMN_PACKED),
    "strided_fp8_row": _case(3, 256, format=FP8_ROW, view=every_other),
    "unrounded_sum_fp8_row": _case(3, 256, dtype=BF16, residual=True, unrounded_sum=True, format=FP8_ROW, copy=True),
    "small_fp8_row": _case(3, 256, dtype=BF16, format=FP8_ROW, out_scale=1e-6),  # below the smallest scale
    "small_mxfp8": _case(3, 256, dtype=BF16, format=MXFP8, out_scale=1e-6),
    "large_fp8_row": _case(3, 256, format=FP8_ROW, out_scale=1e30),
    "large_mxfp8": _case(3, 256, format=MXFP8, out_scale=1e30),
    "zeros_mxfp8": _case(3, 256, format=MXFP8, scale=0.0),
    "nan_fp8_row": _case(3, 256, dtype=BF16, format=FP8_ROW, view=_nan, copy=True),
    "nan_mxfp8": _case(3, 256, dtype=BF16, format=MXFP8, view=_nan),
    "nan_weight_fp8_row": lambda: _with_weight(
        norm_call(3, 256, dtype=BF16, format=FP8_ROW), first=float("nan"), second=float("inf")
    ),
    "nan_weight_mxfp8": lambda: _with_weight(
        norm_call(3, 256, dtype=BF16, format=MXFP8), first=float("nan"), second=-float("inf")
    ),
    "utccp": lambda: norm_call(40, 256, dtype=BF16, format=MXFP8, utccp=utccp_target(40, 256, 16)),
    "utccp_long_blocks": lambda: norm_call(
        200, 128, dtype=BF16, format=MXFP8, layout=ScaleLayout.ROW_PACKED, utccp=utccp_target(200, 128, 192)
    ),
    "utccp_by_column": lambda: norm_call(
        5, 512, residual=True, copy=True, format=MXFP8, layout=ScaleLayout.COLUMN, utccp=utccp_target(5, 512, 4)
    ),
    "utccp_exact": lambda: norm_call(
        130, 384, format=MXFP8, layout=ScaleLayout.COLUMN_PACKED, utccp=utccp_target(130, 384, 128, exact=True)
    ),
    "utccp_of_nothing": lambda: norm_call(0, 256, format=MXFP8, utccp=utccp_target(0, 256, 16)),
}

NORM_CASES: dict[str, Case] = _PLAIN | _OPTIONS | _QUANTISED
PLAIN, QUANTISED = set(_PLAIN), set(_QUANTISED)

NORM_REFUSED: dict[str, set[str]] = {
    "cpu": NORM_CASES.keys() - PLAIN,
    "native": (NORM_CASES.keys() - PLAIN) | {name for name in PLAIN if "bfloat16" not in name}
    | {"residual_bfloat16_heads", "residual_bfloat16_vector"},
    "triton": {name for name in NORM_CASES if any(word in name for word in ("strided", "transposed", "weight_apart"))},
}  # fmt: skip
"""Backend -> the cases that it leaves to others."""
