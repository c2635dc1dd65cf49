"""Joins a checkpoint to a model: every tensor that a layer wants, none left over, each copied in once."""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from rorqual.loader.checkpoint import Checkpoint
from rorqual.loader.dummy import dummy_integers, fill_dummy, fill_dummy_quantized
from rorqual.loader.layer import Layer, OwnNames, WantedTensor
from rorqual.loader.staging import Lane, Staging
from rorqual.ops.split_blocks import split_blocks
from rorqual.platform import trim_heap
from rorqual.quantization.integer import IntegerWeight

_log = logging.getLogger(__name__)

_RECOMPUTED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Tables that old checkpoints store although they follow from the config."""
_SHOWN = 8
_TRIMS = 64
"""How often, while weights are laid out, the memory that has become free is handed back."""
_MOST_TWICE = 1 / 32
"""Part of a model that may be in memory as it was loaded and as it is laid out, unless a single layer is more."""


def wanted_tensors(model: nn.Module) -> dict[str, WantedTensor]:
    """Every checkpoint tensor that the model's layers want, by name."""
    found: dict[str, WantedTensor] = {}
    for _, tensors in _by_layer(model):
        for tensor in tensors:
            assert tensor.name not in found, f"two layers want {tensor.name}"
            found[tensor.name] = tensor
    return found


def _by_layer(model: nn.Module) -> Iterator[tuple[Layer, list[WantedTensor]]]:
    """Every layer and what it wants."""
    for prefix, module in model.named_modules():
        if isinstance(module, Layer):
            yield module, list(module.wanted(prefix))


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    tied_tensors: Mapping[str, str],
    num_threads: int,
    on_tensor: Callable[[int], object] = lambda _values: None,
    prepare: bool = False,
    staging: Staging | None = None,
) -> None:
    """Fill the model from the checkpoint. `on_tensor` is told the number of values in each tensor that is done.

    With `staging`, plain tensors go to its device through its buffers; without, each is copied from where it is mapped.

    What a layer keeps in the integer format that the checkpoint stores goes there as it is, never as floats. With
    `prepare`, a layer is laid out as soon as it is filled, as `prepare_weights` does it later: so only few layers are
    in memory twice.

    What layers say is elsewhere is not read and not left over.

    A model with `OwnNames` says which of its own names a checkpoint's names stand for, and what is not read.

    Raises ValueError, before any parameter is touched, for tensors that are missing, left over or misshapen, by name;
    and on the way for a tensor whose dtype or values the layer cannot hold.
    """
    there = _names_there(model, checkpoint)
    names = set(there.values())
    filled = {layer: found for layer, tensors in _by_layer(model) if (found := _under_its_name_there(tensors, there))}
    wanted = {name: tensor for tensors in filled.values() for name, tensor in tensors.items()}
    _check_names(wanted.keys(), names - _elsewhere(model, there), tied_tensors)
    for name, tensor in wanted.items():
        if (shape := checkpoint.shape(name)) != tensor.shape:
            raise ValueError(
                f"tensor {name} has shape {list(shape)} in {checkpoint.path}, "
                f"and the config wants {list(tensor.shape)}: checkpoint and config.json do not belong together"
            )
    _warn_untied(checkpoint, {name: source for name, source in tied_tensors.items() if name in names}, wanted)

    num_wanted = sum(math.prod(tensor.shape) for tensor in wanted.values())
    twice = _Budget(num_wanted * _MOST_TWICE)

    def fill(layer: Layer) -> list[int]:
        with nullcontext() if staging is None else staging.lane() as lane:
            for name, tensor in filled[layer].items():
                try:
                    _hand_over(checkpoint, name, tensor, lane)
                except (ValueError, TypeError) as error:
                    raise ValueError(f"tensor {name} in {checkpoint.path}: {error}") from error
            sizes = [math.prod(tensor.shape) for tensor in filled[layer].values()]
            if prepare:
                with twice.take(sum(sizes)):
                    prepare_weights(layer)
                    if sum(sizes) > num_wanted / _TRIMS:
                        trim_heap()  # what was loaded is free behind what was made of it
        return sizes

    # Each thread fills whole layers by itself: with teams below them, threads would wait for each other's cores.
    torch_threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            laid_out = 0
            for sizes in pool.map(fill, filled if staging is None else _in_order(filled, num_threads)):
                for num_values in sizes:
                    on_tensor(num_values)
                laid_out += sum(sizes) if prepare else 0
                if laid_out > num_wanted / _TRIMS:
                    trim_heap()
                    laid_out = 0
    finally:
        torch.set_num_threads(torch_threads)
    if staging is not None:
        staging.wait()
    if prepare:  # those that read what others were filled with
        done = {module for layer in filled for module in layer.modules()}
        for module in model.modules():
            if isinstance(module, Layer) and module not in done:
                module.prepare()
        for name, tensor in wanted.items():
            if tensor.keep_blocks is not None:
                checkpoint.release(name)


class _Budget:
    """How much may be in the works at once. Who asks for more than is left waits; for more than all, has it alone."""

    def __init__(self, most: float) -> None:
        self._most = self._left = most
        self._changed = threading.Condition()

    @contextmanager
    def take(self, amount: float) -> Iterator[None]:
        """Hold some of it while the block runs. Blocks do not nest."""
        amount = min(amount, self._most)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= amount)
            self._left -= amount
        try:
            yield
        finally:
            with self._changed:
                self._left += amount
                self._changed.notify_all()


