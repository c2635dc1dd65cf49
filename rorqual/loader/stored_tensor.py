"""Where a checkpoint's tensor lies, for those who read files themselves. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class StoredTensor(NamedTuple):
    """A tensor in a file, row by row without gaps."""

    path: Path
    offset: int
    """Bytes before the first value."""
    dtype: torch.dtype
    shape: tuple[int, ...]
