"""Cases of mHC: streams of several sizes and dtypes, merged, mixed and collapsed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rorqual.ops.hyper_connection import StreamMix
from rorqual.ops.kv_transform import NormStage
from tests.ops.values import Call, normal

BF16 = torch.bfloat16


def stream_mix(count: int, dims: int, *, head: bool = False, iterations: int = 20) -> StreamMix:
    """Parameters whose products are of the size of one."""
    rows = count if head else count * (count + 2)
    fn = normal(rows, count * dims, seed=1) * (count * dims) ** -0.5
    return StreamMix(fn, normal(rows, seed=2), normal(1 if head else 3, seed=3) + 1, 1e-6, 1e-6, iterations)


def _norm(dims: int, dtype: torch.dtype) -> NormStage:
    return NormStage((normal(dims, seed=9) * 0.1 + 1).to(dtype), 1e-6)


def _streams(tokens: int, dims: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    if tokens == 3:  # as they are behind the embedding
        return normal(tokens, dims, dtype=dtype)[:, None].expand(-1, count, -1)
    return normal(tokens, count, dims, dtype=dtype) * torch.linspace(0.5, 3, count).to(dtype)[:, None]


def _weights(tokens: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(tokens, count, seed=5).sigmoid() * 2, normal(tokens, count, count, seed=6).softmax(-1)


def _mix(tokens: int, dims: int, dtype: torch.dtype = BF16, *, count: int = 4, head: bool = False) -> Call:
    mix = stream_mix(count, dims, head=head, iterations=20 if tokens < 4 else 3)
    return (_streams(tokens, dims, dtype, count), mix, _norm(dims, dtype)), {}


def _merge(tokens: int, dims: int, dtype: torch.dtype = BF16, *, count: int = 4) -> Call:
    output = normal(tokens, dims + 16, dtype=dtype, seed=4)[:, 8:-8]
    return (output, _streams(tokens, dims, dtype, count), *_weights(tokens, count)), {}


def _both(tokens: int, dims: int, dtype: torch.dtype = BF16, *, count: int = 4) -> Call:
    mix = stream_mix(count, dims, iterations=20 if tokens < 4 else 3), _norm(dims, dtype)
    return (*_merge(tokens, dims, dtype, count=count)[0], *mix), {}


def _cases(make: Callable[..., Call], **options: bool) -> dict[str, Callable[[], Call]]:
    return {
        "one": lambda: make(1, 256, **options),
        "some": lambda: make(5, 270, **options),
        "a_tile_and_one": lambda: make(17, 64, **options),
        "many": lambda: make(35, 40, **options),
        "none": lambda: make(0, 64, **options),
        "equal_streams_of_odd_width": lambda: make(3, 100, **options),
        "float32": lambda: make(6, 200, torch.float32, **options),
        "two_streams": lambda: make(6, 128, count=2, **options),
    }


STREAM_CASES = {
    "prepare_mix": {
        "layer": lambda: ((stream_mix(4, 72), 4), {}),
        "head": lambda: ((stream_mix(2, 40, head=True), 2), {}),
    },
    "mix_streams": _cases(_mix),
    "collapse_streams": _cases(_mix, head=True),
    "merge_streams": _cases(_merge),
    "merge_and_mix_streams": _cases(_both),
}
