"""The RMSNorm layer: its three ways to run, its weight, and that only what is asked for costs anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.layers.layernorm import RMSNorm
from rorqual.ops.registry import load_backends, watch
from rorqual.quantization import FP8_ROW, MXFP8, QTensor, ScaleLayout
from tests.ops.norm_cases import utccp_target
from tests.ops.values import normal

load_backends("native", "cpu")
BF16 = torch.bfloat16


def layer(size: int, *, dtype: torch.dtype = torch.float32, **options) -> RMSNorm:
    made = RMSNorm(size, eps=1e-5, dtype=dtype, device=torch.device("cpu"), **options)
    made.weight.copy_(normal(size, seed=9) * 0.1 + 1)
    return made


def formula(x: torch.Tensor, norm: RMSNorm, scale: float = 1.0) -> np.ndarray:
    wide = x.double().numpy()
    normalised = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    return normalised * norm.weight.detach().double().numpy() * scale


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 3, 24)])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_forward_is_the_norm(shape, scale):
    norm, x = layer(24, out_scale=scale), normal(*shape)
    np.testing.assert_allclose(norm(x).double().numpy(), formula(x, norm, scale), rtol=3e-6)


def test_add_without_a_residual_hands_the_input_on():
    norm, x = layer(24), normal(3, 24)
    out, total = norm.add(x, None)
    assert total is x
    assert torch.equal(out, norm(x))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_add_normalises_the_rounded_sum(dtype, scale):
    norm = layer(64, dtype=dtype, out_scale=scale)
    x, residual = normal(5, 64, dtype=dtype), normal(5, 64, dtype=dtype, seed=1)
    out, total = norm.add(x, residual)
    assert torch.equal(total, (x.double() + residual.double()).to(dtype))
    rtol = 3e-6 if dtype == torch.float32 else 2**-8 * 1.01
    np.testing.assert_allclose(out.double().numpy(), formula(total, norm, scale), rtol=rtol)


@pytest.mark.parametrize("residual", [None, normal(4, 256, dtype=BF16, seed=1)])
def test_quantised_is_the_norm_in_few_bits(residual):
    norm, x = layer(256, dtype=BF16), normal(4, 256, dtype=BF16)
    got = norm.quantised(x, residual, FP8_ROW, ScaleLayout.COLUMN, copy=True)
    out, total = norm.add(x, residual)
    assert isinstance(got.out, QTensor)
    assert (got.out.format, got.out.layout) == (FP8_ROW, ScaleLayout.COLUMN)
    assert (got.residual is None) == (residual is None)
    if residual is not None:
        assert torch.equal(got.residual, total)
    torch.testing.assert_close(got.copy, out, rtol=2**-7, atol=0)
    error = (got.out.dequantize() - got.copy.float()).abs()
    # Half a step: 2^-4 of the value, or of the smallest normal value of the group, amax / 448 * 2^-6.
    amax = got.copy.float().abs().unflatten(1, (2, 128)).amax(-1).repeat_interleave(128, 1)
    assert (error <= got.copy.float().abs().clamp(min=amax / 448 * 2**-6) * 2**-4 * 1.001).all()
    assert error.max() > 0


def test_quantised_writes_the_scales_for_the_tensor_cores_too():
    target = utccp_target(4, 256, 16)
    got = layer(256).quantised(normal(4, 256), None, MXFP8, utccp=target)
    # Rows 0 to 3 of a block lie 4 apart.
    words = target.out[0:16:4].contiguous().view(torch.uint8)
    assert torch.equal(words, got.out.scales)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_decoder_calls_get_a_faster_answer(dtype):
    norm, x = layer(64, dtype=dtype), normal(5, 64, dtype=dtype)
    verdicts = []
    with watch(lambda _op, _used, verdict: verdicts.append(verdict)):
        norm(x)
        norm.add(x, x)
        norm(x.view(5, 2, 32).flatten(1))
    assert all("ok" in (v.get("native"), v.get("cpu")) for v in verdicts)


def test_weight_has_the_checkpoints_name():
    norm = layer(24)
    (wanted,) = norm.wanted("model.norm")
    assert (wanted.name, wanted.shape) == ("model.norm.weight", (24,))
    wanted.copy(torch.arange(24.0))
    assert norm.weight.tolist() == list(range(24))
