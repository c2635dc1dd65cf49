"""Products with integer weights as they are defined: which integers, and which float32 sums in which order.

Each row of x is cut in groups of 32 columns and rounded to integers q of -127..127 with a scale of its own,

    scale = largest / 127        q = round(x * (127 / largest)), ties to even        largest = max |x| of the group

and every weight group g adds, in ascending order, in float32,

    acc  = fma(scale_x[m, g] * scale[n, g], sum over k of (code[n, k] - offset) * q[m, k], acc)
    acc2 = fma(minimum[n, g], scale_x[m, g] * sum over k of q[m, k], acc2)                       where there are minima

with exact sums over k. The product is acc + acc2. A group of zeros, or of numbers so small that 127 / largest is
infinite, is all zeros; one with an infinity or a NaN has a scale of NaN, and so has its row's product.
"""

from __future__ import annotations

import torch

from rorqual.quantization.integer import IntegerWeight

INPUT_GROUP = 32
"""Columns of x that share a scale."""


def round_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, columns], columns a multiple of 32 -> integers, in float32, [num_rows, columns / 32, 32], and their
    scales [num_rows, columns / 32].
    """
    groups = x.float().reshape(x.shape[0], x.shape[1] // INPUT_GROUP, INPUT_GROUP)
    largest = groups.abs().amax(-1)
    most = torch.full_like(largest, 127)  # by a number, torch would multiply with a reciprocal here and there
    factors = most / largest
    usable = (factors > 0) & factors.isfinite()
    integers = (groups * torch.where(usable, factors, 0)[..., None]).round()
    scales = torch.where(usable | (largest < 1), largest / most, torch.nan)
    return torch.where(usable[..., None], integers, 0), scales


def multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 tensors, rounded once."""
    product, addend = a.double() * b.double(), c.double()  # the product is exact
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    # Rounded to float64 and then to float32, a sum close to halfway might go the wrong way. If what the first rounding
    # dropped is left behind in the last bit, the second one sees that it was not halfway.
    bits = total.view(torch.int64)
    step = torch.where((error > 0) == (total > 0), 1, -1)
    inexact = (error != 0) & error.isfinite() & (bits & 1 == 0)
    return (bits + torch.where(inexact, step, 0)).view(torch.float64).float()


def multiply_integers(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """x [num_rows, in_features], in_features a multiple of 32, times the weight: float32 [num_rows, out_features]."""
    q, x_scales = round_groups(x)
    codes, scales, group = weight.integers(), weight.scales.float(), weight.format.group
    minima = None if weight.minima is None else weight.minima.float()
    acc = x_scales.new_zeros(x.shape[0], weight.shape[0])
    acc2 = torch.zeros_like(acc)
    for g in range(x.shape[1] // group):
        at, start = g * group // INPUT_GROUP, g * group % INPUT_GROUP
        integers, x_scale = q[:, at, start : start + group], x_scales[:, at, None]
        values = codes[:, g * group : (g + 1) * group].float() - weight.format.offset
        # Sums of at most 32 products of 8 bits each: exact in float32, in any order.
        acc = multiply_add(x_scale * scales[:, g], integers @ values.t(), acc)
        if minima is not None:
            acc2 = multiply_add(minima[:, g], x_scale * integers.sum(-1, keepdim=True), acc2)
    return acc + acc2
