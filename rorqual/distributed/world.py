"""The ranks of one engine, as one of them sees them: its place, its groups, and whether the others live."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from rorqual.config import EngineConfig
from rorqual.distributed.launch import Children, Seat
from rorqual.distributed.mesh import Mesh

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from rorqual.distributed.control import ControlGroup
    from rorqual.distributed.rank_group import RankGroup
    from rorqual.distributed.watch import Watch

START_S = 600.0
"""How long ranks wait for each other while they start: some read weights or compile while others are done."""
STEP_S = 60.0
"""How long they do so in a step."""
_FOR_EVER_S = 3600.0 * 24 * 365
_SECONDS_TO_FIND_OUT = 5.0
"""After a peer is lost, how long to wait for what was wrong with it."""

_log = logging.getLogger(__name__)


class RankFailure(RuntimeError):
    """A rank has failed, and the engine with it."""


class World:
    """What a rank has of the others. Of one rank, it costs nothing and does nothing."""

    def __init__(self) -> None:
        self.mesh = Mesh.single()
        self.local_size = 1
        """Ranks on this host, which share its cores and memory."""
        self.control: ControlGroup | None = None
        """The ranks of this replica; None where this is the only one."""
        self.replicas: ControlGroup | None = None
        """The ranks with this one's tp_rank in all replicas that share experts; None where there is one replica."""
        self.failure: str | None = None
        """Why this engine is at its end, if it is."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called when a failure is found, in another thread."""
        self._children: Children | None = None
        self._server: Store | None = None
        """What the ranks meet at, if this one keeps it."""
        self._store: Store | None = None
        """For what is told of failures."""
        self._groups: list[RankGroup] = []
        self._step_groups: list[RankGroup] = []
        """Those of them in which ranks wait for each other in steps only."""
        self._watch: Watch | None = None
        self._closing = threading.Lock()
        self._is_closed = False

    @property
    def leads(self) -> bool:
        """Whether people talk to this rank."""
        return self.mesh.tp_rank == 0

    def describe(self) -> str | None:
        """One line for people; None for a rank alone."""
        mesh = self.mesh
        if mesh.world_size == 1:
            return None
        axes = {"tensor": mesh.tp_size, "data": mesh.dp_size, "expert": mesh.ep_size}
        parallel = ", ".join(f"{axis} parallel {size}" for axis, size in axes.items() if size > 1)
        backends = ", ".join(dict.fromkeys(group.backend for group in self._step_groups))
        return f"{mesh.world_size}: {parallel}" + (f", over {backends}" if backends else "")

    def started(self) -> None:
        """All is loaded: from now on ranks wait for each other no longer than a step may take."""
        for group in self._step_groups:
            group.set_timeout(timedelta(seconds=STEP_S))

    def check(self) -> None:
        """Raise RankFailure if a rank has failed."""
        if self.failure is not None:
            raise RankFailure(self.failure)

    def explain(self, error: BaseException) -> RankFailure:
        """What to raise where an error has ended a step that others take part in; the others are ended."""
        from rorqual.distributed.rank_group import PeerLost

        if isinstance(error, PeerLost):  # another's fault, which the watch is about to find
            end = time.monotonic() + _SECONDS_TO_FIND_OUT
            while self.failure is None and time.monotonic() < end:
                time.sleep(0.05)
            text = self.failure or f"rank {self.mesh.rank} has lost another: {error}"
        elif isinstance(error, RankFailure):
            text = str(error)
        else:
            text = f"rank {self.mesh.rank}: {type(error).__name__}: {error}"
        self._fail(text)
        return RankFailure(self.failure or text)

    def abandon(self, why: str) -> None:
        """Let go of all at once, wherever the others are."""
        if self.mesh.world_size > 1 and self.failure is None:
            self.failure = why
        self.close()

    def close(self) -> None:
        """End the other ranks that this one has started, and let go of all. More calls do nothing."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        if self._watch is not None:
            self._watch.stop()
        if self._children is not None:
            if self.failure is None:
                self._children.end()
            else:
                self._children.kill()
        for group in self._groups:
            group.close()

    def _fail(self, text: str) -> None:
        """Note why all is over, tell the others, and end those that this rank has started."""
        from rorqual.distributed.watch import tell_failure

        with self._closing:
            if self.failure is not None:
                return
            self.failure = text if self._store is None else tell_failure(self._store, text)
        _log.error("the engine ends: %s", self.failure)
        if self._children is not None:
            self._children.kill()
        self.on_failure()


def world_size(config: EngineConfig) -> int:
    """Ranks of the engine that a config describes."""
    return config.tensor_parallel_size * config.data_parallel_size


def seat_of_torchrun(config: EngineConfig) -> Seat:
    """What torchrun's environment says of this process. Raises ValueError where it says nothing, or disagrees."""
    rank = _torchrun_rank()
    size, local_rank, local_size = (int(os.environ[name]) for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if size != world_size(config):
        raise ValueError(
            f"torchrun has started {size} processes, and tensor_parallel_size times data_parallel_size is "
            f"{world_size(config)}: make them equal"
        )
    devices, backend = _arrange(config, local_size)
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[local_rank % len(devices)]
    return Seat(rank, local_rank, local_size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), backend)


