"""Places of ranks, and what ranks compute together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.distributed.mesh import Mesh
from tests.distributed.ranks import connect, on_ranks


def test_ranks_are_numbered_replica_by_replica():
    meshes = [Mesh.of_rank(rank, tp_size=2, dp_size=3, expert_parallel=True) for rank in range(6)]
    assert [(mesh.dp_rank, mesh.tp_rank) for mesh in meshes] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [mesh.rank for mesh in meshes] == [mesh.ep_rank for mesh in meshes] == list(range(6))
    assert meshes[3].tp_ranks == (2, 3)
    assert meshes[3].dp_ranks == (1, 3, 5)
    assert meshes[3].ep_ranks == tuple(range(6))
    assert Mesh.of_rank(1, tp_size=2, expert_parallel=True).ep_ranks == (1,), "who have the same tokens exchange none"
    assert [mesh.shard_experts(12) for mesh in meshes] == [slice(2 * i, 2 * i + 2) for i in range(6)]
    assert {rank for mesh in meshes for rank in mesh.tp_ranks} == set(range(6))
    with pytest.raises(ValueError, match="ranks go from 0 to 5, got 6"):
        Mesh.of_rank(6, tp_size=2, dp_size=3)
    with pytest.raises(ValueError, match="8 experts cannot be shared by 6 ranks"):
        meshes[0].shard_experts(8)


def test_without_expert_parallelism_every_rank_holds_all_experts():
    mesh = Mesh.of_rank(3, tp_size=2, dp_size=2)
    assert (mesh.ep_size, mesh.ep_rank, mesh.shard_experts(7)) == (1, 0, slice(0, 7))


def test_a_single_rank_hands_back_what_it_was_given():
    mesh, x = Mesh.single(), torch.ones(2, 3)
    assert mesh.tp_all_reduce(x) is x
    assert mesh.tp_all_gather(x) is x


def _together(rank: int, store: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    mesh = connect(rank, store, tp=3)
    draw = torch.Generator().manual_seed(rank)
    x = torch.randn(7, 6, generator=draw).to(dtype)
    wide = torch.empty(7, 16, dtype=dtype)[:, :6]  # rows with gaps between them, as products have
    wide.copy_(x)
    assert mesh.tp is not None
    sent, received = [rank, 1, 0], [0, 0, 0]
    for source in range(3):
        received[source] = [source, 1, 0][rank]
    rows = torch.full((rank + 1, 2), rank, dtype=dtype)
    return {
        "x": x,
        "sum": mesh.tp_all_reduce(wide),
        "one": mesh.tp_all_reduce(x[4:5].clone()),
        "beside": mesh.tp_all_gather(x),
        "exchanged": mesh.tp.all_to_all(rows, sent=sent, received=received),
        "told": mesh.tp.broadcast(torch.tensor([rank]), root=1),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_sums_gathers_and_exchanges(dtype):
    found = on_ranks(3, _together, dtype)
    xs = [each["x"] for each in found]
    for each in found:
        assert torch.equal(each["sum"], (xs[0].float() + xs[1].float() + xs[2].float()).to(dtype))
        assert torch.equal(each["one"], each["sum"][4:5])  # whatever lies beside it
        assert torch.equal(each["beside"], torch.cat(xs, dim=-1))
        assert each["told"].item() == 1
    assert [each["exchanged"][:, 0].tolist() for each in found] == [[1, 2, 2], [0, 1, 2], []]
