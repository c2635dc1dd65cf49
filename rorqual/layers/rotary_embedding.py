"""Rotary position embedding: reading its parameters, and the one [cos | sin] table that all layers share."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rorqual.config import did_you_mean
from rorqual.ops.rope import rotary_embedding

DEFAULT_THETA = 10000.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """The kind of rotary embedding and its numbers, from any spelling of config.json."""

    rope_type: str
    theta: float
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The kind's own parameters, by their config.json names."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, layer_type: str | None = None) -> RopeParameters:
        """Read `rope_theta` with `rope_scaling`, or `rope_parameters`, flat or per layer type.

        Raises ValueError for an unknown kind, a missing number, a value that is no number, a parameter that the kind
        does not have, and where `rope_scaling` and `rope_parameters` contradict each other.
        """
        given: dict[str, Any] = {}
        for key in ("rope_scaling", "rope_parameters"):
            value = config.get(key) or {}
            if not isinstance(value, Mapping):
                raise ValueError(f"{key} must be an object or null, got {value!r}")
            if value and all(isinstance(v, Mapping) for v in value.values()):
                if layer_type not in value:
                    raise ValueError(f"{key} has no entry for layer type {layer_type!r}; it has {', '.join(value)}")
                value = value[layer_type]
            for name, number in value.items():
                if number is not None and given.setdefault(name, number) != number:
                    raise ValueError(
                        f"rope_scaling says {name} = {given[name]!r} and rope_parameters says {number!r}: drop one"
                    )
        old_type = given.pop("type", None)
        rope_type = given.pop("rope_type", None) or old_type or "default"
        theta = given.pop("rope_theta", None) or config.get("rope_theta")
        if theta is None:
            _log.warning("the config gives no rope_theta: taking %g, as transformers does", DEFAULT_THETA)
            theta = DEFAULT_THETA
        if rope_type not in _KINDS:
            raise ValueError(f"rope type {rope_type!r} is not supported: {did_you_mean(rope_type, _KINDS)}")
        required, optional = _KINDS[rope_type]
        partial = given.pop("partial_rotary_factor", 1)
        if partial != 1:
            raise ValueError(f"partial_rotary_factor must be 1 for this model, got {partial}")
        given.pop("finetuned", None)
        if rope_type in ("yarn", "longrope", "llama3", "dynamic"):
            given.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
            if given["original_max_position_embeddings"] is None:
                given["original_max_position_embeddings"] = config.get("max_position_embeddings")
        if rope_type == "longrope":
            given.setdefault("factor", config["max_position_embeddings"] / given["original_max_position_embeddings"])
        if missing := [name for name in required if given.get(name) is None]:
            raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)}")
        if unknown := [name for name in given if name not in (*required, *optional)]:
            known = did_you_mean(unknown[0], (*required, *optional))
            raise ValueError(f"rope type {rope_type!r} does not know {unknown[0]!r}: {known}")
        for name, number in {"rope_theta": theta, **given}.items():
            _check_number(name, number)
        return cls(rope_type, float(theta), given)


def _check_number(name: str, value: Any) -> None:
    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    if name == "truncate":
        right, kind = isinstance(value, bool), "true or false"
    elif name in ("short_factor", "long_factor", "factors"):
        right, kind = isinstance(value, list) and all(map(is_number, value)), "a list of numbers"
    else:
        right, kind = is_number(value), "a number"
    if not right:
        raise ValueError(f"the rotary embedding's {name} must be {kind}, got {value!r}")


_ORIGINAL = "original_max_position_embeddings"
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), (_ORIGINAL,)),
    "dynamic": (("factor", _ORIGINAL), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
    "longrope": (("short_factor", "long_factor", _ORIGINAL, "factor"), ("attention_factor",)),
    "gguf_factors": (("factors",), ()),
}
"""Kind -> (required, optional) parameters."""


def inverse_frequencies(
    parameters: RopeParameters, rotary_dim: int, *, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """([rotary_dim / 2] float32 radians per position, factor on cos and sin).

    "dynamic" and "longrope" depend on the length: it is that of the longest sequence served, fixed for the engine's
    life, because cached keys cannot be rotated again. Below the trained length neither scales anything.
    """
    numbers, theta = parameters.numbers, parameters.theta
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    powers = theta**exponent
    plain = 1.0 / powers
    match parameters.rope_type:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / numbers["factor"], 1.0
        case "dynamic":
            trained = numbers[_ORIGINAL]
            if max_model_len <= trained:
                return plain, 1.0
            factor = numbers["factor"]
            grown = theta * (factor * max_model_len / trained - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))
            return 1.0 / grown**exponent, 1.0
        case "llama3":
            return _llama3(plain, numbers), 1.0
        case "yarn":
            return _yarn(powers, rotary_dim, theta, numbers)
        case "longrope":
            trained, factor = numbers[_ORIGINAL], numbers["factor"]
            stretch = _per_pair(numbers, "long_factor" if max_model_len > trained else "short_factor", rotary_dim)
            attention_factor = numbers.get("attention_factor")
            if attention_factor is None:
                attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
            return 1.0 / (stretch * powers), attention_factor
        case _:
            return plain / _per_pair(numbers, "factors", rotary_dim), 1.0


def _per_pair(numbers: Mapping[str, Any], name: str, rotary_dim: int) -> torch.Tensor:
    """float32 [rotary_dim / 2], one number per pair of channels."""
    if len(numbers[name]) != rotary_dim // 2:
        raise ValueError(f"the rotary embedding's {name} must have {rotary_dim // 2} entries, got {len(numbers[name])}")
    return torch.tensor(numbers[name], dtype=torch.float32)


def _llama3(plain: torch.Tensor, numbers: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are slowed by `factor`, short ones kept, and those between blended. Source: Llama 3.1."""
    factor, low, high = numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"]
    # Rotations within the trained context. In transformers' order of roundings: position 4095 multiplies the last bit.
    turns = numbers[_ORIGINAL] / (2 * math.pi / plain)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    blended: torch.Tensor = (1 - blend) * plain / factor + blend * plain
    return blended


def _yarn(
    powers: torch.Tensor, rotary_dim: int, theta: float, numbers: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Peng et al. 2023, arXiv:2309.00071."""
    factor, trained = numbers["factor"], numbers[_ORIGINAL]

    def dim_of(rotations: float) -> float:
        return rotary_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(numbers.get("beta_fast") or 32), dim_of(numbers.get("beta_slow") or 1)
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = numbers.get("attention_factor")
    if attention_factor is None:
        weight, all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
        attention_factor = mscale(weight) / mscale(all_dim) if weight and all_dim else mscale(1.0)
    kept = 1 - interpolated  # transformers' order of roundings, as in _llama3
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, attention_factor


class RotaryEmbedding(nn.Module):
    """One float32 table [max_model_len, rotary_dim], one row [cos | sin] per position, which layers share."""

    def __init__(
        self, parameters: RopeParameters, rotary_dim: int, *, max_model_len: int, device: torch.device
    ) -> None:
        super().__init__()
        frequencies, factor = inverse_frequencies(parameters, rotary_dim, max_model_len=max_model_len)
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
        self.cos_sin: torch.Tensor = (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(device)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, *, scratch: dict[Hashable, Any] | None = None
    ) -> torch.Tensor:
        """x [num_tokens, num_heads, head_dim], positions [num_tokens] -> x rotated; `scratch` is the batch's."""
        return rotary_embedding(x, positions, self.cos_sin, scratch=scratch)
