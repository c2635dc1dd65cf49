"""Codes against tables of all values, and the worked examples of the number formats."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rorqual.quantization import (
    FORMATS,
    decode_e2m1,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_e2m1,
    scale_of,
    ue8m0_of,
    unpack_e2m1,
)
from tests.quantization import numbers

NAN, INF = float("nan"), float("inf")


def every_bfloat16() -> torch.Tensor:
    """All 65,536 of them, as float32."""
    return (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)


def near_ties(element: str) -> torch.Tensor:
    """Every value halfway between two neighbours, and the float32 numbers just beside it; both signs."""
    table = torch.tensor(numbers.TABLES[element], dtype=torch.float32)
    ties = torch.cat([(table[1:] + table[:-1]) / 2, table, table[-1:] * 33 / 32])
    beside = [torch.nextafter(ties, torch.tensor(to)) for to in (-INF, INF)]
    positive = torch.cat([ties, *beside])
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("make", [every_bfloat16, lambda: near_ties("e4m3")])
def test_e4m3_is_the_nearest_of_all_values(make):
    x = make()
    np.testing.assert_array_equal(encode_e4m3(x).view(torch.uint8).numpy(), numbers.nearest(x.numpy(), "e4m3"))


@pytest.mark.parametrize("make", [every_bfloat16, lambda: near_ties("e2m1")])
def test_e2m1_is_the_nearest_of_all_values(make):
    x = make()
    np.testing.assert_array_equal(encode_e2m1(x).numpy(), numbers.nearest(x.numpy(), "e2m1"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("encode", [encode_e4m3, encode_e2m1])
def test_other_dtypes_give_the_codes_of_their_values(encode, dtype):
    x = torch.cat([near_ties("e4m3"), near_ties("e2m1")]).to(dtype)
    assert torch.equal(encode(x).view(torch.uint8), encode(x.float()).view(torch.uint8))


def test_e4m3_saturates_and_keeps_what_is_no_number():
    x = torch.tensor([448.0, 464.0, 465.0, 1e9, INF, -INF, NAN, -NAN, 0.0, -0.0, 2.0**-9, 2.0**-10, 1.01 * 2.0**-10])
    wanted = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x00, 0x80, 0x01, 0x00, 0x01]
    assert encode_e4m3(x).view(torch.uint8).tolist() == wanted


def test_e2m1_worked_examples():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, 7.0, NAN, INF, -INF, -0.0])
    codes = encode_e2m1(x)
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 8, 7, 7, 7, 15, 8]
    assert decode_e2m1(codes)[:7].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert pack_e2m1(encode_e2m1(torch.tensor([1.0, -3.0]))).view(torch.uint8).tolist() == [0xD2]


def test_e2m1_codes_survive_packing():
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack((codes % 16, codes // 16), -1)  # every byte there is
    packed = pack_e2m1(pairs)
    assert packed.dtype == torch.int8
    assert packed.shape == (256, 1)
    assert packed.view(torch.uint8).flatten().tolist() == list(range(256))
    assert torch.equal(unpack_e2m1(packed), pairs)
    assert torch.equal(unpack_e2m1(packed.view(torch.uint8).t()), pack_and_unpack_columns(codes))
    values = decode_e2m1(torch.arange(16))
    assert values.tolist() == [*numbers.E2M1, *-numbers.E2M1]
    assert values.signbit().tolist() == [False] * 8 + [True] * 8


def pack_and_unpack_columns(codes: torch.Tensor) -> torch.Tensor:
    """Bytes 0..255 as one row of 512 codes."""
    return torch.tensor([[half for byte in codes.tolist() for half in (byte % 16, byte // 16)]], dtype=torch.uint8)


def test_an_odd_number_of_codes_does_not_pack():
    with pytest.raises(ValueError, match="even, got 3"):
        pack_e2m1(torch.zeros(2, 3, dtype=torch.uint8))


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_ue8m0_is_the_smallest_power_that_suffices(largest):
    """Around every boundary, float32 neighbour by neighbour, and in between."""
    mantissas = torch.cat([torch.arange(-3, 4) + (int(math.frexp(largest)[0] * 2**24) - 2**23), torch.tensor([0, 5])])
    mantissas = torch.cat([mantissas, torch.randint(1 << 23, (200,), generator=torch.Generator().manual_seed(0))])
    bits = (torch.arange(12, 255)[:, None] << 23) + mantissas.clamp(0, (1 << 23) - 1)
    amax = bits.int().view(torch.float32).flatten()
    wanted = [numbers.smallest_power(value, largest) + 127 for value in amax.tolist()]
    assert min(wanted) >= 1
    assert ue8m0_of(amax, largest).tolist() == wanted


def test_ue8m0_worked_examples():
    amax = torch.tensor([448.0, 448.1, 1.0, 1e-4])
    assert ue8m0_of(amax, 448.0).tolist() == [127, 128, 119, 105]
    scales, factors = scale_of(torch.tensor([1e-5, 0.0, 448.0]), FORMATS["mxfp8"])  # raised to 1e-4
    assert scales.tolist() == [105, 105, 127]
    assert factors.tolist() == [2.0**22, 2.0**22, 1.0]


def test_ue8m0_is_never_the_byte_for_nan():
    amax = torch.tensor([INF, NAN, torch.finfo(torch.float32).max, 0.0, 1e-45])
    assert ue8m0_of(amax, 1.0).tolist() == [254, 254, 254, 0, 1]


def test_ue8m0_decodes_to_powers_of_two():
    exponents = torch.arange(256, dtype=torch.uint8)
    powers = decode_ue8m0(exponents)
    assert powers[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert powers[255].isnan()
    assert torch.equal(encode_ue8m0(powers[:255]), exponents[:255])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_scales_are_never_zero(format):
    scales, factors = scale_of(torch.tensor([0.0, 1e-45]), format)
    if format.scale == "ue8m0":
        wanted = 105 if format.element == "e4m3" else 1
        assert scales.tolist() == [wanted] * 2
    elif format.scale == "e4m3":
        assert scales.float().tolist() == [2.0**-9] * 2
    else:
        np.testing.assert_array_equal(scales.numpy(), [np.float32(1e-4) / np.float32(448)] * 2)
    assert factors.isfinite().all()
