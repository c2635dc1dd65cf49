"""Rotary position embedding: reading its parameters, and the [cos | sin] tables that layers share."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from rorqual.config import did_you_mean
from rorqual.ops.decoder_blocks import Rotation
from rorqual.ops.rope import RotaryOutput, rotary_embedding

DEFAULT_THETA = 10000.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """The kind of rotary embedding and its numbers.

    YaRN's cosines and sines carry a factor, about which two rules are in use; with mscale(s, m) = 0.1 m ln(s) + 1, and
    1 for s <= 1:

    - transformers' (`from_config`): `attention_factor` if given; else mscale(factor, mscale) / mscale(factor,
      mscale_all_dim) if both are given and not 0; else mscale(factor, 1). Where vLLM's `attn_factor` stands instead of
      `attention_factor`, it multiplies what the others give.
    - DeepInfer's (`from_rope_scaling`): always mscale(factor, mscale) / mscale(factor, mscale_all_dim) * attn_factor,
      where true and false stand for 1 and 0. It is worked out when the parameters are read, and kept as
      `attention_factor`.
    """

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
        partial = given.pop("partial_rotary_factor", 1)
        if partial != 1:
            raise ValueError(f"partial_rotary_factor must be 1 for this model, got {partial}")
        for name in (_ORIGINAL, "max_position_embeddings"):
            if rope_type in _TRAINED and config.get(name) is not None:
                given.setdefault(_ORIGINAL, config[name])
        if rope_type == "longrope" and "factor" not in given:
            given["factor"] = _extension(config.get("max_position_embeddings"), given.get(_ORIGINAL))
        return cls._validated(rope_type, theta, given)

    @classmethod
    def from_rope_scaling(cls, base: float, rope_scaling: Mapping[str, Any] | None) -> RopeParameters:
        """DeepInfer's spelling: the base, and a dictionary with its kind under "type"; None scales nothing.

        For YaRN the numbers are `factor`, `original_max_position_embeddings`, and where they differ from their defaults
        `beta_fast` 32, `beta_slow` 1, `extrapolation_factor` 1, `attn_factor` 1, `mscale` true and `mscale_all_dim` 0.
        Raises ValueError as `from_config` does.
        """
        given = {name: number for name, number in (rope_scaling or {"type": "default"}).items() if number is not None}
        rope_type = given.pop("type", None)
        if rope_type is None:
            raise ValueError(f"rope_scaling needs a type, one of {', '.join(_KINDS)}; it has {', '.join(given)}")
        if rope_type == "yarn" and "factor" in given and "attention_factor" not in given:
            weights = [given.pop(name, default) for name, default in (("mscale", True), ("mscale_all_dim", 0))]
            attn_factor = given.pop("attn_factor", 1.0)
            numbers = dict(zip(("mscale", "mscale_all_dim"), map(_as_number, weights), strict=True))
            for name, number in {"factor": given["factor"], "attn_factor": attn_factor, **numbers}.items():
                _check_number(name, number)
            ratio = _mscale(given["factor"], numbers["mscale"]) / _mscale(given["factor"], numbers["mscale_all_dim"])
            given["attention_factor"] = ratio * attn_factor
        return cls._validated(rope_type, base, given)

    @classmethod
    def _validated(cls, rope_type: str, theta: Any, given: dict[str, Any]) -> RopeParameters:
        if rope_type not in _KINDS:
            raise ValueError(f"rope type {rope_type!r} is not supported: {did_you_mean(rope_type, _KINDS)}")
        required, optional = _KINDS[rope_type]
        given.pop("finetuned", None)
        if missing := [name for name in required if given.get(name) is None]:
            raise ValueError(f"rope type {rope_type!r} needs {', '.join(missing)}")
        if unknown := [name for name in given if name not in (*required, *optional, *_PRUNING)]:
            known = did_you_mean(unknown[0], (*required, *optional, *_PRUNING))
            raise ValueError(f"rope type {rope_type!r} does not know {unknown[0]!r}: {known}")
        for name, number in {"rope_theta": theta, **given}.items():
            _check_number(name, number)
        if "attention_factor" in given and "attn_factor" in given:
            raise ValueError("attention_factor replaces what mscale gives and attn_factor multiplies it: drop one")
        return cls(rope_type, float(theta), given)

    @property
    def identity(self) -> Hashable:
        """Equal for equal kinds and numbers, in whatever order they were given."""

        def frozen(value: Any) -> Hashable:
            return tuple(value) if isinstance(value, list) else value

        return self.rope_type, self.theta, frozenset((name, frozen(value)) for name, value in self.numbers.items())


def _extension(longest: Any, trained: Any) -> float:
    """LongRoPE's factor where it is not given: how much longer the served context is than the trained one."""
    if longest is None or trained is None:
        raise ValueError(
            "rope type 'longrope' needs factor, or both max_position_embeddings and original_max_position_embeddings, "
            f"whose ratio it is; got {longest} and {trained}"
        )
    _check_number("max_position_embeddings", longest)
    _check_number(_ORIGINAL, trained)
    return float(longest / trained)


