"""config.json's quantization_config: which number format each linear layer's weight has, by the name of its module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

from rorqual.quantization import (
    FP8_BLOCK,
    FP8_BLOCK_UE8M0,
    FP8_ROW,
    FP8_ROW_UE8M0,
    MXFP4,
    MXFP8,
    MXFP8_TILE,
    QuantFormat,
)
from rorqual.quantization.integer import IntegerFormat


class IntegerParts(NamedTuple):
    """Integer formats of the matrices that one product merges."""

    formats: tuple[IntegerFormat | None, ...]
    """None for a matrix that is not quantised."""
    dynamic: bool
    """Whether the product's input is rounded to integers as well."""


class LinearFormat(NamedTuple):
    """The number formats of a quantised linear layer."""

    weight: QuantFormat | IntegerParts
    activation: QuantFormat | None
    """What its input is quantised to, row by row; None leaves the input as it is, or to integer weights."""


class Quantization(Protocol):
    """What a model's layers hold, by their names in the checkpoint."""

    def of(self, prefix: str, *names: str) -> LinearFormat | None:
        """The formats of the linear layers `names` below `prefix`, which are one product; None if not quantised."""
        ...

    def of_table(self, name: str) -> LinearFormat | None:
        """The format of the embedding or head called `name`; None if it is not quantised."""
        ...


_FP8: Mapping[tuple[tuple[int, int], str], LinearFormat] = {
    ((128, 128), "float"): LinearFormat(FP8_BLOCK, FP8_ROW),
    ((128, 128), "ue8m0"): LinearFormat(FP8_BLOCK_UE8M0, FP8_ROW_UE8M0),
    ((32, 32), "ue8m0"): LinearFormat(MXFP8_TILE, MXFP8),
    ((1, 32), "ue8m0"): LinearFormat(MXFP8, MXFP8),
}
"""weight_block_size and scale_fmt of quant_method fp8. Blocks 32 wide have power-of-two scales without saying so."""

_SKIP_KEYS = ("modules_to_not_convert", "ignored_layers")
_READ = frozenset(
    ("quant_method", "fmt", "weight_block_size", "scale_fmt", "activation_scheme", "expert_dtype", *_SKIP_KEYS)
)


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """What a checkpoint's linear layers hold. Embeddings, norms, lm_head and routers are never quantised."""

    linear: LinearFormat
    experts: LinearFormat
    """Of modules below one that is called "experts"."""
    not_converted: tuple[str, ...] = ()
    """Names of modules that stay as they are, with everything below them: whole ("model.layers.0.mlp"), or an end
    ("lm_head", "mlp.gate") or any other run of a name's parts."""

    @classmethod
    def from_config(cls, options: Mapping[str, Any]) -> Self:
        """Parse config.json's quantization_config.

        Args:
            options: quant_method "fp8" (fmt e4m3; weight_block_size [128, 128], [32, 32] or [1, 32]; scale_fmt "ue8m0",
                "float" or absent; expert_dtype "fp4" for MXFP4 experts) or "mxfp4" (1 x 32); activation_scheme
                "dynamic", which mxfp4 may leave out to keep activations as they are; modules_to_not_convert or
                ignored_layers.

        Raises: ValueError naming the quant_method, or the key and value, that is not supported.
        """
        method = options.get("quant_method", "unnamed")
        if method == "fp8":
            linear = _fp8(options)
        elif method == "mxfp4":
            linear = _mxfp4(options)
        else:
            raise ValueError(
                f"quantization_config ({method}) is not supported (fp8 and mxfp4 are): "
                "take an unquantised checkpoint or a GGUF file"
            )
        experts = linear
        if (dtype := options.get("expert_dtype")) is not None:
            experts = _expert_format(method, dtype, linear)
        skipped = _names(options)
        for key, value in options.items():
            if key not in _READ and value not in (None, False, [], {}):
                raise _refused(key, value, "leaving it out")
        return cls(linear, experts, skipped)

    def of(self, prefix: str, *names: str) -> LinearFormat | None:
        """The format of the modules `names` below `prefix`, which one product merges; None if they are not quantised.

        Args:
            prefix: e.g. "model.layers.0.self_attn".
            names: e.g. "q_proj", "k_proj", "v_proj"; at least one.

        Raises: ValueError if some of them are quantised and some are not.
        """
        found = {name: self._of_module(f"{prefix}.{name}".removeprefix(".")) for name in names}
        if len(set(found.values())) > 1:
            kept, others = ([n for n in names if (found[n] is None) == plain] for plain in (True, False))
            raise ValueError(
                f"quantization_config leaves {', '.join(kept)} of {prefix} unquantised and not {', '.join(others)}, "
                "which are one product here: list all of them in modules_to_not_convert or none"
            )
        return found[names[0]]

    def of_table(self, name: str) -> LinearFormat | None:
        """None: these checkpoints keep embedding and head as they are."""
        return None

    def _of_module(self, name: str) -> LinearFormat | None:
        dotted = f".{name}."
        if any(f".{skipped}." in dotted for skipped in self.not_converted):
            return None
        return self.experts if ".experts." in dotted else self.linear


