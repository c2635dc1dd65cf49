"""RMSNorm's reference against formulas in float64, exact rational scales and byte addresses; what it refuses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from rorqual.ops.registry import load_backends
from rorqual.ops.rms_norm import NormOutput, UtccpTarget, rms_norm
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization import FP8_BLOCK, FP8_ROW, FP8_ROW_UE8M0, MXFP4, MXFP8, QTensor, ScaleLayout
from tests.ops.norm_cases import NORM_CASES, PLAIN, QUANTISED, UNWRITTEN, norm_call, utccp_target
from tests.ops.values import every_other, normal, rows_apart

load_backends("native", "cpu")
if available():
    load_backends("triton")

BF16 = torch.bfloat16
ONE_ROUNDING = {torch.float32: 3e-6, torch.float16: 2**-11 * 1.01, BF16: 2**-8 * 1.01}
"""Relative error of a value that was rounded once, with room for float32 sums."""

E4M3 = np.array([m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])[
    :127
]
"""The magnitudes of codes 0 to 126 (127 is NaN)."""


def array(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def formula(x, weight, *, eps, residual=None, out_scale=1.0, unrounded_sum=False, **_) -> np.ndarray:
    """The norm in float64, nothing rounded but the sum."""
    wide = array(x)
    if residual is not None:
        wide = wide + array(residual)
        if not unrounded_sum:
            wide = array(torch.from_numpy(wide).to(x.dtype))
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * array(weight) * out_scale


def nearest_code(value: float) -> int:
    """The byte of the e4m3 number next to a value, the even one of two."""
    if math.isnan(value):
        return 127
    distance = np.abs(E4M3 - min(abs(value), 448.0))
    close = np.flatnonzero(distance == distance.min())
    code = int(next((c for c in close if c % 2 == 0), close[0]))
    return code | (128 if math.copysign(1.0, value) < 0 else 0)


def power_above(amax: float) -> int:
    """The smallest e with amax / 2^e <= 448, for a float32 quotient; without logarithms."""
    quotient = Fraction(float(np.float32(amax) / np.float32(448.0)))
    e = -200
    while Fraction(2) ** e < quotient:
        e += 1
    return e


def group_scale(values: list[float], format) -> tuple[float, float]:
    """(scale, factor) of a group, as step 5 of DeepInfer's norm has them."""
    amax = max([1e-4, *(min(abs(v), 3.4028234663852886e38) for v in values if not math.isnan(v))])
    if format.scale == "ue8m0":
        e = power_above(amax)
        return 2.0**e, 2.0**-e
    return float(np.float32(amax) / np.float32(448.0)), float(np.float32(448.0) / np.float32(amax))


# --- the norm itself


@pytest.mark.parametrize("name", [name for name in NORM_CASES if name not in QUANTISED])
def test_rms_norm_is_its_formula(name):
    (x, weight), options = NORM_CASES[name]()
    got = rms_norm.reference(x, weight, **options)
    assert isinstance(got, NormOutput)
    assert got.out.dtype == x.dtype
    assert got.out.shape == x.shape
    np.testing.assert_allclose(array(got.out), formula(x, weight, **options), rtol=ONE_ROUNDING[x.dtype], atol=1e-7)
    assert got.copy is None
    if "residual" not in options:
        assert got.residual is None
        return
    assert got.residual.dtype == x.dtype
    np.testing.assert_array_equal(array(got.residual), array((x.double() + options["residual"].double()).to(x.dtype)))


def test_result_is_rounded_once():
    """Not a second time before the weight, which gives other bits for hundreds of these."""
    x, weight = normal(4, 512, dtype=BF16), normal(512, dtype=BF16, seed=1)
    wide = array(x)
    normalised = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    once = torch.from_numpy(normalised * array(weight)).to(BF16)
    twice = (torch.from_numpy(normalised).to(BF16).double() * weight.double()).to(BF16)
    assert (twice != once).sum() > 100
    for got in (rms_norm.reference(x, weight, eps=1e-6), rms_norm(x, weight, eps=1e-6)):
        assert (got.out != once).sum() <= 2  # float32 may fall on the other side of a tie