def _as_number(value: Any) -> Any:
    return float(value) if isinstance(value, bool) else value


def _check_number(name: str, value: Any) -> None:
    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    if name == "truncate":
        right, kind = isinstance(value, bool), "true or false"
    elif name == "rope_freq_sample_interval":
        right, kind = is_number(value) and 1 <= value < math.inf and value == int(value), "a whole number from 1 on"
    elif name in _POSITIVE and is_number(value):
        right, kind = 0 < value < math.inf, "a positive number"
    elif name in ("short_factor", "long_factor", "factors"):
        right, kind = isinstance(value, list) and all(map(is_number, value)), "a list of numbers"
    else:
        right, kind = is_number(value), "a number"
    if not right:
        raise ValueError(f"the rotary embedding's {name} must be {kind}, got {value!r}")


_ORIGINAL = "original_max_position_embeddings"
_PRUNING = ("rope_freq_sample_interval", "high_freq_cycle_threshold")
"""Parameters of every kind, which leave out frequencies."""
_TRAINED = ("yarn", "longrope", "llama3", "dynamic")
"""Kinds that ask how long the context was in training."""
_POSITIVE = (
    "rope_theta", "factor", _ORIGINAL, "max_position_embeddings", "beta_fast", "beta_slow", "high_freq_cycle_threshold"
)  # fmt: skip
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), (_ORIGINAL,)),
    "dynamic": (("factor", _ORIGINAL), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        (
            *("beta_fast", "beta_slow", "truncate", "extrapolation_factor"),
            *("mscale", "mscale_all_dim", "attention_factor", "attn_factor"),
        ),
    ),
    "longrope": (("short_factor", "long_factor", _ORIGINAL, "factor"), ("attention_factor",)),
    "gguf_factors": (("factors",), ()),
}
"""Kind -> (required, optional) parameters."""


