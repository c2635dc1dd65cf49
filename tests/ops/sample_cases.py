"""Cases of the sampler's ops: draws, what filters keep, candidates, penalties."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from rorqual.ops.sample import LastKept, row_key
from tests.ops.values import Call, cut, every_other, normal

BF16 = torch.bfloat16


def _draw(
    rows: int,
    size: int,
    *,
    dtype=torch.float32,
    temperature: float | None = 1.0,
    spread=3.0,
    view=lambda x: x,
    last=None,
) -> Call:
    logits = view((normal(rows, size) * spread).to(dtype))
    keys = torch.tensor([row_key(i, 7 * i) for i in range(rows)], dtype=torch.int64).reshape(rows, 2)
    of_all = torch.arange(rows).double() % 3 * 0.7
    if temperature is not None:
        of_all = torch.full((rows,), temperature, dtype=torch.float64)
    return (logits, of_all, keys), {} if last is None else {"last": last(logits)}


def _best_of(count: int) -> Callable[[torch.Tensor], LastKept]:
    """Keeps `count` tokens of each row, but all of the first."""

    def last(logits: torch.Tensor) -> LastKept:
        values, ids = logits.float().sort(dim=1, descending=True, stable=True)
        kept = LastKept(values[:, count - 1].clone(), ids[:, count - 1].clone())
        kept.values[0], kept.token_ids[0] = -math.inf, logits.shape[1] - 1
        return kept

    return last


_DRAW: dict[str, Callable[[], Call]] = {
    "none": lambda: _draw(0, 5000),
    "rows": lambda: _draw(9, 5001),
    "flat": lambda: _draw(5, 4096, spread=0.0),
    "confident": lambda: _draw(5, 5000, spread=30.0),
    "cold": lambda: _draw(5, 5000, temperature=0.01),
    "hot": lambda: _draw(5, 5000, temperature=50.0),
    "very_cold": lambda: _draw(3, 5000, temperature=1e-6),
    "beyond_float32_cold": lambda: _draw(3, 9000, temperature=1e-45),
    "beyond_float32_cold_negative": lambda: _draw(3, 9000, temperature=1e-45, view=lambda x: -x.abs() - 1),
    "beyond_float32_hot": lambda: _draw(3, 9000, temperature=1e40),
    "many_pieces": lambda: _draw(2, 40000, spread=0.001),
    "some_greedy": lambda: _draw(7, 5000, temperature=None),
    "some_greedy_short": lambda: _draw(7, 50, temperature=None),
    "bfloat16": lambda: _draw(5, 5000, dtype=BF16),
    "excluded_tokens": lambda: _draw(5, 5000, view=cut),
    "strided": lambda: _draw(5, 5000, view=every_other),
    "short_rows": lambda: _draw(9, 199),
    "few_kept": lambda: _draw(9, 5001, last=_best_of(20)),
    "one_kept": lambda: _draw(9, 5001, spread=0.0, last=_best_of(1)),
    "many_kept": lambda: _draw(5, 5001, temperature=2.0, last=_best_of(4000)),
    "some_of_equals": lambda: _draw(5, 5001, dtype=BF16, spread=0.1, last=_best_of(700)),
    "short_rows_kept": lambda: _draw(9, 199, last=_best_of(7)),
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
    "excluded_tokens": lambda: ((cut(normal(7, 199)),), {}),
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
    "excluded_tokens": lambda: ((cut(normal(3, 99)),), {"count": 80}),
    "strided": lambda: ((every_other(normal(7, 199)),), {"count": 20}),
}


def _narrow(rows: int, size: int, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, make=None) -> Call:
    """A filter that is off in every fourth row."""
    logits = normal(rows, size) * 3
    logits = logits if make is None else make(logits)
    on = torch.arange(rows) % 4 != 3
    cut_at = torch.where(on, math.log(min_p) if min_p else -math.inf, -math.inf)
    options = {
        "log_min_p": cut_at.double(),
        "top_k": torch.where(on, top_k or size, size),
        "top_p": torch.where(on, torch.tensor(top_p, dtype=torch.float64), 1.0),
    }
    highest = logits.float().amax(1) if rows else torch.empty(0)
    return (logits, highest, torch.full((rows,), temperature, dtype=torch.float64)), options


def _steps(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).round() / 2


def _two_crowds(x: torch.Tensor) -> torch.Tensor:
    """Two narrow bands: what is sought lies among many that are nearly the same."""
    x = x * 1e-4
    x[:, ::2] -= 9
    return x


_NARROW: dict[str, Callable[[], Call]] = {
    "none": lambda: _narrow(0, 300, top_k=3),
    "off": lambda: _narrow(3, 300),
    "top_k": lambda: _narrow(5, 5001, top_k=40),
    "top_k_one_left": lambda: _narrow(2, 300, top_k=299),
    "top_k_of_equals": lambda: _narrow(5, 5001, top_k=700, make=_steps),
    "top_k_of_all_equals": lambda: _narrow(2, 5001, top_k=4321, make=torch.zeros_like),
    "top_k_of_excluded_tokens": lambda: _narrow(2, 300, top_k=250, make=cut),
    "top_p": lambda: _narrow(5, 5001, top_p=0.9),
    "top_p_tiny": lambda: _narrow(2, 300, top_p=5e-324),
    "top_p_nearly_one": lambda: _narrow(5, 5001, top_p=1 - 2**-53),
    "top_p_of_equals": lambda: _narrow(5, 5001, top_p=0.7, make=_steps),
    "top_p_of_all_equals": lambda: _narrow(2, 5001, top_p=0.75, make=torch.zeros_like),
    "top_p_hot": lambda: _narrow(2, 5001, top_p=0.9, temperature=20.0),
    "top_p_cold": lambda: _narrow(2, 5001, top_p=0.9, temperature=1e-5),
    "top_p_of_crowds": lambda: _narrow(3, 5001, top_p=0.6, make=_two_crowds),
    "top_p_far_out": lambda: _narrow(2, 5001, top_p=0.999999, temperature=0.3),
    "min_p": lambda: _narrow(5, 5001, min_p=0.05),
    "min_p_only_the_best": lambda: _narrow(2, 300, min_p=1.0, make=_steps),
    "min_p_tiny": lambda: _narrow(2, 5001, min_p=1e-30),
    "min_p_hotter_than_float32": lambda: _narrow(2, 300, min_p=0.5, temperature=1e300),
    "top_k_and_top_p": lambda: _narrow(5, 5001, top_k=400, top_p=0.8),
    "top_k_behind_top_p": lambda: _narrow(2, 5001, top_k=4000, top_p=0.8, temperature=0.5),
    "min_p_and_top_k": lambda: _narrow(5, 5001, min_p=0.01, top_k=30),
    "all_three": lambda: _narrow(5, 5001, min_p=0.001, top_k=300, top_p=0.95),
    "all_three_bfloat16": lambda: _narrow(5, 5001, min_p=0.001, top_k=300, top_p=0.95, make=lambda x: x.to(BF16)),
    "all_three_of_excluded_tokens": lambda: _narrow(5, 5001, min_p=0.001, top_k=300, top_p=0.95, make=cut),
    "all_three_strided": lambda: _narrow(5, 5001, min_p=0.001, top_k=300, top_p=0.95, make=every_other),
    "one_token": lambda: _narrow(2, 1, min_p=0.5, top_p=0.5),
    "signed_zeros": lambda: _narrow(
        2, 6, top_k=3, make=lambda _: torch.tensor([[0.0, -0.0, 1.0, -0.0, 0.0, -1.0]]).expand(2, -1)
    ),
}


def _edit(rows: int, size: int, *, share: float = 0.2, table_rows=None, view=lambda x: x) -> Call:
    tables = rows + 2
    there = normal(tables, size, seed=5) < -1.0 if share else torch.zeros(tables, size, dtype=torch.bool)
    counts = ((normal(tables, size, seed=6) * 2).clamp(min=0) * (share > 0)).int()
    bias = normal(tables, size, seed=7).clamp(min=0)
    bias[:, ::7] = -math.inf
    bias[0], there[0], counts[0] = 0.0, False, 0
    strengths = [torch.linspace(*ends, rows) for ends in ((0.8, 1.5), (-0.5, 0.7), (-1.0, 1.0))]
    names = ("repetition", "frequency", "presence")
    table_rows = torch.arange(rows).flip(0) + 1 if table_rows is None else torch.tensor(table_rows)
    options = {"bias": bias, "in_prompt": there, "output_counts": counts, **dict(zip(names, strengths, strict=True))}
    return (view(normal(rows, size) * 3), table_rows), options


_EDITS: dict[str, Callable[[], Call]] = {
    "none": lambda: _edit(0, 9),
    "rows": lambda: _edit(7, 199),
    "long_rows": lambda: _edit(3, 5001),
    "some_rows": lambda: _edit(5, 199, table_rows=[0, 4, 0, 1, 6]),
    "no_row": lambda: _edit(2, 199, table_rows=[0, 0]),
    "nothing_there_before": lambda: _edit(3, 199, share=0.0),
    "bfloat16": lambda: _edit(3, 199, view=lambda x: x.to(BF16)),
    "excluded_tokens": lambda: _edit(7, 199, view=cut),
    "strided": lambda: _edit(7, 199, view=every_other),
}


def _mask(rows: int, size: int, *, mask_rows=None, words: int | None = None, view=lambda x: x) -> Call:
    words = -(-size // 32) if words is None else words
    bits = (normal(rows + 2, words, seed=8) * 2**31).clamp(-(2**31), 2**31 - 129).int()
    mask_rows = torch.arange(rows).flip(0) + 1 if mask_rows is None else torch.tensor(mask_rows)
    return (view(normal(rows, size) * 3), mask_rows, bits), {}


_MASKS: dict[str, Callable[[], Call]] = {
    "none": lambda: _mask(0, 9),
    "rows": lambda: _mask(7, 199),
    "long_rows": lambda: _mask(3, 5001),
    "some_rows": lambda: _mask(5, 199, mask_rows=[-1, 4, -1, 0, 4]),
    "no_row": lambda: _mask(2, 199, mask_rows=[-1, -1]),
    "whole_words": lambda: _mask(3, 4096),
    "more_words": lambda: _mask(3, 64, words=3),
    "bfloat16": lambda: _mask(3, 199, view=lambda x: x.to(BF16)),
    "excluded_tokens": lambda: _mask(7, 199, view=cut),
    "strided": lambda: _mask(7, 199, view=every_other),
}

SAMPLE_CASES: dict[str, dict[str, Callable[[], Call]]] = {
    "gumbel_argmax": _DRAW,
    "row_max": _MAX,
    "narrow": _NARROW,
    "top_candidates": _TOP,
    "edit_logits": _EDITS,
    "mask_logits": _MASKS,
}
"""Every op's cases, each made anew when called."""
