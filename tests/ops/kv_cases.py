"""Cases of the fused write of cache records and of its inverse: every record, every stage alone and together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rorqual.ops.kv_transform import CastStage, HadamardStage, NormStage, RopeStage
from rorqual.ops.load_plan import LoadSegment, paged_range, ring_range, segment_tensor, zero_fill
from rorqual.quantization import FP4_E4M3, FP8_ROW, FP8_ROW_UE8M0, MXFP4, MXFP8, QuantFormat
from rorqual.quantization.kv_record import INDEX_FP4, INDEX_FP8, INDEX_MXFP8, V41, V41_FP4, KVRecord, bf16_record
from tests.ops.number_values import e4m3
from tests.ops.values import Call, normal

BF16 = torch.bfloat16
CASTS = (
    MXFP8,
    MXFP4,
    FP4_E4M3,
    FP8_ROW,
    FP8_ROW_UE8M0,
    QuantFormat("fp8_64", "e4m3", (1, 64), "float32"),
    QuantFormat("fp8_16", "e4m3", (1, 16), "ue8m0"),
)
RECORDS: tuple[KVRecord, ...] = (V41, V41_FP4, INDEX_FP4, INDEX_FP8, INDEX_MXFP8, bf16_record(64), bf16_record(96))
BLOCK_SIZE = 16
GARBAGE = 0xA5


def whole_quarters(tokens: int, *shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    """Multiples of a quarter up to 2 whose squares add up exactly in any order, so that a norm's statistics are the
    same bits for every kernel."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(-8, 9, (tokens, *shape), generator=draw) / 4).to(dtype)