def _torchrun_rank() -> int:
    if "RANK" not in os.environ:
        raise ValueError(
            "distributed_executor_backend 'torchrun' needs RANK in the environment: start this program with torchrun, "
            "or use 'mp'"
        )
    return int(os.environ["RANK"])


def is_follower(config: EngineConfig) -> bool:
    """Whether this program was started for ranks that only follow: not for the one that people talk to."""
    if config.distributed_executor_backend == "torchrun":
        return world_size(config) > 1 and _torchrun_rank() != 0
    return config.node_rank != 0


def start_world(config: EngineConfig) -> World:
    """This process's rank, the first one of its replica, with the others of this host started.

    Raises ValueError for replicas that nobody has started, or redundant experts that nobody would move; RankFailure
    where a rank ends meanwhile.
    """
    if config.data_parallel_size > 1 and config.data_parallel_rank is None:
        raise ValueError(
            f"data_parallel_size {config.data_parallel_size} is for `rorqual serve`, which starts replicas and shares "
            "requests out: leave it at 1, or start an engine for each data_parallel_rank"
        )
    if config.num_redundant_experts and not config.enable_eplb:
        raise ValueError(
            f"num_redundant_experts ({config.num_redundant_experts}) are filled as tokens want experts: turn "
            "enable_eplb on, or leave them out"
        )
    if world_size(config) == 1:
        return World()
    if config.distributed_executor_backend == "torchrun":
        return join(config, seat_of_torchrun(config))
    from torch._C._distributed_c10d import TCPStore

    replica = config.data_parallel_rank or 0
    num_here = world_size(config) // config.nnodes if config.data_parallel_size == 1 else config.tensor_parallel_size
    host, port = config.master_addr or "127.0.0.1", config.master_port or 0
    server = None
    if replica == 0:
        try:
            server = TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_S))
        except RuntimeError as error:
            raise ValueError(
                f"cannot listen on {host} port {port} for the other ranks ({str(error).splitlines()[0]}): give another "
                "master_addr or master_port"
            ) from None
        port = server.port
    elif config.master_port is None:
        raise ValueError("replicas that are not the first need master_port: where the first one listens")
    devices, backend = _arrange(config, num_here)
    first, sharing = replica * config.tensor_parallel_size, world_size(config) // config.nnodes
    seats = [Seat(first + i, i, sharing, host, port, backend) for i in range(num_here)]
    children = Children()
    try:
        children.start(seats[1:], config.model_dump(exclude_unset=True, mode="json"), devices)
        return join(config, seats[0], children=children, server=server)
    except BaseException:
        children.kill()
        raise