def test_statistics_are_of_the_rounded_sum_unless_told_otherwise():
    """1 + 2^-9 is 1 in bfloat16: beside a 0, the float32 sum makes the other value's share larger."""
    x, residual = torch.tensor([[1.0, 1.0]], dtype=BF16), torch.tensor([[2.0**-9 * 1.9, -1.0]], dtype=BF16)
    weight = torch.tensor([300.0, 1.0])
    rounded = rms_norm.reference(x, weight, eps=0.25, residual=residual)
    unrounded = rms_norm.reference(x, weight, eps=0.25, residual=residual, unrounded_sum=True)
    assert rounded.residual.tolist() == unrounded.residual.tolist() == [[1.0, 0.0]]
    exact = 1 + float(residual[0, 0])
    want = [v / math.sqrt(v * v / 2 + 0.25) * 300 for v in (1.0, exact)]
    assert want[0] != pytest.approx(want[1], rel=2**-11)
    assert rounded.out[0, 0] == torch.tensor(want[0]).to(BF16)
    assert unrounded.out[0, 0] == torch.tensor(want[1]).to(BF16)


def test_out_scale_comes_before_the_scales_of_groups():
    x, weight = normal(3, 256), normal(256, seed=1)
    one, four = (rms_norm.reference(x, weight, eps=1e-6, format=FP8_ROW, out_scale=s).out for s in (1.0, 4.0))
    assert torch.equal(one.values.view(torch.uint8), four.values.view(torch.uint8))
    assert torch.equal(one.scales * 4, four.scales)


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_compiled_and_torch_kernels_are_chosen_for_the_plain_norm(name):
    (x, weight), options = NORM_CASES[name]()
    assert rms_norm.choose(x, weight, **options) is not rms_norm.reference
    explicit = {"out_scale": 1.0, "format": None, "layout": ScaleLayout.ROW, "copy": False, "unrounded_sum": False,
                "utccp": None, "out": None}  # fmt: skip
    assert rms_norm.choose(x, weight, **options, **explicit) is rms_norm.choose(x, weight, **options)


def test_three_dimensions_are_batches_of_two():
    x, residual = normal(2, 5, 256, dtype=BF16), normal(2, 5, 256, dtype=BF16, seed=1)
    weight = normal(256, dtype=BF16, seed=2)
    for layout in ScaleLayout:
        options = {"eps": 1e-6, "format": FP8_ROW_UE8M0 if not layout.packed else MXFP8, "layout": layout, "copy": True}
        whole = rms_norm.reference(x, weight, residual=residual, **options)
        for b in range(2):
            part = rms_norm.reference(x[b], weight, residual=residual[b], **options)
            assert torch.equal(whole.out.values[b].view(torch.uint8), part.out.values.view(torch.uint8))
            assert torch.equal(whole.out.scales[b], part.out.scales)
            assert torch.equal(whole.residual[b], part.residual)
            assert torch.equal(whole.copy[b], part.copy)


# --- quantised


def ways_with_copy() -> list[str]:
    """Cases of two or three dimensions whose values before quantising can be asked for."""
    return sorted(name for name in QUANTISED if "wide" not in name and "long" not in name and "utccp" not in name)


