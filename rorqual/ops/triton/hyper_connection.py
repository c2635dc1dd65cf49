"""mHC in two launches: one pass over the streams for the products, and one for what the sublayer reads."""

# mypy: ignore-errors

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from rorqual.ops.hyper_connection import (
    Mixed,
    StreamMix,
    collapse_streams,
    merge_and_mix_streams,
    merge_streams,
    mix_streams,
    prepare_mix,
)
from rorqual.ops.kv_transform import NormStage
from rorqual.ops.triton import _stream_kernels
from rorqual.ops.triton._dependent_launch import DEPENDENT_LAUNCH
from rorqual.ops.triton.launch import refuses

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STEP: int = _stream_kernels.STEP.value
_STEPS: int = _stream_kernels.STEPS.value
_LINES: int = _stream_kernels.LINES.value
_LARGEST = 8192
"""Channels of a stream: a program holds a token's."""


class StreamTile(NamedTuple):
    """Of the pass for the products."""

    tokens: int
    warps: int
    together: int
    """Steps of one program: one, or all of a share."""
    stages: int
    """Of the loop over them."""


TILES = {
    16: StreamTile(16, 4, 1, 1),
    32: StreamTile(32, 4, 1, 1),
    512: StreamTile(64, 4, 1, 1),
    0: StreamTile(64, 4, _STEPS, 2),
}
"""By the most tokens that a tile is taken for; the last is for all above."""
_MERGE_TILE = 4096
"""Values of a program that only merges."""


def tile_of(num_tokens: int) -> StreamTile:
    """The entry of TILES for a number of tokens."""
    return next((tile for most, tile in TILES.items() if num_tokens <= most), TILES[0])


def _refuse_streams(streams: torch.Tensor, *others: torch.Tensor) -> str | None:
    if reason := refuses(streams, *others):
        return reason
    if streams.dim() != 3 or streams.dtype not in _DTYPES:
        return f"needs streams [num_tokens, N, D] of bfloat16, float16 or float32, got {streams.dtype}"
    if streams.shape[1] not in (2, 4) or streams.shape[2] > _LARGEST:
        return f"is for 2 or 4 streams of up to {_LARGEST} channels, got {list(streams.shape)}"
    if streams.stride(2) != 1:
        return f"needs channels side by side, got strides {streams.stride()}"
    return None


def _refuse_mix(streams: torch.Tensor, mix: StreamMix, norm: NormStage, rows: int) -> str | None:
    if reason := _refuse_streams(streams, mix.fn, mix.base, mix.scale, norm.weight):
        return reason
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in mix[:3]) or mix.fn.shape[0] != rows:
        return f"needs contiguous float32 parameters of {rows} rows, got {mix.fn.dtype} {list(mix.fn.shape)}"
    return None if norm.weight.stride(0) == 1 else "needs a norm's weight without gaps"


