"""What every implementation of an op is tried on: op -> case -> arguments, and the tolerances against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rorqual.ops.moe import Routing, route_softmax
from rorqual.ops.sample import row_key
from tests.ops.paged_cases import ALLOCATE_CASES, ATTENTION_CASES, STORE_CASES

Call = tuple[tuple[Any, ...], dict[str, Any]]
BF16 = torch.bfloat16


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Values around zero, the same each time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def every_other(x: torch.Tensor) -> torch.Tensor:
    """The same values behind strides that no dimension's size explains."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), float("nan") if x.is_floating_point() else 0, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def rows_apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with a gap after each row, as a slice of a wider output has."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _norm(*shape: int, residual: bool, dtype: torch.dtype = torch.float32, view=lambda x: x, scale=1.0) -> Call:
    x = [view(normal(*shape, dtype=dtype, seed=i) * scale) for i in range(1 + residual)]
    return (*x, normal(shape[-1], dtype=dtype, seed=9) * 0.1 + 1), {"eps": 1e-6}


def _norm_cases(*, residual: bool) -> dict[str, Callable[[], Call]]:
    def case(*shape: int, **options: Any) -> Callable[[], Call]:
        return lambda: _norm(*shape, residual=residual, **options)

    return {
        "none": case(0, 16),
        "one": case(1, 16),
        "odd": case(7, 13),
        "long": case(3, 2049),
        "heads": case(5, 3, 8),
        "heads_of_a_merged_product": case(5, 3, 8, view=rows_apart),
        "strided": case(4, 12, view=every_other),
        "transposed": case(6, 5, view=lambda x: x.t().contiguous().t()),
        "bfloat16": case(7, 64, dtype=BF16),
        "bfloat16_strided": case(4, 12, dtype=BF16, view=every_other),
        "bfloat16_none": case(0, 16, dtype=BF16),
        "bfloat16_odd": case(5, 77, dtype=BF16),
        "bfloat16_many": case(200, 576, dtype=BF16),
        "bfloat16_rows_apart": case(5, 40, dtype=BF16, view=rows_apart),
        **({} if residual else {"bfloat16_heads": case(5, 3, 40, dtype=BF16, view=rows_apart)}),
        "tiny_values": case(2, 16, scale=1e-5),  # eps decides
        "huge_values": case(2, 16, scale=1e15),
        "zeros": case(2, 16, scale=0.0),
    }


def _linear(
    rows: int, columns: int, features: int, *, bias: bool = False, dtype: torch.dtype = BF16, view=lambda x: x
) -> Call:
    x, weight = view(normal(rows, columns, dtype=dtype)), normal(features, columns, dtype=dtype, seed=1)
    return (x, weight, normal(features, dtype=dtype, seed=2)) if bias else (x, weight), {}


_LINEAR: dict[str, Callable[[], Call]] = {
    "none": lambda: _linear(0, 16, 24),
    "one": lambda: _linear(1, 16, 24),
    "odd": lambda: _linear(7, 13, 11),
    "odd_bias": lambda: _linear(7, 13, 11, bias=True),
    "many_rows": lambda: _linear(700, 24, 40),
    "wide": lambda: _linear(2, 1000, 3),
    "strided": lambda: _linear(5, 12, 8, view=every_other),
    "rows_apart": lambda: _linear(5, 12, 8, bias=True, view=rows_apart),
    "transposed": lambda: _linear(6, 10, 8, view=lambda x: x.t().contiguous().t()),
    "float32": lambda: _linear(3, 16, 24, dtype=torch.float32),
    "float32_bias": lambda: _linear(3, 16, 24, bias=True, dtype=torch.float32),
    "native_none": lambda: _linear(0, 64, 48),
    "native_one": lambda: _linear(1, 64, 48),
    "native_one_block": lambda: _linear(3, 32, 16, bias=True),
    "native_seven": lambda: _linear(7, 96, 80, bias=True),
    "native_sixteen": lambda: _linear(16, 96, 80),
    "native_seventeen": lambda: _linear(17, 64, 48, bias=True),
    "native_forty": lambda: _linear(40, 64, 112),
    "native_many": lambda: _linear(700, 1056, 48),
    "native_wider_than_a_panel": lambda: _linear(90, 16992, 32),
    "native_strided": lambda: _linear(5, 64, 32, view=every_other),
    "native_rows_apart": lambda: _linear(37, 64, 32, bias=True, view=rows_apart),
}

_WEIGHTS: dict[str, Callable[[], Call]] = {
    "even": lambda: ((normal(24, 16, dtype=BF16),), {}),
    "odd": lambda: ((normal(11, 13, dtype=BF16),), {}),
    "one_row": lambda: ((normal(1, 40, dtype=BF16),), {}),
    "slice_of_columns": lambda: ((normal(8, 20, dtype=BF16)[:, 5:15],), {}),
    "float32": lambda: ((normal(24, 16),), {}),
    "native_one_block": lambda: ((normal(16, 32, dtype=BF16),), {}),
    "native_blocks": lambda: ((normal(48, 96, dtype=BF16),), {}),
    "native_slice_of_columns": lambda: ((normal(32, 100, dtype=BF16)[:, 3:67],), {}),
}


