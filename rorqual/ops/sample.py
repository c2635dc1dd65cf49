"""From logits to a token: penalties, what min_p, top_k and top_p keep, and a draw that its row alone decides.

The draw is Gumbel-max: token = argmax(logits / T + g), where g is a hash of (seed, position, token id). The maximum of
independent Gumbel variables shifted by logits / T falls on i with probability softmax(logits / T)[i].
Scores are defined in float64, so that rounding on another device or in another batch shape cannot move the maximum.
"""

from __future__ import annotations

import math
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


class LastKept(NamedTuple):
    """Per row: the last token of the order (larger logit first, lower id first among equals) that may be drawn."""

    values: torch.Tensor
    """[num_rows] float32, its logit."""
    token_ids: torch.Tensor
    """[num_rows] int64."""


@op
def gumbel_argmax(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, *, last: LastKept | None = None
) -> torch.Tensor:
    """Draw one token per row from softmax(logits / temperature), or take the best where the temperature is 0.

    Score = logits / T - log(-log1p(-v)) in float64 with v = (noise_bits + 0.5) / 2**32; the largest wins (the lowest id
    among equals). Small v makes large noise, and v is finest there. A token at -inf is never drawn.

    logits: any float dtype [num_rows, vocab_size]; in a row without a finite maximum the id means nothing.
    temperature: float64 [num_rows]. keys: int64 [num_rows, 2] from `row_key`.
    last: what `narrow` says; tokens behind it are not drawn.
    Returns int64 [num_rows]. Source: Gumbel-max (Maddison et al. 2014); counter-based noise (Salmon et al. 2011).
    """
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    cold = temperature[:, None] == 0
    v = (noise_bits(ids, keys).double() + 0.5) * 2.0**-32
    noise = -torch.log(-torch.log1p(-v))
    scores = torch.where(cold, logits.double(), logits.double() / torch.where(cold, 1.0, temperature[:, None]) + noise)
    if last is not None:
        value, last_id = last.values[:, None], last.token_ids[:, None]
        kept = (logits.float() > value) | ((logits.float() == value) & (ids <= last_id))
        scores = torch.where(kept, scores, -torch.inf)
    best = scores == scores.amax(1, keepdim=True)
    return torch.where(best, ids, logits.shape[1] - 1).amin(1)


class RowMax(NamedTuple):
    """Per row: the largest logit, and the lowest id that has it, if a token can be said at all."""

    values: torch.Tensor
    """[num_rows] float32; NaN where the row holds one."""
    token_ids: torch.Tensor
    """[num_rows] int64; -1 where the value is not finite."""


@op
def row_max(logits: torch.Tensor) -> RowMax:
    """The greedy token of each row of logits [num_rows, vocab_size], any float dtype."""
    ids = logits.argmax(1)
    values = logits.gather(1, ids[:, None])[:, 0].float()
    return RowMax(values, torch.where(values.isfinite(), ids, -1))


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


MASS_BITS = 44
"""The best token's mass is 2**44: sums over vocabularies of half a million tokens stay below 2**63."""
LOWEST_EXPONENT = -40.0
"""Relative logits from here down have no mass."""
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
"""ln 2 in two parts (fdlibm, Sun Microsystems): up to 2**10 times the first is exact."""
EXP_TERMS = tuple(1 / math.factorial(k) for k in range(10, -1, -1))
"""exp's Taylor series, highest first: within 3e-13 between -ln 2 / 2 and ln 2 / 2."""