def _refuse_merge(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> str | None:
    if reason := _refuse_streams(streams, output, post, comb):
        return reason
    if output.dtype != streams.dtype or output.stride(-1) != 1:
        return f"needs an output of {streams.dtype} without gaps between channels, got {output.dtype}"
    if not (post.is_contiguous() and comb.is_contiguous()) or post.dtype != torch.float32:
        return "needs contiguous float32 weights"
    return None


def lay_out(fn: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """fn [rows, N D] for streams of a dtype, zero behind D: [steps, parts, rows, STEP N], of N = count streams.

    bfloat16 has three parts, high to low, that add up to fn; other dtypes have one, which is float32.
    """
    rows, dims = fn.shape[0], fn.shape[1] // count
    in_share = min(_STEPS, triton.cdiv(dims, _STEP))
    steps = triton.cdiv(dims, _STEP * in_share) * in_share
    whole = fn.new_zeros((rows, count, steps * _STEP))
    whole[:, :, :dims] = fn.view(rows, count, dims)
    whole = whole.view(rows, count, steps, _STEP).permute(2, 0, 3, 1).reshape(steps, rows, _STEP * count)
    if dtype != torch.bfloat16:
        return whole[:, None].contiguous()
    high = whole.to(dtype)
    middle = (whole - high.float()).to(dtype)
    low = (whole - high.float() - middle.float()).to(dtype)
    return torch.stack((high, middle, low), dim=1)


@prepare_mix.impl("triton", refuse=lambda mix, count: refuses(mix.fn))
def prepare_mix_triton(mix: StreamMix, count: int) -> StreamMix:
    """For streams of bfloat16; others are laid out in each call."""
    return mix._replace(prepared=lay_out(mix.fn, count, torch.bfloat16))


def _rows(streams: torch.Tensor) -> int:
    return streams.shape[1] * (streams.shape[1] + 2)


def _mix(
    streams: torch.Tensor,
    mix: StreamMix,
    norm: NormStage,
    *,
    merge: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    weighing: bool = True,
    tile: StreamTile | None = None,
) -> Mixed:
    """merge: a sublayer's output, post and comb, and where the new streams go. Without `weighing` no post and comb."""
    num_tokens, count, dims = streams.shape
    device = streams.device
    hidden = torch.empty((num_tokens, dims), dtype=streams.dtype, device=device)
    post = torch.empty((num_tokens, count), dtype=torch.float32, device=device)
    comb = torch.empty((num_tokens, count, count), dtype=torch.float32, device=device)
    if num_tokens == 0:
        return Mixed(hidden, post, comb)
    tile = tile or tile_of(num_tokens)
    plain = streams.dtype != torch.bfloat16
    weights = lay_out(mix.fn, count, streams.dtype) if plain or mix.prepared is None else mix.prepared
    steps = min(_STEPS, triton.cdiv(dims, _STEP))
    together = min(tile.together, steps)
    shares, apart = weights.shape[0] // steps, steps // together
    partial = torch.empty((shares * apart, num_tokens, _LINES), dtype=torch.float32, device=device)
    output, old_post, old_comb, merged = merge or (streams, post, comb, streams)
    rows = mix.fn.shape[0]
    _stream_kernels.project_kernel[(triton.cdiv(num_tokens, tile.tokens), shares * apart)](
        output,
        streams,
        old_post,
        old_comb,
        weights,
        merged,
        partial,
        num_tokens,
        dims,
        output.stride(0),
        streams.stride(0),
        streams.stride(1),
        ROWS=rows,
        N=count,
        MERGE=merge is not None,
        TOGETHER=together,
        EVEN=dims % (_STEP * steps) == 0,
        TOKENS=tile.tokens,
        STAGES=tile.stages,
        num_warps=tile.warps,
        num_stages=tile.stages,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    warps = 8 if dims > 2048 else 4
    _stream_kernels.finish_kernel[(num_tokens * (1 + weighing),)](
        partial,
        merged,
        mix.scale,
        mix.base,
        norm.weight,
        hidden,
        post,
        comb,
        num_tokens,
        dims,
        merged.stride(0),
        merged.stride(1),
        shares,
        mix.norm_eps,
        mix.eps,
        norm.eps,
        ROWS=rows,
        ITERATIONS=mix.iterations,
        N=count,
        APART=apart,
        BLOCK=triton.next_power_of_2(shares),
        BLOCK_D=triton.next_power_of_2(dims),
        WEIGHERS=int(weighing),
        num_warps=warps,
        launch_pdl=DEPENDENT_LAUNCH,
    )
    return Mixed(hidden, post, comb)


@mix_streams.impl("triton", refuse=lambda streams, mix, norm: _refuse_mix(streams, mix, norm, _rows(streams)))
def mix_streams_triton(streams: torch.Tensor, mix: StreamMix, norm: NormStage) -> Mixed:
    """See the reference."""
    return _mix(streams, mix, norm)


@collapse_streams.impl("triton", refuse=lambda streams, mix, norm: _refuse_mix(streams, mix, norm, streams.shape[1]))
def collapse_streams_triton(streams: torch.Tensor, mix: StreamMix, norm: NormStage) -> torch.Tensor:
    """See the reference."""
    return _mix(streams, mix, norm, weighing=False).hidden


@merge_streams.impl("triton", refuse=_refuse_merge)
def merge_streams_triton(
    output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """See the reference."""
    num_tokens, count, dims = streams.shape
    merged = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    block = min(512, triton.next_power_of_2(dims))
    tokens = 1 if num_tokens <= 64 else max(1, _MERGE_TILE // (count * block))
    if num_tokens:
        _stream_kernels.merge_kernel[(triton.cdiv(num_tokens, tokens), triton.cdiv(dims, block))](
            output,
            streams,
            post,
            comb,
            merged,
            num_tokens,
            dims,
            output.stride(0),
            streams.stride(0),
            streams.stride(1),
            N=count,
            TOKENS=tokens,
            BLOCK=block,
            num_warps=2 if tokens == 1 else 4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
    return merged


def _refuse_both(output, streams, post, comb, mix, norm) -> str | None:
    return _refuse_merge(output, streams, post, comb) or _refuse_mix(streams, mix, norm, _rows(streams))


@merge_and_mix_streams.impl("triton", refuse=_refuse_both)
def merge_and_mix_streams_triton(
    output: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    mix: StreamMix,
    norm: NormStage,
) -> tuple[torch.Tensor, Mixed]:
    """See the reference. The streams are read and written once, and read once more for the mix."""
    merged = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    return merged, _mix(streams, mix, norm, merge=(output, post, comb, merged))
