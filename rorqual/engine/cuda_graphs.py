"""CUDA graphs of decode steps: the model, for batches of single tokens, recorded once per size and replayed.

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


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    """[size, hidden_size], written by each replay."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the graphs, ascending: powers of two up to 16, then closer, so that little is computed in vain."""
    sizes = [1, 2, 4, 8, 16, *range(32, 129, 16), *range(160, 513, 32), *range(640, max_num_seqs, 128)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """The graphs of one model over one buffer."""

    def __init__(
        self,
        model: Callable[[Batch], torch.Tensor],
        buffer: DecodeBuffer,
        *,
        max_model_len: int,
        sizes: Sequence[int],
        progress: bool = False,
    ) -> None:
        """Record the model, a batch -> hidden states [num_tokens, hidden_size], at ascending sizes, largest first."""
        self._buffer = buffer
        self._sizes = list(sizes)
        self._graphs: dict[int, _Graph] = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            bar = tqdm(self._sizes[::-1], desc="Capturing CUDA graphs", unit=" graphs", disable=not progress)
            for size in bar:
                any_context = (max_model_len,) * size
                # The first run compiles and allocates what must not be while a graph is recorded.
                model(buffer.batch(size, any_context))
                graph, batch = torch.cuda.CUDAGraph(), buffer.batch(size, any_context)
                with torch.cuda.graph(graph, pool=pool):
                    hidden = model(batch)
                self._graphs[size] = _Graph(graph, hidden)

    def takes(self, batch: Batch) -> bool:
        """Whether there is a graph: the batch is what the buffer holds."""
        return batch is self._buffer.filled

    def run(self, batch: Batch) -> torch.Tensor:
        """The model's hidden states for a batch that `takes` accepts; valid until the next run."""
        graph, hidden = self._graphs[self._sizes[bisect_left(self._sizes, batch.num_tokens)]]
        graph.replay()
        return hidden[: batch.num_tokens]
