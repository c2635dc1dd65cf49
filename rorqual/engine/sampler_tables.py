"""What the sampler keeps per sequence and token of the vocabulary: where the logits are, in rows that are reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.engine.transfer import upload

FIRST_ROWS = 8
"""Rows of the first tables; then they double."""


class SamplerTables:
    """Rows of [vocab_size] for sequences with biases, masks or penalties. Row 0 is nobody's and stays zero."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device("cpu")
        self._free: list[int] = []
        self._allocate(0)

    def _allocate(self, num_rows: int) -> None:
        def zeros(dtype: torch.dtype, *width: int) -> torch.Tensor:
            return torch.zeros((num_rows, *width), dtype=dtype, device=self.device)

        self.num_rows = num_rows
        self.bias = zeros(torch.float32, self.vocab_size)
        """Added to logits; -inf forbids."""
        self.in_prompt = zeros(torch.bool, self.vocab_size)
        self.output_counts = zeros(torch.int32, self.vocab_size)
        """How often each token was generated, without the newest."""
        self.newest = zeros(torch.int64)
        """[num_rows] the token that was drawn last: it counts once the sequence moves past it."""

    def take(self, device: torch.device) -> int:
        """A row that holds nothing; the device is that of the logits, always the same."""
        if not self._free:
            before = (self.bias, self.in_prompt, self.output_counts, self.newest)
            first, self.device = self.num_rows, device
            self._allocate(max(FIRST_ROWS, 2 * first))
            for wider, kept in zip((self.bias, self.in_prompt, self.output_counts, self.newest), before, strict=True):
                wider[:first].copy_(kept)
            self._free = list(range(self.num_rows - 1, max(first, 1) - 1, -1))
        row = self._free.pop()
        for table in (self.bias, self.in_prompt, self.output_counts):
            table[row].zero_()
        return row

    def give_back(self, row: int) -> None:
        """Let another sequence have the row."""
        self._free.append(row)

    def fill(
        self,
        row: int,
        *,
        allowed: Sequence[int] | None,
        bias: Mapping[int, float],
        forbidden: Sequence[int],
        prompt_token_ids: Sequence[int],
    ) -> None:
        """Write what a sequence's parameters and its prompt say of each token. allowed: None allows every one."""
        ids = [np.array(each, np.int64) for each in (allowed or (), list(bias), forbidden, prompt_token_ids)]
        values = np.array(list(bias.values()), np.float32)
        allowed_ids, bias_ids, forbidden_ids, prompt_ids, amounts = upload([*ids, values], self.device)
        if allowed is not None:
            self.bias[row].fill_(-torch.inf)
            self.bias[row].index_fill_(0, allowed_ids, 0.0)
        self.bias[row].index_add_(0, bias_ids, amounts)
        self.bias[row].index_fill_(0, forbidden_ids, -torch.inf)
        self.in_prompt[row].index_fill_(0, prompt_ids, True)

    def count_newest(self, rows: torch.Tensor) -> None:
        """Count the newest token of these rows, int64, all different."""
        self.count(rows * self.vocab_size + self.newest[rows])

    def count(self, cells: torch.Tensor) -> None:
        """Count tokens; cells int64, row * vocab_size + token id, some perhaps more than once."""
        ones = torch.ones_like(cells, dtype=torch.int32)
        self.output_counts.view(-1).scatter_add_(0, cells, ones)

    def cells(self, row: int, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Where a row's tokens are, for `count`."""
        return row * self.vocab_size + np.array(token_ids, np.int64)
