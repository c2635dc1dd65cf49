"""RMSNorm with what comes before and after it: a residual addition, a scale, quantisation for the next product."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rorqual.ops.registry import op
from rorqual.quantization import FP8_ROW, FP8_ROW_UE8M0, MXFP8, QTensor, QuantFormat, ScaleLayout
from rorqual.quantization.layouts import utccp_buffer, write_utccp

FORMATS = (FP8_ROW, FP8_ROW_UE8M0, MXFP8)
"""What a norm's result can be quantised to: e4m3 in groups of a row's values."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class UtccpTarget(NamedTuple):
    """Where to write the scales once more, in the order in which Blackwell's tensor cores copy them."""

    out: torch.Tensor
    """int32 [rows, n / 128] with strides (1, capacity); see `quantization.layouts.utccp_buffer`."""
    block_m: int
    """Rows per block of the product; each block starts at a multiple of 128 of the capacity."""


class NormOutput(NamedTuple):
    """What `rms_norm` returns. The tensors share no memory with each other, nor with the input unless `out` does."""

    out: torch.Tensor | QTensor
    """x's shape: in x's dtype, or quantised."""
    residual: torch.Tensor | None = None
    """x + residual, rounded to x's dtype; None without a residual."""
    copy: torch.Tensor | None = None
    """The bfloat16 result beside a quantised one, if asked for."""


@op
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    format: QuantFormat | None = None,
    layout: ScaleLayout = ScaleLayout.ROW,
    copy: bool = False,
    unrounded_sum: bool = False,
    utccp: UtccpTarget | None = None,
    out: torch.Tensor | None = None,
) -> NormOutput:
    """y = x / sqrt(mean(x^2) + eps) * (weight * out_scale) over the last dimension: float32, rounded once to x's dtype.

    x [n], [m, n] or [b, m, n] in bfloat16, float16 or float32, any strides; weight [n] in any of these dtypes.
    residual: x's shape and dtype; it is added first, and the sum, rounded to x's dtype, is normalised and returned.
        unrounded_sum normalises the float32 sum instead (nano-vLLM's order); what is returned is the rounded one.
    format: FP8_ROW, FP8_ROW_UE8M0 or MXFP8 quantises y (rounded to x's dtype, as it would be without) into a QTensor
        whose scales lie as `layout` says; needs 2 or 3 dimensions. See `QTensor.quantize`.
    copy: the result in bfloat16 beside the quantised one. Refused without a format: it would be the result itself.
    utccp: writes MXFP8 scales of x [m, n], n a multiple of 128, there too.
    out: takes the result that is not quantised: x's shape and dtype, last stride 1. It may be x or residual itself.

    Raises ValueError or TypeError where arguments do not fit. Sources: Zhang and Sennrich 2019, arXiv:1910.07467;
    DeepInfer's norm for what surrounds it.
    """
    check_arguments(x, weight, residual=residual, format=format, copy=copy, utccp=utccp, out=out)
    wide, total = x.float(), None
    if residual is not None:
        total = x + residual
        wide = wide + residual.float() if unrounded_sum else total.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (wide * rstd * (weight.float() * out_scale)).to(x.dtype)
    if format is None:
        return NormOutput(y if out is None else out.copy_(y), total)
    quantised = QTensor.quantize(y, format, layout)
    if utccp is not None:
        write_utccp(quantised.row_scales(), utccp.out, utccp.block_m)
    return NormOutput(quantised, total, y.to(torch.bfloat16) if copy else None)


def check_arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    format: QuantFormat | None = None,
    copy: bool = False,
    utccp: UtccpTarget | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Raise ValueError or TypeError, in one sentence, where the arguments of `rms_norm` do not fit each other."""
    if not 1 <= x.dim() <= 3:
        raise ValueError(f"rms_norm takes 1 to 3 dimensions, got shape {tuple(x.shape)}; flatten the leading ones")
    if x.dtype not in DTYPES:
        raise TypeError(f"rms_norm takes bfloat16, float16 and float32, got {x.dtype}")
    if weight.dtype not in DTYPES:
        raise TypeError(f"rms_norm's weight is bfloat16, float16 or float32, got {weight.dtype}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm of {tuple(x.shape)} needs a weight of shape ({x.shape[-1]},), got {tuple(weight.shape)}"
        )
    for name, like in (("residual", residual), ("out", out)):
        if like is not None and (like.shape != x.shape or like.dtype != x.dtype or like.device != x.device):
            raise ValueError(
                f"rms_norm's {name} must be as x, {tuple(x.shape)} of {x.dtype} on {x.device}, "
                f"got {tuple(like.shape)} of {like.dtype} on {like.device}"
            )
    if out is not None and out.stride(-1) != 1:
        raise ValueError(f"rms_norm's out needs a last stride of 1, got strides {out.stride()}")
    if format is None:
        if copy:
            raise ValueError("rms_norm's copy is the bfloat16 result beside a quantised one: give a format, or drop it")
        if utccp is not None:
            raise ValueError("rms_norm writes UTCCP scales of a quantised result: give format=MXFP8, or drop utccp")
        return
    if format not in FORMATS:
        allowed = ", ".join(known.name for known in FORMATS)
        raise ValueError(f"rms_norm quantises to {allowed}, got {format.name}; take the op quantize for other formats")
    if x.dim() < 2:
        raise ValueError(f"rms_norm quantises 2 or 3 dimensions, got shape {tuple(x.shape)}; add a leading one")
    if out is not None:
        raise ValueError("rms_norm's out takes a result that is not quantised: drop out or format")
    if utccp is not None:
        if format != MXFP8:
            raise ValueError(f"UTCCP scales are UE8M0 of 32 values each: give format=MXFP8, got {format.name}")
        if x.dim() != 2 or x.shape[1] % 128:
            raise ValueError(f"UTCCP scales need x [m, n] with n a multiple of 128, got shape {tuple(x.shape)}")
        if utccp.out.device != x.device:
            raise ValueError(f"UTCCP scales are written where x is, on {x.device}, got {utccp.out.device}")
        utccp_buffer(utccp.out, x.shape[0], x.shape[1] // MXFP8.block[1], utccp.block_m)


def more_than_plain(
    *,
    out_scale: float = 1.0,
    format: QuantFormat | None = None,
    layout: ScaleLayout = ScaleLayout.ROW,
    copy: bool = False,
    unrounded_sum: bool = False,
    utccp: UtccpTarget | None = None,
    out: torch.Tensor | None = None,
) -> str | None:
    """For kernels that know x, weight, eps and residual alone: which other option a call uses, or None."""
    used = {
        "out_scale": out_scale != 1.0,
        "format": format is not None,
        "copy": copy,
        "unrounded_sum": unrounded_sum,
        "utccp": utccp is not None,
        "out": out is not None,
    }
    names = [name for name, is_used in used.items() if is_used]
    return f"has no {' and no '.join(names)}" if names else None
