"""Copies between host and device that nobody waits for: a step's numbers up, its tokens down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 256
"""Bytes, as torch's own tensors have it: Triton compiles a kernel anew for pointers that are less aligned."""


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Contiguous arrays as tensors on the device, in one copy; on the CPU they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
    pinned = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=True)
    bytes_of_all = pinned.numpy()
    for start, array in zip(starts, arrays, strict=False):
        bytes_of_all[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    there = pinned.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _dtype(array: NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(array[:0]).dtype


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