def _in_order(filled: Mapping[Layer, Mapping[str, WantedTensor]], num_threads: int) -> list[Layer]:
    """As they lie in the files, but first those for which the other threads would have to wait in the end."""
    sizes = {layer: sum(math.prod(want.shape) for want in wanted.values()) for layer, wanted in filled.items()}
    large = sum(sizes.values()) / (2 * num_threads)
    return sorted(filled, key=lambda layer: sizes[layer] <= large)


def _hand_over(checkpoint: Checkpoint, name: str, tensor: WantedTensor, lane: Lane | None) -> None:
    """Give a layer one tensor, in the most compact form that it takes."""
    if tensor.format is None or checkpoint.integer_formats.get(name) != tensor.format:
        if lane is None:
            tensor.copy(checkpoint.load(name, tensor.rows))
        else:
            lane.hand_over(checkpoint.stored(name) or checkpoint.load(name, tensor.rows), tensor)
    elif tensor.keep_blocks is not None:
        tensor.keep_blocks(checkpoint.load_blocks(name, tensor.rows))
    else:
        assert tensor.keep is not None
        tensor.keep(split_blocks(checkpoint.load_blocks(name, tensor.rows)))
    checkpoint.release(name)


def fill_with_dummy_weights(
    model: nn.Module, *, seed: int, on_tensor: Callable[[int], object] = lambda _values: None
) -> None:
    """Seeded random weights for every parameter, made where the parameter lives."""
    quantized: set[int] = set()
    for prefix, module in model.named_modules():
        for name, weight in module.quantized() if isinstance(module, Layer) else ():
            fill_dummy_quantized(weight, f"{prefix}.{name}", seed=seed)
            for filled in (weight.values, weight.scales):
                quantized.add(filled.data_ptr())
                on_tensor(filled.numel())
    for tensor in wanted_tensors(model).values():
        if tensor.keep is not None:
            assert tensor.format is not None
            rows, columns = tensor.shape
            whole = dummy_integers((rows, columns), tensor.format, tensor.name, seed=seed)
            tensor.keep(whole if tensor.rows is None else IntegerWeight.cat_rows([whole.slice_rows(tensor.rows)]))
            on_tensor(rows * columns)
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.data_ptr() not in quantized:
            fill_dummy(parameter.data, name, seed=seed)
            on_tensor(parameter.numel())


def prepare_weights(model: nn.Module) -> None:
    """Let every layer lay its weights out for the kernels of this device."""
    for module in model.modules():
        if isinstance(module, Layer):
            module.prepare()


def _names_there(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """The model's name of every tensor that is to be read -> the checkpoint's."""
    if not isinstance(model, OwnNames):
        return {name: name for name in checkpoint.names()}
    there: dict[str, str] = {}
    unread: list[str] = []
    for name in sorted(checkpoint.names()):
        own = model.own_name(name)
        if own is None:
            unread.append(name)
        elif there.setdefault(own, name) != name:
            raise ValueError(
                f"{checkpoint.path} holds {there[own]} and {name}, which are the same tensor: one of them is left over"
            )
    if unread:
        _log.info("%s: the model does not read %s", checkpoint.path, _listed("tensors", unread))
    return there


def _elsewhere(model: nn.Module, there: Mapping[str, str]) -> set[str]:
    """The checkpoint's names of tensors that other ranks hold."""
    modules = {
        name for prefix, layer in model.named_modules() if isinstance(layer, Layer) for name in layer.elsewhere(prefix)
    }
    return {theirs for own, theirs in there.items() if modules and modules.intersection(_above(own))}


def _above(name: str) -> Iterator[str]:
    """The modules that a tensor is in, from the innermost."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _under_its_name_there(wanted: Iterable[WantedTensor], there: Mapping[str, str]) -> dict[str, WantedTensor]:
    """By the name under which the checkpoint has it: the first of name and aliases, if it has none at all the name."""
    return {next((there[n] for n in (want.name, *want.aliases) if n in there), want.name): want for want in wanted}


def _check_names(wanted: Iterable[str], names: set[str], tied_tensors: Mapping[str, str]) -> None:
    wanted = set(wanted)
    missing = sorted(wanted - names)
    left_over = sorted(n for n in names - wanted if n not in tied_tensors and not _RECOMPUTED.search(n))
    if missing or left_over:
        faults = [_listed(what, found) for what, found in (("missing", missing), ("left over", left_over)) if found]
        raise ValueError(f"the checkpoint does not fit the model: {'; '.join(faults)}")


def _listed(what: str, names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}"


def _warn_untied(checkpoint: Checkpoint, tied_tensors: Mapping[str, str], wanted: Mapping[str, WantedTensor]) -> None:
    """Of this rank's rows."""
    for name, source in tied_tensors.items():
        rows = wanted[source].rows
        repeated, kept = (checkpoint.load(each, rows)[rows or slice(None)] for each in (name, source))
        if not torch.equal(repeated, kept):
            _log.warning("%s differs from %s, but the config ties them: using %s", name, source, source)
