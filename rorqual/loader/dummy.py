"""Weights made up: a model at its full size without a checkpoint, to measure speed or to try a config."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rorqual.loader.stored_tensor import StoredTensor
from rorqual.quantization import QTensor, encode_e2m1, encode_e4m3, pack_e2m1
from rorqual.quantization.gguf_blocks import BlockMatrix
from rorqual.quantization.integer import IntegerFormat, IntegerWeight

_POOL_SIZE = 4_194_301
"""Normal values to draw from; prime, so that rows of any length start at different places."""


_SPREAD_E4M3, _SPREAD_E2M1 = 64.0, 2.0
"""Standard deviations of quantised elements before their scale: e4m3 ends at 448, seven of them, e2m1 at 6, three."""
_SPREAD_LEVELS = 6.0
"""Standard deviations that the levels of an integer code cover."""


class DummyCheckpoint:
    """A config with no tensors behind it; `fill_dummy` makes the weights."""

    size_bytes = 0

    def __init__(
        self,
        config: dict[str, Any],
        generation_config: dict[str, Any] | None = None,
        *,
        path: Path,
        integer_formats: Mapping[str, IntegerFormat] | None = None,
    ) -> None:
        self.path, self.config, self.generation_config = path, config, generation_config or {}
        self.integer_formats: Mapping[str, IntegerFormat] = integer_formats or {}
        """Of the file that the config is from: the made-up weights have them too."""

    def names(self) -> Collection[str]:
        """Nothing."""
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        """Never answers: there are no tensors."""
        raise KeyError(name)

    def load(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Never answers: there are no tensors."""
        raise KeyError(name)

    def stored(self, name: str) -> StoredTensor | None:
        """Never answers: there are no tensors."""
        raise KeyError(name)

    def load_blocks(self, name: str, rows: slice | None = None) -> BlockMatrix:
        """Never answers: there are no tensors."""
        raise KeyError(name)

    def release(self, name: str) -> None:
        """Does nothing: there are no tensors."""


@torch.no_grad()
def fill_dummy(tensor: torch.Tensor, name: str, *, seed: int = 0) -> None:
    """Fill a weight in place with values that depend on (seed, name, shape) alone: not on order, rank or device.

    Norms lie near 1, other vectors near 0, matrices have a standard deviation of 1 / sqrt(columns). The values are a
    stretch of one pool of normal ones, from a place that the name decides: a copy, so that billions take seconds.

    Args:
        tensor: contiguous, of a floating dtype, on any device.
        name: its checkpoint name.
        seed: of the pool.
    """
    if not tensor.is_floating_point() or not tensor.is_contiguous():
        raise ValueError(f"dummy weight {name!r} must be contiguous and floating, got {tensor.dtype}")
    if name.endswith(("norm.weight", "layernorm.weight")):
        mean, std = 1.0, 0.1
    else:
        mean, std = 0.0, tensor.shape[-1] ** -0.5 if tensor.dim() > 1 and tensor.numel() else 0.02
    for piece, values in _stretches(tensor.view(-1), _pool(tensor.device, seed), name, seed):
        piece.copy_(values * std + mean)


@torch.no_grad()
def fill_dummy_quantized(weight: QTensor, name: str, *, seed: int = 0) -> None:
    """Fill a quantised weight in place, as `fill_dummy` does, with codes from a pool and one scale for all blocks.

    The elements use their format's range, and the scale makes their standard deviation 1 / sqrt(columns); a power of
    two comes nearest to that.
    """
    pool, spread = _code_pool(weight.device, seed, weight.format.element)
    for piece, codes in _stretches(weight.values.view(torch.uint8).view(-1), pool, name, seed):
        piece.copy_(codes)
    scale = max(1, weight.shape[-1]) ** -0.5 / spread
    if weight.format.scale == "ue8m0":
        weight.scales.fill_(127 + round(math.log2(scale)))  # the byte 127 stands for 1
    else:
        weight.scales.copy_(torch.full_like(weight.scales, scale, dtype=torch.float32))


def dummy_integers(shape: tuple[int, int], format: IntegerFormat, name: str, *, seed: int = 0) -> IntegerWeight:
    """A matrix of integers as `fill_dummy` would make it: codes from a pool that spread over all that the format has,
    and one scale, so that the standard deviation is 1 / sqrt(columns)."""
    levels = _levels(format)
    spread, middle = levels / _SPREAD_LEVELS, float(format.offset) or (levels - 1) / 2
    codes = torch.empty(shape[0], shape[1] * format.bits // 8, dtype=torch.uint8)
    for piece, found in _stretches(codes.view(-1), _integer_pool(seed, levels, middle, format.bits), name, seed):
        piece.copy_(found)
    scale = max(1, shape[1]) ** -0.5 / spread
    scales = torch.full((shape[0], shape[1] // format.group), scale, dtype=format.scale_dtype)
    minima = (scales.float() * -middle).to(format.scale_dtype) if format.has_minima else None
    return IntegerWeight(codes, scales, minima, format)


def _stretches(
    flat: torch.Tensor, pool: torch.Tensor, name: str, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces of a flat tensor, and the stretch of the pool that fills each, from a place that the name decides."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    at, done = int.from_bytes(digest[:8], "little") % len(pool), 0
    while done < flat.numel():
        size = min(len(pool) - at, flat.numel() - done)
        yield flat[done : done + size], pool[at : at + size]
        at, done = 0, done + size


@lru_cache(maxsize=2)
def _pool(device: torch.device, seed: int) -> torch.Tensor:
    """float32 [_POOL_SIZE], drawn on the CPU so that every device gets the same."""
    return torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(seed)).to(device)


@lru_cache(maxsize=2)
def _code_pool(device: torch.device, seed: int, element: str) -> tuple[torch.Tensor, float]:
    """(uint8 codes of normal values as quantised weights store them, the standard deviation that they stand for)."""
    pool = _pool(torch.device("cpu"), seed)
    if element == "e4m3":
        return encode_e4m3(pool * _SPREAD_E4M3).view(torch.uint8).to(device), _SPREAD_E4M3
    codes = pack_e2m1(encode_e2m1(pool[:-1] * _SPREAD_E2M1))
    return codes.view(torch.uint8).to(device), _SPREAD_E2M1


def _levels(format: IntegerFormat) -> int:
    """How many codes a format uses, which may be fewer than its bits hold: its name says so."""
    return 1 << int(format.name[1])


@lru_cache(maxsize=4)
def _integer_pool(seed: int, levels: int, middle: float, bits: int) -> torch.Tensor:
    """Normal values as codes, uint8: one per byte, or two."""
    codes = (_pool(torch.device("cpu"), seed) * (levels / _SPREAD_LEVELS) + middle).round_().clamp_(0, levels - 1)
    codes = codes.to(torch.uint8)
    return codes if bits == 8 else codes[:-1:2] | codes[1::2] << 4