def read_weight_quantization(config: Mapping[str, Any]) -> WeightQuantization | None:
    """What config.json's quantization_config says; None without one. DeepSeek-V4 has expert_dtype beside it.

    Raises as `WeightQuantization.from_config`, and ValueError for an expert_dtype that is there twice and differs.
    """
    options = config.get("quantization_config")
    if options is None:
        return None
    if not isinstance(options, dict):
        raise ValueError(f"config.json: quantization_config must be an object, got {options!r}")
    inside, beside = options.get("expert_dtype"), config.get("expert_dtype")
    if None not in (inside, beside) and inside != beside:
        raise ValueError(
            f"config.json: expert_dtype is {beside!r} and quantization_config has {inside!r}: only one of them is right"
        )
    return WeightQuantization.from_config(options if beside is None else options | {"expert_dtype": beside})


def _fp8(options: Mapping[str, Any]) -> LinearFormat:
    _require(options, "fmt", "e4m3")
    _require(options, "activation_scheme", "dynamic")
    block = options.get("weight_block_size", "absent")
    sizes = sorted({size for size, _ in _FP8}, reverse=True)
    if not isinstance(block, list) or tuple(block) not in sizes:
        allowed = ", ".join(str(list(size)) for size in sizes)
        raise _refused("weight_block_size", block, f"one of {allowed}")
    width = block[1]
    scale_fmt = _require(options, "scale_fmt", *(("float",) if width == 128 else ()), "ue8m0")
    return _FP8[tuple(block), scale_fmt or ("float" if width == 128 else "ue8m0")]


def _mxfp4(options: Mapping[str, Any]) -> LinearFormat:
    _require(options, "fmt", "e2m1", "mxfp4")
    _require(options, "scale_fmt", "ue8m0")
    block = options.get("weight_block_size")
    if block is not None and block != list(MXFP4.block):
        raise _refused("weight_block_size", block, f"{list(MXFP4.block)}")
    scheme = _require(options, "activation_scheme", "dynamic")
    return LinearFormat(MXFP4, MXFP8 if scheme else None)


def _expert_format(method: str, dtype: Any, linear: LinearFormat) -> LinearFormat:
    """Experts in a format of their own: DeepSeek-V4 keeps them in FP4 beside FP8 layers. Their inputs are as the other
    layers' are."""
    if dtype not in ("fp8", "fp4") or (method == "mxfp4" and dtype != "fp4"):
        raise _refused("expert_dtype", dtype, "'fp4'" if method == "mxfp4" else "'fp8' or 'fp4'")
    return linear if dtype == "fp8" or method == "mxfp4" else LinearFormat(MXFP4, linear.activation)


def _names(options: Mapping[str, Any]) -> tuple[str, ...]:
    found: list[str] = []
    for key in _SKIP_KEYS:
        names = options.get(key) or []
        if not isinstance(names, list) or not all(isinstance(n, str) and re.fullmatch(r"[\w.-]+", n) for n in names):
            raise _refused(key, names, "a list of module names (patterns are not read)")
        found += names
    return tuple(dict.fromkeys(found))


def _require(options: Mapping[str, Any], key: str, *allowed: str) -> str | None:
    value = options.get(key)
    if value is not None and value not in allowed:
        raise _refused(key, value, " or ".join(repr(choice) for choice in allowed))
    return value


def _refused(key: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"quantization_config: {key} = {value!r} is not supported, only {wanted} is")
