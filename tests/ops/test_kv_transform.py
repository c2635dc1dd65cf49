"""The fused cache write: every stage in float64, every byte at its address."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rorqual.ops.kv_transform import (
    CastStage,
    HadamardStage,
    NormStage,
    RopeStage,
    hadamard_transform,
    transform_and_store_kv,
    transform_kv,
)
from rorqual.ops.load_kv import load_kv
from rorqual.ops.load_plan import paged_range, segment_tensor
from rorqual.ops.registry import load_backends
from rorqual.ops.rope import rotary_embedding
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization import FP8_BLOCK, FP8_ROW, MXFP8, QTensor, QuantFormat
from rorqual.quantization.kv_record import INDEX_FP4, RECORDS, V41, KVRecord, bf16_record
from tests.ops.kv_cases import (
    CASTS,
    GARBAGE,
    SLOTS,
    filled,
    norm_stage,
    numbers_of,
    rope_stage,
    whole_quarters,
)
from tests.ops.kv_cases import RECORDS as WITH_BF16
from tests.ops.number_values import e2m1, e4m3
from tests.ops.values import normal
from tests.quantization.numbers import quantised

if available():
    load_backends("triton")

BF16 = torch.bfloat16
ONE_ROUNDING = 2**-8 * 1.01
STORES = [transform_and_store_kv.reference] + [i.fn for i in transform_and_store_kv.impls if INTERPRETING]


def array(x: torch.Tensor) -> np.ndarray:
    return x.double().numpy()


def turned(x: np.ndarray, rope: RopeStage) -> np.ndarray:
    """Pairs of channels as complex numbers, times e^(i angle)."""
    width = rope.cos_sin.shape[1]
    first = x.shape[-1] - width if rope.offset is None else rope.offset
    half = width // 2
    a, b = (slice(first, first + width, 2), slice(first + 1, first + width, 2)) if rope.interleaved else (
        slice(first, first + half), slice(first + half, first + width))  # fmt: skip
    angles = array(rope.cos_sin)[rope.positions.numpy()]
    turn = (angles[:, :half] + 1j * angles[:, half:]).reshape(len(x), *[1] * (x.ndim - 2), half)
    pairs = (x[..., a] + 1j * x[..., b]) * (turn.conj() if rope.conjugate else turn)
    out = x.copy()
    out[..., a], out[..., b] = pairs.real, pairs.imag
    return out


def sylvester(size: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def assert_rounded_once(got: torch.Tensor, want: np.ndarray, *, sums: float = 0.0) -> None:
    """Within half a step of bfloat16; `sums` is the error that float32 sums may leave."""
    assert got.dtype == BF16
    np.testing.assert_allclose(array(got), want, rtol=ONE_ROUNDING, atol=sums)


# ---- stages


@pytest.mark.parametrize("shape", [(7, 64), (7, 3, 64)])
def test_norm_is_its_formula(shape):
    x, norm = normal(*shape, dtype=BF16) * 3, norm_stage(64)
    wide = array(x)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * array(norm.weight)
    assert_rounded_once(transform_kv.reference(x, norm=norm), want)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [None, 0, 16])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_rope_turns_the_tail_unless_told_otherwise(heads, offset, interleaved, conjugate):
    x = normal(7, *heads, 64, dtype=BF16)
    rope = rope_stage(7, 32, interleaved=interleaved, offset=offset, conjugate=conjugate)
    got = transform_kv.reference(x, rope=rope)
    assert_rounded_once(got, turned(array(x), rope), sums=1e-6)
    first = 32 if offset is None else offset
    untouched = [c for c in range(64) if not first <= c < first + 32]
    assert torch.equal(got[..., untouched], x[..., untouched])


@pytest.mark.parametrize("size", [1, 2, 16, 128, 512])
def test_hadamard_is_the_product_with_sylvesters_matrix(size):
    x = normal(5, size)
    matrix = sylvester(size)
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))
    got = hadamard_transform(x, scale=0.5)
    np.testing.assert_allclose(array(got), 0.5 * array(x) @ matrix, rtol=0, atol=1e-6 * size)
    back = hadamard_transform(hadamard_transform(x, scale=size**-0.5), scale=size**-0.5)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-5)


def test_hadamard_comes_behind_the_rotation_and_before_the_cast():
    x, rope = normal(5, 128, dtype=BF16), rope_stage(5, 64)
    rotated = transform_kv.reference(x, rope=rope)
    both = transform_kv.reference(x, rope=rope, hadamard=HadamardStage(128**-0.5))
    assert_rounded_once(both, array(rotated) @ sylvester(128) * 128**-0.5, sums=1e-5)
    cast = transform_kv.reference(x, rope=rope, hadamard=HadamardStage(128**-0.5), cast=CastStage(MXFP8))
    want = QTensor.quantize(both, MXFP8)
    assert torch.equal(cast.values.view(torch.uint8), want.values.view(torch.uint8))


def test_stages_are_rounded_one_after_the_other():
    """Together or one by one: the same bits."""
    x, rope = normal(9, 2, 128, dtype=BF16), rope_stage(9, 64, interleaved=True)
    stages = {
        "norm": norm_stage(128),
        "rope": rope,
        "hadamard": HadamardStage(128**-0.5),
        "cast": CastStage(MXFP8, True),
    }
    at_once, one_by_one = transform_kv.reference(x, **stages), x
    for name, stage in stages.items():
        one_by_one = transform_kv.reference(one_by_one, **{name: stage})
    assert torch.equal(at_once, one_by_one)


def test_nothing_to_do_gives_a_new_tensor():
    x = normal(3, 64, dtype=BF16)
    got = transform_kv.reference(x)
    assert torch.equal(got, x)
    assert got.data_ptr() != x.data_ptr()
    assert transform_kv.reference(normal(3, 128, dtype=BF16)[:, ::2]).is_contiguous()


# ---- the cast


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", CASTS, ids=lambda f: f.name)
def test_cast_is_the_nearest_code_times_the_scale_of_its_group(format, dtype):
    x = (normal(6, 2, 128) * torch.logspace(-3, 3, 6).view(6, 1, 1)).to(dtype)
    want = quantised(x.float().view(12, 128).numpy(), format)
    got = transform_kv.reference(x, cast=CastStage(format))
    assert isinstance(got, QTensor)
    assert got.scales.shape == (6, 2, 128 // format.block[1])
    np.testing.assert_array_equal(codes_of(got.values.view(12, -1), format), want.codes)
    scales = got.scales.view(12, -1)
    stored = scales if format.scale == "float32" else scales.view(torch.uint8)
    np.testing.assert_array_equal(stored.numpy(), want.stored.astype(stored.numpy().dtype))


def codes_of(values: torch.Tensor, format: QuantFormat) -> np.ndarray:
    raw = values.contiguous().view(torch.uint8).numpy()
    return raw if format.element == "e4m3" else np.stack((raw & 15, raw >> 4), -1).reshape(len(raw), -1)


@pytest.mark.parametrize("format", CASTS, ids=lambda f: f.name)
def test_cast_back_is_code_times_scale_rounded_once(format):
    x = normal(6, 128, dtype=BF16) * 10
    made = transform_kv.reference(x, cast=CastStage(format))
    raw = made.values.contiguous().view(torch.uint8).numpy()
    values = e4m3(raw) if format.element == "e4m3" else e2m1(raw)
    scales = numbers_of(made.scales, format)
    want = torch.from_numpy(values * np.repeat(scales, format.block[1], -1)).float().to(BF16)
    assert torch.equal(transform_kv.reference(x, cast=CastStage(format, cast_back=True)), want)


@pytest.mark.parametrize("format", [f for f in CASTS if f.scale == "ue8m0"], ids=lambda f: f.name)
def test_casting_twice_is_casting_once(format):
    """Where scales are powers of two, a round trip is kept as it is: prompts are quantised before their cache is."""
    x = normal(64, 128, dtype=BF16) * torch.logspace(-4, 4, 64).view(64, 1).to(BF16)
    once = transform_kv.reference(x, cast=CastStage(format, cast_back=True))
    twice = transform_kv.reference(once, cast=CastStage(format, cast_back=True))
    assert torch.equal(once, twice)
    assert not torch.equal(once, x)


def test_a_product_with_the_inverse_finds_the_same_exponent_as_a_quotient():
    """DeepInfer's fused transform multiplies by 1 / largest where its norm divides. For no float32 does that matter."""
    mantissas = torch.arange(1 << 23, dtype=torch.int32)
    for largest in (448.0, 6.0):
        for exponent in (-100, -1, 0, 2, 8, 100):
            amax = (mantissas + ((127 + exponent) << 23)).view(torch.float32)
            quotient, product = amax / torch.tensor(largest), amax * torch.tensor(1 / largest)
            assert torch.equal((quotient.view(torch.int32) - 1) >> 23, (product.view(torch.int32) - 1) >> 23)


