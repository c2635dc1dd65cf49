"""From logits to a token: penalties, the most likely tokens in order, and a draw that its row alone decides.

The draw is Gumbel-max: token = argmax(logits / T + g), where g is a hash of (seed, position, token id). The maximum of
independent Gumbel variables shifted by logits / T falls on i with probability softmax(logits / T)[i].
Scores are defined in float64, so that rounding on another device or in another batch shape cannot move the maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.ops.registry import op

MASK32 = 0xFFFF_FFFF
MASK64 = 0xFFFF_FFFF_FFFF_FFFF
LOWBIAS32 = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
"""(shift, multiplier) steps of lowbias32 (Chris Wellons, hash-prospector, public domain); the last one only shifts."""
FMIX32 = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1))
"""The same for fmix32, MurmurHash3's finaliser (Austin Appleby, public domain)."""


def mix64(x: int) -> int:
    """The output function of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words for the draw at `position` (tokens before it) of a sequence with this 64-bit `seed`."""
    key = mix64((mix64((seed + 0x9E3779B97F4A7C15) & MASK64) + position * 0xD1B54A32D192ED03) & MASK64)
    return key & MASK32, key >> 32


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.int64]:
    """`row_key` of many rows: uint64 [num_rows] each -> int64 [num_rows, 2]."""

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    key = mix(mix(seeds + np.uint64(0x9E3779B97F4A7C15)) + positions * np.uint64(0xD1B54A32D192ED03))
    return np.stack((key & np.uint64(MASK32), key >> np.uint64(32)), 1).astype(np.int64)


def _scramble(x: torch.Tensor, steps: tuple[tuple[int, int], ...]) -> torch.Tensor:
    for shift, multiplier in steps:
        x = ((x ^ (x >> shift)) * multiplier) & MASK32
    return x


def noise_bits(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """32 random bits per row and token: fmix32(lowbias32(token ^ key0) ^ key1).

    token_ids int64 [num_rows or 1, num_tokens], keys int64 [num_rows, 2], both within 32 bits
    -> int64 [num_rows, num_tokens], each in [0, 2**32). Integer arithmetic only: the same on every device.
    """
    return _scramble(_scramble(token_ids ^ keys[:, :1], LOWBIAS32) ^ keys[:, 1:], FMIX32)


@op
def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *, token_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Draw one token per row from softmax(logits / temperature).

    Score = logits / T - log(-log1p(-v)) in float64 with v = (noise_bits + 0.5) / 2**32; the largest wins (the lowest id
    among equals). Small v makes large noise, and v is finest there. A token at -inf is never drawn.

    logits: any float dtype [num_rows, num_candidates]; no NaN, and a finite maximum in each row.
    temperature: float64 [num_rows], above 0. keys: int64 [num_rows, 2] from `row_key`.
    token_ids: int64 [num_rows, num_candidates], where column and token id differ.
    Returns int64 [num_rows]. Source: Gumbel-max (Maddison et al. 2014); counter-based noise (Salmon et al. 2011).
    """
    ids = torch.arange(logits.shape[1], device=logits.device)[None] if token_ids is None else token_ids
    v = (noise_bits(ids, keys).double() + 0.5) * 2.0**-32
    scores = logits.double() / temperature[:, None] - torch.log(-torch.log1p(-v))
    best = scores == scores.amax(1, keepdim=True)
    return torch.where(best, ids, torch.iinfo(torch.int64).max).amin(1)


class RowMax(NamedTuple):
    """Per row: the largest logit, and the lowest id that has it."""

    values: torch.Tensor
    """[num_rows] float32; NaN where the row holds one."""
    token_ids: torch.Tensor
    """[num_rows] int64; of a row with NaN, where the first one is."""


@op
def row_max(logits: torch.Tensor) -> RowMax:
    """The greedy token of each row of logits [num_rows, vocab_size], any float dtype."""
    ids = logits.argmax(1)
    return RowMax(logits.gather(1, ids[:, None])[:, 0].float(), ids)


class Candidates(NamedTuple):
    """The most likely tokens of each row in order: larger logit first, lower id first among equals."""

    logits: torch.Tensor
    """[num_rows, count] float32."""
    token_ids: torch.Tensor
    """[num_rows, count] int64."""


def sort_keys(values: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 keys whose ascending order is that of `Candidates`; no two alike, so that any sort or top-k is exact."""
    bits = (-values + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0: the two are equal logits
    ascending = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)  # sign and magnitude -> two's complement
    return (ascending << 32) + token_ids


@op
def top_candidates(logits: torch.Tensor, *, count: int) -> Candidates:
    """The `count` (at most vocab_size) most likely tokens of each row of logits [num_rows, vocab_size]; no NaN."""
    keys = sort_keys(logits.float(), torch.arange(logits.shape[1], device=logits.device))
    ids = keys.topk(count, dim=1, largest=False, sorted=True).values & MASK32
    return Candidates(logits.gather(1, ids).float(), ids)


@op
def total_mass(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """sum(exp((logits - max) / T)) of each row of logits [num_rows, vocab_size] -> float64 [num_rows].

    temperature: float64 [num_rows], above 0. One over it is the probability of the most likely token.
    """
    x = logits.double()
    return ((x - x.amax(1, keepdim=True)) / temperature[:, None]).exp().sum(1)


@op
def apply_penalties(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Make tokens that were there before less likely, by the definitions that vLLM and the OpenAI API share.

    Tokens of prompt or output: l = l / repetition if l > 0 else l * repetition, once however often the token was there.
    Tokens of the output: l - frequency * count - presence. The prompt's do not count here.

    logits float32, in_prompt bool, output_counts int32: [num_rows, vocab_size]; the three penalties float32 [num_rows].
    Returns float32 [num_rows, vocab_size].
    """
    factor = repetition[:, None]
    in_output = output_counts > 0
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(in_prompt | in_output, repeated, logits)
    return logits - frequency[:, None] * output_counts - presence[:, None] * in_output
