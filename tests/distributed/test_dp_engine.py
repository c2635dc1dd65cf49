"""Engines of several replicas that share experts: each with requests of its own, the same tokens as of one rank."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from rorqual.distributed.world import RankFailure
from tests.distributed.engines import HARD, PARAMS, PROMPTS, generate
from tests.distributed.ranks import on_ranks
from tests.engine.engines import tiny_llm
from tests.tiny import checkpoint_folder


def check(name: str, options: dict[str, Any], shares: list[list[int]]) -> None:
    with tiny_llm(name, **HARD) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        want = {i: output.outputs[0].token_ids for i, output in enumerate(outputs)}
    size = options.get("tensor_parallel_size", 1) * options.get("data_parallel_size", 1)
    found = on_ranks(size, generate, str(checkpoint_folder(name)), HARD | options | {"check_ranks": True}, shares)
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


def _fail_in_the_third_step(rank: int, store: Any, name: str, options: dict[str, Any]) -> str:
    def arm(engine: Any) -> None:
        sound, steps = engine._step, itertools.count(1)

        def step() -> Any:
            if next(steps) == 3:
                raise MemoryError("no memory is left on this rank")
            return sound()

        if rank == 1:
            engine._step = step

    with pytest.raises(RankFailure) as failure:
        generate(rank, store, name, options, [[0, 1, 2], [3, 4, 5]], before=arm)
    return str(failure.value)


def test_a_replica_that_fails_ends_those_that_share_its_experts():
    """Each has one rank, and none that follows."""
    options = HARD | {"data_parallel_size": 2, "enable_expert_parallel": True}
    found = on_ranks(2, _fail_in_the_third_step, str(checkpoint_folder("qwen3_moe")), options)
    assert found == ["rank 1: MemoryError: no memory is left on this rank"] * 2