def run_node(config: EngineConfig) -> int:
    """The ranks of a host that is not the first, as children of this process; returns an exit code when they ended."""
    local_size = world_size(config) // config.nnodes
    assert config.master_addr is not None
    assert config.master_port is not None
    first = config.node_rank * local_size
    devices, backend = _arrange(config, local_size)
    seats = [Seat(first + i, i, local_size, config.master_addr, config.master_port, backend) for i in range(local_size)]
    children = Children()
    try:
        children.start(seats, config.model_dump(exclude_unset=True, mode="json"), devices)
        return children.wait()
    finally:
        children.kill()


def visible_devices() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


def _arrange(config: EngineConfig, local_size: int) -> tuple[list[str] | None, str]:
    """What each rank of this host sees of its GPUs, and how ranks exchange. Ranks that share a GPU, which NCCL does not
    do, exchange through the host."""
    devices = [] if config.device == "cpu" else visible_devices()
    if not devices:
        return None, "gloo"
    if len(devices) < local_size:
        _log.warning("%d ranks share %d GPUs: they exchange through the host, slowly", local_size, len(devices))
        return devices, "gloo"
    return devices[:local_size], "nccl"


def join(config: EngineConfig, seat: Seat, *, children: Children | None = None, server: Store | None = None) -> World:
    """Take a seat: meet the others and connect. Raises RankFailure where one ends meanwhile."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from rorqual.distributed.control import ControlGroup
    from rorqual.distributed.rank_group import RankGroup
    from rorqual.distributed.watch import Watch

    def store() -> Store:
        """A connection of its own: calls of one wait for each other."""
        return PrefixStore("rorqual", TCPStore(seat.host, seat.port, timeout=timedelta(seconds=START_S)))

    world = World()
    mesh = Mesh.of_rank(
        seat.rank,
        tp_size=config.tensor_parallel_size,
        dp_size=config.data_parallel_size,
        expert_parallel=config.enable_expert_parallel,
        num_redundant_experts=config.num_redundant_experts if config.enable_eplb else None,
    )
    world.mesh, world.local_size, world._children = mesh, seat.local_size, children
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if config.distributed_executor_backend == "torchrun" and seat.rank == 0 and not has_agent:
        server = TCPStore(seat.host, seat.port, is_master=True, wait_for_workers=False)
    world._server, world._store, shared = server, store(), store()
    watched = [rank for rank in range(mesh.world_size) if rank != seat.rank] if seat.rank == 0 else [0]
    world._watch = Watch(
        store(),
        seat.rank,
        watched,
        timeout_s=config.rank_timeout,
        on_failure=world._fail,
        also=children.fault if children is not None else lambda: None,
    )
    _meet(world, shared, seat.rank)
    with socket.create_connection((seat.host, seat.port)) as connection:
        address = connection.getsockname()[0]

    def group(name: str, ranks: Sequence[int], backend: str, seconds: float) -> RankGroup:
        made = RankGroup(
            PrefixStore(f"{name}{ranks[0]}", shared),
            ranks.index(seat.rank),
            len(ranks),
            backend=backend,
            timeout=timedelta(seconds=seconds),
            address=address,
        )
        world._groups.append(made)
        return made

    tp = ep = None
    if mesh.tp_size > 1:  # which wait for requests, however long there are none
        world.control = ControlGroup(group("control", mesh.tp_ranks, "gloo", _FOR_EVER_S))
        tp = group("tp", mesh.tp_ranks, seat.backend, START_S)
        world._step_groups.append(tp)
    if len(mesh.ep_ranks) > 1:
        world.replicas = ControlGroup(group("replicas", mesh.dp_ranks, "gloo", _FOR_EVER_S))
        ep = group("ep", mesh.ep_ranks, seat.backend, START_S)
        world._step_groups.append(ep)
    world.mesh = mesh.connected(tp=tp, ep=ep)
    return world


def _meet(world: World, store: Store, rank: int) -> None:
    """Wait for all ranks, and for no longer than none has ended."""
    store.set(f"here/{rank}", "1")
    waiting = [f"here/{other}" for other in range(world.mesh.world_size)]
    end = time.monotonic() + START_S
    while not store.check(waiting):
        world.check()
        if time.monotonic() > end:
            raise RankFailure(f"not all of {len(waiting)} ranks have come within {START_S:.0f} s")
        time.sleep(0.02)
