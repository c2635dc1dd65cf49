"""Cases of `quantize`: every format and layout, edges within groups, values that are easily rounded wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rorqual.quantization import (
    FP4_E4M3,
    FP8_ROW,
    FP8_ROW_UE8M0,
    MXFP4,
    MXFP8,
    QuantFormat,
    ScaleLayout,
)
from tests.ops.values import Call

BF16 = torch.bfloat16
FORMATS = (
    FP8_ROW,
    FP8_ROW_UE8M0,
    MXFP8,
    MXFP4,
    FP4_E4M3,
    QuantFormat("fp8_64", "e4m3", (1, 64), "float32"),
    QuantFormat("fp8_16_ue8m0", "e4m3", (1, 16), "ue8m0"),
    QuantFormat("fp8_32_e4m3", "e4m3", (1, 32), "e4m3"),
    QuantFormat("fp4_16_float32", "e2m1", (1, 16), "float32"),
)


def activations(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows of sizes from 1e-3 to 1e3, some values a thousand times as large as their neighbours."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    outliers = torch.where(torch.rand(rows, columns, generator=draw) < 0.01, 1000.0, 1.0)
    return (torch.randn(rows, columns, generator=draw) * sizes * outliers).to(dtype)


def boundaries(columns: int = 256) -> torch.Tensor:
    """Largest values on, just below and just above those at which the exponent of a scale changes; float32."""
    largest = torch.tensor([448.0, 6.0])[:, None] * 2.0 ** torch.arange(-20, 21)
    near = torch.stack([largest, *(torch.nextafter(largest, torch.tensor(to)) for to in (0.0, float("inf")))]).flatten()
    x = torch.linspace(-1, 1, columns).repeat(len(near), 1) * near[:, None]
    x[:, 1::16] = near[:, None]
    return x


def ties(columns: int = 256) -> torch.Tensor:
    """Values halfway between neighbours of e4m3 and of e2m1, in groups whose scale is one."""
    e4m3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    e2m1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    rows = []
    for values in (e4m3, e2m1):
        halfway = (values[1:] + values[:-1]) / 2
        row = torch.cat([halfway, -halfway]).repeat(columns)[:columns]
        row[::16] = values.max()
        rows.append(row)
    return torch.stack(rows)


def extremes(columns: int = 256) -> torch.Tensor:
    """Zeros of both signs, groups below every floor, the smallest and largest float32, and infinities."""
    x = torch.zeros(8, columns)
    x[1] = -0.0
    x[2] = torch.linspace(-1e-5, 1e-5, columns)
    x[3] = torch.linspace(-1e-37, 1e-37, columns)
    x[4] = torch.linspace(-1, 1, columns) * torch.finfo(torch.float32).max
    x[5, ::7] = float("inf")
    x[6] = torch.linspace(-1, 1, columns)
    x[6, 40] = float("-inf")
    x[7] = torch.linspace(-60000, 60000, columns)
    return x


def every_exponent() -> torch.Tensor:
    """All finite numbers of bfloat16, subnormal ones too, in order, as float32."""
    bits = torch.arange(1 << 16, dtype=torch.int32).reshape(256, 256) << 16
    return bits.view(torch.float32).nan_to_num(nan=1.0, posinf=0.0, neginf=0.0)


def spoiled(columns: int = 256) -> torch.Tensor:
    """Single values, whole groups and a whole row that are not numbers."""
    x = activations(4, columns)
    x[0, 5], x[1, 128:] = float("nan"), float("nan")
    x[1, 3], x[1, 4], x[2] = float("inf"), -float("nan"), float("nan")
    return x


def _call(
    format: QuantFormat, make: Callable[..., torch.Tensor], *sizes: Any, layout: ScaleLayout = ScaleLayout.ROW
) -> Callable[[], Call]:
    return lambda: ((make(*sizes),), {"format": format, "layout": layout})


def _apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    wide = torch.full((x.shape[0], x.shape[1] + gap), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def _cases() -> dict[str, Callable[[], Call]]:
    cases: dict[str, Callable[[], Call]] = {}
    for format in FORMATS:
        for layout in ScaleLayout:
            if (layout.packed and format.scale != "ue8m0") or (layout.by_column and format.scale == "e4m3"):
                continue
            columns = 1024 if layout is ScaleLayout.ROW_PACKED else 554
            name = f"{format.name}_{layout.value}"
            cases[f"{name}_bfloat16"] = _call(format, activations, 131, columns, BF16, layout=layout)
            cases[f"{name}_few"] = _call(format, activations, 6, columns, BF16, layout=layout)
            cases[f"{name}_one"] = _call(format, activations, 1, columns, layout=layout)
            cases[f"{name}_none"] = _call(format, activations, 0, columns, layout=layout)
        cases[f"{format.name}_boundaries"] = _call(format, boundaries)
        cases[f"{format.name}_ties"] = _call(format, ties)
        cases[f"{format.name}_every_exponent"] = _call(format, every_exponent)
        cases[f"{format.name}_extremes"] = _call(format, extremes)
        cases[f"{format.name}_nan"] = _call(format, spoiled)
    cases["narrow"] = _call(MXFP4, activations, 18, 6, layout=ScaleLayout.COLUMN_PACKED)
    cases["no_columns"] = _call(MXFP8, activations, 3, 0, layout=ScaleLayout.COLUMN_PACKED)
    cases["float16"] = _call(MXFP8, activations, 5, 256, torch.float16)
    cases["rows_apart"] = _call(FP8_ROW, lambda: _apart(activations(130, 256, BF16), 16), layout=ScaleLayout.COLUMN)
    cases["rows_apart_odd"] = _call(
        MXFP8, lambda: _apart(activations(3, 131, BF16), 3), layout=ScaleLayout.COLUMN_PACKED
    )
    cases["strided"] = _call(MXFP8, lambda: activations(5, 512)[:, ::2])
    cases["transposed"] = _call(MXFP8, lambda: activations(256, 5).t())
    cases["odd_group"] = _call(QuantFormat("fp8_24", "e4m3", (1, 24), "ue8m0"), activations, 5, 100)
    return cases


QUANTIZE_CASES = _cases()
REFUSED_BY_TRITON = {"strided", "transposed", "odd_group"}
