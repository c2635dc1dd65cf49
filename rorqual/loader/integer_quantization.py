"""Which matrices are kept as integers of 4 or 8 bits: those that a GGUF file stores so, and those rounded at load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rorqual.loader.quantization_config import IntegerParts, LinearFormat
from rorqual.quantization.integer import Q4_1, Q8_0, IntegerFormat

_ROUNDED = {"int8": Q8_0, "int4": Q4_1}
_WEIGHT_ONLY = "_weight_only"
_DEVICE = "cpu"
"""Type of the devices that multiply integer weights."""


@dataclass(frozen=True, slots=True)
class IntegerQuantization:
    """What becomes of a model's matrices. Norms, biases and routers are never quantised."""

    dynamic: bool
    """Whether the inputs of products are rounded to integers as well."""
    stored: Mapping[str, IntegerFormat] = field(default_factory=dict)
    """Formats of the tensors that the checkpoint stores as integers; they are kept as they are."""
    linear: IntegerFormat | None = None
    """What the weights of other linear layers are rounded to; None leaves them alone."""
    table: IntegerFormat | None = None
    """The same for the embedding and the head."""

    def of(self, prefix: str, *names: str) -> LinearFormat | None:
        """The formats of the modules `names` below `prefix`, which one product merges; None if none is quantised."""
        return self._of(self.linear, [f"{prefix}.{name}".removeprefix(".") for name in names])

    def of_table(self, name: str) -> LinearFormat | None:
        """The format of the embedding or head called `name`."""
        return self._of(self.table, [name])

    def _of(self, rounded: IntegerFormat | None, names: list[str]) -> LinearFormat | None:
        formats = tuple(self.stored.get(f"{name}.weight", rounded) for name in names)
        return LinearFormat(IntegerParts(formats, self.dynamic), None) if any(formats) else None


def choose_integers(
    wanted: str,
    config: Mapping[str, Any],
    stored: Mapping[str, IntegerFormat],
    *,
    dtype: str,
    device: str,
) -> IntegerQuantization | None:
    """Answer `EngineConfig.quantization` for a model; None where no matrix is kept as integers.

    Args:
        wanted: the option's value.
        config: the model's config.json.
        stored: formats of the tensors that the checkpoint stores as integers.
        dtype: the option's value.
        device: type of the device that was picked.

    Raises: ValueError for a checkpoint or device that does not go with what is wanted.
    """
    method = (config.get("quantization_config") or {}).get("quant_method")
    if wanted == "auto":
        keeps = stored and device == _DEVICE and dtype != "float32"
        return IntegerQuantization(dynamic=True, stored=stored) if keeps else None
    if method is not None:
        raise ValueError(
            f"quantization {wanted!r} is for unquantised checkpoints and GGUF files, this one's weights are quantised "
            f"already (quantization_config: {method}): leave it at 'auto', or take the unquantised checkpoint"
        )
    if wanted == "none":
        return None
    if device != _DEVICE:
        raise ValueError(
            f"quantization {wanted!r} is for device {_DEVICE!r}, got {device!r}: "
            "leave it at 'auto', or take an FP8 checkpoint, whose weights stay quantised there"
        )
    rounded = _ROUNDED[wanted.removesuffix(_WEIGHT_ONLY)]
    return IntegerQuantization(
        dynamic=not wanted.endswith(_WEIGHT_ONLY), stored=stored, linear=rounded, table=_ROUNDED["int8"]
    )
