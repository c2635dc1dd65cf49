"""How much memory the KV cache gets, and how many blocks that makes.

On a CPU the cache is sized before anything is loaded: from what is free and from what the weights will take. On a GPU
it gets what is left of the engine's share once the weights lie there and the largest step has run: `plan_memory` makes
the account from readings of the card before, between and after. Others may hold memory of the same card, and may take
more while this engine starts: what is really free is always the limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from rorqual.cache.sizing import blocks_beside, blocks_for_tokens, bytes_for_blocks, plan_blocks
from rorqual.cache.spec import CacheGroup
from rorqual.config import EngineConfig
from rorqual.platform import available_memory, total_memory

_log = logging.getLogger(__name__)

_AUTO_KV_BYTES_CPU = 4 << 30
NOTEWORTHY = 1 << 30
"""Bytes from which memory that is not torch's is taken for another process'. What the driver holds for this one (code
of kernels, graphs, the context) is less."""
SLACK = 256 << 20
"""Bytes that stay free for what no measurement shows: gaps between tensors, code of kernels that are loaded later."""


class Reading(NamedTuple):
    """A GPU's memory at one moment, in bytes, with nothing kept in reserve by this process."""

    free: int
    """Held by nobody."""
    total: int
    reserved: int
    """Held by torch in this process."""


class DeviceMemory(Protocol):
    """Where readings come from."""

    def read(self) -> Reading:
        """Wait for the device, hand back what torch only keeps in reserve, and look."""
        ...

    def peak_of(self, step: Callable[[], object]) -> int:
        """The most bytes that torch holds while a step runs, over those before."""
        ...


class CudaMemory:
    """The memory of the current CUDA device."""

    def read(self) -> Reading:
        """See DeviceMemory."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return Reading(*torch.cuda.mem_get_info(), torch.cuda.memory_reserved())

    def peak_of(self, step: Callable[[], object]) -> int:
        """See DeviceMemory. Gaps count: they cannot hold anything else."""
        before = self.read()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return max(0, torch.cuda.max_memory_reserved() - before.reserved)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where a GPU's memory goes, in bytes."""

    utilization: float
    total: int
    free: int
    """Before this engine took any."""
    others: int
    """Held then by others, the driver among them."""
    newcomers: int
    """Taken by others since."""
    weights: int
    workspaces: int
    """What kernels and the driver keep for this engine."""
    activations: int
    """What the largest step needs."""
    graphs: int
    """What CUDA graphs will need."""
    available: int
    """Free for the KV cache once all of the above is there; below 0 if it does not fit."""
    kv_cache: int
    """What the cache may take of that: within this engine's share, and some slack left; below 0 likewise."""

    @property
    def share(self) -> int:
        """What gpu_memory_utilization grants."""
        return int(self.total * self.utilization)

    def account(self) -> str:
        """The bytes, for the message that something does not fit."""
        newcomers = f", {self.newcomers:,} taken by other processes meanwhile" if self.newcomers else ""
        return (
            f"GPU memory: {self.total:,} bytes in all, {self.share:,} granted by --gpu-memory-utilization "
            f"{self.utilization:g}, {self.free:,} free at the start ({self.others:,} held by others){newcomers}; "
            f"weights take {self.weights:,}, the largest step {self.activations:,}, CUDA graphs {self.graphs:,}, "
            f"workspaces {self.workspaces:,}"
        )

    def with_graphs(self, num_bytes: int) -> MemoryPlan:
        """The plan with what CUDA graphs came to hold; said in the log if that is much more than planned."""
        if num_bytes > self.graphs + SLACK:
            _log.warning(
                "CUDA graphs hold %s bytes and %s were planned: lower --gpu-memory-utilization if memory runs out",
                f"{num_bytes:,}", f"{self.graphs:,}",
            )  # fmt: skip
        return replace(self, graphs=max(0, num_bytes))

    def summary(self, kv_cache_bytes: int) -> str:
        """One line for people."""
        parts = {
            "weights": self.weights,
            "activations": self.activations,
            "CUDA graphs": self.graphs,
            "workspaces": self.workspaces,
            "KV cache": kv_cache_bytes,
        }
        of_it = ", ".join(f"{name} {num_bytes / 2**30:.2f}" for name, num_bytes in parts.items())
        others = self.others + self.newcomers
        held = f", {others / 2**30:.1f} GiB held by others" if others > NOTEWORTHY else ""
        return f"{sum(parts.values()) / 2**30:.2f} of {self.total / 2**30:.1f} GiB ({of_it}){held}"


