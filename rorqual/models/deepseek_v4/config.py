"""Reading a config.json of DeepSeek-V4, as released or as transformers writes it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rorqual.layers.compressed_attention import AttentionShape, LayerKind
from rorqual.layers.rotary_embedding import RopeParameters
from rorqual.loader.config_reader import ConfigReader
from rorqual.loader.quantization_config import read_weight_quantization

WINDOW = LayerKind(0, sparse=False)
_RATIOS = {0: WINDOW, 4: LayerKind(4, sparse=True), 128: LayerKind(128, sparse=False)}
"""compress_ratios' numbers."""
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_TYPES = {"sliding_attention": 0, _SPARSE: 4, _HEAVY: 128}
"""layer_types' names, with the ratios that they have unless compress_rates says otherwise."""
_YARN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate")
"""The numbers that compressing layers' frequencies follow from. Cosines and sines carry no factor."""


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """The model, under the names of config.json."""

    vocab_size: int
    max_position_embeddings: int
    attention: AttentionShape
    layer_kinds: tuple[LayerKind, ...]
    """One per layer."""
    hash_layers: frozenset[int]
    """Layers whose experts follow from the token."""
    main_rope: RopeParameters
    """Of layers that have only a window."""
    compress_rope: RopeParameters
    """Of all others."""
    hc_mult: int
    """Streams."""
    hc_sinkhorn_iters: int
    hc_eps: float
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    """Width of one expert."""
    routed_scaling_factor: float
    swiglu_limit: float
    num_nextn_predict_layers: int


def read_config(config: Mapping[str, Any]) -> DeepseekV4Config:
    """Parse a config.json of model_type deepseek_v4. Raises ValueError naming what is missing or not honoured."""
    reader = ConfigReader(config, model_type="deepseek_v4")
    _refuse_draft_blocks(config)
    for key, only in {
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "router_jitter_noise": 0.0,
    }.items():
        reader.require(key, only)
    num_layers = reader.take("num_hidden_layers", int)
    kinds = _read_kinds(reader, num_layers)
    attention = _read_attention(reader, indexed=any(kind.sparse for kind in kinds))
    main, compress = _read_ropes(reader, config)
    _check_quantization(reader, config)
    parsed = DeepseekV4Config(
        vocab_size=reader.take("vocab_size", int),
        max_position_embeddings=reader.take("max_position_embeddings", int),
        attention=attention,
        layer_kinds=kinds,
        hash_layers=_read_hash_layers(reader, num_layers),
        main_rope=main,
        compress_rope=compress,
        hc_mult=_positive(reader, "hc_mult"),
        hc_sinkhorn_iters=_positive(reader, "hc_sinkhorn_iters"),
        hc_eps=reader.take("hc_eps", float),
        n_routed_experts=reader.take("n_routed_experts", int, aliases=("num_local_experts",)),
        n_shared_experts=reader.take("n_shared_experts", int),
        num_experts_per_tok=reader.take("num_experts_per_tok", int),
        moe_intermediate_size=reader.take("moe_intermediate_size", int, aliases=("intermediate_size",)),
        routed_scaling_factor=reader.take("routed_scaling_factor", float),
        swiglu_limit=reader.take("swiglu_limit", float),
        num_nextn_predict_layers=reader.take("num_nextn_predict_layers", int, 0),
    )
    reader.finish()
    return parsed


def _refuse_draft_blocks(config: Mapping[str, Any]) -> None:
    found = {key: value for key, value in config.items() if key.startswith("dspark_") and value is not None}
    if found:
        shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in found.items())
        raise ValueError(
            f"config.json asks for DSpark's draft blocks, which are not supported: {shown}; the model answers without "
            f"them, and their tensors are left unread, with --hf-overrides '{json.dumps(dict.fromkeys(found))}'"
        )


def _positive(reader: ConfigReader, key: str) -> int:
    value = reader.take(key, int)
    if value < 1:
        raise ValueError(f"config.json: {key} must be at least 1, got {value}")
    return value


