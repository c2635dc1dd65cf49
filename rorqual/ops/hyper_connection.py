"""mHC, manifold-constrained hyper-connections: several residual streams, mixed around each sublayer.

Source: DeepSeek-V4; Zhu et al. 2024, arXiv:2409.19606, for hyper-connections; the Sinkhorn normalisation keeps the
mixing matrix near the doubly stochastic ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rorqual.ops.kv_transform import NormStage
from rorqual.ops.registry import op
from rorqual.ops.rms_norm import rms_norm


class StreamMix(NamedTuple):
    """The parameters around one sublayer, all float32, for N streams of D channels."""

    fn: torch.Tensor
    """[(2 + N) N, N D], or [N, N D] before the head."""
    base: torch.Tensor
    """[(2 + N) N] or [N]."""
    scale: torch.Tensor
    """[3] or [1]."""
    norm_eps: float
    eps: float
    iterations: int = 0
    """Sinkhorn's; not used before the head."""
    prepared: torch.Tensor | None = None
    """fn as `prepare_mix` laid it out for the implementation that reads it."""


class Mixed(NamedTuple):
    """A sublayer's input, and how its output goes back."""

    hidden: torch.Tensor
    """[num_tokens, D] in the streams' dtype: the normalised mix."""
    post: torch.Tensor
    """float32 [num_tokens, N]: how much of the output each stream gets."""
    comb: torch.Tensor
    """float32 [num_tokens, N, N]: how much of each stream (rows) goes into each new one (columns)."""


@op
def prepare_mix(mix: StreamMix, count: int) -> StreamMix:
    """The parameters for `count` streams, ready for the other ops; once, at load time. They may hold fn once more."""
    return mix


@op
def mix_streams(streams: torch.Tensor, mix: StreamMix, norm: NormStage) -> Mixed:
    """What a sublayer reads, and the weights for `merge_streams`.

    streams [num_tokens, N, D]. With f a token's streams end to end and m = (fn f) / rms(f), all in float32:

        pre = sigmoid(m[:N] scale0 + base) + eps        post = 2 sigmoid(m[N:2N] scale1 + base)
        comb = softmax over columns of (m[2N:] scale2 + base), + eps, its columns divided by their sums (+ eps); then
        iterations - 1 times its rows, then its columns

    hidden = norm(sum_s pre_s streams_s), the sum rounded to the streams' dtype.
    """
    num_tokens, count, _ = streams.shape
    m = _projected(streams, mix)
    scale, base = mix.scale, mix.base
    pre = torch.sigmoid(m[:, :count] * scale[0] + base[:count]) + mix.eps
    post = 2 * torch.sigmoid(m[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    comb = (m[:, 2 * count :] * scale[2] + base[2 * count :]).view(num_tokens, count, count).softmax(-1) + mix.eps
    comb = comb / (comb.sum(1, keepdim=True) + mix.eps)
    for _ in range(mix.iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + mix.eps)
        comb = comb / (comb.sum(1, keepdim=True) + mix.eps)
    return Mixed(_normed(_weighted(streams, pre), norm), post, comb)


@op
def merge_streams(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """New streams: post_k * output + sum_j comb[j, k] streams_j, float32, rounded once. Shapes as in `mix_streams`."""
    mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
    return (post[..., None] * output.float()[:, None] + mixed).to(streams.dtype)


@op
def merge_and_mix_streams(
    output: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    mix: StreamMix,
    norm: NormStage,
) -> tuple[torch.Tensor, Mixed]:
    """`merge_streams`, and `mix_streams` of what it returns: the way from one sublayer to the next."""
    merged = merge_streams(output, streams, post, comb)
    return merged, mix_streams(merged, mix, norm)


@op
def collapse_streams(streams: torch.Tensor, mix: StreamMix, norm: NormStage) -> torch.Tensor:
    """norm(sum_s pre_s streams_s), [num_tokens, D], with pre as in `mix_streams`: what the head reads."""
    pre = torch.sigmoid(_projected(streams, mix) * mix.scale + mix.base) + mix.eps
    return _normed(_weighted(streams, pre), norm)


def _projected(streams: torch.Tensor, mix: StreamMix) -> torch.Tensor:
    flat = streams.flatten(1).float()
    return (flat @ mix.fn.T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + mix.norm_eps)


def _weighted(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    return (pre[..., None] * streams.float()).sum(1).to(streams.dtype)


def _normed(x: torch.Tensor, norm: NormStage) -> torch.Tensor:
    out = rms_norm(x, norm.weight, eps=norm.eps).out
    assert isinstance(out, torch.Tensor)
    return out