def check_weights_fit(start: Reading, weight_bytes: int, utilization: float) -> None:
    """Before loading: say who else holds memory. Raises ValueError, with the bytes, if the weights alone do not fit."""
    others = start.total - start.free - start.reserved
    if others > NOTEWORTHY:
        _log.warning("%s bytes of the GPU's memory are held by others: this engine takes what is free", f"{others:,}")
    share = int(start.total * utilization)
    if weight_bytes > min(share, start.free):
        raise ValueError(
            f"the weights need {weight_bytes:,} bytes of the GPU's memory; it has {start.total:,}, of which {share:,} "
            f"are granted by --gpu-memory-utilization {utilization:g} and {start.free:,} are free: "
            f"{_way_out(share, start.free)}, or take a smaller model"
        )


def plan_memory(
    start: Reading, loaded: Reading, now: Reading, *, activations: int, graphs: int, utilization: float
) -> MemoryPlan:
    """What is left for the KV cache.

    Args:
        start: before anything was loaded.
        loaded: with the weights.
        now: after the largest step has run, whose tensors are gone.
        activations: what that step held for a while.
        graphs: what CUDA graphs will hold.
        utilization: the share of the card that this engine may fill.
    """
    ours = now.reserved - start.reserved
    unexplained = start.free - now.free - ours
    newcomers = unexplained if unexplained > NOTEWORTHY else 0
    if newcomers:
        _log.warning(
            "%s bytes of the GPU's memory were taken by other processes while this engine started: "
            "the KV cache gets what is left",
            f"{newcomers:,}",
        )
    driver = max(0, unexplained - newcomers)
    share = int(start.total * utilization)
    available = now.free - activations - graphs
    return MemoryPlan(
        utilization=utilization,
        total=start.total,
        free=start.free,
        others=start.total - start.free - start.reserved,
        newcomers=newcomers,
        weights=loaded.reserved - start.reserved,
        workspaces=now.reserved - loaded.reserved + driver,
        activations=activations,
        graphs=graphs,
        available=available,
        kv_cache=min(share - ours - driver - activations - graphs, available) - SLACK,
    )


@contextmanager
def told_when_full(doing: str, memory: DeviceMemory | None) -> Iterator[None]:
    """Say in one sentence what did not fit, with the bytes, where torch only says that it got no memory."""
    try:
        yield
    except RuntimeError as error:
        # Torch's own error, perhaps hidden by what closing a graph says then, or the driver's.
        full = isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError)
        if memory is None or not (full or "out of memory" in str(error)):
            raise
        error.__traceback__ = None  # whose frames hold tensors
        reading = memory.read()
        raise ValueError(
            f"the GPU's memory ran out while {doing}: of {reading.total:,} bytes this process holds "
            f"{reading.reserved:,} and {reading.free:,} are free; free memory that other processes hold on the GPU, or "
            "lower --max-num-batched-tokens or --max-num-seqs, or take a smaller model"
        ) from None


class CacheBudget(NamedTuple):
    """Bytes for the KV cache, and what to say where they are too few."""

    num_bytes: int
    """What a cache of automatic size takes; below 1 for none."""
    available: int | None
    """What one of a given size must not exceed; None where nobody looks."""
    account: str
    """Where the memory goes."""
    more: str
    """What to do for a larger cache."""
    less: str = "--max-model-len"
    """The flags to lower, for less of everything else."""


