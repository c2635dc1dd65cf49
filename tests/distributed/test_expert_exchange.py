"""Experts that ranks share: each token gets what one rank with all experts would give it, however it travels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from rorqual.batch import ExchangeSize
from rorqual.distributed.expert_exchange import Choices, ExpertExchange, ExpertPlacement
from rorqual.distributed.mesh import Mesh
from rorqual.ops.linear import prepare_weight
from rorqual.ops.moe import ExpertWeights, Routing, fused_experts
from rorqual.ops.registry import load_backends
from rorqual.ops.sum_in_order import sum_in_order
from tests.distributed.ranks import connect, on_ranks
from tests.ops.values import normal

load_backends("native", "cpu")
DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, INNER, NUM_EXPERTS, TOP_K = 64, 32, 8, 3


class Step(NamedTuple):
    """How many tokens each replica has, and whom they choose."""

    num_tokens: tuple[int, int]
    chosen: tuple[int, ...] = tuple(range(NUM_EXPERTS))
    most: int | None = None
    """What the replicas agree on; None: the most tokens that one has."""
    rows_together: int = 8192
    moved: bool = False
    """Whether experts are in other places than in the beginning."""

    def inputs(self, replica: int, dtype: torch.dtype) -> tuple[torch.Tensor, Routing]:
        count = self.num_tokens[replica]
        ids = normal(count, len(self.chosen), seed=20 + replica).argsort(1)[:, :TOP_K]
        weights = normal(count, ids.shape[1], seed=30 + replica).softmax(1) if count else torch.zeros(0, ids.shape[1])
        return normal(count, HIDDEN, seed=10 + replica).to(dtype), Routing(torch.tensor(self.chosen)[ids], weights)

    def places(self) -> torch.Tensor:
        return normal(NUM_EXPERTS, seed=40).argsort() if self.moved else torch.arange(NUM_EXPERTS)


STEPS = {
    "even": Step((9, 9)),
    "uneven": Step((2, 33)),
    "one token": Step((0, 1)),
    "an idle replica": Step((11, 0)),
    "all idle": Step((0, 0)),
    "nothing but fillers": Step((0, 0), most=4),
    "fillers": Step((3, 5), most=16),
    "one expert": Step((7, 12), chosen=(5,)),
    "experts of one rank": Step((6, 5), chosen=(0, 1)),
    "more than a buffer": Step((19, 4), rows_together=8),
    "a row at a time": Step((5, 0), rows_together=1),
    "moved": Step((9, 8), moved=True),
}


def all_experts(dtype: torch.dtype) -> list[tuple[Any, Any]]:
    """Of each expert gate_up and down."""
    return [
        tuple(
            prepare_weight(normal(*shape, seed=seed + e).to(dtype) * shape[1] ** -0.5)
            for shape, seed in (((2 * INNER, HIDDEN), 100), ((HIDDEN, INNER), 200))
        )
        for e in range(NUM_EXPERTS)
    ]


def _rows(x: torch.Tensor, weights: ExpertWeights, choices: Choices) -> Iterator[tuple[Any, ...]]:
    for i in range(len(x)):
        yield x[i : i + 1], weights, Routing(*(part[i : i + 1] for part in choices))


class Found(NamedTuple):
    """What a rank has of a step."""

    fixed: torch.Tensor
    """Of buffers of one size."""
    exact: torch.Tensor
    """Of those as large as needed."""
    alone: torch.Tensor
    """The replica's last token, computed in a step of its own."""
    rows: tuple[int, int]
    """Rows that the rank's experts were given in the first two."""


def _all_exchanged(rank: int, store: Any, tp: int) -> dict[torch.dtype, dict[str, Found]]:
    mesh = connect(rank, store, tp=tp, dp=2, expert_parallel=True)
    return {dtype: _exchanged(mesh, dtype) for dtype in DTYPES}


def _exchanged(mesh: Mesh, dtype: torch.dtype) -> dict[str, Found]:
    experts = all_experts(dtype)
    found: dict[str, Found] = {}
    given: list[int] = []
    for name, step in STEPS.items():
        placement = ExpertPlacement(NUM_EXPERTS, mesh)
        if step.moved:
            placement.table = step.places()
        here = [experts[e] for e in step.places().argsort()[placement.held].tolist()]
        weights = ExpertWeights(*zip(*here, strict=True), num_everywhere=NUM_EXPERTS)

        def compute(rows: torch.Tensor, choices: Choices, weights: ExpertWeights = weights) -> torch.Tensor:
            given.append(len(rows))
            if dtype is torch.bfloat16:
                return fused_experts(rows, weights, Routing(*choices))
            # One by one: products in float32 are not the same to the bit for every number of rows.
            alone = (fused_experts(*each) for each in _rows(rows, weights, choices))
            return torch.cat((rows[:0], *alone))

        exchange = ExpertExchange(mesh, placement, add_up=sum_in_order, rows_together=step.rows_together)
        x, routing = step.inputs(mesh.dp_rank, dtype)
        most = max(step.num_tokens) if step.most is None else step.most
        both, counts = [], []
        for fixed in (True, False):
            given.clear()
            both.append(exchange.run(x, *routing, ExchangeSize(most, fixed), compute))
            counts.append(sum(given))
        last = [part[-1:] for part in (x, *routing)]
        found[name] = Found(*both, exchange.run(*last, ExchangeSize(1, True), compute), tuple(counts))
    return found


@functools.cache
def found_by(tp: int) -> list[dict[torch.dtype, dict[str, Found]]]:
    """What two replicas of tp ranks each have, by rank."""
    return on_ranks(2 * tp, _all_exchanged, tp)


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["4 ranks", "2 ranks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
def test_every_token_gets_what_all_experts_on_one_rank_give_it(tp, dtype):
    everywhere = ExpertWeights(*zip(*all_experts(dtype), strict=True))
    by_rank = [found[dtype] for found in found_by(tp)]
    for name, step in STEPS.items():
        for replica in range(2):
            x, routing = step.inputs(replica, dtype)
            want = fused_experts(x, everywhere, routing).float()
            first, *others = (found[name] for found in by_rank[replica * tp : (replica + 1) * tp])
            assert first.fixed.dtype == dtype
            assert first.fixed.shape == x.shape
            largest = want.abs().max().item() if len(want) else 0.0
            close = 1e-6 * largest if dtype is torch.float32 else 2**-7 * largest
            torch.testing.assert_close(first.fixed.float(), want, rtol=0, atol=close, msg=name)
            assert torch.equal(first.exact, first.fixed), name
            assert torch.equal(first.alone, first.fixed[-1:]), name
            for other in others:
                assert all(torch.equal(*both) for both in zip(other[:3], first[:3], strict=True)), name


def test_rows_go_once_to_each_rank_that_has_one_of_their_experts():
    """Buffers of one size have room for as many tokens of all ranks as the replicas agreed on."""
    by_rank = [found[torch.bfloat16] for found in found_by(2)]
    for name, step in STEPS.items():
        ids = torch.cat([step.inputs(replica, torch.bfloat16)[1].expert_ids for replica in range(2)])
        ranks = step.places()[ids] // (NUM_EXPERTS // 4)
        agreed = max(step.num_tokens) if step.most is None else step.most
        for rank, found in enumerate(by_rank):
            assert found[name].rows == (4 * -(-agreed // 2), int((ranks == rank).any(1).sum())), name
