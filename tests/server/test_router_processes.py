"""Replicas as processes: what each gets of the host, and what happens when one ends. No model: a small program stands
for the server."""

from __future__ import annotations

import asyncio
import contextlib
import sys

import pytest

from rorqual.config import EngineConfig
from rorqual.server.router import plans, processes
from rorqual.server.router.health import HealthChecks
from rorqual.server.router.plans import plans_for
from rorqual.server.router.policy import Balancer
from rorqual.server.router.processes import Plan, ReplicaProcesses
from rorqual.server.router.settings import RoutingSettings
from rorqual.server.settings import ServerSettings
from tests.server.stub_replica import soon
from tests.server.test_faults_signals import alive

SERVER = """
import http.server, json, os, socket, sys
order = json.load(sys.stdin)
if order["config"]["mode"] == "broken":
    sys.exit(2)
ill = False
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global ill
        ill = ill or self.path == "/ill"
        if self.path == "/exit":
            os._exit(3)
        said = {"pid": os.getpid(), "number": order["number"], "shown": os.environ.get("SHOWN")}
        body = json.dumps(said | {"error": {"message": "it fell", "code": "engine_dead"}} if ill else said).encode()
        self.send_response(503 if ill else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = socket.socket(fileno=int(sys.argv[1]))
server.serve_forever()
"""
SETTINGS = RoutingSettings(health_check_interval=0.05, health_check_timeout=1)


@contextlib.asynccontextmanager
async def started(*modes, tied=False, on_failure=lambda: None):
    plan = [Plan({"mode": mode}, {}, {"SHOWN": mode}) for mode in modes]
    running = ReplicaProcesses((sys.executable, "-c", SERVER), plan, SETTINGS, tied=tied)
    running.on_failure = on_failure  # before any can end
    checks = HealthChecks(Balancer(running.replicas, SETTINGS), SETTINGS)
    try:
        await running.start()
        await checks.start()
        yield running
    finally:
        await checks.stop()
        await running.stop()
        assert not any(alive(child.process.pid) for child in running._children)


async def get(replica, path):
    async with replica.client.request("GET", path) as answer:
        return await answer.body()


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["/exit", "/ill"])
async def test_one_that_ends_or_whose_engine_does_is_started_again(monkeypatch, end):
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(processes, "_LOOK_S", 0.02)
    async with started("well", "well") as running:
        await soon(lambda: running.have_started)
        first, second = running.replicas
        pid = running._children[0].process.pid
        assert b'"number": 0' in await get(first, "/")
        assert b'"shown": "well"' in await get(second, "/")
        with contextlib.suppress(Exception):
            await get(first, end)
        await soon(lambda: not first.is_healthy)
        await soon(lambda: first.is_healthy)
        assert running._children[0].process.pid != pid
        assert not alive(pid)
        assert second.is_healthy
        assert running.failure is None


@pytest.mark.asyncio
async def test_one_that_never_was_well_ends_all():
    ended = asyncio.Event()
    async with started("well", "broken", on_failure=ended.set) as running:
        await asyncio.wait_for(ended.wait(), 5)
        assert running.failure == "replica 1 has ended (exit code 2)"
        assert not running.have_started


@pytest.mark.asyncio
async def test_those_that_are_tied_end_with_the_first():
    ended = asyncio.Event()
    async with started("well", "well", tied=True, on_failure=ended.set) as running:
        await soon(lambda: running.have_started)
        with contextlib.suppress(Exception):
            await get(running.replicas[1], "/exit")
        await asyncio.wait_for(ended.wait(), 5)
        assert running.failure == "replica 1 has ended (exit code 3)"
        assert running.have_started


# --- what each gets


@pytest.fixture
def host(monkeypatch):
    """Eight cores, 6 GiB, four GPUs."""
    monkeypatch.setattr(plans, "usable_cores", lambda: 8)
    monkeypatch.setattr(plans, "available_memory", lambda: 6 << 30)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3,GPU-5,7")


def test_cores_and_memory_are_shared(host):
    settings = ServerSettings(port=80, api_key=("k",), max_body_size=5, root_path="/x", served_model_name=("m",))
    shares = plans_for(EngineConfig(model="m", device="cpu", data_parallel_size=3), settings)
    assert [plan.environment for plan in shares] == [{}] * 3
    config = EngineConfig(**shares[0].config)
    assert (config.model, config.data_parallel_size, config.threads) == ("m", 1, 2)
    assert config.kv_cache_memory == 1 << 30
    served = ServerSettings(**shares[0].settings)
    assert (served.api_key, served.max_body_size, served.served_model_name) == (("k",), 5, ("m",))
    assert (served.port, served.root_path) == (8000, "")
    kept = EngineConfig(device="cpu", data_parallel_size=2, threads=3, num_kv_blocks=9)
    assert plans_for(kept, settings)[1].config == {
        "device": "cpu",
        "data_parallel_size": 1,
        "threads": 3,
        "num_kv_blocks": 9,
    }


def test_each_has_gpus_of_its_own(host):
    config = EngineConfig(data_parallel_size=2, tensor_parallel_size=2)
    assert [plan.environment["CUDA_VISIBLE_DEVICES"] for plan in plans_for(config, ServerSettings())] == [
        "0,3",
        "GPU-5,7",
    ]
    with pytest.raises(ValueError, match="needs 6 GPUs, and there are 4"):
        plans_for(EngineConfig(data_parallel_size=3, tensor_parallel_size=2), ServerSettings())


def test_with_expert_parallelism_they_are_ranks_of_one_engine(host):
    shares = plans_for(EngineConfig(data_parallel_size=2, enable_expert_parallel=True), ServerSettings())
    configs = [EngineConfig(**plan.config) for plan in shares]
    assert [config.data_parallel_rank for config in configs] == [0, 1]
    assert {config.data_parallel_size for config in configs} == {2}
    assert configs[0].master_port == configs[1].master_port is not None


def test_hosts_that_share_need_a_router(host):
    config = EngineConfig(data_parallel_size=2, nnodes=2, master_addr="a", master_port=5)
    with pytest.raises(ValueError, match="rorqual route in front of all"):
        plans_for(config, ServerSettings())