def _rope(tokens: int, heads: int, head_dim: int, width: int, *, dtype=torch.float32, view=lambda x: x) -> Call:
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(width // 2) * 2 / width))
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(3))
    x = view(normal(tokens, heads, head_dim, dtype=dtype))
    return (x, positions, torch.cat((angles.cos(), angles.sin()), -1)), {}


_ROPE: dict[str, Callable[[], Call]] = {
    "none": lambda: _rope(0, 2, 8, 8),
    "one": lambda: _rope(1, 1, 8, 8),
    "several": lambda: _rope(9, 3, 16, 16),
    "part_of_the_head": lambda: _rope(9, 3, 16, 6),
    "bfloat16": lambda: _rope(9, 3, 16, 16, dtype=BF16),
    "part_of_the_head_bfloat16": lambda: _rope(9, 3, 16, 6, dtype=BF16),
    "none_bfloat16": lambda: _rope(0, 3, 64, 64, dtype=BF16),
    "wide_bfloat16": lambda: _rope(70, 12, 64, 64, dtype=BF16),
    "half_of_the_head_bfloat16": lambda: _rope(9, 3, 80, 40, dtype=BF16),
    "heads_of_a_merged_product_bfloat16": lambda: _rope(9, 5, 96, 96, dtype=BF16, view=lambda x: x[:, 1:4]),
    "strided_bfloat16": lambda: _rope(9, 3, 32, 32, dtype=BF16, view=every_other),
    "heads_of_a_merged_product": lambda: _rope(9, 5, 16, 16, view=lambda x: x[:, 1:4]),
    "strided": lambda: _rope(9, 3, 16, 16, view=every_other),
}

_GATE: dict[str, Callable[[], Call]] = {
    "none": lambda: ((normal(0, 8),), {}),
    "one": lambda: ((normal(1, 2),), {}),
    "odd": lambda: ((normal(7, 26),), {}),
    "bfloat16": lambda: ((normal(7, 26, dtype=BF16),), {}),
    "bfloat16_none": lambda: ((normal(0, 64, dtype=BF16),), {}),
    "bfloat16_many": lambda: ((normal(100, 3072, dtype=BF16) * 3,), {}),
    "bfloat16_strided": lambda: ((every_other(normal(7, 90, dtype=BF16)),), {}),
    "bfloat16_large_values": lambda: ((normal(4, 64, dtype=BF16) * 200,), {}),
    "strided": lambda: ((every_other(normal(7, 26)),), {}),
    "large_values": lambda: ((normal(4, 8) * 200,), {}),
}


def _routing(logits: torch.Tensor, top_k: int, *, renormalize: bool = True) -> Call:
    return (logits,), {"top_k": top_k, "renormalize": renormalize}


_ROUTE: dict[str, Callable[[], Call]] = {
    "none": lambda: _routing(normal(0, 8), 2),
    "one_of_one": lambda: _routing(normal(3, 1), 1),
    "some": lambda: _routing(normal(5, 9), 2),
    "some_raw": lambda: _routing(normal(5, 9), 2, renormalize=False),
    "all_experts": lambda: _routing(normal(5, 4), 4),
    "negative": lambda: _routing(-normal(5, 128).abs(), 8),
    "bfloat16": lambda: _routing(normal(5, 16, dtype=BF16) + torch.arange(16).to(BF16), 3),
    "far_apart": lambda: _routing(normal(5, 16) * 100, 3),
}


def _experts(tokens: int, experts: int, top_k: int, *, dtype=torch.float32, view=lambda x: x, only=None) -> Call:
    hidden, inter = 10, 6
    logits = normal(tokens, experts, seed=4)
    if only is not None:
        logits[:, only] += 50
    routing = route_softmax.reference(logits.to(dtype), top_k=top_k, renormalize=True)
    gate_up = [normal(2 * inter, hidden, dtype=dtype, seed=10 + i) for i in range(experts)]
    down = [normal(hidden, inter, dtype=dtype, seed=50 + i) for i in range(experts)]
    return (view(normal(tokens, hidden, dtype=dtype)), gate_up, down, Routing(*routing)), {}


_EXPERTS: dict[str, Callable[[], Call]] = {
    "none": lambda: _experts(0, 4, 2),
    "one": lambda: _experts(1, 4, 2),
    "several": lambda: _experts(17, 5, 2),
    "one_expert_for_all": lambda: _experts(6, 5, 1, only=3),
    "every_expert": lambda: _experts(4, 3, 3),
    "bfloat16": lambda: _experts(17, 5, 2, dtype=BF16),
    "strided": lambda: _experts(7, 5, 2, view=every_other),
}


def _draw(
    rows: int, size: int, *, dtype=torch.float32, temperature=1.0, spread=3.0, view=lambda x: x, ids=False
) -> Call:
    logits = view((normal(rows, size) * spread).to(dtype))
    keys = torch.tensor([row_key(i, 7 * i) for i in range(rows)], dtype=torch.int64).reshape(rows, 2)
    options = {"token_ids": torch.arange(size).flip(0).expand(rows, size)} if ids else {}
    return (logits, torch.full((rows,), temperature, dtype=torch.float64), keys), options


