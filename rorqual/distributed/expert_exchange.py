"""Where experts are, and the exchange of tokens between the ranks that hold them.

The ranks of one replica have the same tokens, so each computes what its experts make of them, and one sum over the
ranks is all. Replicas have tokens of their own: a token's row goes to every rank that holds one of its experts, which
sends back the weighted sum of what they make of it. Sums of several ranks are added up in the order of ranks in
float32 and rounded once, so that what a token gets depends on its experts and on where they are, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from rorqual.batch import ExchangeSize
from rorqual.distributed.expert_balance import ExpertLayout
from rorqual.distributed.mesh import Mesh
from rorqual.distributed.rank_group import RankGroup

ROWS_TOGETHER = 8192
"""The most rows that a rank may be sent at once: they bound the memory. Steps of more tokens take several rounds."""


class Choices(NamedTuple):
    """Which experts rows use and how much."""

    ids: torch.Tensor
    """[rows, top_k] int64."""
    weights: torch.Tensor
    """[rows, top_k] float32, or the rows' dtype."""


Compute = Callable[[torch.Tensor, Choices], torch.Tensor]
"""Rows [n, hidden_size], and their choices by the number that an expert has on this rank -> for each row the weighted
sum over those that are here, in the rows' dtype. Other numbers are to be skipped."""
AddUp = Callable[[torch.Tensor], torch.Tensor]
"""[num_parts, rows, hidden_size] -> [rows, hidden_size]: added up from the first to the last in float32, and rounded
once."""


class ExpertPlacement:
    """Which rank holds which expert, and under which number: this is the one place that says so.

    Every rank has as many places, numbered rank by rank. Expert e is in place e, until there is a `table`. Where
    experts are moved there may be more places than experts; the first experts are in them too, until they move.
    """

    def __init__(self, num_experts: int, mesh: Mesh) -> None:
        """Raises ValueError when the ranks cannot share the experts evenly."""
        self.held: list[int]
        """The experts that this rank loads, by place."""
        if mesh.num_redundant_experts is None:
            self.held = list(range(num_experts)[mesh.shard_experts(num_experts)])
        else:
            redundant, ranks = mesh.num_redundant_experts, mesh.ep_size
            layout = ExpertLayout.initial(1, num_experts, num_redundant=redundant, num_ranks=ranks)
            self.held = layout.on_rank(mesh.ep_rank)[0].tolist()
        self.per_rank, self._first = len(self.held), mesh.ep_rank * len(self.held)
        self.table: torch.Tensor | None = None
        """[num_experts] int64: the place to which this replica's tokens go for an expert; the same on all its ranks."""

    def places(self, expert_ids: torch.Tensor) -> torch.Tensor:
        """The places of experts."""
        return expert_ids if self.table is None else self.table[expert_ids]

    def ranks(self, places: torch.Tensor) -> torch.Tensor:
        """The ranks that have the places."""
        return places.div(self.per_rank, rounding_mode="floor")

    def here(self, places: torch.Tensor) -> torch.Tensor:
        """Numbers of places on this rank, from 0 to per_rank - 1; others mean places of other ranks, or none."""
        return places - self._first if self._first else places


