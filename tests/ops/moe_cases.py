"""Cases of the routing by scores: whom biases, groups and equal scores choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rorqual.ops.moe import TokenTable
from tests.ops.values import Call, every_other, normal


def _scored(logits: torch.Tensor, top_k: int, scoring: str = "sigmoid", **options: Any) -> Call:
    return (logits,), {"scoring": scoring, "top_k": top_k, "renormalize": True, "scale": 2.5} | options


def _bias(num_experts: int, scale: float = 0.3) -> torch.Tensor:
    return normal(num_experts, seed=9) * scale


def _grouped(top_groups: int, **options: Any) -> Call:
    """As DeepSeek-V3 has it: 256 experts in 8 groups."""
    return _scored(normal(21, 256), 8, num_groups=8, top_groups=top_groups, **{"bias": _bias(256)} | options)


def _hashed(dtype: torch.dtype, num_tokens: int = 9, **options: Any) -> Call:
    ids = normal(40, 16, seed=6).argsort(1)[:, :3].to(dtype)
    tokens = normal(num_tokens, 40, seed=7).argmax(1).to(dtype) if num_tokens else torch.zeros(0, dtype=dtype)
    return _scored(normal(num_tokens, 16), 3, "sqrtsoftplus", table=TokenTable(ids, tokens), **options)


SCORE_CASES: dict[str, Callable[[], Call]] = {
    "none": lambda: _scored(normal(0, 8), 2),
    "none_in_groups": lambda: _scored(normal(0, 8), 2, num_groups=4, top_groups=2),
    "one_of_one": lambda: _scored(normal(3, 1), 1),
    "sigmoid": lambda: _scored(normal(9, 20), 3, bias=_bias(20)),
    "sqrtsoftplus": lambda: _scored(normal(9, 256), 6, "sqrtsoftplus", bias=_bias(256), scale=1.5),
    "sqrtsoftplus_of_384": lambda: _scored(normal(9, 384), 6, "sqrtsoftplus", bias=_bias(384)),
    "not_renormalised": lambda: _scored(normal(9, 20), 3, "sqrtsoftplus", renormalize=False),
    "all_experts": lambda: _scored(normal(5, 4), 4, bias=_bias(4)),
    "far_apart": lambda: _scored(normal(9, 16) * 100, 3, "sqrtsoftplus"),
    "far_apart_sigmoid": lambda: _scored(normal(9, 16) * 100, 3, bias=_bias(16)),
    "negative_biases": lambda: _scored(normal(9, 16), 3, bias=_bias(16) - 5),
    "equals": lambda: _scored(normal(60, 40).round(), 5, bias=_bias(40).round()),
    "equals_sqrtsoftplus": lambda: _scored(normal(60, 40).round(), 5, "sqrtsoftplus"),
    "all_equal": lambda: _scored(torch.zeros(3, 16), 5),
    "strided": lambda: _scored(every_other(normal(9, 33)), 3, bias=_bias(33)),
    "groups": lambda: _grouped(4),
    "one_group": lambda: _grouped(1),
    "every_group": lambda: _grouped(8),
    "groups_without_bias": lambda: _grouped(3, bias=None),
    "groups_negative_biases": lambda: _grouped(2, bias=_bias(256) - 3),
    "groups_all_equal": lambda: _scored(torch.zeros(3, 16), 5, num_groups=4, top_groups=2),
    "groups_equals": lambda: _scored(normal(60, 32).round(), 4, num_groups=8, top_groups=3),
    "whole_groups": lambda: _scored(normal(9, 12), 6, num_groups=4, top_groups=2, bias=_bias(12)),
    "hash_int32": lambda: _hashed(torch.int32),
    "hash_int64": lambda: _hashed(torch.int64, renormalize=False),
    "hash_none": lambda: _hashed(torch.int32, 0),
    "many": lambda: _scored(normal(48, 128), 8, bias=_bias(128)),
}