@pytest.mark.parametrize("name", ways_with_copy())
def test_quantised_result_is_its_formula(name):
    """t is what the norm gives without a format; every code and scale follows from it exactly."""
    (x, weight), options = NORM_CASES[name]()
    plain = {k: v for k, v in options.items() if k not in ("format", "layout", "copy")}
    t = rms_norm.reference(x, weight, **plain).out
    if "nan" not in name:
        np.testing.assert_allclose(array(t), formula(x, weight, **options), rtol=ONE_ROUNDING[x.dtype], atol=1e-30)
    got = rms_norm.reference(x, weight, **options)
    format, layout = options["format"], options.get("layout", ScaleLayout.ROW)
    assert isinstance(got.out, QTensor)
    assert (got.out.format, got.out.layout, got.out.shape) == (format, layout, x.shape)
    assert (got.copy is None) == (not options.get("copy"))
    if got.copy is not None:
        torch.testing.assert_close(got.copy, t.to(BF16), rtol=0, atol=0, equal_nan=True)
    if got.residual is not None:
        assert torch.equal(got.residual, x + options["residual"])
    rows = t.double().flatten(0, -2).tolist()
    codes = got.out.values.view(torch.uint8).flatten(0, -2).tolist()
    scales = got.out.float_scales().flatten(0, -2).tolist()
    size = format.block[1]
    for row, row_codes, row_scales in zip(rows, codes, scales, strict=True):
        assert len(row_scales) == -(-len(row) // size)
        for j, scale in enumerate(row_scales):
            part = row[j * size : (j + 1) * size]
            want_scale, factor = group_scale(part, format)
            assert scale == want_scale
            want = [nearest_code(float(np.float32(v) * np.float32(factor))) for v in part]
            assert row_codes[j * size : (j + 1) * size] == want


def storage_bytes(x: torch.Tensor) -> list[int]:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).tolist()


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize(
    ("format", "layout"),
    [(f, at) for f in (FP8_ROW, FP8_ROW_UE8M0, MXFP8) for at in ScaleLayout if f.scale == "ue8m0" or not at.packed],
)
def test_scales_lie_where_the_layout_says(format, layout, rows, batch):
    """By byte addresses in the memory behind the view, and by its shape and strides."""
    size = 1024
    groups, padded = size // format.block[1], -(-rows // 4) * 4
    lead = () if batch is None else (batch,)
    x, weight = normal(*lead, rows, size, dtype=BF16), normal(size, dtype=BF16, seed=1)
    plain = rms_norm.reference(x, weight, eps=1e-6, format=format).out
    scales = rms_norm.reference(x, weight, eps=1e-6, format=format, layout=layout).out.scales
    packs = groups // 4 if layout.packed else groups
    assert scales.shape == (*lead, rows, packs)
    by_column = layout in (ScaleLayout.COLUMN, ScaleLayout.COLUMN_PACKED)
    strides = (packs * padded, 1, padded) if by_column else (rows * packs, packs, 1)
    assert scales.stride()[-2:] == strides[1:]
    assert batch is None or scales.stride(0) == strides[0]
    memory = storage_bytes(scales)
    wanted = plain.float_scales().reshape(batch or 1, rows, groups).tolist()
    for b in range(batch or 1):
        for m in range(rows):
            for j in range(groups):
                scale = wanted[b][m][j]
                if format.scale == "float32" or layout is ScaleLayout.COLUMN:
                    entry = (b * groups + j) * padded + m if by_column else (b * rows + m) * groups + j
                    got = np.frombuffer(bytes(memory[4 * entry : 4 * entry + 4]), np.float32)[0]
                    assert got == scale
                else:
                    at = (b * rows + m) * groups + j
                    if by_column:
                        at = b * groups * padded + j // 4 * padded * 4 + m * 4 + j % 4
                    assert memory[at] == int(math.log2(scale)) + 127


@pytest.mark.parametrize("layout", ScaleLayout)
def test_no_rows_have_the_layouts_shape(layout):
    format = MXFP8 if layout.packed else FP8_ROW
    got = rms_norm.reference(torch.zeros(0, 512), torch.ones(512), eps=1e-6, format=format, layout=layout, copy=True)
    assert got.out.shape == (0, 512)
    assert got.out.scales.shape == (0, 4)  # 512 / 128 scales, or 512 / 32 in fours
    assert got.copy.shape == (0, 512)