# ---- the store


def expected_bytes(record: KVRecord, rows: np.ndarray, slots: list[int], cache: torch.Tensor) -> np.ndarray:
    """The cache's memory after the rows (float64) are written, from addresses and tables alone."""
    memory = np.full(cache.untyped_storage().nbytes(), GARBAGE, np.uint8)
    block_size, stride = cache.shape[1], cache.stride(0)
    if record.format is not None:
        made = quantised(rows.astype(np.float32), record.format)
    for row, slot in enumerate(slots):
        if not 0 <= slot < len(cache) * block_size:
            continue
        block, inner = slot // block_size * stride, slot % block_size
        if record.format is None:
            values, scales = torch.from_numpy(rows[row]).to(BF16).view(torch.uint8).numpy(), np.zeros(0, np.uint8)
        else:
            codes = made.codes[row]
            values = codes if record.format.element == "e4m3" else codes[::2] | codes[1::2] << 4
            kind = np.float32 if record.format.scale == "float32" else np.uint8
            scales = made.stored[row].astype(kind).view(np.uint8)
        if record.interleaved:
            at = block + inner * (len(values) + len(scales))
            scales_at = at + len(values)
        else:
            at = block + inner * len(values)
            scales_at = block + block_size * len(values) + inner * len(scales)
        memory[at : at + len(values)] = values
        memory[scales_at : scales_at + len(scales)] = scales
    return memory


