"""Which products Hopper's kernel takes: those that were measured, one answer for both backends, and operands of TMA."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from rorqual.ops import _hopper_tiles
from rorqual.ops._hopper_tiles import HopperTile, choose_tile, hopper_tile
from rorqual.ops.gated_linear import gated_linear
from rorqual.ops.linear import linear
from rorqual.ops.registry import Op

BF16 = torch.bfloat16
SHAPES = {  # features, columns, gated
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (3072, 1024, True), "down": (1024, 3072)},
    "8B": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (12288, 4096, True), "down": (4096, 12288)},
}


def name(tile: HopperTile | None) -> str:
    if tile is None:
        return "-"
    return f"{tile.lines}x{tile.rows}k{tile.step}s{tile.stages}{'e' if tile.early else ''}"


@pytest.mark.parametrize(
    ("model", "rows", "want"),
    [
        ("0.6B", 16, "- - - -"),
        ("0.6B", 17, "64x32k128s8e 64x32k128s8e 64x32k64s8e 64x32k128s8e"),
        ("0.6B", 32, "64x32k128s8e 64x32k128s8e 64x32k64s8e 64x32k128s8e"),
        ("0.6B", 64, "64x64k128s6e 64x64k128s6e 64x64k64s6e 64x64k128s6e"),
        ("0.6B", 128, "64x64k128s6e 64x64k128s6e 64x64k64s6 64x64k128s6e"),
        ("0.6B", 192, "64x64k64s6e 64x64k128s6e - 64x64k128s6e"),
        ("0.6B", 256, "64x128k128s4e 64x64k128s6e 64x128k64s4e 64x64k128s6e"),
        ("0.6B", 257, "- - - -"),
        ("8B", 32, "64x32k128s8e 64x32k128s8e 128x64k64s4e 64x32k128s8e"),
        ("8B", 64, "64x64k128s6e 64x64k128s6e 128x64k64s4e 64x64k128s6e"),
        ("8B", 128, "- 64x64k128s6e - -"),
        ("8B", 256, "- - - -"),
    ],
)
def test_tiles_of_measured_products(model, rows, want):
    found = [
        choose_tile(rows, features, columns, gated=bool(gated)) for features, columns, *gated in SHAPES[model].values()
    ]
    assert " ".join(map(name, found)) == want


def test_no_tile_for_the_vocabulary():
    for rows in range(300):
        assert choose_tile(rows, 151936, 1024, gated=False) is None
        assert choose_tile(rows, 151936, 4096, gated=False) is None


def test_programs_have_room_and_gated_steps_are_64_columns():
    for lines, gated in ((_hopper_tiles._PLAIN, False), (_hopper_tiles._GATED, True)):
        for line in lines:
            tile = line.tile
            held = (tile.lines * (2 if gated else 1) + tile.rows) * tile.step * 2 * tile.stages
            assert line.places * (held + 2048) <= 227 * 1024
            assert line.to_rows <= _hopper_tiles.MOST_HOPPER_ROWS
            assert tile.step == 64 or not gated


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(_hopper_tiles, "is_hopper", lambda device: True)


def operands(rows: int = 40, columns: int = 128, features: int = 192, dtype: torch.dtype = BF16):
    return torch.zeros(rows, columns, dtype=dtype), torch.zeros(features, columns, dtype=dtype)


def test_operands(on_hopper):
    x, weight = operands()
    assert hopper_tile(x, weight) == HopperTile(64, 64, 128, 6)
    assert hopper_tile(x, weight, gated=True) == HopperTile(64, 64, 64, 6)
    assert hopper_tile(x, weight, out_dtype=BF16) is not None
    assert hopper_tile(x.half(), weight.half()) is not None
    assert hopper_tile(x.view(2, 20, 128), weight) is not None
    wide = torch.zeros(40, 136, dtype=BF16)
    assert hopper_tile(wide[:, :128], weight) is not None
    assert hopper_tile(wide[:, :121], weight[:, :121]) is not None
    for refused in (
        lambda: hopper_tile(x, weight, weight[:, 0]),
        lambda: hopper_tile(x, weight, out_dtype=torch.float32),
        lambda: hopper_tile(x, weight, out_acc=torch.zeros(40, 192, dtype=BF16)),
        lambda: hopper_tile(x, weight.half()),
        lambda: hopper_tile(x.float(), weight.float()),
        lambda: hopper_tile(x[:16], weight),
        lambda: hopper_tile(x[0], weight),
        lambda: hopper_tile(x[:1].expand(40, 128), weight),
        lambda: hopper_tile(x, weight[:, ::2]),
        lambda: hopper_tile(x.t().contiguous().t(), weight),
        lambda: hopper_tile(x, weight.t().contiguous().t()),
        lambda: hopper_tile(wide[:, 4:132], weight),  # not from 16 bytes on
        lambda: hopper_tile(torch.zeros(40, 132, dtype=BF16)[:, :128], weight),
        lambda: hopper_tile(wide.view(2, 20, 136)[..., :128], weight),
        lambda: hopper_tile(x[:, :0], weight[:, :0]),
        lambda: hopper_tile(x, weight[:0]),
        lambda: hopper_tile(x, weight[:1], gated=True),
    ):
        assert refused() is None


def test_other_devices_keep_their_kernels():
    assert hopper_tile(*operands()) is None


@pytest.fixture
def refusals(monkeypatch):
    """Backends' refusals as on a GPU, and no trace of a module that was not loaded before."""
    pytest.importorskip("triton")
    names = [f"rorqual.ops.{which}" for which in ("vendor.linear", "triton.linear", "triton.gated_linear")]
    loaded, before = set(sys.modules), {op: list(op.impls) for op in _ops()}
    vendor, triton, gated = (importlib.import_module(which) for which in names)
    monkeypatch.setattr(vendor, "_elsewhere", lambda *tensors: None)
    for module in (triton, gated):
        monkeypatch.setattr(module, "refuses", lambda *tensors: None)
    yield vendor._refuse, triton._refuse, gated._refuse
    for op, impls in before.items():
        op.impls[:] = impls
    for which in names:
        if which not in loaded:
            del sys.modules[which]