@pytest.mark.parametrize(("rows", "block_m"), [(40, 16), (200, 192), (200, 128), (5, 300), (1, 1)])
def test_utccp_scales_are_the_rows_of_each_block_transposed(rows, block_m):
    """Of 128 rows seen as 4 x 32, row m goes to (m % 32) * 4 + m // 32; blocks start at multiples of 128."""
    size, padded = 256, -(-block_m // 128) * 128
    target = utccp_target(rows, size, block_m)
    got = rms_norm.reference(
        normal(rows, size), torch.ones(size), eps=1e-6, format=MXFP8, layout=ScaleLayout.COLUMN_PACKED, utccp=target
    )
    scales = got.out.float_scales().log2().int() + 127
    words = target.out.tolist()
    written = set()
    for m in range(rows):
        block, i = divmod(m, block_m)
        place = block * padded + i // 128 * 128 + i % 32 * 4 + i % 128 // 32
        written.add(place)
        for pack in range(size // 128):
            want = sum(int(scales[m, 4 * pack + k]) << 8 * k for k in range(4))
            assert words[place][pack] & 0xFFFFFFFF == want
    assert len(written) == rows
    assert all(word == [UNWRITTEN] * 2 for place, word in enumerate(words) if place not in written)


def test_utccp_places_of_the_worked_examples():
    for block_m, places in ((16, {0: 0, 1: 4, 15: 60, 16: 128}), (192, {31: 124, 32: 1, 128: 128, 160: 129, 191: 253})):
        rows = max(places) + 1
        for m, place in places.items():
            x = torch.full((rows, 128), 1e-6)
            x[m] = torch.linspace(500, 501, 128)  # a row that alone has other scales than the floor's
            target = utccp_target(rows, 128, block_m)
            rms_norm.reference(x, torch.ones(128), eps=1.0, format=MXFP8, utccp=target)
            other = [at for at, (word,) in enumerate(target.out.tolist()) if word not in (UNWRITTEN, 0x69696969)]
            assert other == [place]  # 1e-4, the floor, has byte 105 = 0x69


# --- memory


def implementations() -> list[pytest.ParameterSet]:
    """(function, device) of those that know every option."""
    found = [pytest.param(rms_norm.reference, "cpu", id="reference")]
    if available():
        triton = next(impl.fn for impl in rms_norm.impls if impl.backend == "triton")
        marks = () if INTERPRETING else pytest.mark.gpu
        found.append(pytest.param(triton, "cpu" if INTERPRETING else "cuda", marks=marks, id="triton"))
    return found


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


@pytest.mark.parametrize(("run", "device"), implementations())
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_results_share_no_memory(run, device, dtype):
    x, residual = normal(3, 256, dtype=dtype).to(device), normal(3, 256, dtype=dtype, seed=1).to(device)
    weight = torch.ones(256, device=device)
    got = run(x, weight, eps=1e-6, residual=residual, format=FP8_ROW, copy=True)
    given = [x, residual, weight, got.residual, got.copy, got.out.values, got.out.scales]
    assert not any(same_memory(a, b) for i, a in enumerate(given) for b in given[:i])
    plain = run(x, weight, eps=1e-6, residual=residual)
    given = [x, residual, weight, plain.out, plain.residual]
    assert not any(same_memory(a, b) for i, a in enumerate(given) for b in given[:i])


@pytest.mark.parametrize(("run", "device"), implementations())
@pytest.mark.parametrize("place", ["x", "residual"])
def test_out_may_be_the_input(run, device, place):
    args = {name: normal(5, 3, 40, dtype=BF16, seed=seed).to(device) for seed, name in enumerate(("x", "residual"))}
    weight = normal(40, dtype=BF16, seed=9).to(device)
    want = run(weight=weight, eps=1e-6, **args)
    out = args[place]
    got = run(weight=weight, eps=1e-6, out=out, **args)
    assert got.out is out
    assert torch.equal(out, want.out)
    assert torch.equal(got.residual, want.residual)


@pytest.mark.parametrize(("run", "device"), implementations())
def test_out_leaves_the_gaps_between_its_rows(run, device):
    memory = torch.full((4, 5, 48), 7.0, dtype=BF16, device=device)
    x, weight = normal(4, 2, 40, dtype=BF16).to(device), torch.ones(40, dtype=BF16, device=device)
    run(x, weight, eps=1e-6, out=memory[:, 1:3, 4:44])
    assert torch.equal(memory[:, 1:3, 4:44], run(x, weight, eps=1e-6).out)
    memory[:, 1:3, 4:44] = 7.0
    assert (memory == 7.0).all()


@pytest.mark.parametrize(("run", "device"), implementations())
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_a_row_is_the_same_in_any_company(run, device, size):
    x, weight = normal(300 if size < 1000 else 9, size, dtype=BF16).to(device), normal(size, seed=1).to(device)
    options = {"eps": 1e-6, "format": MXFP8, "copy": True}
    whole = run(x, weight, **options)
    for start, stop in ((0, 1), (3, 4), (4, 9)):
        part = run(x[start:stop], weight, **options)
        assert torch.equal(part.copy, whole.copy[start:stop])
        assert torch.equal(part.out.values.view(torch.uint8), whole.out.values[start:stop].view(torch.uint8))
        assert torch.equal(part.out.scales, whole.out.scales[start:stop])


# --- refusals

X, W = torch.zeros(2, 256), torch.ones(256)
TARGET = utccp_target(2, 256, 16)
REFUSALS = {
    "four_dimensions": ((torch.zeros(1, 1, 1, 8), torch.ones(8)), {}, ValueError, "1 to 3 dimensions"),
    "no_dimension": ((torch.zeros(()), torch.ones(1)), {}, ValueError, "1 to 3 dimensions"),
    "integers": ((torch.zeros(2, 256, dtype=torch.int32), W), {}, TypeError, "takes bfloat16, float16 and float32"),
    "weight_of_integers": ((X, torch.ones(256, dtype=torch.int64)), {}, TypeError, "weight is bfloat16"),
    "short_weight": ((X, torch.ones(255)), {}, ValueError, r"weight of shape \(256,\), got \(255,\)"),
    "matrix_weight": ((X, torch.ones(1, 256)), {}, ValueError, r"weight of shape \(256,\), got \(1, 256\)"),
    "residual_of_another_shape": ((X, W), {"residual": torch.zeros(1, 256)}, ValueError, "residual must be as x"),
    "residual_of_another_dtype": (
        (X, W),
        {"residual": torch.zeros(2, 256, dtype=BF16)},
        ValueError,
        "residual must be",
    ),
    "out_of_another_shape": ((X, W), {"out": torch.zeros(2, 255)}, ValueError, "out must be as x"),
    "out_of_another_dtype": ((X, W), {"out": torch.zeros(2, 256, dtype=BF16)}, ValueError, "out must be as x"),
    "strided_out": ((X, W), {"out": every_other(X)}, ValueError, "last stride of 1"),
    "copy_without_format": ((X, W), {"copy": True}, ValueError, "give a format, or drop it"),
    "utccp_without_format": ((X, W), {"utccp": TARGET}, ValueError, "give format=MXFP8"),
    "weight_format": ((X, W), {"format": FP8_BLOCK}, ValueError, "fp8_row, fp8_row_ue8m0, mxfp8, got fp8_block"),
    "four_bits": ((X, W), {"format": MXFP4}, ValueError, "got mxfp4"),
    "quantised_vector": ((torch.zeros(256), W), {"format": FP8_ROW}, ValueError, "2 or 3 dimensions"),
    "out_with_format": ((X, W), {"format": FP8_ROW, "out": X.clone()}, ValueError, "drop out or format"),
    "packed_float32": ((X, W), {"format": FP8_ROW, "layout": ScaleLayout.COLUMN_PACKED}, ValueError, "UE8M0"),
    "three_scales_in_fours": (
        (torch.zeros(2, 96), torch.ones(96)),
        {"format": MXFP8, "layout": ScaleLayout.ROW_PACKED},
        ValueError,
        "multiple of 4",
    ),
    "utccp_of_128": ((X, W), {"format": FP8_ROW_UE8M0, "utccp": TARGET}, ValueError, "32 values each"),
    "utccp_of_three_dimensions": ((X[None], W), {"format": MXFP8, "utccp": TARGET}, ValueError, r"need x \[m, n\]"),
    "utccp_of_an_odd_size": (
        (torch.zeros(2, 100), torch.ones(100)),
        {"format": MXFP8, "utccp": utccp_target(2, 128, 16)},
        ValueError,
        "multiple of 128",
    ),
    "utccp_of_floats": ((X, W), {"format": MXFP8, "utccp": TARGET._replace(out=X)}, TypeError, "int32"),
    "utccp_by_rows": (
        (X, W),
        {"format": MXFP8, "utccp": TARGET._replace(out=torch.zeros(2, 2, dtype=torch.int32))},
        ValueError,
        "strides",
    ),
    "utccp_of_another_width": ((X, W), {"format": MXFP8, "utccp": utccp_target(2, 384, 16)}, ValueError, "shape"),
    "utccp_without_space": (
        (torch.zeros(40, 256), W),
        {"format": MXFP8, "utccp": UtccpTarget(torch.zeros(2, 256, dtype=torch.int32).t(), 16)},
        ValueError,
        "384 or more",
    ),
    "utccp_blocks_of_nothing": (
        (X, W),
        {"format": MXFP8, "utccp": TARGET._replace(block_m=0)},
        ValueError,
        "at least 1",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_one_sentence(name):
    args, options, error, words = REFUSALS[name]
    before = TARGET.out.clone()
    with pytest.raises(error, match=words):
        rms_norm.reference(*args, eps=1e-6, **options)
    with pytest.raises(error, match=words):  # whatever implementation a call gets
        rms_norm(*args, eps=1e-6, **options)
    assert torch.equal(TARGET.out, before)


def test_strides_of_any_kind_give_the_same():
    (x, weight), options = norm_call(6, 256, dtype=BF16, residual=True, format=FP8_ROW, copy=True)
    want = rms_norm.reference(x, weight, **options)
    for view in (every_other, rows_apart, lambda v: v.t().contiguous().t()):
        got = rms_norm.reference(view(x), weight, **(options | {"residual": view(options["residual"])}))
        assert torch.equal(got.out.values.view(torch.uint8), want.out.values.view(torch.uint8))
        assert torch.equal(got.copy, want.copy)
