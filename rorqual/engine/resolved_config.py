"""The answers to every "auto" of an EngineConfig, for one model on one machine; the cache's size is `memory.py`'s."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rorqual.cache.paging import Paging
from rorqual.cache.sizing import bytes_for_blocks
from rorqual.cache.spec import CacheGroup, group_caches
from rorqual.config import EngineConfig
from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.layers.stacked_weight import StackedWeight
from rorqual.loader.integer_quantization import choose_integers
from rorqual.loader.layer import Layer
from rorqual.loader.quantization_config import Quantization, read_weight_quantization
from rorqual.loader.weights import wanted_tensors
from rorqual.models.registry import build_model, read_model_config
from rorqual.platform import native_bfloat16, pick_device
from rorqual.quantization.integer import IntegerFormat

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The answers to every "auto" of an EngineConfig, for one model on one machine."""

    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None
    """What the layers hold, where that is not what config.json says."""
    weight_formats: tuple[str, ...]
    """Number formats of the matrices, the one with the most values first: names of dtypes and quantised formats."""
    kv_cache_dtype: torch.dtype
    index_cache_format: Literal["plain", "fp8", "fp4"]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int | None
    block_size: int
    enable_prefix_caching: bool
    async_scheduling: bool
    groups: tuple[CacheGroup, ...]
    num_blocks: tuple[int, ...]
    """Per cache group; () until the cache is sized, which on a GPU is after loading."""
    num_parameters: int
    """Values that loading fills."""
    weight_bytes: int
    """Memory of this rank's weights once they are laid out."""
    mesh: Mesh
    """This rank's place."""

    def placement(self, device: torch.device, max_model_len: int) -> Placement:
        """How to build the model there."""
        return Placement(
            self.mesh,
            self.dtype,
            device,
            self.kv_cache_dtype,
            max_model_len,
            quantization=self.quantization,
            index_cache_format=self.index_cache_format,
        )

    @property
    def paging(self) -> tuple[Paging, ...]:
        """Per cache group."""
        return tuple(group.paging(self.block_size) for group in self.groups)

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all blocks."""
        return bytes_for_blocks(self.groups, self.num_blocks, block_size=self.block_size)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit the groups that keep all; where there are none, the group that holds the most."""
        kept = [
            count * paging.block_tokens
            for group, paging, count in zip(self.groups, self.paging, self.num_blocks, strict=True)
            if group.spec.retention is None
        ]
        sizes = zip(self.paging, self.num_blocks, strict=True)
        return min(kept) if kept else max(count * paging.block_tokens for paging, count in sizes)


def resolve(
    config: EngineConfig,
    hf_config: Mapping[str, Any],
    stored: Mapping[str, IntegerFormat] | None = None,
    *,
    mesh: Mesh | None = None,
) -> ResolvedConfig:
    """Answer every "auto" but the cache's size. `stored` is a checkpoint's `integer_formats`, `mesh` this rank's place.

    Raises ValueError for what does not go together.
    """
    device = pick_device(config.device)
    integers = choose_integers(config.quantization, hf_config, stored or {}, dtype=config.dtype, device=device.type)
    dtype = _pick_dtype(config.dtype, device, integers=integers is not None)
    quantization: Quantization | None = integers
    if config.activation_quantization == "none":
        quantization = _weights_alone(hf_config) if integers is None else dataclasses.replace(integers, dynamic=False)
    kv_dtype = _pick_kv_dtype(config.kv_cache_dtype, dtype)
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        1024 if device.type == "cpu" else 8192, config.max_num_seqs or 0
    )
    max_num_seqs = config.max_num_seqs or min(256, max_num_batched_tokens)
    trained_len = read_model_config(hf_config).max_position_embeddings
    max_model_len = config.max_model_len or trained_len
    if max_model_len > trained_len:
        _log.warning("max_model_len %d is more than the %d tokens the model was made for", max_model_len, trained_len)
    index_format: Literal["plain", "fp8", "fp4"] = (
        "plain" if config.index_cache_dtype == "auto" else config.index_cache_dtype
    )
    mesh = mesh or Mesh.single()
    place = Placement(
        mesh,
        dtype,
        torch.device("meta"),
        kv_dtype,
        1,
        quantization=quantization,
        index_cache_format=index_format,
    )
    sketch = build_model(hf_config, place)
    assert isinstance(sketch, torch.nn.Module)
    if index_format != "plain":
        plain = build_model(hf_config, dataclasses.replace(place, index_cache_format="plain"))
        if list(plain.kv_specs) == list(sketch.kv_specs):
            raise ValueError(
                f"index_cache_dtype {index_format!r} is for models with an indexer, and model_type "
                f"{hf_config['model_type']!r} has none: leave it at 'auto'"
            )
    # A tied head takes no weights of its own from the checkpoint, but may be laid out anew for its product.
    loaded = [tensor.shape for tensor in wanted_tensors(sketch).values()]
    weight_bytes = sum(p.numel() * p.element_size() for p in sketch.parameters())
    weight_bytes += sum(layer.integer_bytes() for layer in sketch.modules() if isinstance(layer, Layer))
    _check_integers(sketch, config.quantization, dtype)
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        quantization=quantization,
        weight_formats=_weight_formats(sketch),
        kv_cache_dtype=kv_dtype,
        index_cache_format=index_format,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling and device.type == "cuda",
        groups=group_caches(sketch.kv_specs),
        num_blocks=(),
        num_parameters=sum(math.prod(shape) for shape in loaded),
        weight_bytes=weight_bytes,
        mesh=mesh,
    )


def _weights_alone(hf_config: Mapping[str, Any]) -> Quantization | None:
    """What config.json says of the weights, beside inputs that are not quantised."""
    found = read_weight_quantization(hf_config)
    if found is None:
        return None
    linear, experts = (formats._replace(activation=None) for formats in (found.linear, found.experts))
    return dataclasses.replace(found, linear=linear, experts=experts)


def _pick_dtype(wanted: str, device: torch.device, *, integers: bool) -> torch.dtype:
    if wanted == "auto":  # products of integers need no bfloat16 instructions
        return torch.bfloat16 if integers or native_bfloat16(device) else torch.float32
    if wanted == "float16" and device.type == "cpu":
        raise ValueError("dtype 'float16' is not for the CPU, which computes it slowly: use bfloat16 or float32")
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def _weight_formats(model: torch.nn.Module) -> tuple[str, ...]:
    """Number formats of the matrices that a model's layers hold, the one with the most values first."""
    found: Counter[str] = Counter()
    for layer in model.modules():
        if isinstance(layer, StackedWeight):
            found.update(layer.format_sizes())
    return tuple(name for name, _ in found.most_common())


def _check_integers(model: torch.nn.Module, wanted: str, dtype: torch.dtype) -> None:
    """Say which matrices could not be kept as integers; an error if that is all of them and integers were asked for."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, StackedWeight)}
    plain = [name for name, layer in layers.items() if layer.left_plain]
    if not plain:
        return
    why = "their input features do not split into groups of 32, or they are merged with a matrix that is not quantised"
    if wanted not in ("auto", "none") and not any(layer.integers for layer in layers.values()):
        raise ValueError(
            f"quantization {wanted!r} needs matrices with a multiple of 32 input features, and this model has none: "
            "leave it at 'auto'"
        )
    _log.warning("%d matrices stay in %s, such as %s: %s", len(plain), dtype, plain[0], why)


def _pick_kv_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    if wanted == "auto":
        return dtype
    picked: torch.dtype = torch.float8_e4m3fn if wanted.startswith("fp8") else getattr(torch, wanted)
    return picked