def masses(relative: torch.Tensor) -> torch.Tensor:
    """round(exp(x) * 2**MASS_BITS) of x <= 0, float64 -> int64 of the same shape.

    Integers, so that every order of summation gives the same; from single operations on float64, so that every device
    does.
    """
    x = relative.clamp(min=LOWEST_EXPONENT)
    whole = (x * LOG2_E + 0.5).floor()
    x = (x - whole * LN2_HIGH) - whole * LN2_LOW
    value = torch.full_like(x, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        value = value * x + term
    scale = ((whole.long() + (MASS_BITS + 1023)) << 52).view(torch.float64)
    return (value * scale + 0.5).floor().long()


@op
def narrow(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    *,
    log_min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> LastKept:
    """Where min_p, top_k and top_p cut the order of each row's tokens.

    With x = logits / T - highest / T in float64: min_p keeps x >= log_min_p; of these, top_k keeps the first k; of
    these, top_p keeps those before which less lies than its share of their `masses`. The first is always kept.

    logits: any float dtype [num_rows, vocab_size]; rows with NaN, or whose highest is not finite, may get anything.
    highest: float32 [num_rows], the largest logit. temperature: float64 [num_rows], above 0 where something narrows.
    Off: log_min_p float64 -inf, top_k int64 vocab_size, top_p float64 1. A row with all three off gets (-inf, last id).
    """
    vocab_size = logits.shape[1]
    scaled, best = logits.double() / temperature[:, None], highest.double() / temperature
    relative = scaled - best[:, None]
    order = sort_keys(logits.float(), torch.arange(vocab_size, device=logits.device)).argsort(1)
    count = torch.minimum((relative >= log_min_p[:, None]).sum(1), top_k)
    outside = torch.arange(vocab_size, device=logits.device) >= count[:, None]
    mass = masses(relative.gather(1, order)).masked_fill(outside, 0)
    reached = mass.cumsum(1)
    total = reached[:, -1]
    limit = torch.minimum((top_p * total.double()).ceil().long(), total)
    nucleus = (reached - mass < limit[:, None]).sum(1)
    size = torch.where(top_p < 1, torch.minimum(nucleus, count), count)
    ids = order.gather(1, (size - 1).clamp(min=0)[:, None])
    off = (log_min_p == -torch.inf) & (top_k >= vocab_size) & (top_p >= 1)
    values = logits.gather(1, ids)[:, 0].float() + 0.0  # -0.0 becomes 0.0
    return LastKept(torch.where(off, -torch.inf, values), torch.where(off, vocab_size - 1, ids[:, 0]))


@op
def edit_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    *,
    bias: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Logits plus bias, then less for tokens that were there before, as vLLM and the OpenAI API define it.

    Tokens of prompt or output: l = l / repetition if l > 0 else l * repetition, once however often the token was there.
    Tokens of the output: l - frequency * count - presence. The prompt's do not count here.

    logits: any float dtype [num_rows, vocab_size]. rows: int64 [num_rows], which row of the tables is each one's; 0 for
    those that stay as they are. Tables, [any, vocab_size]: bias float32 (-inf forbids), in_prompt bool, output_counts
    int32. The three penalties: float32 [num_rows]. Returns float32 [num_rows, vocab_size].
    """
    strengths = (strength[:, None] for strength in (repetition, frequency, presence))
    edited = penalised(logits.float() + bias[rows], in_prompt[rows], output_counts[rows], *strengths)
    return torch.where(rows[:, None] > 0, edited, logits.float())


def penalised(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """The penalties of `edit_logits`, of tensors that broadcast; the logits are float32."""
    in_output = output_counts > 0
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | in_output, repeated, logits)
    return logits - frequency * output_counts - presence * in_output


@op
def mask_logits(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Logits with -inf in place of tokens that a bit mask leaves out.

    logits: any float dtype [num_rows, vocab_size]. rows: int64 [num_rows], which row of the mask is each one's; -1 for
    those that stay as they are. bitmask: int32 [any, at least vocab_size / 32]; bit i % 32 of number i // 32 is 1 where
    token i may come. Returns a new tensor of the logits' shape and dtype, rows without gaps.
    """
    size = logits.shape[1]
    masked = logits.clone(memory_format=torch.contiguous_format)
    if not len(bitmask):
        return masked
    bits = (bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device)) & 1
    allowed = bits.view(len(bitmask), -1)[:, :size] == 1
    return masked.masked_fill_(~allowed[rows.clamp(min=0)] & (rows >= 0)[:, None], -torch.inf)


class TopLogprobs(NamedTuple):
    """Per row: the given token, then the most likely ones, best first."""

    logprobs: torch.Tensor
    """[num_rows, 1 + count] float32; -inf in rows of logits that hold NaN or +inf or nothing else than -inf."""
    token_ids: torch.Tensor
    """[num_rows, 1 + count] int64."""
    ranks: torch.Tensor
    """[num_rows, 1 + count] int64: how many tokens are at least as likely."""


def top_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> TopLogprobs:
    """Log-probabilities in float32 of a token per row, and of the `count` (at most vocab_size) most likely ones.

    logits: any float dtype [num_rows, vocab_size]. token_ids: int64 [num_rows].
    """
    usable = row_max(logits).token_ids >= 0
    logprobs = torch.where(usable[:, None], logits.float().log_softmax(1), -torch.inf)
    ids = token_ids[:, None]
    values = logprobs.gather(1, ids)
    if count:
        top = top_candidates(logprobs, count=count)
        values, ids = torch.cat([values, top.logits], 1), torch.cat([ids, top.token_ids], 1)
    # Only ties of the last one can lie outside the top: two passes over the vocabulary answer for all.
    ranks = (values[:, None, 1:] >= values[:, :, None]).sum(2)
    for column in {0, count}:
        reached = (logprobs >= values[:, column, None]).sum(1, keepdim=True)
        ranks = torch.where(values == values[:, column, None], reached, ranks)
    return TopLogprobs(values, ids, ranks)
