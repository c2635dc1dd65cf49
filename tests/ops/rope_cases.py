"""Cases of the rotary embedding: both pairings, whole heads and parts of them, a key beside the query, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.ops.values import Call, every_other, normal, rows_apart

BF16, F16 = torch.bfloat16, torch.float16


def _table(width: int, *, factor: float = 1.0) -> torch.Tensor:
    """[50, width], the angles of base 10^4."""
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(width // 2) * 2 / width))
    return torch.cat((angles.cos(), angles.sin()), -1) * factor


def _rope(
    tokens: int,
    heads: int,
    head_dim: int,
    width: int,
    *,
    kv_heads: int | None = None,
    dtype: torch.dtype = torch.float32,
    positions: torch.dtype = torch.int64,
    view: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    factor: float = 1.0,
    **options: Any,
) -> Callable[[], Call]:
    def make() -> Call:
        rows = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(3)).to(positions)
        query = view(normal(tokens, heads, head_dim, dtype=dtype))
        key = {} if kv_heads is None else {"key": view(normal(tokens, kv_heads, head_dim, dtype=dtype, seed=1))}
        return (query, rows, _table(width, factor=factor)), key | options

    return make


def _merged(tokens: int, heads: int, kv_heads: int, head_dim: int, **options: Any) -> Callable[[], Call]:
    """Query and key as slices of one projection, which has values behind them."""

    def make() -> Call:
        qkv = normal(tokens, heads + 2 * kv_heads, head_dim, dtype=BF16)
        query, key, _ = qkv.split((heads, kv_heads, kv_heads), dim=1)
        (_, rows, table), _ = _rope(tokens, 1, head_dim, head_dim)()
        return (query, rows, table), {"key": key, **options}

    return make


ROPE_CASES: dict[str, Callable[[], Call]] = {
    "none": _rope(0, 2, 8, 8),
    "one": _rope(1, 1, 8, 8),
    "several": _rope(9, 3, 16, 16),
    "part_of_the_head": _rope(9, 3, 16, 6),
    "bfloat16": _rope(9, 3, 16, 16, dtype=BF16),
    "part_of_the_head_bfloat16": _rope(9, 3, 16, 6, dtype=BF16),
    "none_bfloat16": _rope(0, 3, 64, 64, dtype=BF16),
    "wide_bfloat16": _rope(70, 12, 64, 64, dtype=BF16),
    "half_of_the_head_bfloat16": _rope(9, 3, 80, 40, dtype=BF16),
    "heads_of_a_merged_product_bfloat16": _rope(9, 5, 96, 96, dtype=BF16, view=lambda x: x[:, 1:4]),
    "strided_bfloat16": _rope(9, 3, 32, 32, dtype=BF16, view=every_other),
    "heads_of_a_merged_product": _rope(9, 5, 16, 16, view=lambda x: x[:, 1:4]),
    "strided": _rope(9, 3, 16, 16, view=every_other),
    "float16": _rope(9, 3, 16, 16, dtype=F16, kv_heads=1),
    "one_pair": _rope(5, 3, 3, 2, offset=1),
    "int32_positions": _rope(9, 3, 16, 16, positions=torch.int32),
    "int32_positions_bfloat16": _rope(9, 3, 16, 16, positions=torch.int32, dtype=BF16),
    "key": _rope(9, 4, 16, 16, kv_heads=2),
    "key_bfloat16": _rope(37, 4, 128, 128, kv_heads=2, dtype=BF16),
    "key_of_one_head_bfloat16": _rope(9, 8, 64, 64, kv_heads=1, dtype=BF16),
    "key_none_bfloat16": _rope(0, 8, 64, 64, kv_heads=1, dtype=BF16),
    "key_strided_bfloat16": _rope(9, 4, 32, 32, kv_heads=2, dtype=BF16, view=every_other),
    "interleaved": _rope(9, 3, 16, 16, kv_heads=1, interleaved=True),
    "interleaved_strided": _rope(9, 3, 16, 8, interleaved=True, view=every_other, offset=4),
    "interleaved_bfloat16": _rope(9, 3, 64, 64, kv_heads=1, interleaved=True, dtype=BF16),
    "interleaved_odd_bfloat16": _rope(9, 3, 48, 42, interleaved=True, dtype=BF16, offset=3),
    "tail": _rope(9, 3, 24, 8, kv_heads=1, offset=16),
    "tail_interleaved_bfloat16": _rope(9, 4, 512, 64, kv_heads=1, offset=448, interleaved=True, dtype=BF16),
    "middle_bfloat16": _rope(9, 3, 80, 40, offset=7, dtype=BF16, view=rows_apart),
    "conjugate": _rope(9, 3, 16, 16, kv_heads=1, conjugate=True),
    "conjugate_bfloat16": _rope(9, 3, 96, 96, kv_heads=1, conjugate=True, dtype=BF16),
    "conjugate_interleaved_tail": _rope(9, 3, 24, 8, conjugate=True, interleaved=True, offset=16),
    "conjugate_interleaved_tail_bfloat16": _rope(
        9, 4, 128, 64, kv_heads=1, conjugate=True, interleaved=True, offset=64, inplace=True, dtype=BF16
    ),
    "factor_bfloat16": _rope(9, 3, 64, 64, factor=1.25, dtype=BF16),
    "inplace": _rope(9, 3, 16, 16, kv_heads=1, inplace=True),
    "inplace_tail": _rope(9, 3, 24, 8, kv_heads=1, offset=16, inplace=True, interleaved=True),
    "inplace_strided": _rope(9, 3, 16, 16, kv_heads=1, inplace=True, view=every_other),
    "inplace_strided_bfloat16": _rope(9, 3, 32, 32, kv_heads=1, inplace=True, view=every_other, dtype=BF16),
    "inplace_bfloat16": _rope(9, 3, 80, 40, kv_heads=1, inplace=True, dtype=BF16),
    "inplace_none_bfloat16": _rope(0, 3, 80, 40, kv_heads=1, inplace=True, dtype=BF16),
    "inplace_merged_bfloat16": _merged(37, 6, 2, 64, inplace=True),
    "merged_bfloat16": _merged(37, 6, 2, 64),
}
