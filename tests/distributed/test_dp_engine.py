"""Engines of several replicas that share experts: each with requests of its own, the same tokens as of one rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from rorqual import SamplingParams
from rorqual.config import EngineConfig
from rorqual.distributed.launch import Seat
from rorqual.distributed.world import join
from tests.distributed.ranks import on_ranks
from tests.engine.engines import TINY_OPTIONS, tiny_llm
from tests.tiny import VOCAB, checkpoint_folder

PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 2) + 2 for j in range(3 + 7 * i)] for i in range(6)]
PARAMS = [
    SamplingParams(max_tokens=6 + 2 * i, ignore_eos=True, temperature=float(i % 2), seed=i) for i in range(len(PROMPTS))
]
HARD: dict[str, Any] = {"num_kv_blocks": 17, "max_num_seqs": 4}


def _engine(rank: int, store: Any, name: str, options: dict[str, Any], shares: list[list[int]]) -> Any:
    """One rank; replica i has the requests shares[i]. Tokens by request, and how many were preempted."""
    from rorqual.engine.engine import Engine

    given = TINY_OPTIONS | {"model": name} | options
    config = EngineConfig(**{key: value for key, value in given.items() if key != "progress"})
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    if server is not None:
        store.set("port", str(server.port))
    size = config.tensor_parallel_size * config.data_parallel_size
    world = join(config, Seat(rank, rank, size, "127.0.0.1", int(store.get("port")), "gloo"), server=server)
    engine = Engine(config, world=world)
    try:
        if not world.leads:
            engine.follow()
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
        return found, engine.scheduler.num_preemptions
    finally:
        engine.close()
        store.add("closed", 1)
        while rank == 0 and store.add("closed", 0) < size:  # the store that the others still use is here
            pass


def check(name: str, options: dict[str, Any], shares: list[list[int]]) -> None:
    with tiny_llm(name, **HARD) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        want = {i: output.outputs[0].token_ids for i, output in enumerate(outputs)}
    size = options.get("tensor_parallel_size", 1) * options.get("data_parallel_size", 1)
    found = on_ranks(size, _engine, str(checkpoint_folder(name)), HARD | options | {"check_ranks": True}, shares)
    tokens: dict[int, list[int]] = {}
    for each in found:
        tokens |= each[0] if each is not None else {}
    assert tokens == {i: want[i] for share in shares for i in share}


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("qwen3_moe", [[0, 1, 2], [3, 4, 5]]),
        pytest.param("qwen3_moe", [[], [5]], marks=pytest.mark.slow),  # one never has a request
        pytest.param("deepseek_v3", [[4], [0, 1, 2, 3, 5]], marks=pytest.mark.slow),
        pytest.param("deepseek_v32", [[4, 5], [0, 1]], marks=pytest.mark.slow),
        pytest.param("deepseek_v4", [[0, 5], [1, 2, 3]], marks=pytest.mark.slow),
    ],
)
def test_two_replicas_share_experts(name, shares):
    """They end at different times, and one goes on beside an idle one."""
    check(name, {"data_parallel_size": 2, "enable_expert_parallel": True}, shares)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "deepseek_v4"])
def test_two_replicas_of_two_ranks_share_experts(name):
    options = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    check(name, options, [[0, 3, 5], [1, 2, 4]])


@pytest.mark.slow
def test_ranks_of_one_replica_share_experts():
    check("qwen3_moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, [list(range(6))])