def memory_of(cache: torch.Tensor) -> np.ndarray:
    return cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0).numpy()


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("record", WITH_BF16, ids=lambda r: r.name)
def test_store_writes_records_to_their_slots_and_nothing_else(record, block_size, store):
    x = normal(len(SLOTS), record.dims, dtype=BF16) * 4
    cache = filled(record, block_size=block_size)
    rope = rope_stage(len(SLOTS), 32, interleaved=True)
    slots = torch.tensor(SLOTS)
    kept = store(x, cache, slots, record=record, norm=norm_stage(record.dims), rope=rope, keep="transform")
    np.testing.assert_array_equal(memory_of(cache), expected_bytes(record, array(kept), SLOTS, cache))
    assert sum(0 <= slot < 5 * block_size for slot in SLOTS) == {3: 3, 16: 6}[block_size]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("shape", [(9, 512), (9, 1, 512)])
def test_kept_stages_are_what_the_transform_makes(shape, store):
    x, norm, rope = normal(*shape, dtype=BF16), norm_stage(512), rope_stage(9, 64)
    wanted = {
        "norm": transform_kv.reference(x, norm=norm),
        "transform": transform_kv.reference(x, norm=norm, rope=rope),
        "cast_back": transform_kv.reference(x, norm=norm, rope=rope, cast=CastStage(MXFP8, cast_back=True)),
    }
    assert not torch.equal(wanted["norm"], wanted["transform"])
    memories = []
    for keep, want in (wanted | {None: None}).items():
        cache = filled(V41)
        got = store(x, cache, torch.tensor(SLOTS), record=V41, norm=norm, rope=rope, keep=keep)
        memories.append(memory_of(cache))
        assert (got is None) == (want is None)
        if got is not None:
            assert got.shape == x.shape
            torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2)
    for memory in memories[1:]:
        np.testing.assert_array_equal(memory, memories[0])


def test_storing_what_was_cast_back_writes_the_same_record():
    """A prompt's window is quantised, attended to, and stored later: the bytes are those of a direct store."""
    x, slots = normal(9, 512, dtype=BF16), torch.arange(9)
    direct, later = filled(V41), filled(V41)
    back = transform_and_store_kv.reference(x, direct, slots, record=V41, keep="cast_back")
    transform_and_store_kv.reference(back, later, slots, record=V41)
    first, second = (load_kv.reference(c, segment_tensor(paged_range([0], 0, 9, block_size=16)), 9, record=V41)
                     for c in (direct, later))  # fmt: skip
    assert torch.equal(first, second)
    assert torch.equal(first, back)


def test_nobody_to_store_and_nobody_with_a_slot():
    cache = filled(V41)
    empty = torch.empty(0, 512, dtype=BF16)
    assert transform_and_store_kv(empty, cache, torch.empty(0, dtype=torch.int32), record=V41) is None
    kept = transform_and_store_kv(empty, cache, torch.empty(0, dtype=torch.int32), record=V41, keep="transform")
    assert kept.shape == (0, 512)
    transform_and_store_kv(normal(2, 512, dtype=BF16), cache, torch.tensor([-1, 80]), record=V41)
    assert (memory_of(cache) == GARBAGE).all()


