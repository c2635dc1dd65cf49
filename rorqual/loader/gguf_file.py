"""The layout of a GGUF file: its metadata and where its tensors lie. Nothing here knows a model. No torch."""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Names of types that exist and do not load, for the error."""


class StoredType(NamedTuple):
    """A GGML number format: every `block_size` values of a row take `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int


STORED_TYPES = {
    0: StoredType("F32", 1, 4),
    1: StoredType("F16", 1, 2),
    2: StoredType("Q4_0", 32, 18),
    3: StoredType("Q4_1", 32, 20),
    6: StoredType("Q5_0", 32, 22),
    7: StoredType("Q5_1", 32, 24),
    8: StoredType("Q8_0", 32, 34),
    12: StoredType("Q4_K", 256, 144),
    13: StoredType("Q5_K", 256, 176),
    14: StoredType("Q6_K", 256, 210),
    30: StoredType("BF16", 1, 2),
}
"""The formats that load, by GGML's number. Ours rather than the gguf package's, whose import takes 0.2 s."""

# GGUF's value types by number; 7 is bool (one byte), 8 a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


class TensorInfo(NamedTuple):
    """Where a tensor lies. Shape as torch spells it: GGUF's dimensions in reverse, the contiguous one last."""

    name: str
    shape: tuple[int, ...]
    type: StoredType
    offset: int
    """Bytes from the start of the file."""
    size_bytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A mapped GGUF file. Pages are read when touched; writing to an array made of `data` changes no file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map `path` and read its header.

        Raises: ValueError naming the file, and the tensor where one is at fault: not GGUF, another version, a
        truncated header, a type that does not load, or tensor data past the end of the file.
        """
        header = _Header.open(path)
        metadata = header.metadata()
        return cls(path, metadata, header.tensors(metadata), header.data)

    def bytes_of(self, info: TensorInfo) -> np.ndarray:
        """A tensor's stored bytes, uint8 [rows..., row bytes], without a copy. A scalar has shape [row bytes]."""
        import numpy as np

        flat = np.frombuffer(self.data, np.uint8, info.size_bytes, info.offset)
        rows = info.shape[:-1]
        return flat.reshape(*rows, info.size_bytes // max(prod(rows), 1))

    def release(self, start: int, stop: int) -> None:
        """Let go of the memory of the pages that lie wholly between two bytes. What was written there is lost."""
        first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, first, end - first)


def matrix_formats(path: Path) -> tuple[str, ...]:
    """Names of the formats of a file's matrices, the one with the most values first. Raises as `GGUFFile.open`."""
    found: Counter[str] = Counter()
    for info in GGUFFile.open(path).tensors.values():
        if len(info.shape) > 1:
            found[info.type.name] += prod(info.shape)
    return tuple(name for name, _ in found.most_common())


def read_metadata(path: Path) -> dict[str, Any]:
    """A GGUF file's metadata as plain Python values; arrays are lists. Tensors are not looked at.

    Raises: ValueError if the file is not GGUF or its header is damaged.
    """
    return _Header.open(path).metadata()


class _Header:
    """A cursor over the header: `at` is the next byte to read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0
        if data[:4] != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it must begin with b'GGUF', got {data[:4]!r}")
        self.at = 4
        version = self._number(4)
        if version not in (2, 3):
            big = " (big-endian files are not read)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"{path}: GGUF version must be 2 or 3, got {version}{big}; convert the model again")
        self.num_tensors, self.num_keys = self._number(8), self._number(8)

    @classmethod
    def open(cls, path: Path) -> _Header:
        try:
            with path.open("rb") as file:
                # A private mapping: torch wants writable memory, and the file must never change.
                return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            if str(error) == "cannot mmap an empty file":
                raise ValueError(f"{path} is not a GGUF file: it is empty") from None
            raise

    def _take(self, size: int) -> int:
        """Step over `size` bytes; returns where they start."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError(f"{self.path} is cut short: its header runs past the end of the file; fetch it again")
        return start

    def _number(self, size: int) -> int:
        start = self._take(size)
        return int.from_bytes(self.data[start : start + size], "little")

    def _string(self) -> str:
        size = self._number(8)
        start = self._take(size)
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: the header's text at byte {start} is not UTF-8 ({error.reason})") from None

    def _strings(self, count: int) -> list[str]:
        """As `_string` for each, without its calls: a vocabulary has 100,000 of them."""
        data, at, found = self.data, self.at, []
        read_size = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                end = at + 8 + read_size(data, at)[0]
                found.append(str(data[at + 8 : end], "utf-8"))
                at = end
        except struct.error:
            at = len(data) + 1
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.path}: the header's text at byte {at} is not UTF-8 ({error.reason})") from None
        self._take(at - self.at)
        return found

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            kind, count = self._number(4), self._number(8)
            if kind == _STRING:
                return self._strings(count)
            if kind == _ARRAY:
                return [self._value(_ARRAY) for _ in range(count)]
            return self._numbers(kind, count)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: unknown metadata type {kind} at byte {self.at}; the header is damaged")
        code = _SCALARS[kind]
        start = self._take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(self.num_keys):
            key = self._string()
            found[key] = self._value(self._number(4))
        return found

    def tensors(self, metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        """Every tensor by name; the cursor stands behind the metadata."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{self.path}: general.alignment must be a power of two, got {alignment!r}")
        entries = [self._tensor() for _ in range(self.num_tensors)]
        start = -(-self.at // alignment) * alignment
        found: dict[str, TensorInfo] = {}
        for entry in entries:
            info = entry._replace(offset=start + entry.offset)
            if info.name in found:
                raise ValueError(f"{self.path} holds tensor {info.name!r} twice")
            if info.offset + info.size_bytes > len(self.data):
                raise ValueError(
                    f"{self.path} is cut short: tensor {info.name!r} ends at byte {info.offset + info.size_bytes}, "
                    f"the file at byte {len(self.data)}; fetch it again"
                )
            found[info.name] = info
        return found

    def _tensor(self) -> TensorInfo:
        """One tensor's entry, its offset still counted from the start of the data."""
        name, num_dims = self._string(), self._number(4)
        if num_dims > _MAX_DIMS:
            raise ValueError(f"{self.path}: tensor {name!r} has {num_dims} dimensions, at most {_MAX_DIMS} are allowed")
        shape = tuple(reversed([self._number(8) for _ in range(num_dims)]))
        number, offset = self._number(4), self._number(8)
        if number not in STORED_TYPES:
            allowed = ", ".join(kind.name for kind in STORED_TYPES.values())
            found = _OTHER_TYPES.get(number, f"number {number}")
            raise ValueError(f"{self.path}: tensor {name!r} has type {found}; types that load: {allowed}")
        kind = STORED_TYPES[number]
        row = shape[-1] if shape else 1
        if row % kind.block_size:
            raise ValueError(
                f"{self.path}: tensor {name!r} has rows of {row} values, which is not a multiple of "
                f"{kind.name}'s block of {kind.block_size}"
            )
        return TensorInfo(name, shape, kind, offset, prod(shape) // kind.block_size * kind.block_bytes)