def _cut(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, ::3] = float("-inf")
    return x


_DRAW: dict[str, Callable[[], Call]] = {
    "none": lambda: _draw(0, 5000),
    "rows": lambda: _draw(9, 5001),
    "flat": lambda: _draw(5, 4096, spread=0.0),
    "confident": lambda: _draw(5, 5000, spread=30.0),
    "cold": lambda: _draw(5, 5000, temperature=0.01),
    "hot": lambda: _draw(5, 5000, temperature=50.0),
    "very_cold": lambda: _draw(3, 5000, temperature=1e-6),
    "bfloat16": lambda: _draw(5, 5000, dtype=BF16),
    "excluded_tokens": lambda: _draw(5, 5000, view=_cut),
    "strided": lambda: _draw(5, 5000, view=every_other),
    "short_rows": lambda: _draw(9, 199),
    "candidates": lambda: _draw(9, 20, ids=True),
    "many_candidates": lambda: _draw(3, 5000, ids=True),
}


def _spoiled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[1, 5] = x[1, 9] = float("nan")
    return x


_MAX: dict[str, Callable[[], Call]] = {
    "none": lambda: ((normal(0, 9),), {}),
    "rows": lambda: ((normal(7, 199),), {}),
    "equals": lambda: ((torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-1.0, -1.0, -2.0]]),), {}),
    "bfloat16": lambda: ((normal(7, 199, dtype=BF16),), {}),
    "excluded_tokens": lambda: ((_cut(normal(7, 199)),), {}),
    "strided": lambda: ((every_other(normal(7, 199)),), {}),
    "nan_row": lambda: ((_spoiled(normal(3, 20)),), {}),
}

_TOP: dict[str, Callable[[], Call]] = {
    "none": lambda: ((normal(0, 9),), {"count": 2}),
    "one": lambda: ((normal(7, 199),), {"count": 1}),
    "twenty": lambda: ((normal(7, 5001),), {"count": 20}),
    "all": lambda: ((normal(3, 199),), {"count": 199}),
    "equals": lambda: ((normal(5, 300).round(),), {"count": 50}),
    "signed_zeros": lambda: ((torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0, -1.0]]),), {"count": 5}),
    "bfloat16": lambda: ((normal(7, 199, dtype=BF16),), {"count": 20}),
    "excluded_tokens": lambda: ((_cut(normal(3, 99)),), {"count": 80}),
    "strided": lambda: ((every_other(normal(7, 199)),), {"count": 20}),
}


def _mass(x: torch.Tensor, temperature: float = 1.0) -> Call:
    return (x, torch.full((len(x),), temperature, dtype=torch.float64)), {}


_MASS: dict[str, Callable[[], Call]] = {
    "none": lambda: _mass(normal(0, 9)),
    "rows": lambda: _mass(normal(7, 5001)),
    "cold": lambda: _mass(normal(7, 199), 0.01),
    "bfloat16": lambda: _mass(normal(7, 199, dtype=BF16)),
    "excluded_tokens": lambda: _mass(_cut(normal(7, 199))),
    "strided": lambda: _mass(every_other(normal(7, 199))),
}


def _penalties(rows: int, size: int, *, share: float = 0.2, view=lambda x: x) -> Call:
    there = normal(rows, size, seed=5) < -1.0 if share else torch.zeros(rows, size, dtype=torch.bool)
    counts = ((normal(rows, size, seed=6) * 2).clamp(min=0) * (share > 0)).int()
    strengths = [torch.linspace(*ends, rows) for ends in ((0.8, 1.5), (-0.5, 0.7), (-1.0, 1.0))]
    names = ("repetition", "frequency", "presence")
    return (view(normal(rows, size) * 3), there, counts), dict(zip(names, strengths, strict=True))


_PENALTIES: dict[str, Callable[[], Call]] = {
    "none": lambda: _penalties(0, 9),
    "rows": lambda: _penalties(7, 199),
    "nothing_there_before": lambda: _penalties(3, 199, share=0.0),
    "excluded_tokens": lambda: _penalties(7, 199, view=_cut),
    "strided": lambda: _penalties(7, 199, view=every_other),
}

CASES: dict[str, dict[str, Callable[[], Call]]] = {
    "paged_attention": {
        name: lambda make=make: ((made := make()).args, made.options) for name, make in ATTENTION_CASES.items()
    },
    "store_kvcache": STORE_CASES,
    "allocate_kvcache": ALLOCATE_CASES,
    "rms_norm": _norm_cases(residual=False),
    "add_rms_norm": _norm_cases(residual=True),
    "linear": _LINEAR,
    "prepare_weight": _WEIGHTS,
    "rotary_embedding": _ROPE,
    "silu_and_mul": _GATE,
    "route_softmax": _ROUTE,
    "fused_experts": _EXPERTS,
    "gumbel_argmax": _DRAW,
    "row_max": _MAX,
    "top_candidates": _TOP,
    "total_mass": _MASS,
    "apply_penalties": _PENALTIES,
}
"""Every op's cases, each made anew when called."""
