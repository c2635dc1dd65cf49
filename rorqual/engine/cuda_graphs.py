"""CUDA graphs of decode steps: the model, for batches of single tokens, recorded once per size and replayed.

A graph reads its batch from tensors that stay where they are. A batch takes the smallest graph that it fits; the rows
behind it write nowhere (slot -1), see no keys (context 0), and nobody reads what comes out of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from tqdm import tqdm

from rorqual.batch import Batch, CacheView


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    hidden: torch.Tensor
    """[size, hidden_size], written by each replay."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the graphs, ascending: powers of two up to 16, then closer, so that little is computed in vain."""
    sizes = [1, 2, 4, 8, 16, *range(32, 129, 16), *range(160, 513, 32), *range(640, max_num_seqs, 128)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """The graphs of one model, and the tensors that they read."""

    def __init__(
        self,
        model: Callable[[Batch], torch.Tensor],
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device,
        progress: bool = False,
    ) -> None:
        """Record the model, a batch -> hidden states [num_tokens, hidden_size], at every size, the largest first."""
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, _Graph] = {}
        most_blocks = -(-max_model_len // block_size)
        zeros = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._rows = Batch(
            input_ids=zeros,
            positions=zeros.clone(),
            cu_seqlens_q=torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device),
            context_lens=zeros.int(),
            caches=tuple(
                CacheView(
                    torch.full_like(zeros, -1),
                    torch.zeros((max_num_seqs, most_blocks), dtype=torch.int32, device=device),
                )
                for _ in range(num_groups)
            ),
            logits_indices=zeros[:0],
            query_lens=(1,) * max_num_seqs,
            context_lens_host=(max_model_len,) * max_num_seqs,
        )
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode():
            sizes = tqdm(self._sizes[::-1], desc="Capturing CUDA graphs", unit=" graphs", disable=not progress)
            for size in sizes:
                model(self._first(size))  # compiles and allocates what must not be while a graph is recorded
                graph, batch = torch.cuda.CUDAGraph(), self._first(size)
                with torch.cuda.graph(graph, pool=pool):
                    hidden = model(batch)
                self._graphs[size] = _Graph(graph, hidden)

    def _first(self, size: int) -> Batch:
        """The first rows, as a batch that may reach any context."""
        rows = self._rows
        return Batch(
            input_ids=rows.input_ids[:size],
            positions=rows.positions[:size],
            cu_seqlens_q=rows.cu_seqlens_q[: size + 1],
            context_lens=rows.context_lens[:size],
            caches=tuple(CacheView(view.slot_mapping[:size], view.block_tables[:size]) for view in rows.caches),
            logits_indices=rows.logits_indices,
            query_lens=rows.query_lens[:size],
            context_lens_host=rows.context_lens_host[:size],
        )

    def takes(self, batch: Batch) -> bool:
        """Whether a graph fits: every sequence has one token."""
        num_seqs = len(batch.query_lens)
        return batch.num_tokens == num_seqs <= self._sizes[-1] and batch.num_single_token_seqs == num_seqs

    def run(self, batch: Batch) -> torch.Tensor:
        """The model's hidden states for a batch that `takes` accepts; valid until the next run."""
        count = batch.num_tokens
        size = next(size for size in self._sizes if size >= count)
        rows, to, values = self._rows, [], []
        for mine, given in zip(rows.caches, batch.caches, strict=True):
            to += [mine.slot_mapping[:count], mine.block_tables[:count, : given.block_tables.shape[1]]]
            values += [given.slot_mapping, given.block_tables]
            mine.slot_mapping[count:size].fill_(-1)
        rows.context_lens[count:size].zero_()
        to += [rows.input_ids[:count], rows.positions[:count], rows.context_lens[:count]]
        values += [batch.input_ids, batch.positions, batch.context_lens]
        torch._foreach_copy_(to, values)
        self._graphs[size].graph.replay()
        return self._graphs[size].hidden[:count]
