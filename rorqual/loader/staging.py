"""Weights on their way from files to a device, through a few buffers from which the device copies by itself.

Every reader thread has two pinned buffers and a stream of its own: while the device fetches one piece, the thread reads
the next. So the host never holds more of a checkpoint than the buffers, and neither the disk nor the bus waits for the
other. What is more than a copy (other dtypes, quantised parts) is done on the device.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from io import FileIO
from pathlib import Path
from typing import Self

import torch

from rorqual.loader.layer import WantedTensor
from rorqual.loader.stored_tensor import StoredTensor

MOST_READERS = 8
"""Threads that are worth having: a core copies 4 to 10 GB/s out of the page cache, and PCIe 5.0 carries 55."""
_BUFFER_BYTES = 8 << 20

Read = Callable[[int, torch.Tensor], object]
"""(first byte, uint8 buffer that is to be filled from there on)."""


class Staging:
    """The way to one device. On the CPU it works too, for tests."""

    def __init__(self, device: torch.device, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self.device, self.buffer_bytes = device, buffer_bytes
        self.lanes: list[Lane] = []
        """One per thread that came by."""
        self._mine = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        for lane in self.lanes:
            lane.close()

    def wait(self) -> None:
        """Until all has arrived that was handed over."""
        for lane in self.lanes:
            lane.wait()

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """This thread's lane; inside, its stream is the current one."""
        if not hasattr(self._mine, "lane"):
            self._mine.lane = Lane(self.device, self.buffer_bytes)
            self.lanes.append(self._mine.lane)
        lane: Lane = self._mine.lane
        with nullcontext() if lane.stream is None else torch.cuda.stream(lane.stream):
            yield lane


class Lane:
    """One thread's buffers, stream and open files."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        pinned = device.type == "cuda"
        self.device, self.buffer_bytes = device, buffer_bytes
        self.stream = torch.cuda.Stream(device) if pinned else None  # type: ignore[no-untyped-call]
        if self.stream is not None:  # the weights' memory may have been something else's a moment ago
            self.stream.wait_stream(torch.cuda.current_stream(device))
        self.buffers = [torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._fetched = [torch.cuda.Event() if pinned else None for _ in self.buffers]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._files: dict[Path, FileIO] = {}

    def hand_over(self, source: StoredTensor | torch.Tensor, wanted: WantedTensor) -> None:
        """Give a layer a tensor from a file or from host memory: by rows where it takes them, else whole. Rows that it
        does not keep are not read, and are undefined where it takes the tensor whole.

        Raises ValueError for a file that is cut short, and what `wanted` raises.
        """
        shape, dtype = tuple(source.shape), source.dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        read = self._reader_of(source)
        row_bytes = num_bytes // shape[0] if shape and shape[0] else 0
        part = range(num_bytes)
        if wanted.rows is not None:
            part = range(wanted.rows.start * row_bytes, wanted.rows.stop * row_bytes)
        if wanted.copy_rows is not None and 0 < row_bytes <= self.buffer_bytes:
            step = self.buffer_bytes // row_bytes * row_bytes
            for start, piece in self._pieces(read, part, step):
                wanted.copy_rows(piece.view(dtype).view(-1, *shape[1:]), start // row_bytes)
            return
        whole = torch.empty(shape, dtype=dtype, device=self.device)
        flat = whole.view(-1).view(torch.uint8)
        for start, piece in self._pieces(read, part, self.buffer_bytes):
            flat[start : start + len(piece)].copy_(piece, non_blocking=True)
        wanted.copy(whole)

    def _pieces(self, read: Read, part: range, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first byte, buffer with what is there), each to be copied by this lane's stream before the next is asked."""
        for start in part[::step]:
            buffer, fetched = self.buffers[self._turn], self._fetched[self._turn]
            self._turn = 1 - self._turn
            if fetched is not None:
                fetched.synchronize()
            piece = buffer[: min(step, part.stop - start)]
            read(start, piece)
            yield start, piece
            if fetched is not None:
                fetched.record(self.stream)

    def _reader_of(self, source: StoredTensor | torch.Tensor) -> Read:
        if isinstance(source, torch.Tensor):
            flat = source.contiguous().view(-1).view(torch.uint8)
            return lambda start, buffer: buffer.copy_(flat[start : start + len(buffer)])
        if source.path not in self._files:
            self._files[source.path] = source.path.open("rb", buffering=0)
        file = self._files[source.path]

        def read(start: int, buffer: torch.Tensor) -> None:
            file.seek(source.offset + start)
            left = buffer.numpy().data
            while left:
                if not (count := file.readinto(left)):
                    raise ValueError("the file has become shorter since it was opened; fetch it again")
                left = left[count:]

        return read

    def wait(self) -> None:
        """Until this lane's copies are done."""
        if self.stream is not None:
            self.stream.synchronize()

    def close(self) -> None:
        """Wait, and close the files."""
        self.wait()
        for file in self._files.values():
            file.close()
