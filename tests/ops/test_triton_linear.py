"""The Triton products beyond parity: exactness, a row's independence of its company, layouts, and every tile.

They run on a GPU, and in Triton's interpreter (tests/ops/test_triton_interpreted.py).
"""

from __future__ import annotations

import pytest
import torch

from rorqual.ops.linear import linear, prepare_weight, unpack_weight
from rorqual.ops.registry import load_backends
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization import FP8_BLOCK, FP8_BLOCK_UE8M0, MXFP4, MXFP8, QTensor, QuantFormat, pack_e2m1
from tests.ops.linear_cases import FORMATS
from tests.ops.values import normal

pytestmark = [
    pytest.mark.skipif(not available(), reason="there is neither a GPU nor Triton's interpreter"),
    *([] if INTERPRETING else [pytest.mark.gpu]),
]
if available():
    load_backends("triton")
    from rorqual.ops.triton import _linear_launch as launches
    from rorqual.ops.triton import linear as products

DEVICE = "cpu" if INTERPRETING else "cuda"
BF16 = torch.bfloat16


def multiply(x: torch.Tensor | QTensor, weight: QTensor, **options) -> torch.Tensor:
    """The Triton implementation on operands wherever they are; the result on the CPU."""
    impl = {impl.backend: impl for impl in linear.impls}["triton"]
    prepared = prepare_weight(weight.to(DEVICE))
    assert impl.refuse(x.to(DEVICE), prepared, **options) is None
    return impl.fn(x.to(DEVICE), prepared, **options).cpu()


def formats_of(family: str) -> tuple[QuantFormat, QuantFormat | None]:
    """A weight's format, and x's, for which a product takes a family of tiles."""
    format, activation = FORMATS["fp8_block" if family.startswith("fp8") else family.removesuffix("_weight")]
    return format, None if family.endswith("_weight") else activation