def test_a_slot_named_twice_harms_no_other_slot():
    x, cache = whole_quarters(3, 512), filled(V41)
    transform_and_store_kv.reference(x, cache, torch.tensor([5, 5, 9]), record=V41)
    memory = memory_of(cache)
    want = expected_bytes(V41, array(x), [-1, 5, 9], cache)
    others = np.ones(len(memory), bool)
    others[5 * 528 : 6 * 528] = False
    np.testing.assert_array_equal(memory[others], want[others])


# ---- attention's way back


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_conjugate_undoes_the_rotation_of_a_shared_key_and_value(interleaved):
    """A latent is key and value at once: its rotated tail is turned back behind attention, at the query's position. A
    query that sees itself alone gets its own latent back."""
    dims, width, heads = 64, 16, 3
    latent, rope = normal(7, dims), rope_stage(7, width, interleaved=interleaved)
    stored = transform_kv.reference(latent, rope=rope)
    out = stored.unsqueeze(1).expand(7, heads, dims)
    back = rotary_embedding(
        out, rope.positions, rope.cos_sin, interleaved=interleaved, offset=dims - width, conjugate=True
    ).query
    torch.testing.assert_close(back, latent.unsqueeze(1).expand(7, heads, dims), rtol=0, atol=1e-6)
    assert (stored - latent).abs().max() > 0.1
    scaled = RopeStage(rope.positions, rope.cos_sin * 1.25, interleaved, None, True)
    there = transform_kv.reference(latent, rope=scaled._replace(conjugate=False))
    tail = transform_kv.reference(there, rope=scaled)[:, -width:]
    torch.testing.assert_close(tail, latent[:, -width:] * 1.25**2, rtol=0, atol=1e-5)  # no inverse with a factor


# ---- mistakes

X = normal(4, 128, dtype=BF16)
SLOT = torch.arange(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: transform_kv(X.int()), "x must be bfloat16, float16 or float32"),
        (lambda: transform_kv(X[0]), r"shape \[num_tokens, D\] or \[num_tokens, num_heads, D\]"),
        (lambda: transform_kv(X, norm=NormStage(torch.ones(64), 1e-6)), r"must have shape \[128\]"),
        (lambda: transform_kv(X, rope=rope_stage(3, 64)), r"positions must be .* of shape \[4\]"),
        (lambda: transform_kv(X, rope=rope_stage(4, 64, offset=65)), "must lie within the head's 128, got offset 65"),
        (lambda: transform_kv(X, rope=rope_stage(4, 256)), "got offset -128 and R = 256"),
        (lambda: transform_kv(X[:, :96], hadamard=HadamardStage()), "power of two of channels, got 96"),
        (lambda: transform_kv(X, cast=CastStage(FP8_BLOCK)), "fp8_block .* blocks of 128 x 128"),
        (lambda: transform_kv(X[:, :96], cast=CastStage(FP8_ROW)), "a cast of 96 values needs blocks"),
        (lambda: transform_kv(X, cast=CastStage(QuantFormat("b", "e4m3", (1, 32), "e4m3"))), "e4m3 scales beside e2m1"),
        (lambda: transform_kv(X, cast=CastStage(QuantFormat("b", "e4m3", (1, 8), "ue8m0"))), "16, 32, 64 or 128"),
        (lambda: transform_and_store_kv(X, filled(V41), SLOT, record=V41), "one head of 512 values per token"),
        (
            lambda: transform_and_store_kv(X.view(2, 2, 128), filled(INDEX_FP4), SLOT[:2], record=INDEX_FP4),
            "one head of 128 values",
        ),
        (lambda: transform_and_store_kv(X, filled(V41), SLOT, record=INDEX_FP4), "must be uint8 .* 68"),
        (lambda: transform_and_store_kv(X, filled(INDEX_FP4), SLOT[:3], record=INDEX_FP4), "one slot per token"),
        (lambda: transform_and_store_kv(X, filled(INDEX_FP4), SLOT.float(), record=INDEX_FP4), "int32 or int64"),
        (
            lambda: transform_and_store_kv(X, filled(INDEX_FP4), SLOT, record=INDEX_FP4, keep="norm"),
            "keep='norm' needs a norm stage",
        ),
        (
            lambda: transform_and_store_kv(X, filled(INDEX_FP4), SLOT, record=INDEX_FP4, keep="rope"),
            "keep must be None, 'norm', 'transform' or 'cast_back', got 'rope'",
        ),
    ],
)
def test_mistakes_are_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_records_of_every_kind_are_covered():
    assert set(RECORDS) < set(WITH_BF16)
    assert any(record == bf16_record(record.dims) for record in WITH_BF16)
