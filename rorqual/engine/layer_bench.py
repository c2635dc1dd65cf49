"""The ops of a model's steps, each timed by itself through the op seam, on weights that no cache holds.

Some layers of the model are built with made-up weights and run once; calls of ops are kept with their arguments, and
those that are alike in all layers are made again in turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from rorqual.batch import Batch, CacheView
from rorqual.config import EngineConfig
from rorqual.engine.device_timing import CACHE_BYTES, call_us
from rorqual.engine.model_runner import ModelRunner
from rorqual.engine.op_report import first_layers, layers_of_all_kinds
from rorqual.engine.op_work import op_work
from rorqual.engine.resolved_config import ResolvedConfig, resolve
from rorqual.engine.roofline import ModelCost, Work, model_cost
from rorqual.loader.checkpoint import Checkpoint, open_checkpoint
from rorqual.loader.source import resolve_model
from rorqual.ops.registry import Op, around
from rorqual.platform import usable_cores

_MOST_CALLS = 24
"""Calls that take turns."""


class StepShape(NamedTuple):
    """A step of sequences that are all alike."""

    num_seqs: int
    length: int
    """Tokens of each that the step computes, the last of its context."""
    context: int
    """Keys that the last of them sees, itself included."""


Role = Literal["part", "whole", "inner"]
"""Of a call: a "part" of the step, which is all such calls together; the "whole" of a reference and the ops that it
calls; or "inner" to another op's kernels, whose part it belongs to."""


class OpTiming(NamedTuple):
    """Calls of one op that are alike."""

    op: str
    backend: str
    shapes: str
    num_calls: int
    """In all the layers that were built."""
    role: Role
    us: float
    in_graph: bool
    work: Work | None
    """None for an op whose work is not counted."""