def every_code(format, features: int, columns: int) -> QTensor:
    """All codes but NaN, and power-of-two scales from 2^-40 to 2."""
    scales = (torch.arange(features * columns // 32) * 7 % 42 + 87).view(features, -1).to(torch.uint8)
    codes = torch.arange(features * columns).view(features, columns) * 5
    if format is MXFP4:
        return QTensor(pack_e2m1(codes % 16), scales, MXFP4)
    values = (codes % 256).to(torch.uint8)
    values[values & 0x7F == 0x7F] = 1
    if format is MXFP8:
        return QTensor(values.view(torch.float8_e4m3fn), scales, MXFP8)
    blocks = 2.0 ** torch.arange(-3, 0).float().view(1, -1)[:, : -(-columns // 128)]
    return QTensor(values.view(torch.float8_e4m3fn), blocks, FP8_BLOCK)


@pytest.mark.parametrize("rows", [16, 65])
@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8, MXFP4], ids=lambda f: f.name)
def test_every_value_of_a_weight_comes_out_as_it_is(format, rows):
    """Through a product with rows of the identity, subnormal codes included; powers of two lose nothing."""
    weight = every_code(format, 24, 160)
    picked = torch.eye(160)[torch.arange(rows) * 7 % 160]
    got = multiply(picked.to(BF16), weight, out_dtype=torch.float32)
    assert torch.equal(got, picked @ weight.dequantize().t())


@pytest.mark.parametrize("format", [MXFP8, MXFP4], ids=lambda f: f.name)
def test_weights_are_decoded_as_a_whole_as_they_are(format):
    weight = every_code(format, 40, 224)
    expanded = launches.expand(prepare_weight(weight.to(DEVICE)))
    assert expanded.dtype == BF16
    assert torch.equal(expanded.float().cpu(), weight.dequantize())


def test_panels_decode_a_weight_a_part_at_a_time(monkeypatch):
    monkeypatch.setattr(products, "_PANEL", 128 * 96)
    monkeypatch.setattr(products, "EXPAND_ROWS", 3)
    for name in ("mxfp8_tile", "mxfp4"):
        weight = QTensor.quantize(normal(300, 96, seed=1), FORMATS[name][0])
        x = normal(5, 96).to(BF16)
        want = linear.reference(x, weight)
        torch.testing.assert_close(multiply(x, weight), want, rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("family", launches.TILES if available() else [])
def test_a_row_does_not_depend_on_its_company(family):
    """Up to SKINNY rows: other tiles, the same sums in the same order. (NumPy's order depends on the tile's shape.)"""
    format, activation = formats_of(family)
    weight = QTensor.quantize(normal(24, 1024, seed=1) / 32, format)
    x = normal(launches.SKINNY, 1024).to(BF16)

    def rows(first: int, last: int) -> torch.Tensor:
        part = x[first:last]
        return multiply(part if activation is None else QTensor.quantize(part, activation), weight)

    assert launches.shares(family, 1, 24, 1024) > 1
    together = rows(0, launches.SKINNY)
    for first, last in ((0, 1), (5, 12), (3, 19), (31, 63)):
        allowed = {"rtol": 2**-7, "atol": 1e-5} if INTERPRETING else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(rows(first, last), together[first:last], **allowed)


def test_counters_are_zero_again():
    weight = QTensor.quantize(normal(200, 1024, seed=1), MXFP4)
    multiply(normal(3, 1024).to(BF16), weight)
    assert launches.arrivals(torch.empty(0, device=DEVICE).device).count_nonzero() == 0


@pytest.mark.parametrize("family", launches.TILES if available() else [])
def test_shares_do_not_depend_on_rows(family):
    for features, columns in ((12288, 4096), (4096, 12288), (1024, 4096), (64, 128), (152064, 4096)):
        counts = {launches.shares(family, rows, features, columns) for rows in range(1, launches.SKINNY + 1)}
        assert len(counts) == 1
        assert counts <= {1, 2, 4, 8}
        assert launches.shares(family, launches.SKINNY + 1, features, columns) == 1
    assert launches.shares(family, 1, 152064, 4096) == 1  # enough tiles as it is
    assert launches.shares(family, 1, 1024, 2048) == 4  # no less than four steps each
    assert launches.shares(family, 1, 1024, 8192) == 8


def test_skinny_tiles_of_a_family_use_one_kind_of_tensor_instruction():
    for family, entries in launches.TILES.items():
        assert list(entries) == sorted(entries)
        assert launches.SKINNY in entries
        kinds = {tile.warps >= 4 and tile.block_n >= 64 for most, tile in entries.items() if most <= launches.SKINNY}
        assert len(kinds) == 1, family
        for most in entries:
            assert launches.tile_of(family, most) == entries[most]
        assert launches.tile_of(family, 10**6) == list(entries.values())[-1]


@pytest.mark.parametrize(
    ("family", "most"),
    [(family, most) for family, entries in launches.TILES.items() for most in entries] if available() else [],
)
def test_every_tile_is_right(family, most):
    format, activation = formats_of(family)
    weight = QTensor.quantize(normal(72, 256, seed=1) / 16, format)
    x = normal(min(most, 70), 256).to(BF16)
    operand = x if activation is None else QTensor.quantize(x, activation)
    torch.testing.assert_close(multiply(operand, weight), linear.reference(operand, weight), rtol=2**-7, atol=2e-2)


def test_planes_hold_four_codes_to_a_word():
    """Signs in bits 15, 12, 14 and 13; magnitudes in bits 8-6, 5-3, 2-0 and 11-9; 32 columns apart."""
    codes = torch.zeros(1, 256, dtype=torch.uint8)
    codes[0, 5], codes[0, 32 + 5], codes[0, 64 + 5], codes[0, 96 + 5] = 0x9, 0xA, 0xC, 0xF
    codes[0, 128 + 31] = 0x7
    weight = QTensor(pack_e2m1(codes), torch.tensor([[127, 128, 0, 5, 127, 126, 125, 124]], dtype=torch.uint8), MXFP4)
    prepared = prepare_weight(weight.to(DEVICE))
    words = prepared.values.cpu().int() & 0xFFFF
    assert prepared.shape == (1, 256)
    assert words.shape == (1, 2, 64, 32)  # tiles of 64 rows, groups of 128 columns
    assert words[0, 0, 0, 5] == 1 << 15 | 1 << 6 | 1 << 12 | 2 << 3 | 1 << 14 | 4 | 1 << 13 | 7 << 9
    assert words[0, 1, 0, 31] == 7 << 6
    assert words.count_nonzero() == 2
    raised = prepared.scales.cpu().contiguous().view(torch.uint8).tolist()
    assert raised == [[253, 254, 126, 131, 253, 252, 251, 250]]
    assert torch.equal(unpack_weight(prepared).values.cpu(), weight.values)


def test_weights_that_the_layouts_do_not_hold_are_refused():
    impl = {impl.backend: impl for impl in prepare_weight.impls}["triton"]
    large = QTensor.quantize(normal(4, 64) * 100, MXFP4).to(DEVICE)
    assert "e2m1 scales up to 2, got 2^" in impl.refuse(large)
    narrow = QTensor.quantize(normal(4, 64), FP8_BLOCK).reblock(1, 16).to(DEVICE)
    assert "blocks of 32, 64 or 128 columns" in impl.refuse(narrow)


def test_prepared_weights_dequantise_as_before():
    for name, (format, _) in FORMATS.items():
        weight = QTensor.quantize(normal(40, 200), format).to(DEVICE)
        assert torch.equal(prepare_weight(weight).dequantize(), weight.dequantize()), name


def test_scales_of_blocks_lie_as_cublas_wants_them():
    """Rows a multiple of 16 bytes apart, powers of two as float32."""
    for format in (FP8_BLOCK, FP8_BLOCK_UE8M0):
        prepared = prepare_weight(QTensor.quantize(normal(256, 640), format).to(DEVICE))
        assert prepared.scales.dtype == torch.float32
        assert prepared.scales.shape == (2, 5)
        assert prepared.scales.stride() == (8, 1)
