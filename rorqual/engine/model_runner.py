"""Loads a model, sizes its cache from what the machine has (`memory.py` says how), and runs it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from rorqual.batch import Batch, CacheView, ExchangeSize
from rorqual.cache.spec import KVSpec
from rorqual.cache.storage import KVStorage
from rorqual.config import EngineConfig
from rorqual.distributed.world import World
from rorqual.engine.cuda_graphs import Decoded, DecodeGraphs, graph_sizes
from rorqual.engine.decode_buffer import DecodeBuffer
from rorqual.engine.expert_balancer import ExpertBalancer
from rorqual.engine.memory import (
    CacheBudget,
    CacheSizing,
    CudaMemory,
    DeviceMemory,
    MemoryPlan,
    Reading,
    check_weights_fit,
    cpu_budget,
    gpu_budget,
    plan_memory,
    told_when_full,
)
from rorqual.engine.prompt_graphs import PromptGraphs, prompt_sizes
from rorqual.engine.resolved_config import resolve
from rorqual.engine.sampler import Sampler, draw_tokens
from rorqual.loader.checkpoint import Checkpoint
from rorqual.loader.staging import MOST_READERS, Staging
from rorqual.loader.weights import fill_with_dummy_weights, load_weights, prepare_weights
from rorqual.models.registry import build_model
from rorqual.ops.registry import Op, load_backends, watch
from rorqual.ops.sum_in_order import sum_in_order
from rorqual.platform import return_freed_memory
from rorqual.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_BACKENDS = {"cpu": ("native", "cpu"), "cuda": ("vendor", "triton")}
"""Device -> the folders of ops/ whose kernels serve it."""
_OPS_THAT_WAIT = (
    "compress_rows",
    "fused_experts",
    "paged_attention",
    "row_attention",
    "select_rows",
    "store_kvcache",
    "store_rows",
)
"""Ops whose references ask the device for numbers, which a CUDA graph cannot record."""
_FAR_LONGER = 2
"""How many times a step's launches must fit in it to be hidden for sure."""
_TRIAL_BLOCKS = 16
"""Size of the cache that the largest step is measured with: no more than kernels want for their addresses."""


