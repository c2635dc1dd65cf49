"""Loads a model, sizes its cache from what the machine has, and runs it."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from rorqual.batch import Batch, CacheView
from rorqual.cache.sizing import blocks_for_tokens, bytes_for_blocks, plan_blocks
from rorqual.cache.spec import GroupLayers, group_layers
from rorqual.cache.storage import KVStorage
from rorqual.config import EngineConfig
from rorqual.distributed.mesh import Mesh
from rorqual.engine.cuda_graphs import DecodeGraphs, graph_sizes
from rorqual.engine.decode_buffer import DecodeBuffer
from rorqual.layers.decoder import Placement
from rorqual.layers.stacked_weight import StackedWeight
from rorqual.loader.checkpoint import Checkpoint
from rorqual.loader.integer_quantization import IntegerQuantization, choose_integers
from rorqual.loader.layer import Layer
from rorqual.loader.weights import fill_with_dummy_weights, load_weights, prepare_weights, wanted_tensors
from rorqual.models.registry import build_model, read_model_config
from rorqual.ops.registry import Op, load_backends, watch
from rorqual.platform import (
    available_memory,
    native_bfloat16,
    pick_device,
    return_freed_memory,
    total_memory,
)
from rorqual.quantization.integer import IntegerFormat

_log = logging.getLogger(__name__)

_AUTO_KV_BYTES_CPU = 4 << 30
_BACKENDS = {"cpu": ("native", "cpu"), "cuda": ("vendor", "triton")}
"""Device -> the folders of ops/ whose kernels serve it."""
_OPS_THAT_WAIT = ("paged_attention", "store_kvcache", "fused_experts")
"""Ops whose references ask the device for numbers, which a CUDA graph cannot record."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """The answers to every "auto" of an EngineConfig, for one model on one machine."""

    device: torch.device
    dtype: torch.dtype
    quantization: IntegerQuantization | None
    """What is kept as integers; None if nothing is."""
    weight_formats: tuple[str, ...]
    """Number formats of the matrices, the one with the most values first: names of dtypes and quantised formats."""
    kv_cache_dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int | None
    block_size: int
    enable_prefix_caching: bool
    async_scheduling: bool
    groups: tuple[GroupLayers, ...]
    num_blocks: tuple[int, ...]
    """Per cache group."""
    num_parameters: int
    """Values that loading fills."""
    weight_bytes: int
    """Memory of all weights once they are laid out."""

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all blocks."""
        return bytes_for_blocks(self.groups, self.num_blocks, block_size=self.block_size)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit the group with the most blocks."""
        return max(self.num_blocks) * self.block_size


class ModelRunner:
    """The model with its weights and cache, on one rank."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, *, progress: bool) -> None:
        hf_config = {**checkpoint.config, **config.hf_overrides}
        self.resolved = resolve(config, hf_config, checkpoint.integer_formats)
        resolved = self.resolved
        load_backends(*_BACKENDS[resolved.device.type])
        place = Placement(
            Mesh.single(),
            resolved.dtype,
            resolved.device,
            resolved.kv_cache_dtype,
            resolved.max_model_len,
            quantization=resolved.quantization,
        )
        self.model = build_model(hf_config, place)
        self._load(config, checkpoint, progress=progress)
        self.kv = KVStorage(
            resolved.groups, resolved.num_blocks, block_size=resolved.block_size, device=resolved.device
        )
        self.decode_buffer = DecodeBuffer(
            max_num_seqs=resolved.max_num_seqs,
            max_model_len=resolved.max_model_len,
            block_size=resolved.block_size,
            num_groups=len(resolved.groups),
            device=resolved.device,
        )
        self._graphs: DecodeGraphs | None = None
        self._uses_graphs = resolved.device.type == "cuda" and not config.enforce_eager
        self._progress = progress

    def _load(self, config: EngineConfig, checkpoint: Checkpoint, *, progress: bool) -> None:
        assert isinstance(self.model, torch.nn.Module)
        total = self.resolved.num_parameters
        with tqdm(total=total, desc="Loading weights", unit=" values", unit_scale=True, disable=not progress) as bar:
            if config.load_format == "dummy":
                fill_with_dummy_weights(self.model, seed=config.seed or 0, on_tensor=bar.update)
                prepare_weights(self.model)
            else:
                load_weights(
                    self.model,
                    checkpoint,
                    tied_tensors=self.model.tied_tensors,
                    num_threads=torch.get_num_threads(),
                    on_tensor=bar.update,
                    prepare=True,
                )
        return_freed_memory()

    def warm_up(self) -> dict[str, str]:
        """Run tokens that write nothing, so that the first request does not pay for it; op -> backend that ran."""
        used: dict[str, str] = {}

        def tell(op: Op[..., Any], backend: str, _verdicts: dict[str, str]) -> None:
            used[op.name] = backend

        with watch(tell):
            self.run(self._idle_batch((1,)))
        if self.resolved.device.type == "cuda":  # whose kernels for chunks are compiled when they are first used
            self.run(self._idle_batch((1, 2)))
        if self._uses_graphs and all(used.get(op) != "reference" for op in _OPS_THAT_WAIT):
            self._graphs = DecodeGraphs(
                lambda batch: self.model(batch, self.kv),
                self.decode_buffer,
                max_model_len=self.resolved.max_model_len,
                sizes=graph_sizes(self.resolved.max_num_seqs),
                progress=self._progress,
            )
        return used

    def _idle_batch(self, lengths: tuple[int, ...]) -> Batch:
        """Sequences of so many tokens, which are written nowhere and see whatever the first block holds."""
        count, device = sum(lengths), self.resolved.device
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        view = CacheView(zeros - 1, torch.zeros((len(lengths), 1), dtype=torch.int32, device=device))
        return Batch(
            input_ids=zeros,
            positions=zeros,
            cu_seqlens_q=offsets.int(),
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            caches=(view,) * len(self.resolved.groups),
            logits_indices=offsets[1:] - 1,
            query_lens=lengths,
            context_lens_host=lengths,
        )

    @torch.inference_mode()
    def run(self, batch: Batch) -> torch.Tensor:
        """Compute a batch, write its keys and values, and return the wanted logits [num_rows, vocab_size]."""
        graphs = self._graphs
        hidden = graphs.run(batch) if graphs and graphs.takes(batch) else self.model(batch, self.kv)
        if len(batch.logits_indices) != batch.num_tokens:
            hidden = hidden.index_select(0, batch.logits_indices)
        return self.model.compute_logits(hidden)