def _read_kinds(reader: ConfigReader, num_layers: int) -> tuple[LayerKind, ...]:
    """What compress_ratios says, or layer_types with compress_rates; without either the model is not known."""
    ratios = reader.take("compress_ratios", list, None)
    types = reader.take("layer_types", list, None)
    rates = reader.take("compress_rates", dict, None) or {}
    if ratios is None and types is None:
        raise ValueError(
            "config.json of model_type 'deepseek_v4' lacks compress_ratios or layer_types, and no default fits the "
            "released models: add one of them"
        )
    by_types = None if types is None else _kinds_by_types(types, rates, num_layers)
    if ratios is None:
        assert by_types is not None
        return by_types
    if len(ratios) < num_layers:
        raise ValueError(f"compress_ratios has {len(ratios)} entries for {num_layers} layers")
    if wrong := [ratio for ratio in ratios if isinstance(ratio, bool) or ratio not in _RATIOS]:
        raise ValueError(f"compress_ratios may hold {', '.join(map(str, _RATIOS))}, got {wrong[0]!r}")
    if any(ratios[num_layers:]):
        raise ValueError(
            f"compress_ratios ends with the blocks that predict further tokens, which have windows alone, so 0 each; "
            f"got {ratios[num_layers:]} behind the {num_layers} layers"
        )
    kinds = tuple(_RATIOS[ratio] for ratio in ratios[:num_layers])
    if by_types not in (None, kinds):
        raise ValueError("config.json's compress_ratios and layer_types contradict each other: drop one")
    return kinds


def _kinds_by_types(types: list[Any], rates: Mapping[str, Any], num_layers: int) -> tuple[LayerKind, ...]:
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {num_layers} layers")
    if unknown := [kind for kind in types if kind not in _TYPES]:
        raise ValueError(f"layer_types may hold {', '.join(_TYPES)}, got {unknown[0]!r}")
    for kind, rate in rates.items():
        if kind not in (_SPARSE, _HEAVY) or not isinstance(rate, int) or rate < 1 or isinstance(rate, bool):
            raise ValueError(
                f"compress_rates maps {_SPARSE} and {_HEAVY} to tokens per entry, at least 1, got {kind!r}: {rate!r}"
            )
    ratio_of = _TYPES | dict(rates)
    return tuple(LayerKind(ratio_of[kind], sparse=kind == _SPARSE) for kind in types)


def _read_hash_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    count = reader.take("num_hash_layers", int, None)
    types = reader.take("mlp_layer_types", list, None)
    if count is None and types is None:
        raise ValueError("config.json of model_type 'deepseek_v4' lacks num_hash_layers or mlp_layer_types")
    found = None if count is None else frozenset(range(min(count, num_layers)))
    if types is None:
        assert found is not None
        return found
    if len(types) != num_layers or any(kind not in ("hash_moe", "moe") for kind in types):
        raise ValueError(f"mlp_layer_types holds 'hash_moe' or 'moe' for each of {num_layers} layers, got {types}")
    by_types = frozenset(i for i, kind in enumerate(types) if kind == "hash_moe")
    if found not in (None, by_types):
        raise ValueError("config.json's num_hash_layers and mlp_layer_types contradict each other: drop one")
    return by_types


def _read_attention(reader: ConfigReader, *, indexed: bool) -> AttentionShape:
    head_dim, num_heads = reader.take("head_dim", int), reader.take("num_attention_heads", int)
    window = _positive(reader, "sliding_window")
    groups = _positive(reader, "o_groups")
    if num_heads % groups:
        raise ValueError(f"num_attention_heads ({num_heads}) must be a multiple of o_groups ({groups})")
    keys = ("index_n_heads", "index_head_dim", "index_topk")
    index = {key: _positive(reader, key) for key in keys} if indexed else {}
    reader.ignore(*keys)
    rope_dim = _read_rope_dim(reader, head_dim)
    if index and index["index_head_dim"] < rope_dim:
        raise ValueError(f"index_head_dim must hold the {rope_dim} rotated channels, got {index['index_head_dim']}")
    return AttentionShape(
        hidden_size=reader.take("hidden_size", int),
        num_attention_heads=num_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        q_lora_rank=reader.take("q_lora_rank", int),
        o_groups=groups,
        o_lora_rank=reader.take("o_lora_rank", int),
        sliding_window=window,
        rms_norm_eps=reader.take("rms_norm_eps", float),
        **index,
    )


