"""From a config.json to a model: which file answers for a model_type."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

import rorqual.models as package
from rorqual.batch import Batch
from rorqual.cache.spec import CacheSpec
from rorqual.cache.storage import KVStorage
from rorqual.config import did_you_mean
from rorqual.layers.decoder import Placement
from rorqual.loader.quantization_config import read_weight_quantization

_ALIASES = {"kimi_k2": "deepseek_v3", "mistral": "llama", "qwen2": "llama"}
"""model_types whose layers are another's; that file tells them apart by the config's model_type."""


class Model(Protocol):
    """What the engine needs from a model. Each one is also a torch.nn.Module whose layers name their tensors."""

    vocab_size: int
    kv_specs: Sequence[CacheSpec]
    """What each of its caches keeps, of which a layer has one or several."""
    tied_tensors: Mapping[str, str]
    """Checkpoint names that may be there but only repeat another tensor."""

    def __call__(self, batch: Batch, kv: KVStorage) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        ...


class ModelConfig(Protocol):
    """What the engine needs from a model's parsed config, before the model is built."""

    vocab_size: int
    max_position_embeddings: int


def supported_model_types() -> list[str]:
    """Every model_type that can be loaded."""
    files = [module.name for module in pkgutil.iter_modules(package.__path__) if module.name != "registry"]
    return sorted([*files, *_ALIASES])


def _module(config: Mapping[str, Any]) -> Any:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in supported_model_types():
        raise ValueError(
            f"model_type {model_type!r} is not supported: {did_you_mean(str(model_type), supported_model_types())}"
        )
    return importlib.import_module(f"rorqual.models.{_ALIASES.get(model_type, model_type)}")


def read_model_config(config: Mapping[str, Any]) -> ModelConfig:
    """Parse a config.json. Raises ValueError for a model_type or a value that is not supported, naming it."""
    parsed: ModelConfig = _module(config).read_config(config)
    return parsed


def build_model(config: Mapping[str, Any], place: Placement) -> Model:
    """The model with allocated but unfilled weights. Raises ValueError as `read_model_config` does.

    Its layers hold what place.quantization says, or else what the config's quantization_config does.
    """
    module = _module(config)
    if place.quantization is None:
        place = dataclasses.replace(place, quantization=read_weight_quantization(config))
    model: Model = module.build(module.read_config(config), place)
    return model
