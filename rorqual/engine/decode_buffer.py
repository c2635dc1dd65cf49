"""Where the batches of steps that only decode lie: always in the same place, so that CUDA graphs can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.batch import Batch, CacheView
from rorqual.cache.paging import Paging
from rorqual.engine.decode_rows import DecodeRows
from rorqual.engine.sampler import Draws
from rorqual.engine.transfer import StagedArrays, upload


class DecodeBuffer:
    """Tensors for max_num_seqs rows of one token, filled for one step at a time, in one copy.

    Rows behind a step's own write nowhere (slot -1) and see no keys (context 0), so that a larger batch than the
    step's may be computed. Block tables stay on the device from step to step; each step a row writes the block of its
    token again, which is news when the token begins one, and whole tables are sent when the rows are others.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, paging: Sequence[Paging], device: torch.device
    ) -> None:
        """`paging` is each cache group's."""
        self.max_num_seqs, self._paging, self._device = max_num_seqs, tuple(paging), device
        rows, num_groups = (max_num_seqs,), len(self._paging)
        self._staging = StagedArrays(
            [
                (rows, np.int64),  # input_ids
                (rows, np.int64),  # positions
                (rows, np.int32),  # context_lens
                (rows, np.float64),  # temperature
                ((max_num_seqs, 2), np.int64),  # keys
                *[(rows, np.int64)] * num_groups,  # slot_mapping
                *[((max_num_seqs, 1), np.int64)] * num_groups,  # columns: where in its block table a row's token is
                *[((max_num_seqs, 1), np.int32)] * num_groups,  # blocks: what stands there
            ],
            device,
        )
        self._input_ids, self._positions, self._context_lens, *more = self._staging.tensors
        self.temperature, self.keys, *per_group = more
        """[max_num_seqs] float64 and [max_num_seqs, 2] int64, for a draw that is part of the step."""
        self._slots, self._columns, self._blocks = (per_group[i * num_groups :][:num_groups] for i in range(3))
        self._tables = [
            torch.zeros((max_num_seqs, lie.blocks_for(max_model_len)), dtype=torch.int32, device=device)
            for lie in self._paging
        ]
        self._tables_of: list[NDArray[np.int32]] | None = None
        self._offsets = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)
        self._indices = torch.arange(max_num_seqs, device=device)
        self._row_numbers = np.arange(max_num_seqs)
        self._batches: dict[int, Batch] = {}
        """By their number of rows, whose contexts the host is yet to say."""
        self.filled: Batch | None = None
        """The batch that the tensors hold now."""
        self._num_written: dict[int, int] = {}
        """Rows of each turn's arrays that may do something, by the list's identity."""
        self._clear_behind(self._staging.arrays(), 0)
        self._staging.send()

    def batch(self, count: int, context_lens: tuple[int, ...]) -> Batch:
        """The first rows, whatever they hold, as a batch; context_lens are the host's."""
        batch = self._batches.get(count)
        if batch is None:
            batch = self._batches[count] = Batch(
                input_ids=self._input_ids[:count],
                positions=self._positions[:count],
                cu_seqlens_q=self._offsets[: count + 1],
                context_lens=self._context_lens[:count],
                caches=tuple(
                    CacheView(slots[:count], table[:count])
                    for slots, table in zip(self._slots, self._tables, strict=True)
                ),
                logits_indices=self._indices[:count],
                query_lens=(1,) * count,
                context_lens_host=(),
            )
        return replace(batch, context_lens_host=context_lens, scratch={})

    def fill(self, rows: DecodeRows, input_ids: torch.Tensor | None = None, draws: Draws | None = None) -> Batch:
        """A step's batch, valid until the next call.

        input_ids: int64 [num_rows] on the device, where the host does not know the tokens yet. draws: what
        `temperature` and `keys` become, if it matters.
        """
        count = len(rows.seqs)
        arrays = self._staging.arrays()
        ids, positions, context_lens, temperature, keys, *per_group = arrays
        if draws is not None:
            temperature[:count], keys[:count] = draws
        at = positions[:count]
        np.subtract(rows.stops, 1, out=at)
        context_lens[:count] = rows.stops
        row_numbers, num_groups = self._row_numbers[:count], len(self._paging)
        for group, (table, lie) in enumerate(zip(rows.block_tables, self._paging, strict=True)):
            slots, columns, blocks = per_group[group::num_groups]
            column = at // lie.block_tokens
            block = table[row_numbers, column]
            slots[:count] = lie.slots(block, at)
            columns[:count, 0], blocks[:count, 0] = column, block
        self._clear_behind(arrays, count)
        if input_ids is None:
            ids[:count] = [seq.token_ids[-1] for seq in rows.seqs]
            self._staging.send()
        else:
            self._staging.send(first=1)
            self._input_ids[:count].copy_(input_ids)
            if self.filled is None or self.filled.num_tokens > count:
                self._input_ids[count:].zero_()  # all behind ask for the same experts of a mixture
        self._send_tables(rows, int(rows.stops.max()))
        self.filled = self.batch(count, tuple(rows.stops.tolist()))
        return self.filled

    def _clear_behind(self, arrays: list[NDArray[np.int64]], count: int) -> None:
        """Let the rows from `count` on do nothing."""
        written = self._num_written.get(id(arrays), self.max_num_seqs)
        self._num_written[id(arrays)] = count
        if written <= count:
            return
        _, positions, context_lens, temperature, _, *per_group = arrays
        num_groups = len(self._paging)
        for array in (positions, context_lens, temperature, *per_group[num_groups:]):
            array[count:written] = 0
        for slots in per_group[:num_groups]:
            slots[count:written] = -1

    def _send_tables(self, rows: DecodeRows, num_tokens: int) -> None:
        """Bring the block tables on the device up to date; the rows have `num_tokens` tokens at most."""
        if rows.block_tables is self._tables_of:
            for table, columns, blocks in zip(self._tables, self._columns, self._blocks, strict=True):
                table.scatter_(1, columns, blocks)
            return
        used = [
            np.ascontiguousarray(table[:, : lie.blocks_for(num_tokens)])
            for table, lie in zip(rows.block_tables, self._paging, strict=True)
        ]
        for table, new in zip(self._tables, upload(used, self._device), strict=True):
            table[: new.shape[0], : new.shape[1]].copy_(new)
        self._tables_of = rows.block_tables