class LayerBench:
    """Layers of a model with made-up weights, as many as make those of each op larger than a cache."""

    def __init__(self, config: EngineConfig, shapes: list[StepShape], *, progress: bool = False) -> None:
        """Load them, beside a cache for the largest of the steps. Raises ValueError as an engine does."""
        torch.set_num_threads(config.threads or usable_cores())
        checkpoint = open_checkpoint(resolve_model(config.model, revision=config.revision), load_format="dummy")
        changes: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,  # a graph of the whole step would hide its ops
            "max_num_seqs": max(shape.num_seqs for shape in shapes),
            "max_num_batched_tokens": max(shape.num_seqs * shape.length for shape in shapes),
            "max_model_len": max(shape.context for shape in shapes) + 1,
            "num_kv_blocks": max(shape.num_seqs * -(-shape.context // config.block_size) for shape in shapes) + 1,
            "kv_cache_memory": None,
        }
        given = config.model_dump(exclude_unset=True) | changes
        hf_config = {**checkpoint.config, **config.hf_overrides}
        self.num_layers: int = hf_config["num_hidden_layers"]
        """The whole model's."""
        self.used_layers = self._enough_layers(EngineConfig(**given), checkpoint)
        given["hf_overrides"] = {**config.hf_overrides, **first_layers(hf_config, self.used_layers)}
        self._runner = ModelRunner(EngineConfig(**given), checkpoint, progress=progress)
        self._runner.warm_up()
        self.resolved: ResolvedConfig = self._runner.resolved

    def _enough_layers(self, config: EngineConfig, checkpoint: Checkpoint) -> int:
        hf_config = {**checkpoint.config, **config.hf_overrides}
        cost: ModelCost = model_cost(hf_config, resolve(config, hf_config, checkpoint.integer_formats))
        smallest = cost.dense_bytes / self.num_layers / 6  # one of four products has about that share
        enough = math.ceil(max(CACHE_BYTES.values()) / smallest)
        return min(self.num_layers, max(layers_of_all_kinds(hf_config), enough))

    @torch.inference_mode()
    def time_step(self, shape: StepShape, *, on_op: Callable[[], Any] = lambda: None) -> list[OpTiming]:
        """Time the ops of a step, in the order of their first calls; `on_op` is called after each."""
        batch = made_up_batch(self._runner.resolved, shape, vocab_size=self._runner.model.vocab_size)
        recorder = _Recorder()
        with around(recorder.run):
            self._runner.run(batch)
        found = []
        for calls in recorder.groups.values():
            timed = call_us(self.resolved.device, calls.kept)
            facts = (calls.op.name, calls.backend, calls.shapes, len(calls.works), calls.role)
            found.append(OpTiming(*facts, *timed, calls.work()))
            calls.kept.clear()
            on_op()
        return found


def made_up_batch(resolved: ResolvedConfig, shape: StepShape, *, vocab_size: int) -> Batch:
    """A step on random tokens, whose sequences hold the first blocks of every cache group, one after the other: as many
    as they would hold then, so that a group with a retention has none of what is far behind.
    """
    device = resolved.device
    start = shape.context - shape.length
    positions = np.tile(np.arange(start, shape.context), shape.num_seqs)
    owner = np.repeat(np.arange(shape.num_seqs), shape.length)
    ends = torch.arange(1, shape.num_seqs + 1) * shape.length
    generator = torch.Generator().manual_seed(0)
    caches = []
    for group, paging, num_blocks in zip(resolved.groups, resolved.paging, resolved.num_blocks, strict=True):
        retention, last = group.spec.retention, paging.blocks_for(shape.context)
        first = 0 if retention is None else retention.first_kept(start) // paging.block_tokens
        tables = np.zeros((shape.num_seqs, last), np.int32)
        tables[:, first:] = np.arange(shape.num_seqs * (last - first)).reshape(shape.num_seqs, -1) % num_blocks
        slots = paging.slots(tables[owner, positions // paging.block_tokens], positions)
        caches.append(CacheView(torch.from_numpy(slots).to(device), torch.from_numpy(tables).to(device)))
    return Batch(
        input_ids=torch.randint(0, vocab_size, (len(positions),), generator=generator).to(device),
        positions=torch.from_numpy(positions).to(device),
        cu_seqlens_q=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int().to(device),
        context_lens=torch.full((shape.num_seqs,), shape.context, dtype=torch.int32, device=device),
        caches=tuple(caches),
        logits_indices=(ends - 1).to(device),
        query_lens=(shape.length,) * shape.num_seqs,
        context_lens_host=(shape.context,) * shape.num_seqs,
    )


@dataclass(slots=True)
class _Calls:
    """Calls of one op that are alike, as many kept as time needs."""

    op: Op[..., Any]
    backend: str
    shapes: str
    role: Role
    works: list[Work | None] = field(default_factory=list)
    kept: list[Callable[[], Any]] = field(default_factory=list)

    def add(self, call: Callable[[], Any], work: Work | None) -> None:
        self.works.append(work)
        if len(self.kept) < self._enough(work):
            self.kept.append(call)

    def work(self) -> Work | None:
        """The mean call's: not every layer's tokens choose as many experts."""
        counted = [work for work in self.works if work is not None]
        return Work(*map(statistics.fmean, zip(*counted, strict=True))) if counted else None

    @staticmethod
    def _enough(work: Work | None) -> int:
        """Calls that are larger together than a cache."""
        num_bytes = work.num_bytes if work else 0
        return _MOST_CALLS if not num_bytes else min(_MOST_CALLS, 1 + int(2 * max(CACHE_BYTES.values()) / num_bytes))


class _Recorder:
    """Keeps the calls of ops; those with the same shapes and operations are alike."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, str, float, Role], _Calls] = {}
        self._inner_calls = [0]
        self._within_kernels = False

    def run(self, op: Op[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and keep it."""
        backend = next((known.backend for known in op.impls if known.fn is fn), "reference")
        within, by_kernels = self._within_kernels, backend != "reference"
        self._inner_calls[-1] += 1
        self._inner_calls.append(0)
        self._within_kernels |= by_kernels
        result = fn(*args, **kwargs)
        self._within_kernels = within
        calls_others = self._inner_calls.pop() > 0
        role: Role = "inner" if within else "whole" if calls_others and not by_kernels else "part"
        shapes, work = _shapes(args, kwargs, result), op_work(op, args, kwargs, result)
        key = (op.name, shapes, work.flops if work else 0.0, role)
        if key not in self.groups:
            self.groups[key] = _Calls(op, backend, shapes, role)
        self.groups[key].add(lambda: op(*args, **kwargs), work)
        return result


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str:
    """The tensors of a call, as text: "256x1024 1024 -> 256x1024"."""

    def shown(found: Any) -> list[str]:
        if isinstance(found, torch.Tensor):
            return ["x".join(map(str, found.shape))]
        return [text for each in found for text in shown(each)] if type(found) is tuple else []

    results = tuple(result) if isinstance(result, tuple) else (result,)
    return " ".join([*shown(tuple(args)), *shown(tuple(kwargs.values())), "->", *shown(results)])