def resolve(
    config: EngineConfig, hf_config: Mapping[str, Any], stored: Mapping[str, IntegerFormat] | None = None
) -> ResolvedConfig:
    """Answer every "auto". Raises ValueError, with the bytes and the flag to change, when the model cannot fit.

    `stored` is a checkpoint's `integer_formats`.
    """
    device = pick_device(config.device)
    quantization = choose_integers(config.quantization, hf_config, stored or {}, dtype=config.dtype, device=device.type)
    dtype = _pick_dtype(config.dtype, device, integers=quantization is not None)
    kv_dtype = _pick_kv_dtype(config.kv_cache_dtype, dtype)
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        1024 if device.type == "cpu" else 8192, config.max_num_seqs or 0
    )
    max_num_seqs = config.max_num_seqs or min(256, max_num_batched_tokens)
    trained_len = read_model_config(hf_config).max_position_embeddings
    max_model_len = config.max_model_len or trained_len
    if max_model_len > trained_len:
        _log.warning("max_model_len %d is more than the %d tokens the model was made for", max_model_len, trained_len)
    place = Placement(Mesh.single(), dtype, torch.device("meta"), kv_dtype, 1, quantization=quantization)
    sketch = build_model(hf_config, place)
    assert isinstance(sketch, torch.nn.Module)
    # A tied head takes no weights of its own from the checkpoint, but may be laid out anew for its product.
    loaded = [tensor.shape for tensor in wanted_tensors(sketch).values()]
    weight_bytes = sum(p.numel() * p.element_size() for p in sketch.parameters())
    weight_bytes += sum(layer.integer_bytes() for layer in sketch.modules() if isinstance(layer, Layer))
    _check_integers(sketch, config.quantization, dtype)
    groups = group_layers(sketch.kv_specs)
    sizing = _Sizing(config, groups, device, weight_bytes, max_num_seqs, max_num_batched_tokens)
    num_blocks = sizing.num_blocks()
    if config.max_model_len is None:
        max_model_len = sizing.longest_that_fits(num_blocks, max_model_len)
    sizing.check(num_blocks, max_model_len)
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        quantization=quantization,
        weight_formats=_weight_formats(sketch),
        kv_cache_dtype=kv_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling and device.type == "cuda",
        groups=groups,
        num_blocks=tuple(num_blocks),
        num_parameters=sum(math.prod(shape) for shape in loaded),
        weight_bytes=weight_bytes,
    )


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


