"""Token embedding and language-model head, split over ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional as F

from rorqual.distributed.mesh import Mesh
from rorqual.layers.stacked_weight import Part, StackedWeight
from rorqual.loader.layer import WantedTensor
from rorqual.loader.quantization_config import LinearFormat
from rorqual.ops.embedding import embedding
from rorqual.ops.linear import Weight, linear
from rorqual.ops.split_blocks import split_blocks
from rorqual.quantization import QTensor
from rorqual.quantization.gguf_blocks import BlockMatrix


class _VocabParallelTable(StackedWeight):
    """A table [vocabulary, hidden size]; each rank holds a slice of the vocabulary, of one width but for the last."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        quantization: LinearFormat | None = None,
    ) -> None:
        self.vocab_size, self.widest = vocab_size, -(-vocab_size // mesh.tp_size)
        """Tokens in all, and of a rank that is not the last."""
        if self.widest * (mesh.tp_size - 1) >= vocab_size:
            raise ValueError(
                f"vocab_size ({vocab_size}) is too small for {mesh.tp_size} ranks with {self.widest} tokens each: "
                "use a smaller tensor_parallel_size"
            )
        start = mesh.tp_rank * self.widest
        rows = slice(start, min(start + self.widest, vocab_size))
        format = quantization.weight if quantization else None
        super().__init__(hidden_size, [Part(None, vocab_size, rows)], format=format, dtype=dtype, device=device)
        self.mesh, self.rows, self.dtype, self.quantization = mesh, rows, dtype, quantization

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The table."""
        return self.wanted_parts([prefix])


class VocabParallelEmbedding(_VocabParallelTable):
    """Rows of the embedding table; a table of integers stays so, and the rows that are looked up are dequantised.

    It has no memory of its own where it can do without: rows of one that a GGUF file stores are read in the mapped
    file, and rows of one that is tied to a head of integers as the head has laid them out.
    """

    _blocks: BlockMatrix | None = None

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The table."""
        for tensor in super().wanted(prefix):
            yield tensor if tensor.keep is None else tensor._replace(keep_blocks=self._keep_blocks)

    def _keep_blocks(self, blocks: BlockMatrix) -> None:
        self._blocks = blocks

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [num_tokens] -> [num_tokens, hidden_size]."""
        if self.mesh.tp_size == 1:
            return self._look_up(input_ids)
        mine = (input_ids >= self.rows.start) & (input_ids < self.rows.stop)
        found = self._look_up((input_ids - self.rows.start) * mine)
        return self.mesh.tp_all_reduce(found * mine[:, None])

    def _look_up(self, rows: torch.Tensor) -> torch.Tensor:
        table = self._blocks or self.operand
        assert not isinstance(table, QTensor)
        return embedding(rows, table, dtype=self.dtype)

    @property
    def table(self) -> Weight:
        """The table as a product takes it before it is laid out; one that lies in a file is read from there."""
        return self._loaded()

    def _loaded(self) -> Weight:
        if self._blocks is None:
            return super()._loaded()
        return replace(split_blocks(self._blocks), dynamic=self._dynamic)

    def prepare(self) -> None:
        """Keep the table as it is: no product reads it."""
        if self._blocks is None:
            self._operand = self.table

    def share(self, laid_out: Weight) -> None:
        """Read rows in what a tied head has made of the table, from now on."""
        self._operand, self._blocks, self._kept = laid_out, None, [None] * len(self.integers)


class ParallelLMHead(_VocabParallelTable):
    """Logits over the vocabulary. With `tied`, it reads that embedding's table and wants none of its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabParallelEmbedding | None,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        quantization: LinearFormat | None = None,
    ) -> None:
        if tied is not None:  # it allocates nothing, and keeps what the embedding does
            device = torch.device("meta")
            quantization = tied.quantization
        super().__init__(vocab_size, hidden_size, mesh=mesh, dtype=dtype, device=device, quantization=quantization)
        self._tied = [tied] if tied else []  # in a list, so that the embedding is not registered as a child twice

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size], the same on every rank."""
        logits = linear(hidden, self.operand)
        if self.mesh.tp_size == 1:
            return logits
        padded = F.pad(logits, (0, self.widest - logits.shape[1]))
        return self.mesh.tp_all_gather(padded)[:, : self.vocab_size]

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The table, unless it is tied."""
        return iter(()) if self._tied else super().wanted(prefix)

    def _loaded(self) -> Weight:
        """The table as it was loaded; of a tied one, the embedding's."""
        return self._tied[0].table if self._tied else super()._loaded()

    def prepare(self) -> None:
        """Lay the table out. Where it is of integers, a tied embedding looks its rows up there."""
        super().prepare()
        if self._tied and self.integers:
            self._tied[0].share(self.operand)
