"""What a layer tells the loader: which checkpoint tensors it wants, and how this rank's part of each is copied in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from rorqual.quantization import QTensor
from rorqual.quantization.gguf_blocks import BlockMatrix
from rorqual.quantization.integer import IntegerFormat, IntegerWeight


class WantedTensor(NamedTuple):
    """One checkpoint tensor that a layer needs."""

    name: str
    """Full name in the checkpoint."""
    shape: tuple[int, ...]
    """Its whole shape there, before any sharding."""
    copy: Callable[[torch.Tensor], None]
    """Copies this rank's part of the whole tensor into the layer. Raises ValueError or TypeError for values or a dtype
    that the layer cannot hold."""
    copy_rows: Callable[[torch.Tensor, int], None] | None = None
    """Copies this rank's part of some rows of the tensor, from the one of that number on. What is in pinned memory is
    only on its way when it returns."""
    rows: slice | None = None
    """What this rank keeps of it, where that is not all: nobody looks at the other rows, which are not read then."""
    aliases: tuple[str, ...] = ()
    """Other full names that checkpoints give it; exactly one of all is there."""
    format: IntegerFormat | None = None
    """What the layer keeps it in, where that is integers; `copy` rounds to it."""
    keep: Callable[[IntegerWeight], None] | None = None
    """Takes this rank's columns of the tensor in that format, given `rows` of it alone."""
    keep_blocks: Callable[[BlockMatrix], None] | None = None
    """In place of `keep` where the checkpoint stores that format: takes those rows as they lie there, even mapped."""


class Layer(nn.Module):
    """A module that owns weights. Parameters are allocated on construction and filled by the loader."""

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The checkpoint tensors of this layer; `prefix` is its place in the model ("model.layers.0.mlp.down_proj")."""
        raise NotImplementedError

    def elsewhere(self, prefix: str) -> Iterator[str]:
        """Modules of the checkpoint that are this layer's and that other ranks hold: what is below them is not read."""
        return iter(())

    def quantized(self) -> Iterator[tuple[str, QTensor]]:
        """(parameter name, weight) of each quantised weight, over the memory of its parameters, before `prepare`."""
        return iter(())

    def integer_bytes(self) -> int:
        """Memory of the weights that are kept as integers, which are no parameters; known before they are loaded."""
        return 0

    def prepare(self) -> None:
        """Lay weights out for the kernels that read them; called once, when all are loaded."""


@runtime_checkable
class OwnNames(Protocol):
    """A model whose checkpoints name tensors in several ways, or hold some that it does not read."""

    def own_name(self, name: str) -> str | None:
        """The name under which the model wants a checkpoint's tensor; None leaves it unread. Raises ValueError for one
        that says that the checkpoint is of another kind."""
        ...


def sibling(prefix: str, name: str) -> str:
    """The checkpoint name of a module beside `prefix`: for layers that merge several of the checkpoint's."""
    return f"{prefix.rpartition('.')[0]}.{name}" if "." in prefix else name


def copy_into(weight: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values of any dtype into a weight; what lies in pinned memory, by the current stream, without waiting."""
    if values.dtype != weight.dtype:
        values = values.to(weight.device, non_blocking=True)  # to convert them there
    weight.copy_(values, non_blocking=True)


def weight_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter that needs no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