def cpu_budget(weight_bytes: int, *, num_ranks: int = 1) -> CacheBudget:
    """Half of what is free beside the weights, which are not loaded yet, and no more than 4 GiB; of ranks that share
    the memory, each has its part."""
    free = available_memory() // num_ranks
    prepared = weight_bytes + weight_bytes // 10  # laying out the largest weights again takes some room beside them
    return CacheBudget(
        num_bytes=min(_AUTO_KV_BYTES_CPU, (free - prepared) // 2),
        available=None,
        account=f"memory: {total_memory():,} bytes in all, {free:,} available before loading, {weight_bytes:,} for the "
        "weights",
        more="raise --kv-cache-memory",
    )


def gpu_budget(plan: MemoryPlan) -> CacheBudget:
    """What the plan leaves."""
    return CacheBudget(
        num_bytes=plan.kv_cache,
        available=plan.available,
        account=plan.account(),
        more=_way_out(plan.share, plan.free - plan.newcomers),
        less="--max-model-len, --max-num-batched-tokens or --max-num-seqs",
    )


def _way_out(share: int, free: int) -> str:
    if share < free:
        return "raise --gpu-memory-utilization"
    return "free memory that other processes hold on the GPU"


@dataclass(frozen=True, slots=True)
class CacheSizing:
    """From bytes to blocks, and the sentences for when there are too few."""

    config: EngineConfig
    groups: tuple[CacheGroup, ...]
    budget: CacheBudget
    max_num_seqs: int
    max_chunk: int

    def size(self, max_model_len: int) -> tuple[tuple[int, ...], int]:
        """(blocks per group, max_model_len, which is less than the model's own if the cache holds no more).

        Raises ValueError, with the bytes and the flag to change, for a cache that cannot hold one such sequence, or of
        a given size that the memory cannot hold.
        """
        num_blocks = self._num_blocks()
        self._check_available(num_blocks)
        if self.config.max_model_len is None:
            max_model_len = self._longest_that_fits(num_blocks, max_model_len)
        self._check_holds(num_blocks, max_model_len)
        return tuple(num_blocks), max_model_len

    def _num_blocks(self) -> list[int]:
        block_size, num_seqs, max_chunk = self.config.block_size, self.max_num_seqs, self.max_chunk
        if (count := self.config.num_kv_blocks) is not None:
            return blocks_beside(self.groups, count, block_size=block_size, max_num_seqs=num_seqs, max_chunk=max_chunk)
        given = self.config.kv_cache_memory
        budget = max(0, self.budget.num_bytes if given is None else int(given))
        return plan_blocks(self.groups, budget, block_size=block_size, max_num_seqs=num_seqs, max_chunk=max_chunk)

    def _check_available(self, num_blocks: list[int]) -> None:
        wanted, available, flag = self._bytes(num_blocks), self.budget.available, self._given_by()
        if flag is not None and available is not None and wanted > available:
            raise ValueError(
                f"a KV cache of {wanted:,} bytes, as {flag} wants it, does not fit the {max(0, available):,} bytes "
                f"that are left for it; {self.budget.account}; lower {flag}"
            )

    def _longest_that_fits(self, num_blocks: list[int], max_model_len: int) -> int:
        """max_model_len, or less if the cache cannot hold one such sequence; said in the log."""
        longest, too_long = 1, max_model_len + 1
        while longest + 1 < too_long:
            middle = (longest + too_long) // 2
            if self._fits(num_blocks, middle):
                longest = middle
            else:
                too_long = middle
        if 2 <= longest < max_model_len:
            _log.warning(
                "max_model_len is %d instead of the model's %d, because the KV cache holds no more: for more, %s",
                longest, max_model_len, self._more(),
            )  # fmt: skip
        return longest

    def _check_holds(self, num_blocks: list[int], max_model_len: int) -> None:
        if max_model_len >= 2 and self._fits(num_blocks, max_model_len):
            return
        needed, size = self._needed(max(max_model_len, 2)), self.config.block_size
        lacking = [
            f"{have} of {need} blocks of {group.bytes_per_block(size):,} bytes"
            for group, need, have in zip(self.groups, needed, num_blocks, strict=True)
            if have < need
        ]
        raise ValueError(
            f"the KV cache cannot hold one sequence of {max(max_model_len, 2)} tokens: it needs "
            f"{self._bytes(needed):,} bytes and gets {self._bytes(num_blocks):,} bytes ({', '.join(lacking)}); "
            f"{self.budget.account}; {self._more()} or lower {self.budget.less}"
        )

    def _needed(self, max_model_len: int) -> list[int]:
        return blocks_for_tokens(
            self.groups, max_model_len, block_size=self.config.block_size, max_chunk=self.max_chunk
        )

    def _fits(self, num_blocks: list[int], max_model_len: int) -> bool:
        return all(have >= need for have, need in zip(num_blocks, self._needed(max_model_len), strict=True))

    def _bytes(self, num_blocks: list[int]) -> int:
        return bytes_for_blocks(self.groups, num_blocks, block_size=self.config.block_size)

    def _given_by(self) -> str | None:
        """The flag that sets the size, if one does."""
        if self.config.num_kv_blocks is not None:
            return "--num-kv-blocks"
        return None if self.config.kv_cache_memory is None else "--kv-cache-memory"

    def _more(self) -> str:
        given = self._given_by()
        return f"raise {given}" if given is not None else self.budget.more