class ModelRunner:
    """The model with its weights and cache, on one rank."""

    @torch.inference_mode(mode=False)  # whose tensors the threads that load could not write to
    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        *,
        progress: bool,
        memory: DeviceMemory | None = None,
        world: World | None = None,
    ) -> None:
        """Load the model. On a GPU its cache comes with `warm_up`; `memory` is where that reads what is free, and
        `world` this rank's place."""
        hf_config = {**checkpoint.config, **config.hf_overrides}
        self._world = world or World()
        self.resolved = resolved = resolve(config, hf_config, checkpoint.integer_formats, mesh=self._world.mesh)
        self._config, self._progress = config, progress
        self._on_gpu = on_gpu = resolved.device.type == "cuda"
        mesh = self._world.mesh  # sums over the host cannot be recorded, and sizes of exchanges are each step's own
        recordable = mesh.ep is None and (mesh.tp is None or mesh.tp.backend == "nccl")
        self._uses_graphs = on_gpu and recordable and not config.enforce_eager
        self._graphs: DecodeGraphs | None = None
        self._prompt_sizes: list[int] = []
        self._prompt_graphs: PromptGraphs | None = None
        self._memory = CudaMemory() if memory is None and on_gpu else memory
        self._readings: list[Reading] = []
        """Before and after loading."""
        self._plan: MemoryPlan | None = None
        load_backends(*_BACKENDS[resolved.device.type])
        if mesh.tp is not None:
            mesh.tp.add_up = sum_in_order
        if self._memory is None:
            self._size_cache(cpu_budget(resolved.weight_bytes, num_ranks=self._world.local_size))
        else:
            self._readings.append(self._memory.read())
            check_weights_fit(self._readings[0], resolved.weight_bytes, config.gpu_memory_utilization)
        place = resolved.placement(resolved.device, self.resolved.max_model_len)
        with told_when_full("loading the weights", self._memory):
            self.model = build_model(hf_config, place)
            self._load(config, checkpoint, progress=progress)
            self.balancer: ExpertBalancer | None = None
            """What moves experts between ranks, if they are to be moved."""
            if mesh.num_redundant_experts is not None:
                assert isinstance(self.model, torch.nn.Module)
                self.balancer = ExpertBalancer(self.model, config, mesh, resolved.device)
            self.decode_buffer = DecodeBuffer(
                max_num_seqs=resolved.max_num_seqs,
                max_model_len=self.resolved.max_model_len,
                paging=resolved.paging,
                device=resolved.device,
            )
        if self._memory is None:
            self.kv = self._allocate_cache(self.resolved.num_blocks)
        else:
            self._readings.append(self._memory.read())

    def _size_cache(self, budget: CacheBudget) -> None:
        resolved = self.resolved
        sizing = CacheSizing(
            self._config, resolved.groups, budget, resolved.max_num_seqs, resolved.max_num_batched_tokens
        )
        num_blocks, max_model_len = sizing.size(resolved.max_model_len)
        if self._world.control is not None:  # the same blocks on every rank, or their numbers would part
            *least, max_model_len = self._world.control.least([*num_blocks, max_model_len])
            num_blocks = tuple(least)
        self.resolved = dataclasses.replace(resolved, num_blocks=num_blocks, max_model_len=max_model_len)

    def _allocate_cache(self, num_blocks: Sequence[int]) -> KVStorage:
        """The cache. Its first blocks hold zeros, so that idle batches, which see them, meet nothing odd."""
        resolved = self.resolved
        kv = KVStorage(resolved.groups, num_blocks, block_size=resolved.block_size, device=resolved.device)
        for memory in kv.tensors():
            memory[0].zero_()
        return kv

    def _load(self, config: EngineConfig, checkpoint: Checkpoint, *, progress: bool) -> None:
        assert isinstance(self.model, torch.nn.Module)
        total = self.resolved.num_parameters
        with tqdm(total=total, desc="Loading weights", unit=" values", unit_scale=True, disable=not progress) as bar:
            if config.load_format == "dummy":
                fill_with_dummy_weights(self.model, seed=config.seed or 0, on_tensor=bar.update)
                prepare_weights(self.model)
            else:
                num_threads = torch.get_num_threads()
                with Staging(self.resolved.device) if self._on_gpu else nullcontext() as staging:
                    load_weights(
                        self.model,
                        checkpoint,
                        tied_tensors=self.model.tied_tensors,
                        num_threads=num_threads if staging is None else min(num_threads, MOST_READERS),
                        on_tensor=bar.update,
                        prepare=True,
                        staging=staging,
                    )
        return_freed_memory()

    @torch.inference_mode(mode=False)
    def warm_up(self) -> dict[str, str]:
        """Run tokens that write nothing, so that the first request does not pay for it; op -> backend that ran.

        On a GPU the cache is sized and allocated here. Raises ValueError, with the bytes, where it does not fit.
        """
        used: dict[str, str] = {}

        def tell(op: Op[..., Any], backend: str, _verdicts: dict[str, str]) -> None:
            used[op.name] = backend
            if backend == "reference" and op.name in _OPS_THAT_WAIT:  # in some layers, maybe not in the last
                self._uses_graphs = False

        memory = self._memory
        with told_when_full("running the first steps", memory):
            if memory is not None:
                self.kv = self._allocate_cache([_TRIAL_BLOCKS] * len(self.resolved.groups))
            with watch(tell):
                self.run(self._idle_batch((1,)))
            plan = self._measure(memory) if memory is not None else None
        if memory is not None and plan is not None:
            self._size_cache(gpu_budget(plan))
            with told_when_full("taking the memory that was planned for", memory):
                self._plan = self._fill(memory, plan)
        if self.balancer is not None:
            self.balancer.discard()
        return used

    def _measure(self, memory: DeviceMemory) -> MemoryPlan:
        """What runs beside the cache needs, seen on a trial cache."""
        self.run(self._idle_batch((1, 2)))  # compiles what is compiled, beside which nothing else should count
        activations = memory.peak_of(self._largest_step)
        # Steps with prompts are cut at paged attention; other kinds, whose shapes are each step's own too, run as told.
        records_prompts = self._uses_graphs and all(isinstance(g.spec, KVSpec) for g in self.resolved.groups)
        self._prompt_sizes = self._sizes_bound_by_launches() if records_prompts else []
        graphs = self._graph_bytes(memory)
        del self.kv
        start, loaded = self._readings
        return plan_memory(
            start,
            loaded,
            memory.read(),
            activations=activations,
            graphs=graphs,
            utilization=self._config.gpu_memory_utilization,
        )

    def _fill(self, memory: DeviceMemory, plan: MemoryPlan) -> MemoryPlan:
        """Take what was planned for: the cache, the graphs, and what the largest step needs; the plan with the graphs
        as they have become."""
        self.kv = self._allocate_cache(self.resolved.num_blocks)
        if self._uses_graphs:
            before = memory.read()
            self._graphs = self._capture(graph_sizes(self.resolved.max_num_seqs), progress=self._progress)
            self._prompt_graphs = self._capture_prompts(self._prompt_sizes, progress=self._progress)
            plan = plan.with_graphs(before.free - memory.read().free)
        self._largest_step()  # what it needs stays in reserve from now on, whatever others take
        return plan

    def _largest_step(self) -> None:
        """As many tokens and sequences as there may be, each with a draw that needs all that a draw can need."""
        resolved = self.resolved
        count = min(resolved.max_num_seqs, resolved.max_num_batched_tokens)
        each, more = divmod(resolved.max_num_batched_tokens, count)
        lengths = [each] * (count - more) + [each + 1] * more
        logits = self.run(self._idle_batch(tuple(min(length, resolved.max_model_len) for length in lengths)))
        sampler = Sampler(self.model.vocab_size)
        params = SamplingParams(
            temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=self._config.max_logprobs, max_tokens=1
        )
        slots = [sampler.add(params, seed=row, prompt_token_ids=[0], end_token_ids=[]) for row in range(count)]
        sampler.draw(logits, np.array(slots), np.ones(count, np.int64)).wait()

    def _graph_bytes(self, memory: DeviceMemory) -> int:
        """What graphs will hold: the largest of both kinds, whose memory the others share, and logits, which stay."""
        if not self._uses_graphs:
            return 0
        *others, largest = graph_sizes(self.resolved.max_num_seqs)
        before = memory.read()
        graphs = (
            self._capture([largest], progress=False),
            self._capture_prompts(self._prompt_sizes[-1:], progress=False),
        )
        held = before.free - memory.read().free
        del graphs
        return max(0, held) + sum(others) * self.model.vocab_size * self.resolved.dtype.itemsize

    def _capture(self, sizes: Sequence[int], *, progress: bool) -> DecodeGraphs:
        return DecodeGraphs(
            self._decode_and_draw,
            self.decode_buffer,
            max_model_len=self.resolved.max_model_len,
            sizes=sizes,
            progress=progress,
        )

    def _capture_prompts(self, sizes: Sequence[int], *, progress: bool) -> PromptGraphs | None:
        if not sizes:
            return None
        return PromptGraphs(
            lambda batch: self.model(batch, self.kv),
            sizes=sizes,
            num_groups=len(self.resolved.groups),
            device=self.resolved.device,
            progress=progress,
        )

    def _sizes_bound_by_launches(self) -> list[int]:
        """Sizes of steps with prompts to record: up to one that takes the device far longer than launching it the host.

        From there on a graph would gain nothing, and its padding would cost.
        """
        found: list[int] = []
        for size in prompt_sizes(self.resolved.max_num_batched_tokens):
            found.append(size)
            longest = self.resolved.max_model_len
            lengths = [longest] * (size // longest) + [size % longest] * (size % longest > 0)
            batch = self._idle_batch(tuple(lengths))
            for _ in range(2):  # the first one compiles
                torch.cuda.synchronize(self.resolved.device)
                start = time.perf_counter()
                self.model(batch, self.kv)
                launched = time.perf_counter() - start
                torch.cuda.synchronize(self.resolved.device)
                done = time.perf_counter() - start
            hidden: int | None = int(done > _FAR_LONGER * launched)
            if self._world.control is not None:  # what one rank records, all must
                hidden = self._world.control.first_says(hidden)
            if hidden:
                break
        return found

    def memory_summary(self) -> str | None:
        """One line on where a GPU's memory went; None on a CPU."""
        return self._plan.summary(self.resolved.kv_cache_bytes) if self._plan is not None else None

    def _idle_batch(self, lengths: tuple[int, ...], exchange: ExchangeSize | None = None) -> Batch:
        """Sequences of so many tokens, which are written nowhere and see the first block's zeros. exchange: by default,
        what replicas have agreed on that all run such a batch."""
        count, device = sum(lengths), self.resolved.device
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        zeros = torch.zeros(count, dtype=torch.int64, device=device)
        widths = [lie.blocks_for(max(lengths)) for lie in self.resolved.paging]
        return Batch(
            input_ids=zeros,
            positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
            cu_seqlens_q=offsets.int(),
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            caches=tuple(
                CacheView(zeros - 1, torch.zeros((len(lengths), width), dtype=torch.int32, device=device))
                for width in widths
            ),
            logits_indices=offsets[1:] - 1,
            query_lens=lengths,
            context_lens_host=lengths,
            exchange=exchange or (None if self._world.mesh.ep is None else ExchangeSize(count, fixed=False)),
        )

    def run_idle(self, exchange: ExchangeSize) -> None:
        """Take part in a step of other replicas, with a token that is written nowhere."""
        self.hidden_states(self._idle_batch((1,), exchange))

    @torch.inference_mode()  # others than a step call it too; what only steps call is in this mode already
    def run(self, batch: Batch) -> torch.Tensor:
        """Compute a batch, write its keys and values, and return the wanted logits [num_rows, vocab_size]."""
        return self.compute_logits(self.hidden_states(batch))

    @property
    def draws(self) -> bool:
        """Whether `decode` draws tokens too."""
        return self._graphs is not None

    def decode(self, batch: Batch) -> Decoded:
        """The step of the decode buffer's batch: a recorded one with its draws, or the logits alone."""
        if self._graphs is not None:
            return self._graphs.run(batch)
        return Decoded(self.compute_logits(self.hidden_states(batch)), None)

    def _decode_and_draw(self, batch: Batch) -> Decoded:
        logits, buffer, count = self.run(batch), self.decode_buffer, batch.num_tokens
        return Decoded(logits, draw_tokens(logits, buffer.temperature[:count], buffer.keys[:count]))

    def hidden_states(self, batch: Batch) -> torch.Tensor:
        """Compute a batch, write its keys and values, and return the rows whose logits are wanted [num_rows, size]."""
        hidden = self._prompt_graphs.run(batch) if self._prompt_graphs is not None else None
        if hidden is None:
            hidden = self.model(batch, self.kv)
        if not batch.wants_all_in_order:
            hidden = hidden.index_select(0, batch.logits_indices)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [num_rows, vocab_size] of rows that `hidden_states` returned."""
        return self.model.compute_logits(hidden)
