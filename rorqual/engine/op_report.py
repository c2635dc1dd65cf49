"""Which implementation each op of a model gets on this machine, found by running a small copy of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rorqual.config import EngineConfig
from rorqual.engine.engine import Engine
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.source import resolve_model
from rorqual.ops.registry import Op, watch
from rorqual.sampling_params import SamplingParams

_LARGEST_VOCABULARY = 8192
"""Kernels do not ask for a larger vocabulary than this."""
_PER_LAYER = ("layer_types", "mlp_layer_types", "compress_ratios")
"""Keys of a config.json with an entry for each layer."""
_LEADING = ("first_k_dense_replace", "num_hash_layers")
"""Those that count leading layers of another kind."""
_FEWEST, _MOST = 2, 8
"""Layers that are enough where all are alike, and those that no pattern is followed beyond."""
_KINDS = (
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, max_tokens=4, ignore_eos=True),
)


class OpVerdict(NamedTuple):
    """What one backend says about the calls of one op; under the name "weights", their formats."""

    op: str
    backend: str
    verdict: str
    """"used", "ok" (would take it, a better one does), or the sentence with which it refuses."""


def first_layers(hf_config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The keys of a config.json that make it the model's first layers alone."""
    changes: dict[str, Any] = {"num_hidden_layers": count}
    changes |= {key: hf_config[key][:count] for key in _PER_LAYER if isinstance(hf_config.get(key), list)}
    return changes


def layers_of_all_kinds(hf_config: Mapping[str, Any]) -> int:
    """How many of the first layers have one of each kind among them."""
    most: int = hf_config["num_hidden_layers"]
    count = _FEWEST
    for key in _PER_LAYER:
        if isinstance(hf_config.get(key), list):
            kinds = hf_config[key][:most]
            count = max(count, *(kinds.index(kind) + 1 for kind in kinds))
    for key in _LEADING:
        if isinstance(leading := hf_config.get(key), int):
            count = max(count, leading + 1)
    return min(count, most, _MOST)


def op_report(config: EngineConfig) -> list[OpVerdict]:
    """Run prompts and decode steps through some layers of the model with made-up weights; what each op answered.

    Widths, heads, number formats and device are the model's own. A backend that takes some calls and refuses others
    gets one row for each answer. Raises ValueError as the engine does.
    """
    hf_config = open_checkpoint(resolve_model(config.model, revision=config.revision), load_format="dummy").config
    whole = {**hf_config, **config.hf_overrides}
    small = first_layers(whole, layers_of_all_kinds(whole))
    if hf_config.get("vocab_size", 0) > _LARGEST_VOCABULARY:
        small["vocab_size"] = _LARGEST_VOCABULARY
    changes = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "hf_overrides": {**config.hf_overrides, **small},
        "max_model_len": 128,
        "num_kv_blocks": 128,
        "kv_cache_memory": None,
    }
    engine = Engine(EngineConfig(**(config.model_dump(exclude_unset=True) | changes)))
    found: dict[OpVerdict, None] = {}

    def tell(op: Op[..., Any], used: str, verdicts: dict[str, str]) -> None:
        for backend, verdict in verdicts.items():
            found[OpVerdict(op.name, backend, "used" if backend == used else verdict)] = None

    with watch(tell):
        for params in _KINDS:
            engine.add_request(range(3, 40), params)
        while engine.has_work:
            engine.step()
    dtype = str(engine.resolved.dtype).removeprefix("torch.")
    held = f"{' and '.join(engine.resolved.weight_formats)}, beside {dtype} activations"
    return sorted([*found, OpVerdict("weights", "", held)])