def _read_rope_dim(reader: ConfigReader, head_dim: int) -> int:
    """qk_rope_head_dim, or partial_rotary_factor of head_dim."""
    dims = reader.take("qk_rope_head_dim", int, None)
    factor = reader.take("partial_rotary_factor", float, None)
    if dims is None and factor is None:
        raise ValueError("config.json of model_type 'deepseek_v4' lacks qk_rope_head_dim or partial_rotary_factor")
    by_factor = None if factor is None else round(head_dim * factor)
    if dims is None:
        assert by_factor is not None
        dims = by_factor
    elif by_factor not in (None, dims):
        raise ValueError(
            f"config.json says qk_rope_head_dim = {dims}, and partial_rotary_factor = {factor} of head_dim {head_dim}: "
            "they mean the same, so drop one"
        )
    if dims % 2 or not 2 <= dims <= head_dim:
        raise ValueError(f"qk_rope_head_dim must be even and at most head_dim ({head_dim}), got {dims}")
    return dims


def _read_ropes(reader: ConfigReader, config: Mapping[str, Any]) -> tuple[RopeParameters, RopeParameters]:
    """The tables of layers with windows alone and of all others: rope_theta; compress_rope_theta with rope_scaling.

    transformers nests them as rope_parameters' main and compress.
    """
    thetas = {
        "main": reader.take("rope_theta", float, None),
        "compress": reader.take("compress_rope_theta", float, None),
    }
    scaling = reader.take("rope_scaling", dict, None) or {}
    nested = reader.take("rope_parameters", dict, None) or {}
    if set(nested) != {"main", "compress"}:
        if scaling and nested and scaling != nested:
            raise ValueError("config.json's rope_scaling and rope_parameters contradict each other: drop one")
        flat = dict(scaling or nested)
        theta = flat.pop("rope_theta", None)  # transformers writes one of the two there
        if theta is not None and theta not in thetas.values():
            raise ValueError(f"rope_scaling says rope_theta = {theta}, which is neither of {thetas}: drop it")
        nested = {"main": {}, "compress": flat}
    elif scaling:
        raise ValueError("config.json's rope_scaling and rope_parameters contradict each other: drop one")
    factor = config.get("partial_rotary_factor")
    return tuple(_read_rope(name, dict(nested[name] or {}), thetas[name], factor) for name in ("main", "compress"))  # type: ignore[return-value]


def _read_rope(name: str, given: dict[str, Any], theta: float | None, partial: float | None) -> RopeParameters:
    """One of the two; `given` is its object, `theta` and `partial` what stands beside it."""
    where = f"the rotary embedding of {name} layers"
    kinds = {given.pop(key) for key in ("type", "rope_type") if given.get(key) is not None} or {"default"}
    allowed = ("default",) if name == "main" else ("default", "yarn")
    if len(kinds) > 1 or not kinds <= set(allowed):
        raise ValueError(f"{where} must be of type {' or '.join(allowed)}, got {' and '.join(sorted(kinds))}")
    spelled = "rope_theta" if name == "main" else "compress_rope_theta"
    for key, outside, beside in (
        ("rope_theta", spelled, theta),
        ("partial_rotary_factor", "partial_rotary_factor", partial),
    ):
        inside = given.pop(key, None)
        if None not in (inside, beside) and inside != beside:
            raise ValueError(
                f"{where}: {key} is {inside!r} in rope_parameters, and {outside} beside it {beside!r}: drop one"
            )
        theta = inside if key == "rope_theta" and inside is not None else theta
    if theta is None:
        raise ValueError(f"config.json of model_type 'deepseek_v4' lacks {spelled}")
    if given.get("attention_factor", 1.0) not in (None, 1.0):
        raise ValueError(f"{where}: attention_factor must be 1.0, got {given['attention_factor']!r}")
    given.pop("attention_factor", None)
    if kinds == {"default"}:
        numbers: dict[str, Any] = {}
    else:
        numbers = {key: given.pop(key) for key in _YARN if given.get(key) is not None}
        numbers["attention_factor"] = 1.0
    if unknown := {key: value for key, value in given.items() if value is not None}:
        shown = ", ".join(f"{key} = {value!r}" for key, value in unknown.items())
        raise ValueError(f"{where}: {shown} is not honoured: leave it out")
    return RopeParameters.from_config({"rope_parameters": {"rope_type": kinds.pop(), "rope_theta": theta, **numbers}})


def _check_quantization(reader: ConfigReader, config: Mapping[str, Any]) -> None:
    """Refuse what is not supported; `build_model` reads it again."""
    reader.ignore("quantization_config", "expert_dtype")
    if read_weight_quantization(config) is None and config.get("expert_dtype") is not None:
        raise ValueError(
            f"config.json says expert_dtype = {config['expert_dtype']!r} without a quantization_config: drop it where "
            "experts are plain, or add what the other layers are quantised to"
        )