@dataclass(frozen=True, slots=True)
class _Sizing:
    """From bytes to blocks, and the sentences for when there are too few."""

    config: EngineConfig
    groups: tuple[GroupLayers, ...]
    device: torch.device
    weight_bytes: int
    max_num_seqs: int
    max_chunk: int

    def num_blocks(self) -> list[int]:
        if self.config.num_kv_blocks is not None:
            return [self.config.num_kv_blocks] * len(self.groups)
        return plan_blocks(
            self.groups,
            max(0, self._budget()),
            block_size=self.config.block_size,
            max_num_seqs=self.max_num_seqs,
            max_chunk=self.max_chunk,
        )

    def longest_that_fits(self, num_blocks: list[int], max_model_len: int) -> int:
        """max_model_len, or less if the cache cannot hold one such sequence; said in the log."""
        longest = min(max_model_len, min(num_blocks) * self.config.block_size + 1)
        while longest > 1 and not self._fits(num_blocks, longest):
            longest -= self.config.block_size  # windows: a few steps, as the other groups bound it
        if 2 <= longest < max_model_len:
            _log.warning(
                "max_model_len is %d instead of the model's %d: the KV cache holds no more; %s allows more",
                longest, max_model_len, self._flag(),
            )  # fmt: skip
        return longest

    def check(self, num_blocks: list[int], max_model_len: int) -> None:
        if max_model_len >= 2 and self._fits(num_blocks, max_model_len):
            return
        needed_blocks = self._needed(max(max_model_len, 2))
        size = self.config.block_size
        needed = bytes_for_blocks(self.groups, needed_blocks, block_size=size)
        have = bytes_for_blocks(self.groups, num_blocks, block_size=size)
        per_block = sum(group.bytes_per_block(size) for group in self.groups)
        raise ValueError(
            f"the KV cache cannot hold one sequence of {max(max_model_len, 2)} tokens: it needs {needed:,} bytes "
            f"({max(needed_blocks)} blocks of {per_block:,} bytes) and gets {have:,} bytes ({min(num_blocks)} blocks); "
            f"{self._memory()}; raise {self._flag()} or lower --max-model-len"
        )

    def _needed(self, max_model_len: int) -> list[int]:
        return blocks_for_tokens(
            self.groups, max_model_len, block_size=self.config.block_size, max_chunk=self.max_chunk
        )

    def _fits(self, num_blocks: list[int], max_model_len: int) -> bool:
        return all(have >= need for have, need in zip(num_blocks, self._needed(max_model_len), strict=True))

    def _budget(self) -> int:
        """Bytes for the KV cache, now that the weights are not loaded yet."""
        if self.config.kv_cache_memory is not None:
            return int(self.config.kv_cache_memory)
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return int(total * self.config.gpu_memory_utilization) - (total - free) - self._prepared_weight_bytes()
        return min(_AUTO_KV_BYTES_CPU, (available_memory() - self._prepared_weight_bytes()) // 2)

    def _prepared_weight_bytes(self) -> int:
        # Laying out the largest weights again takes some room beside them.
        return self.weight_bytes + self.weight_bytes // 10

    def _memory(self) -> str:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
        else:
            free, total = available_memory(), total_memory()
        return (
            f"memory: {total:,} bytes in all, {free:,} available before loading, {self.weight_bytes:,} for the weights"
        )

    def _flag(self) -> str:
        if self.config.num_kv_blocks is not None:
            return "--num-kv-blocks"
        if self.device.type == "cuda" and self.config.kv_cache_memory is None:
            return "--gpu-memory-utilization"
        return "--kv-cache-memory"
