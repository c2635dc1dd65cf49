"""CUDA graphs of decode steps: from tokens to logits and draws, for batches of single tokens, recorded once per size.

A graph reads its batch from a DecodeBuffer, whose tensors stay where they are. A batch takes the smallest graph that it
fits; the buffer sees to it that the rows behind it do nothing, and nobody reads what comes out of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from rorqual.batch import Batch
from rorqual.engine.decode_buffer import DecodeBuffer


class Decoded(NamedTuple):
    """What a decode step leaves on the device; valid until the next one."""

    logits: torch.Tensor
    """[num_rows, vocab_size]"""
    token_ids: torch.Tensor | None
    """[num_rows] int64, if the step draws too: by the buffer's temperatures and keys; -1 where nothing can be drawn."""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    decoded: Decoded
    """Of as many rows as the graph has, written by each replay."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the graphs, ascending: powers of two up to 16, then closer, so that little is computed in vain."""
    sizes = [1, 2, 4, 8, 16, *range(32, 129, 16), *range(160, 513, 32), *range(640, max_num_seqs, 128)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """The graphs of one model over one buffer."""

    def __init__(
        self,
        decode: Callable[[Batch], Decoded],
        buffer: DecodeBuffer,
        *,
        max_model_len: int,
        sizes: Sequence[int],
        progress: bool = False,
    ) -> None:
        """Record a step that only decodes at ascending sizes, the largest first."""
        self._buffer = buffer
        self._sizes = list(sizes)
        self._graphs: dict[int, _Graph] = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            bar = tqdm(self._sizes[::-1], desc="Capturing CUDA graphs", unit=" graphs", disable=not progress)
            for size in bar:
                any_context = (max_model_len,) * size
                # The first run compiles and allocates what must not be while a graph is recorded.
                decode(buffer.batch(size, any_context))
                graph, batch = torch.cuda.CUDAGraph(), buffer.batch(size, any_context)
                with torch.cuda.graph(graph, pool=pool):
                    decoded = decode(batch)
                self._graphs[size] = _Graph(graph, decoded)

    def run(self, batch: Batch) -> Decoded:
        """The step of the batch that the buffer holds."""
        assert batch is self._buffer.filled, "a graph reads the buffer"
        count = batch.num_tokens
        graph, (logits, token_ids) = self._graphs[self._sizes[bisect_left(self._sizes, count)]]
        graph.replay()
        return Decoded(logits[:count], None if token_ids is None else token_ids[:count])