def inverse_frequencies(
    parameters: RopeParameters, rotary_dim: int, *, max_model_len: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, float]:
    """([rotary_dim / 2] radians per position, factor on cos and sin).

    "dynamic" and "longrope" depend on the length: it is that of the longest sequence served, fixed for the engine's
    life, because cached keys cannot be rotated again. Below the trained length neither scales anything.

    `high_freq_cycle_threshold` = c drops the frequencies above 2 pi / c, which turn once in fewer than c positions;
    then `rope_freq_sample_interval` = n keeps every n-th. Fewer than rotary_dim / 2 are left.

    Raises ValueError for a rotary_dim that is odd, a list of another length, and a threshold that no frequency meets or
    that finds them not in descending order.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"the rotary dimension must be even and at least 2, got {rotary_dim}")
    frequencies, factor = _all_frequencies(parameters, rotary_dim, max_model_len, dtype)
    start, threshold = 0, parameters.numbers.get("high_freq_cycle_threshold")
    if threshold is not None:
        if bool((frequencies.diff() > 0).any()):
            raise ValueError("high_freq_cycle_threshold needs frequencies in descending order, which these are not")
        low_enough = (frequencies <= 2 * math.pi / threshold).nonzero()
        if not len(low_enough):
            raise ValueError(
                f"high_freq_cycle_threshold = {threshold} leaves no frequency: the slowest turns once in "
                f"{2 * math.pi / float(frequencies[-1]):.6g} positions, and the threshold must not exceed that"
            )
        start = int(low_enough[0])
    return frequencies[start :: int(parameters.numbers.get("rope_freq_sample_interval", 1))], factor


def _all_frequencies(
    parameters: RopeParameters, rotary_dim: int, max_model_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, float]:
    numbers, theta = parameters.numbers, parameters.theta
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(dtype) / rotary_dim
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
            name = "long_factor" if max_model_len > trained else "short_factor"
            stretch = _per_pair(numbers, name, plain)
            attention_factor = numbers.get("attention_factor")
            if attention_factor is None:
                attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
            return 1.0 / (stretch * powers), attention_factor
        case _:
            return plain / _per_pair(numbers, "factors", plain), 1.0


def _per_pair(numbers: Mapping[str, Any], name: str, like: torch.Tensor) -> torch.Tensor:
    """[rotary_dim / 2], one number per pair of channels."""
    if len(numbers[name]) != len(like):
        raise ValueError(f"the rotary embedding's {name} must have {len(like)} entries, got {len(numbers[name])}")
    return torch.tensor(numbers[name], dtype=like.dtype)


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
    ramp = (torch.arange(rotary_dim // 2, dtype=powers.dtype) - low) / ((high - low) or 0.001)
    interpolated = ramp.clamp(0, 1)

    attention_factor = numbers.get("attention_factor")
    if attention_factor is None:
        weight, all_dim = numbers.get("mscale"), numbers.get("mscale_all_dim")
        ratio = _mscale(factor, weight) / _mscale(factor, all_dim) if weight and all_dim else _mscale(factor, 1.0)
        attention_factor = ratio * numbers.get("attn_factor", 1.0)
    kept = (1 - interpolated) * numbers.get("extrapolation_factor", 1.0)  # transformers' order, as in _llama3
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, attention_factor


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


class RotaryTables:
    """The [cos | sin] tables of one model on its devices: layers with equal parameters get the same tensor.

    Whoever builds a model owns one, so that models share nothing and a table lives as long as the layers that use it.
    """

    def __init__(self) -> None:
        self._tables: dict[Hashable, torch.Tensor] = {}

    def get(
        self,
        parameters: RopeParameters,
        rotary_dim: int,
        *,
        max_model_len: int,
        device: torch.device,
        float64_angles: bool = False,
    ) -> torch.Tensor:
        """float32 [max_model_len, R], one row [cos | sin] per position, made when it is first asked for.

        R is rotary_dim, or less where the parameters leave out frequencies. Angles are products in float32, as in the
        systems that models were trained with: at position 10^6 fast frequencies are off by hundredths of a radian.
        With `float64_angles` they, and the frequencies, are float64 until their cosine and sine are taken.
        """
        name = (parameters.identity, rotary_dim, max_model_len, device, float64_angles)
        if name not in self._tables:
            dtype = torch.float64 if float64_angles else torch.float32
            frequencies, factor = inverse_frequencies(parameters, rotary_dim, max_model_len=max_model_len, dtype=dtype)
            angles = torch.outer(torch.arange(max_model_len, dtype=dtype), frequencies)
            turns = torch.polar(torch.ones_like(angles), angles)
            self._tables[name] = (torch.cat((turns.real, turns.imag), dim=-1) * factor).to(device, torch.float32)
        return self._tables[name]


class RotaryEmbedding(nn.Module):
    """Rotates heads by the angles of one table, which layers share through `tables`.

    Args:
        parameters: kind and numbers.
        rotary_dim: channels of each head that are rotated.
        max_model_len: positions, and rows of the table.
        device: the table's.
        tables: the model's; by default a table of its own.
        interleaved: pairs are (2i, 2i + 1), as in DeepSeek's models, instead of (i, i + rotary_dim / 2).
        offset: the first rotated channel of a head.
        float64_angles: see `RotaryTables.get`.
    """

    def __init__(
        self,
        parameters: RopeParameters,
        rotary_dim: int,
        *,
        max_model_len: int,
        device: torch.device,
        tables: RotaryTables | None = None,
        interleaved: bool = False,
        offset: int = 0,
        float64_angles: bool = False,
    ) -> None:
        super().__init__()
        tables = RotaryTables() if tables is None else tables
        # No buffer: a module that is cast to another dtype must not take the table along.
        self.cos_sin: torch.Tensor = tables.get(
            parameters, rotary_dim, max_model_len=max_model_len, device=device, float64_angles=float64_angles
        )
        self.rotary_dim, self.interleaved, self.offset = rotary_dim, interleaved, offset

    def forward(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        *,
        conjugate: bool = False,
        inplace: bool = False,
        scratch: dict[Hashable, Any] | None = None,
    ) -> RotaryOutput:
        """Rotate query [num_tokens, num_heads, head_dim], and key [num_tokens, num_kv_heads, head_dim] if given.

        `conjugate` turns back: of rotated vectors it makes the given ones times the square of the table's factor, which
        is 1 but for YaRN and LongRoPE. `inplace` and `scratch` as in the op, which says what is returned and raised.
        Raises ValueError where the table is narrower than rotary_dim, because frequencies were left out.
        """
        self._check_table()
        return rotary_embedding(
            query,
            positions,
            self.cos_sin,
            key=key,
            interleaved=self.interleaved,
            offset=self.offset,
            conjugate=conjugate,
            inplace=inplace,
            scratch=scratch,
        )

    def rotation(self) -> Rotation:
        """The table and how it is read, for an op of several. Raises ValueError as `forward` does."""
        self._check_table()
        return Rotation(self.cos_sin, self.interleaved, self.offset)

    def _check_table(self) -> None:
        if self.cos_sin.shape[1] != self.rotary_dim:
            raise ValueError(
                f"the rotary table has {self.cos_sin.shape[1]} columns for {self.rotary_dim} channels: "
                f"{' and '.join(_PRUNING)} leave frequencies out, and no layer rotates by such a table; drop them"
            )
