"""A tensor that a checkpoint keeps by itself and that stays float32 whatever the activations are."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rorqual.loader.layer import Layer, WantedTensor, copy_into, weight_parameter


class Float32Tensor(Layer):
    """A tensor under the layer's own name, without a suffix. `rows` are those of its first dimension that are kept."""

    def __init__(self, *shape: int, rows: slice | None = None, device: torch.device) -> None:
        super().__init__()
        self._shape, self._rows = shape, rows or slice(0, shape[0])
        kept = self._rows.stop - self._rows.start
        self.weight = weight_parameter(kept, *shape[1:], dtype=torch.float32, device=device)

    @property
    def tensor(self) -> torch.Tensor:
        """float32, of the shape that was asked for."""
        return self.weight.data

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The tensor."""
        kept = None if self._rows == slice(0, self._shape[0]) else self._rows
        yield WantedTensor(prefix, self._shape, lambda whole: copy_into(self.weight, whole[self._rows]), rows=kept)
