"""Options of several ranks, and which seat each process takes."""

from __future__ import annotations

import pytest

from rorqual.config import EngineConfig
from rorqual.distributed import world
from rorqual.distributed.launch import Children
from rorqual.distributed.world import World, is_follower, seat_of_torchrun, start_world, world_size


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel_size": 4, "nnodes": 3}, "4 ranks .* do not go into 3 hosts evenly"),
        ({"node_rank": 1}, "node_rank goes from 0 to 0 with nnodes 1, got 1"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "several hosts need master_addr and master_port"),
        ({"data_parallel_size": 2, "data_parallel_rank": 2}, "data_parallel_rank goes from 0 to 1"),
    ],
)
def test_options_that_do_not_fit_together(options, said):
    with pytest.raises(ValueError, match=said):
        EngineConfig(model="m", **options)


def test_one_rank_is_alone():
    alone = start_world(EngineConfig(model="m"))
    assert alone.mesh.world_size == 1
    assert alone.control is None
    assert alone.describe() is None
    alone.check()
    alone.close()


def test_replicas_are_for_the_server():
    with pytest.raises(ValueError, match="is for `rorqual serve`"):
        start_world(EngineConfig(model="m", data_parallel_size=2))
    with pytest.raises(ValueError, match="need master_port"):
        start_world(EngineConfig(model="m", data_parallel_size=2, data_parallel_rank=1))


def test_seats_of_torchrun(monkeypatch):
    config = EngineConfig(model="m", device="cpu", tensor_parallel_size=4, distributed_executor_backend="torchrun")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start this program with torchrun"):
        is_follower(config)
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (names | {"MASTER_ADDR": "host0", "MASTER_PORT": "1234"}).items():
        monkeypatch.setenv(name, value)
    seat = seat_of_torchrun(config)
    assert (seat.rank, seat.local_rank, seat.local_size, seat.host, seat.port, seat.backend) == (
        *(3, 1, 2, "host0", 1234),
        "gloo",
    )
    assert is_follower(config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"torchrun has started 2 processes, and .* is 4"):
        seat_of_torchrun(config)


def test_programs_on_other_hosts_follow():
    options = {"tensor_parallel_size": 4, "nnodes": 2, "master_addr": "host0", "master_port": 1234}
    assert [is_follower(EngineConfig(model="m", node_rank=i, **options)) for i in range(2)] == [False, True]
    assert world_size(EngineConfig(model="m", **options)) == 4


@pytest.mark.parametrize(
    ("visible", "local_size", "want"),
    [
        ("", 2, (None, "gloo")),
        ("0,3,5", 2, (["0", "3"], "nccl")),
        ("GPU-a,GPU-b", 2, (["GPU-a", "GPU-b"], "nccl")),
        ("2", 3, (["2"], "gloo")),
    ],
)
def test_every_rank_sees_its_own_gpu_or_all_share(monkeypatch, visible, local_size, want):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert world._arrange(EngineConfig(model="m"), local_size) == want
    assert world._arrange(EngineConfig(model="m", device="cpu"), local_size) == (None, "gloo")


def test_a_port_that_is_taken_is_a_plain_error():
    from torch._C._distributed_c10d import TCPStore

    taken = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1 port {taken.port}"):
        start_world(EngineConfig(model="m", tensor_parallel_size=2, master_port=taken.port))


def test_a_failure_is_told_once():
    failed, calls = World(), []
    failed.on_failure = lambda: calls.append(failed.failure)
    failed._children = Children()
    failed._fail("rank 1 has ended")
    failed._fail("rank 2 has ended")
    assert calls == ["rank 1 has ended"]
    with pytest.raises(world.RankFailure, match="rank 1 has ended"):
        failed.check()
