"""Copies between host and device that nobody waits for: a step's numbers up, its tokens down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

_ALIGNMENT = 256
"""Bytes, as torch's own tensors have it: Triton compiles a kernel anew for pointers that are less aligned."""
_TURNS = 2
"""Pinned copies of a staging: one is written while the other may still wait to be sent."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Contiguous arrays as tensors on the device, in one copy; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, size = _lay_out(array.nbytes for array in arrays)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    bytes_of_all = pinned.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_of_all[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def _lay_out(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Where arrays of so many bytes start, and where the last one ends."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


class StagedArrays:
    """Tensors that stay where they are on the device, and arrays on the host that are written and sent, in one copy.

    Each step: write `arrays()`, which hold what they held when they were last returned, then `send`. On the CPU arrays
    and tensors share their memory.
    """

    def __init__(self, fields: Sequence[tuple[tuple[int, ...], DTypeLike]], device: torch.device) -> None:
        """fields: (shape, dtype) of each tensor. They are zero at first."""
        kinds = [(shape, np.dtype(dtype)) for shape, dtype in fields]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        starts, end = _lay_out(sizes)

        def cut(memory: torch.Tensor) -> list[torch.Tensor]:
            return [
                memory[start : start + size].view(_torch_dtype(dtype)).view(shape)
                for start, size, (shape, dtype) in zip(starts, sizes, kinds, strict=True)
            ]

        there = torch.zeros(end, dtype=torch.uint8, device=device)
        self.tensors = cut(there)
        self._on_cuda = device.type == "cuda"
        here = (
            [torch.zeros(end, dtype=torch.uint8, pin_memory=True) for _ in range(_TURNS)] if self._on_cuda else [there]
        )
        self._arrays = [[part.numpy() for part in cut(memory)] for memory in here]
        # What `send` copies, by the first field that it sends.
        self._to = [there[start:] for start in starts]
        self._from = [[memory[start:] for start in starts] for memory in here]
        self._sent = [torch.cuda.Event() for _ in here] if self._on_cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0

    def arrays(self) -> list[NDArray[Any]]:
        """The arrays to write, one per field; they take turns, and each turn's list is the same object."""
        if self._on_cuda:
            self._turn = (self._turn + 1) % _TURNS
            self._sent[self._turn].synchronize()  # sent two steps ago, so there is nothing to wait for
        return self._arrays[self._turn]

    def send(self, first: int = 0) -> None:
        """Copy the arrays from field number `first` on."""
        if self._on_cuda:
            self._to[first].copy_(self._from[self._turn][first], non_blocking=True)
            self._sent[self._turn].record()


class Download:
    """A tensor on its way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._done = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> Any:
        """The numbers, as nested lists."""
        if self._done is not None:
            self._done.synchronize()
        return self._host.tolist()
