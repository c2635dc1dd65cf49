"""Engines of several ranks, each a process of `ranks.on_ranks`, that run the requests of a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import TCPStore

from rorqual import SamplingParams
from rorqual.config import EngineConfig
from rorqual.distributed.launch import Seat
from rorqual.distributed.world import join
from tests.engine.engines import TINY_OPTIONS
from tests.tiny import VOCAB

PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 2) + 2 for j in range(3 + 7 * i)] for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=6 + 2 * i, ignore_eos=True, temperature=float(i % 2), seed=i) for i in range(len(PROMPTS))
]
HARD: dict[str, Any] = {"num_kv_blocks": 17, "max_num_seqs": 4}


def engine_config(name: str, options: dict[str, Any]) -> EngineConfig:
    """Options over those of tiny models."""
    given = TINY_OPTIONS | {"model": name} | options
    return EngineConfig(**{key: value for key, value in given.items() if key != "progress"})


def generate(
    rank: int,
    store: Any,
    name: str,
    options: dict[str, Any],
    shares: list[list[int]],
    *,
    before: Callable[[Any], object] = lambda _engine: None,
    after: Callable[[Any], object] = lambda _engine: None,
) -> Any:
    """One rank; replica i has the requests shares[i]. Tokens by request, and how many were preempted; None of a rank
    that follows. before, after: called with the engine."""
    from rorqual.engine.engine import Engine

    config = engine_config(name, options)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if server is not None:
        store.set("port", str(server.port))
    size = config.tensor_parallel_size * config.data_parallel_size
    world = join(config, Seat(rank, rank, size, "127.0.0.1", int(store.get("port")), "gloo"), server=server)
    engine = Engine(config, world=world)
    try:
        before(engine)
        if not world.leads:
            engine.follow()
            after(engine)
            return None
        found: dict[int, list[int]] = {}

        def keep(i: int) -> Any:
            return lambda output: found.update({i: output.outputs[0].token_ids})

        for i in shares[world.mesh.dp_rank]:
            engine.add_request(PROMPTS[i], PARAMS[i], on_finish=keep(i))
        engine.step()
        while engine.has_work or engine.others_work:
            engine.step()
        engine.scheduler.check()
        after(engine)
        return found, engine.scheduler.num_preemptions
    finally:
        engine.close()
        store.add("closed", 1)
        while rank == 0 and store.add("closed", 0) < size:  # the store that the others still use is here
            pass