def rope_stage(tokens: int, width: int, *, dtype: torch.dtype = torch.int64, **options: Any) -> RopeStage:
    """Angles of a table of 50 positions."""
    angles = torch.outer(torch.arange(50.0), 1e4 ** -(torch.arange(width // 2) * 2 / width))
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(3)).to(dtype)
    return RopeStage(positions, torch.cat((angles.cos(), angles.sin()), -1), **options)


def norm_stage(dims: int, dtype: torch.dtype = BF16) -> NormStage:
    """Weights around one."""
    return NormStage((normal(dims, seed=9) * 0.1 + 1).to(dtype), 1e-6)


def heads_apart(x: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of a merged projection has them: gaps between tokens, channels side by side."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 48), float("nan"), dtype=x.dtype)
    wide[..., 16:-32] = x
    return wide[..., 16:-32]


def _transform(x: torch.Tensor, **stages: Any) -> Callable[[], Call]:
    return lambda: ((x,), stages)


def _transform_cases() -> dict[str, Callable[[], Call]]:
    norm, hadamard = norm_stage(128), HadamardStage(128**-0.5)
    x, quarters = normal(9, 3, 128, dtype=BF16) * 5, whole_quarters(9, 3, 128)
    cases = {
        "nothing": _transform(x),
        "nothing_of_nobody": _transform(x[:0], norm=norm, rope=rope_stage(0, 64), cast=CastStage(MXFP8)),
        "norm": _transform(x, norm=norm),
        "rope_interleaved": _transform(x, rope=rope_stage(9, 64, interleaved=True)),
        "rope_halves": _transform(x, rope=rope_stage(9, 64)),
        "rope_first_channels": _transform(x, rope=rope_stage(9, 32, offset=0)),
        "rope_middle_conjugate": _transform(x, rope=rope_stage(9, 32, offset=64, interleaved=True, conjugate=True)),
        "rope_halves_conjugate": _transform(x, rope=rope_stage(9, 64, conjugate=True, dtype=torch.int32)),
        "rope_whole_head": _transform(x, rope=rope_stage(9, 128, interleaved=True)),
        "rope_from_an_odd_channel": _transform(x, rope=rope_stage(9, 64, interleaved=True, offset=3)),
        "rope_of_six_channels": _transform(x, rope=rope_stage(9, 6)),
        "hadamard": _transform(x, hadamard=hadamard),
        "hadamard_of_one_token": _transform(normal(1, 16, dtype=BF16), hadamard=HadamardStage()),
        "all_stages": _transform(
            x, norm=norm, rope=rope_stage(9, 64, interleaved=True), hadamard=hadamard, cast=CastStage(MXFP8, True)
        ),
        "float32": _transform(normal(9, 128), hadamard=hadamard, cast=CastStage(FP8_ROW)),
        "float16": _transform(normal(9, 2, 128, dtype=torch.float16), cast=CastStage(MXFP4)),
        "two_dimensions": _transform(quarters[:, 0], norm=norm, cast=CastStage(MXFP4)),
        "gaps": _transform(heads_apart(quarters), norm=norm, rope=rope_stage(9, 64), cast=CastStage(MXFP8)),
        "strided_channels": _transform(normal(9, 256, dtype=BF16)[:, ::2], cast=CastStage(MXFP8)),
        "odd_width": _transform(normal(5, 2, 96, dtype=BF16), norm=norm_stage(96), rope=rope_stage(5, 32)),
        "odd_width_cast": _transform(normal(5, 2, 96, dtype=BF16), cast=CastStage(MXFP8)),
        "wider_than_a_program": _transform(normal(2, 2048, dtype=BF16), cast=CastStage(MXFP8)),
        "many": _transform(whole_quarters(1100, 512), norm=norm_stage(512), cast=CastStage(MXFP8)),
        "extremes": _transform(_extremes(), cast=CastStage(MXFP8)),
        "extremes_fp4": _transform(_extremes(), cast=CastStage(FP4_E4M3)),
        "nan": _transform(_spoiled(), cast=CastStage(MXFP8)),
        "nan_outside_the_rotated_channels": _transform(_spoiled(), rope=rope_stage(8, 64, interleaved=True)),
        "nan_fp4": _transform(_spoiled(), cast=CastStage(MXFP4)),
    }
    for format in CASTS:
        cases[f"cast_{format.name}"] = _transform(x, cast=CastStage(format))
        cases[f"cast_back_{format.name}"] = _transform(x, cast=CastStage(format, cast_back=True))
    return cases


def _extremes() -> torch.Tensor:
    x = torch.zeros(8, 128)
    x[1] = -0.0
    x[2] = torch.linspace(-1e-5, 1e-5, 128)
    x[3] = torch.linspace(-1e-37, 1e-37, 128)
    x[4] = torch.linspace(-1, 1, 128) * torch.finfo(BF16).max
    x[5, ::7] = float("inf")
    x[6] = torch.linspace(-448, 448, 128)
    x[7] = torch.linspace(-6, 6, 128) * 2.0**20
    return x.to(BF16)


def _spoiled() -> torch.Tensor:
    x = normal(8, 128)
    x[0, 5], x[1, 32:] = float("nan"), float("nan")
    x[2], x[3, 7] = float("nan"), float("-inf")
    return x.to(BF16)


TRANSFORM_CASES = _transform_cases()
TRANSFORM_REFUSED = {
    "rope_from_an_odd_channel",
    "rope_of_six_channels",
    "strided_channels",
    "wider_than_a_program",
}
"""By Triton."""


def filled(record: KVRecord, num_blocks: int = 5, block_size: int = BLOCK_SIZE) -> torch.Tensor:
    """A cache in which every byte is GARBAGE, the gaps between blocks too."""
    cache = record.allocate(num_blocks, block_size)
    whole = cache.as_strided((cache.untyped_storage().nbytes(),), (1,), 0)
    whole.fill_(GARBAGE)
    return cache


SLOTS = [7, 0, -1, 79, 3, 80, 40, 1 << 20, 33]
"""Of a cache of 5 blocks of 16: the third token has none, the sixth and eighth are beyond it."""


def _store(
    record: KVRecord, *, slots: list[int] = SLOTS, view=lambda x: x, slot_dtype=torch.int64, **stages: Any
) -> Call:
    x = view(whole_quarters(len(slots), record.dims, seed=record.bytes))
    return (x, filled(record), torch.tensor(slots, dtype=slot_dtype)), {"record": record, **stages}


def _store_cases() -> dict[str, Callable[[], Call]]:
    cases: dict[str, Callable[[], Call]] = {}
    for record in RECORDS:

        def case(record: KVRecord = record, **options: Any) -> Callable[[], Call]:
            return lambda: _store(record, **options)

        norm, rope = norm_stage(record.dims), rope_stage(len(SLOTS), 32, interleaved=True)
        cases[f"{record.name}_plain"] = case()
        cases[f"{record.name}_norm_rope_keep_norm"] = case(norm=norm, rope=rope, keep="norm")
        cases[f"{record.name}_norm_rope_halves_keep_cast_back"] = case(
            norm=norm, rope=rope_stage(len(SLOTS), 32), keep="cast_back"
        )
        cases[f"{record.name}_gaps_int32_slots"] = case(
            norm=norm, rope=rope, view=heads_apart, slot_dtype=torch.int32, keep="transform"
        )
        cases[f"{record.name}_one_head"] = case(view=lambda x: x.unsqueeze(1), rope=rope, keep="transform")
        cases[f"{record.name}_nobody"] = case(slots=[], keep="cast_back")
    hadamard = HadamardStage(128**-0.5)
    cases["hadamard"] = lambda: _store(INDEX_FP4, norm=norm_stage(128), hadamard=hadamard, keep="transform")
    cases["only_padding"] = lambda: _store(V41, slots=[-1, -1])
    cases["spaced_slots"] = lambda: _spaced_slots(_store(V41))
    return cases


def _spaced_slots(call: Call) -> Call:
    (x, cache, slots), options = call
    return (x, cache, torch.stack((slots, slots), 1)[:, 0]), options


RECORD_STORE_CASES = _store_cases()
RECORD_STORE_REFUSED = {"spaced_slots"}

PLAN: list[LoadSegment] = [
    *zero_fill(19, block_size=BLOCK_SIZE),
    *paged_range([4, 1, 3], 5, 41, block_size=BLOCK_SIZE, first_row=19),
    *ring_range(2, 27, 38, ring_size=BLOCK_SIZE, first_row=55),
]
PLAN_ROWS = 66


def random_records(record: KVRecord) -> torch.Tensor:
    """A cache of random bytes in which no number is NaN."""
    cache = filled(record)
    cache.copy_(torch.randint(0, 256, cache.shape, generator=torch.Generator().manual_seed(record.bytes)))
    values, scales, _ = record.split(cache)
    if record.format is None:
        values.copy_(normal(*values.shape))
        return cache
    assert scales is not None
    if record.format.element == "e4m3":
        values.view(torch.uint8).bitwise_and_(0xBF)
    if record.format.scale == "float32":
        scales.copy_(normal(*scales.shape).abs())
    elif record.format.scale == "e4m3":
        scales.view(torch.uint8).bitwise_and_(0x3F)
    else:
        scales.clamp_(100, 140)
    return cache


def numbers_of(scales: torch.Tensor, format: QuantFormat) -> np.ndarray:
    """What stored scales stand for, in float64."""
    if format.scale == "float32":
        return scales.double().numpy()
    raw = scales.contiguous().view(torch.uint8).numpy()
    return e4m3(raw) if format.scale == "e4m3" else 2.0 ** (raw.astype(np.float64) - 127)


def _load(record: KVRecord, segments: list[LoadSegment] = PLAN, total: int = PLAN_ROWS, **options: Any) -> Call:
    return (random_records(record), segment_tensor(segments), total), {"record": record, **options}


def _load_cases() -> dict[str, Callable[[], Call]]:
    cases: dict[str, Callable[[], Call]] = {}
    for record in RECORDS:
        cases[record.name] = lambda record=record: _load(record)
        cases[f"{record.name}_nothing"] = lambda record=record: _load(record, [], 0)
        cases[f"{record.name}_zeros"] = lambda record=record: _load(record, zero_fill(5, block_size=16), 5)
    for dtype in (BF16, torch.float16, torch.float32):
        out = torch.full((PLAN_ROWS + 4, 600), -1.0, dtype=dtype)[2:-2, :512]
        name = f"into_{str(dtype).removeprefix('torch.')}"
        cases[name] = lambda out=out: _load(V41, out=out.clone())
        cases[f"{name}_fp4"] = lambda out=out: _load(V41_FP4, out=out)
        cases[f"{name}_rows_between"] = lambda out=out: _load(V41, PLAN[1:3], out=out)
    return cases


LOAD_CASES = _load_cases()
