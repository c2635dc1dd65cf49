"""What each of several replicas on this host gets of its cores, memory and GPUs. No torch at import."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from rorqual.config import EngineConfig
from rorqual.platform import available_memory, usable_cores
from rorqual.server.router.processes import HOST, Plan
from rorqual.server.settings import ListenerSettings, ServerSettings

_MOST_KV_BYTES = 4 << 30  # as an engine that is alone takes


def plans_for(config: EngineConfig, settings: ServerSettings) -> list[Plan]:
    """One per replica of `config.data_parallel_size`.

    With expert parallelism they are the ranks of one engine, which shares the host by itself.

    Raises: ValueError for too few GPUs, or several hosts.
    """
    count = config.data_parallel_size
    if config.nnodes > 1:
        raise ValueError(
            f"nnodes must be 1 where data_parallel_size is {count}: start rorqual serve on each host, and rorqual "
            "route in front of all"
        )
    given = config.model_dump(exclude_unset=True, mode="json")
    served = settings.model_dump(exclude_unset=True, mode="json", exclude=set(ListenerSettings.model_fields))
    for name in ("max_body_size", "body_timeout", "drain_timeout", "uvicorn_log_level"):
        served[name] = settings.model_dump(mode="json")[name]
    environments = _environments(config)
    if config.enable_expert_parallel:
        meeting = {"master_addr": HOST, "master_port": config.master_port or _free_port()}
        shares = [given | meeting | {"data_parallel_rank": i} for i in range(count)]
    else:
        shares = [given | {"data_parallel_size": 1} | (_cpu_share(config) if environments is None else {})] * count
    return [Plan(share, served, {} if environments is None else environments[i]) for i, share in enumerate(shares)]


def _environments(config: EngineConfig) -> list[dict[str, str]] | None:
    """What each replica is to see of the GPUs; None where they run on the CPU."""
    devices = [] if config.device == "cpu" else _gpus()
    if not devices:
        return None
    size, count = config.tensor_parallel_size, config.data_parallel_size
    if len(devices) < size * count:
        raise ValueError(
            f"data_parallel_size {count} with tensor_parallel_size {size} needs {size * count} GPUs, and there are "
            f"{len(devices)}: lower one of them, or use --device cpu"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(devices[i * size : (i + 1) * size])} for i in range(count)]


def _gpus() -> list[str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES has them. Without any, torch is not asked: it would take a second to load."""
    may_be_there = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    if "CUDA_VISIBLE_DEVICES" not in os.environ and not may_be_there:
        return []
    from rorqual.distributed.world import visible_devices

    return visible_devices()


def _cpu_share(config: EngineConfig) -> dict[str, int]:
    """Cores and cache of a replica, as far as nobody has set them: all start at once, and see the same free memory."""
    count, share = config.data_parallel_size, dict[str, int]()
    if config.threads is None:
        share["threads"] = max(1, usable_cores() // count)
    if config.kv_cache_memory is None and config.num_kv_blocks is None:
        share["kv_cache_memory"] = min(_MOST_KV_BYTES, available_memory() // (2 * count))
    return share


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
