"""Weights made up: a model at its full size without a checkpoint, to measure speed or to try a config."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_POOL_SIZE = 4_194_301
"""Normal values to draw from; prime, so that rows of any length start at different places."""


class DummyCheckpoint:
    """A config with no tensors behind it; `fill_dummy` makes the weights."""

    size_bytes = 0

    def __init__(self, config: dict[str, Any], generation_config: dict[str, Any] | None = None, *, path: Path) -> None:
        self.path, self.config, self.generation_config = path, config, generation_config or {}

    def names(self) -> Collection[str]:
        """Nothing."""
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        """Never answers: there are no tensors."""
        raise KeyError(name)

    def load(self, name: str) -> torch.Tensor:
        """Never answers: there are no tensors."""
        raise KeyError(name)


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
    pool = _pool(tensor.device, seed)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    at, done, flat = int.from_bytes(digest[:8], "little") % _POOL_SIZE, 0, tensor.view(-1)
    while done < flat.numel():
        size = min(_POOL_SIZE - at, flat.numel() - done)
        flat[done : done + size] = pool[at : at + size] * std + mean
        at, done = 0, done + size


@lru_cache(maxsize=2)
def _pool(device: torch.device, seed: int) -> torch.Tensor:
    """float32 [_POOL_SIZE], drawn on the CPU so that every device gets the same."""
    return torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(seed)).to(device)