class ExpertExchange:
    """What the replicas' ranks do together for a layer. Every call is made by all of them, with the same size.

    Of a replica's tokens each of its ranks sends a share; in the end all of them have all results.
    """

    def __init__(
        self, mesh: Mesh, placement: ExpertPlacement, *, add_up: AddUp, rows_together: int = ROWS_TOGETHER
    ) -> None:
        self._mesh, self._placement, self._add_up = mesh, placement, add_up
        self._most_rows = max(1, rows_together // mesh.ep_size)

    def run(
        self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, size: ExchangeSize, compute: Compute
    ) -> torch.Tensor:
        """The weighted sum over each token's experts, equal to the bit on all ranks of the replica.

        Args:
            x: [num_tokens, hidden_size], the same on all ranks of the replica; perhaps no tokens at all.
            expert_ids: [num_tokens, top_k] int64.
            weights: [num_tokens, top_k], float32 or x's dtype.
            size: what all replicas agreed on. With `fixed`, shapes follow from it and num_tokens, and nobody waits for
                the device; without, each round waits once, for the numbers of rows.
            compute: this rank's experts.

        Raises: ValueError for more tokens than agreed on.
        """
        num_tokens, tp_size = x.shape[0], self._mesh.tp_size
        if num_tokens > size.most_tokens:
            raise ValueError(f"replicas agreed on {size.most_tokens} tokens at most, got {num_tokens}")
        share = -(-num_tokens // tp_size)
        mine = slice(self._mesh.tp_rank * share, (self._mesh.tp_rank + 1) * share)
        x, choices = x[mine], Choices(self._placement.places(expert_ids[mine]), weights[mine])
        most = -(-size.most_tokens // tp_size)
        found = [x[:0]]
        for start in range(0, most, self._most_rows):
            stop = min(start + self._most_rows, most)
            rows, chosen = x[start:stop], Choices(*(part[start:stop] for part in choices))
            if size.fixed:
                found.append(self._to_everybody(rows, chosen, stop - start, compute))
            else:
                found.append(self._to_those_concerned(rows, chosen, compute))
        out = found[-1] if len(found) <= 2 else torch.cat(found)
        if tp_size == 1 or not num_tokens:
            return out
        assert self._mesh.tp is not None, "several ranks need a group"
        out = _filled_up(out, share)
        return self._mesh.tp.gather(out).flatten(0, 1)[:num_tokens]

    def _to_everybody(self, x: torch.Tensor, choices: Choices, capacity: int, compute: Compute) -> torch.Tensor:
        """In buffers of `capacity` rows for each rank.

        Any rank may be wanted by all rows, so buffers of one size must have room for all, and travel whole however few
        are in use. So they are filled with all rows, which takes no sorting; a rank skips what is not for it.
        """
        group = self._group()
        rows = group.gather(_filled_up(x, capacity)).flatten(0, 1)
        ids, weights = _filled_up(choices.ids, capacity, with_value=-1), _filled_up(choices.weights, capacity)
        answers = compute(rows, self._unpack(group.gather(_pack(Choices(ids, weights))).flatten(0, 1)))
        returned = group.all_to_all(answers).view(group.size, capacity, -1)
        return self._add_up(returned[:, : len(x)])

    def _to_those_concerned(self, x: torch.Tensor, choices: Choices, compute: Compute) -> torch.Tensor:
        """Each row once to each rank that has one of its experts; their numbers go ahead."""
        group = self._group()
        wanted = torch.zeros((len(x), group.size), dtype=torch.uint8, device=x.device)
        wanted.scatter_(1, self._placement.ranks(choices.ids), 1)
        counts = wanted.sum(0, dtype=torch.int64)
        sent, received = torch.stack((counts, group.all_to_all(counts))).tolist()
        by_rank = wanted.T.flatten().argsort(descending=True, stable=True)[: sum(sent)]
        tokens = by_rank % max(1, len(x))
        rows, packed = (group.all_to_all(part[tokens], sent=sent, received=received) for part in (x, _pack(choices)))
        answers = compute(rows, self._unpack(packed))
        returned = group.all_to_all(answers, sent=received, received=sent)
        total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for part, of in zip(torch.split(returned, sent), torch.split(tokens, sent), strict=True):
            total.index_add_(0, of, part.to(total.dtype))  # no token twice, so in the order of ranks
        return total.to(x.dtype)

    def _unpack(self, packed: torch.Tensor) -> Choices:
        places, weights = packed.chunk(2, dim=1)
        return Choices(self._placement.here(places.long()), weights.view(torch.float32))

    def _group(self) -> RankGroup:
        assert self._mesh.ep is not None, "several replicas need a group"
        return self._mesh.ep


def _filled_up(x: torch.Tensor, rows: int, *, with_value: int = 0) -> torch.Tensor:
    """x with so many rows, the further ones of a value."""
    return x if len(x) == rows else F.pad(x, (0, 0, 0, rows - len(x)), value=with_value)


def _pack(choices: Choices) -> torch.Tensor:
    """Places and weights as one: int32 [rows, 2 * top_k]."""
    return torch.cat((choices.ids.int(), choices.weights.float().view(torch.int32)), dim=1)
