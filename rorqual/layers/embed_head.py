"""Token embedding and language-model head, split over ranks by vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from rorqual.distributed.mesh import Mesh
from rorqual.loader.layer import Layer, WantedTensor, weight_parameter
from rorqual.ops.linear import linear, prepare_weight


class VocabParallelEmbedding(Layer):
    """Rows of the embedding table; each rank holds a slice of the vocabulary."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, mesh: Mesh, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.vocab_size, self.mesh = vocab_size, mesh
        self.rows = mesh.shard(vocab_size, what="vocab_size")
        self.weight = weight_parameter(self.rows.stop - self.rows.start, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [num_tokens] -> [num_tokens, hidden_size]."""
        if self.mesh.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        mine = (input_ids >= self.rows.start) & (input_ids < self.rows.stop)
        found = F.embedding((input_ids - self.rows.start) * mine, self.weight)
        return self.mesh.tp_all_reduce(found * mine[:, None])

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The table."""

        def copy(whole: torch.Tensor) -> None:
            self.weight.copy_(whole[self.rows])

        yield WantedTensor(f"{prefix}.weight", (self.vocab_size, self.weight.shape[1]), copy)


class ParallelLMHead(VocabParallelEmbedding):
    """Logits over the vocabulary. With `tied`, it reads that embedding's weight and wants none of its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabParallelEmbedding | None,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        meta = torch.device("meta")  # a tied head allocates nothing
        super().__init__(vocab_size, hidden_size, mesh=mesh, dtype=dtype, device=meta if tied else device)
        self._tied = [tied] if tied else []  # in a list, so that the embedding is not registered as a child twice

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size of this rank]."""
        return linear(hidden, self.weight)

    def wanted(self, prefix: str) -> Iterator[WantedTensor]:
        """The weight, unless it is tied."""
        return iter(()) if self._tied else super().wanted(prefix)

    def prepare(self) -> None:
        """Lay the weight out for the linear kernel. A tied weight is kept as it is for the embedding too."""
        source = self._tied[0].weight if self._tied else self.weight
        prepared = prepare_weight(source.data)
        assert isinstance(prepared, torch.Tensor)
        self.weight = nn.Parameter(prepared, requires_grad=False)