def _ops() -> list[Op]:
    from rorqual.ops.linear import prepare_weight, unpack_weight

    return [linear, gated_linear, prepare_weight, unpack_weight]


def test_one_backend_takes_what_the_other_leaves(on_hopper, refusals):
    vendor, triton, gated = refusals
    for rows in (1, 16, 17, 64, 65, 128, 129, 192, 250, 256, 257, 1000):
        for features, columns in ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (1024, 1021), (9000, 512)):
            x, weight = operands(rows, columns, features)
            tile = hopper_tile(x, weight)
            assert tile is None or (vendor(x, weight) is not None and triton(x, weight) is None)
            if rows > 128:
                assert (triton(x, weight) is None) == (tile is not None) == (vendor(x, weight) is not None)
            assert vendor(x, weight) is None or triton(x, weight) is None
            takes_gated = rows <= 16 or hopper_tile(x, weight, gated=True) is not None
            assert (gated(x, weight) is None) == takes_gated
    x, weight = operands(200, 64, 1024)
    for options in ({"out_dtype": torch.float32}, {"out_acc": torch.zeros(200, 1024, dtype=BF16)}):
        assert vendor(x, weight, **options) is None
        assert "up to 128 rows" in triton(x, weight, **options)
    bias = torch.zeros(1024, dtype=BF16)
    assert vendor(x, weight, bias) is None
    assert "up to 128 rows" in triton(x, weight, bias)
    assert "up to 16 rows" in gated(x, weight, bias)


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_narrow_weights_are_streamed_beside_more_rows(on_hopper, refusals, out_dtype):
    """A router's whole product would be a few of cuBLAS's programs."""
    vendor, triton, _ = refusals
    for rows, taken in ((129, True), (512, True), (513, False)):
        x, weight = operands(rows, 7168, 256)
        assert (triton(x, weight, out_dtype=out_dtype) is None) == taken
        assert (vendor(x, weight, out_dtype=out_dtype) is None) == (not taken)


def test_a_weight_is_described_once_and_not_kept():
    pytest.importorskip("triton")
    from rorqual.ops.triton import _hopper_product

    weight = torch.zeros(64, 128, dtype=BF16)
    boxes = _hopper_product._boxes_of_weight(weight, 64, 64)
    assert _hopper_product._boxes_of_weight(weight, 64, 64) is boxes
    assert _hopper_product._boxes_of_weight(weight, 64, 128).block_shape == [64, 128]
    weight.data = torch.ones(64, 128, dtype=BF16)  # as when weights are replaced
    moved = _hopper_product._boxes_of_weight(weight, 64, 64)
    assert moved.base.data_ptr() == weight.data_ptr()
    known = len(_hopper_product._described)
    del weight
    assert len(_hopper_product._described) == known - 1
