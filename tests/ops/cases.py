"""What every implementation of an op is tried on: op -> case -> arguments, and the tolerances against the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rorqual.ops.moe import ExpertWeights, Routing, route_softmax
from rorqual.ops.sample import row_key
from tests.ops.gemm_cases import GEMM_CASES
from tests.ops.integer_cases import EMBEDDING_CASES, SPLIT_CASES
from tests.ops.kv_cases import LOAD_CASES, RECORD_STORE_CASES, TRANSFORM_CASES
from tests.ops.linear_cases import LINEAR_CASES, WEIGHT_CASES
from tests.ops.norm_cases import NORM_CASES
from tests.ops.paged_cases import ALLOCATE_CASES, ATTENTION_CASES, STORE_CASES
from tests.ops.quantize_cases import QUANTIZE_CASES
from tests.ops.rope_cases import ROPE_CASES
from tests.ops.values import Call, every_other, normal, rows_apart

BF16 = torch.bfloat16


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
    "float16": lambda: ((normal(5, 2 * 700, dtype=torch.float16) * 3,), {}),
    "wider_than_a_tile_bfloat16": lambda: ((normal(3, 2 * 2500, dtype=BF16),), {}),
    "batched": lambda: ((normal(2, 3, 64, dtype=torch.float16).transpose(0, 1),), {}),
    "rows_apart_bfloat16": lambda: ((rows_apart(normal(7, 48, dtype=BF16)),), {}),
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
    "equals": lambda: _routing(normal(9, 40).round(), 5),
    "bfloat16_equals": lambda: _routing(normal(60, 128, dtype=BF16).round(), 8),
    "bfloat16_far_apart": lambda: _routing(normal(60, 23, dtype=BF16) * 100, 4),
    "bfloat16_raw": lambda: _routing(normal(60, 60, dtype=BF16) * 3, 6, renormalize=False),
    "bfloat16_excluded_experts": lambda: _routing(_cut(normal(9, 12, dtype=BF16)), 12),
    "bfloat16_strided": lambda: _routing(every_other(normal(9, 33, dtype=BF16)), 3),
    "bfloat16_many": lambda: _routing(normal(700, 128, dtype=BF16) * 2, 8),
    "bfloat16_none": lambda: _routing(normal(0, 16, dtype=BF16), 2),
}


def _experts(tokens: int, experts: int, top_k: int, *, dtype=torch.float32, view=lambda x: x, only=None) -> Call:
    hidden, inter = 10, 6
    logits = normal(tokens, experts, seed=4)
    if only is not None:
        logits[:, only] += 50
    routing = route_softmax.reference(logits.to(dtype), top_k=top_k, renormalize=True)
    gate_up = tuple(normal(2 * inter, hidden, dtype=dtype, seed=10 + i) for i in range(experts))
    down = tuple(normal(hidden, inter, dtype=dtype, seed=50 + i) for i in range(experts))
    return (view(normal(tokens, hidden, dtype=dtype)), ExpertWeights(gate_up, down), Routing(*routing)), {}


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
    "transform_kv": TRANSFORM_CASES,
    "transform_and_store_kv": RECORD_STORE_CASES,
    "load_kv": LOAD_CASES,
    "rms_norm": NORM_CASES,
    "linear": LINEAR_CASES | GEMM_CASES,
    "prepare_weight": WEIGHT_CASES,
    "unpack_weight": WEIGHT_CASES,
    "embedding": EMBEDDING_CASES,
    "split_blocks": SPLIT_CASES,
    "rotary_embedding": ROPE_CASES,
    "quantize": QUANTIZE_CASES,
    "silu_and_mul": _GATE,
    "route_softmax": _ROUTE,
    "allocate_experts": {
        "some": lambda: ((3, 10, 6), {"dtype": BF16, "device": torch.device("cpu")}),
        "one": lambda: ((1, 4, 8), {"dtype": torch.float32, "device": torch.device("cpu")}),
    },
    "fused_experts": _EXPERTS,
    "gumbel_argmax": _DRAW,
    "row_max": _MAX,
    "top_candidates": _TOP,
    "total_mass": _MASS,
    "apply_penalties": _PENALTIES,
}
"""Every op's cases, each made anew when called."""
