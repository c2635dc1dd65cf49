"""What every implementation of an op is tried on: op -> case -> arguments, and the tolerances against the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rorqual.ops.moe import ExpertWeights, Routing, route_softmax
from tests.ops.gemm_cases import GEMM_CASES
from tests.ops.grouped_cases import GROUPED_CASES
from tests.ops.integer_cases import EMBEDDING_CASES, SPLIT_CASES
from tests.ops.kv_cases import LOAD_CASES, RECORD_STORE_CASES, TRANSFORM_CASES
from tests.ops.latent_cases import LATENT_CASES
from tests.ops.linear_cases import LINEAR_CASES, WEIGHT_CASES
from tests.ops.moe_cases import SCORE_CASES
from tests.ops.norm_cases import NORM_CASES
from tests.ops.paged_cases import ALLOCATE_CASES, ATTENTION_CASES, STORE_CASES
from tests.ops.quantize_cases import QUANTIZE_CASES
from tests.ops.rope_cases import ROPE_CASES
from tests.ops.row_attention_cases import ROW_ATTENTION_CASES
from tests.ops.row_cases import COMPRESS_CASES, STORE_ROWS_CASES
from tests.ops.sample_cases import SAMPLE_CASES
from tests.ops.select_cases import SELECT_CASES
from tests.ops.stream_cases import STREAM_CASES
from tests.ops.values import Call, cut, every_other, normal, rows_apart

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
    "limit": lambda: ((normal(7, 26) * 3,), {"limit": 1.5}),
    "limit_of_strided": lambda: ((every_other(normal(7, 90)) * 20,), {"limit": 10.0}),
    "limit_bfloat16": lambda: ((normal(100, 3072, dtype=BF16) * 20,), {"limit": 10.0}),
    "limit_bfloat16_odd": lambda: ((normal(7, 26, dtype=BF16) * 3,), {"limit": 0.7}),
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
    "bfloat16_excluded_experts": lambda: _routing(cut(normal(9, 12, dtype=BF16)), 12),
    "bfloat16_strided": lambda: _routing(every_other(normal(9, 33, dtype=BF16)), 3),
    "bfloat16_many": lambda: _routing(normal(70, 1000, dtype=BF16) * 2, 8),
    "bfloat16_none": lambda: _routing(normal(0, 16, dtype=BF16), 2),
}


def _experts(
    tokens: int,
    experts: int,
    top_k: int,
    *,
    dtype=torch.float32,
    weight_dtype=None,
    view=lambda x: x,
    only=None,
    limit=None,
) -> Call:
    hidden, inter = 10, 6
    logits = normal(tokens, experts, seed=4)
    if only is not None:
        logits[:, only] += 50
    routing = route_softmax.reference(logits.to(weight_dtype or dtype), top_k=top_k, renormalize=True)
    gate_up = tuple(normal(2 * inter, hidden, dtype=dtype, seed=10 + i) for i in range(experts))
    down = tuple(normal(hidden, inter, dtype=dtype, seed=50 + i) for i in range(experts))
    return (view(normal(tokens, hidden, dtype=dtype)), ExpertWeights(gate_up, down, None, limit), Routing(*routing)), {}


_SUMS: dict[str, Callable[[], Call]] = {
    "two": lambda: ((normal(2, 3, 40, dtype=BF16),), {}),
    "none": lambda: ((torch.zeros(3, 0, 16),), {}),
    "one": lambda: ((normal(1, 5, 7),), {}),
    "many": lambda: ((normal(11, 9, 300, dtype=BF16) * 100,), {}),
    "some_rows": lambda: ((normal(4, 9, 33)[:, :5],), {}),
    "strided": lambda: ((every_other(normal(3, 4, 20, dtype=torch.float16)),), {}),
}


_EXPERTS: dict[str, Callable[[], Call]] = {
    "none": lambda: _experts(0, 4, 2),
    "one": lambda: _experts(1, 4, 2),
    "several": lambda: _experts(17, 5, 2),
    "one_expert_for_all": lambda: _experts(6, 5, 1, only=3),
    "every_expert": lambda: _experts(4, 3, 3),
    "bfloat16": lambda: _experts(17, 5, 2, dtype=BF16),
    "strided": lambda: _experts(7, 5, 2, view=every_other),
    "limit": lambda: _experts(17, 5, 2, limit=0.7),
    "limit_bfloat16": lambda: _experts(17, 5, 2, dtype=BF16, limit=2.0),
    "float32_weights_bfloat16": lambda: _experts(17, 5, 2, dtype=BF16, weight_dtype=torch.float32),
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
    "row_attention": ROW_ATTENTION_CASES,
    "latent_attention": LATENT_CASES,
    "rms_norm": NORM_CASES,
    "linear": LINEAR_CASES | GEMM_CASES,
    "prepare_weight": WEIGHT_CASES,
    "unpack_weight": WEIGHT_CASES,
    "embedding": EMBEDDING_CASES,
    "split_blocks": SPLIT_CASES,
    "rotary_embedding": ROPE_CASES,
    "quantize": QUANTIZE_CASES,
    "silu_and_mul": _GATE,
    "sum_in_order": _SUMS,
    "route_softmax": _ROUTE,
    "route_scores": SCORE_CASES,
    "allocate_experts": {
        "some": lambda: ((3, 10, 6), {"dtype": BF16, "device": torch.device("cpu")}),
        "one": lambda: ((1, 4, 8), {"dtype": torch.float32, "device": torch.device("cpu")}),
    },
    "fused_experts": _EXPERTS,
    "select_rows": SELECT_CASES,
    **SAMPLE_CASES,
    "grouped_linear": GROUPED_CASES,
    "store_rows": STORE_ROWS_CASES,
    "compress_rows": COMPRESS_CASES,
    **STREAM_CASES,
}
"""Every op's cases, each made anew when called."""
