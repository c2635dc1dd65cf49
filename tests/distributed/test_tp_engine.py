"""Whole engines of several ranks: the same tokens as of one, whoever starts the ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rorqual import LLM, SamplingParams
from tests.engine.engines import TINY_OPTIONS, tiny_llm
from tests.tiny import VOCAB, checkpoint_folder

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = [[(7 * i + 3 * j) % (VOCAB - 2) + 2 for j in range(3 + 9 * i)] for i in range(5)]
PARAMS = [
    SamplingParams(max_tokens=14, ignore_eos=True, temperature=float(i % 2), seed=i if i < 4 else None, top_p=0.9)
    for i in range(len(PROMPTS))
]
HARD: dict[str, Any] = {"num_kv_blocks": 17, "max_num_seqs": 4, "seed": 5}
"""Fewer blocks than all need, so that some are preempted; prompts longer than a step."""


def answers(llm: LLM) -> list[list[int]]:
    """The same requests twice, the second time with prefixes in the cache."""
    found = []
    for _ in range(2):
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found += [output.outputs[0].token_ids for output in outputs]
        found += [[output.num_cached_tokens] for output in outputs]
    found.append([llm.engine.scheduler.num_preemptions])
    return found


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    with tiny_llm("qwen3", **HARD) as llm:
        found = answers(llm)
    assert found[-1][0] > 0
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_answer_as_one_does(alone, ranks):
    """With chunks, prefix hits, preemptions, and draws whose seed is the engine's; two engines after one another."""
    with tiny_llm("qwen3", **HARD, tensor_parallel_size=ranks, check_ranks=True) as llm:
        assert answers(llm) == alone
        assert f"ranks    {ranks}: tensor parallel {ranks}, over gloo" in llm.engine.banner()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "llama_bias", "qwen2", "qwen3_moe", "deepseek_v3", "deepseek_v32", "deepseek_v4"]
)
def test_every_family_answers_so(name):
    found = []
    for ranks in (1, 2):
        with tiny_llm(name, **HARD, tensor_parallel_size=ranks, check_ranks=True) as llm:
            found.append(answers(llm))
    assert found[0] == found[1]


def test_requests_that_end_early_end_on_every_rank():
    """Aborted, stopped by a token, of which there are several answers; and bad ones, which change nothing."""
    with tiny_llm("qwen3", tensor_parallel_size=2, check_ranks=True) as llm:
        stream = llm.stream(PROMPTS[3], SamplingParams(max_tokens=20, ignore_eos=True))
        next(stream)
        stream.close()
        with pytest.raises(ValueError, match="out of vocabulary"):
            llm.generate([VOCAB + 5], use_tqdm=False)
        want = llm.generate(PROMPTS[2], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True), use_tqdm=False)
        tokens = want[0].outputs[0].token_ids
        params = SamplingParams(max_tokens=9, temperature=0, n=2, stop_token_ids=[tokens[4]])
        stopped = llm.generate(PROMPTS[2], params, use_tqdm=False)[0]
        assert [answer.token_ids for answer in stopped.outputs] == [tokens[: tokens.index(tokens[4]) + 1]] * 2
        llm.engine.reset_prefix_cache()
        assert llm.generate(PROMPTS[2], params, use_tqdm=False)[0].num_cached_tokens == 0


PROGRAM = """
import json, sys
from rorqual import LLM, SamplingParams
options, prompts = json.loads(sys.argv[1])
with LLM(**options) as llm:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    print("TOKENS", json.dumps([out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]))
"""


def run_programs(programs: list[tuple[list[str], dict[str, str], dict[str, Any]]]) -> list[str]:
    """What each program of (prefix of its command, environment, options) writes."""
    processes = []
    for prefix, env, options in programs:
        whole = TINY_OPTIONS | {"model": str(checkpoint_folder("qwen3")), "tensor_parallel_size": 2} | options
        argument = json.dumps([whole, PROMPTS[:3]])
        command = [*prefix, sys.executable, "-c", PROGRAM, argument]
        whole_env = os.environ | {"PYTHONPATH": str(REPOSITORY)} | env
        processes.append(subprocess.Popen(command, env=whole_env, stdout=subprocess.PIPE, text=True))
    try:
        written = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return written


@pytest.fixture(scope="module")
def tokens_of_one() -> str:
    (written,) = run_programs([([], {}, {"tensor_parallel_size": 1})])
    return written.splitlines()[-1]


@pytest.mark.slow
def test_torchrun_starts_the_ranks(tokens_of_one, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = TINY_OPTIONS | {
        "model": str(checkpoint_folder("qwen3")),
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "torchrun",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(program), json.dumps([options, PROMPTS[:3]])],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("TOKENS")] == [tokens_of_one]


def _namespaces() -> bool:
    """Whether this user may make network namespaces."""
    made = subprocess.run(["ip", "netns", "add", "rorqual-probe"], capture_output=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", "rorqual-probe"], check=True)
    return made.returncode == 0


@pytest.fixture
def hosts():
    """Two network namespaces with addresses of their own, joined by a cable: prefixes of commands and addresses."""
    try:
        usable = _namespaces()
    except FileNotFoundError:
        usable = False
    if not usable:
        pytest.skip("needs the right to make network namespaces")
    names, addresses = [f"rorqual{i}-{os.getpid()}" for i in range(2)], ["10.77.0.1", "10.77.0.2"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
        for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"cable{i}")
            ip("-n", name, "link", "set", f"cable{i}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [(["ip", "netns", "exec", name], address) for name, address in zip(names, addresses, strict=True)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mp", "torchrun"])
def test_two_hosts(hosts, backend, tokens_of_one):
    """Which reach each other by addresses that are not this machine's."""
    first_address = hosts[0][1]
    programs = []
    for i, (prefix, _) in enumerate(hosts):
        env: dict[str, str] = {}
        if backend == "mp":
            options = {"nnodes": 2, "node_rank": i, "master_addr": first_address, "master_port": 29777}
        else:
            options = {"distributed_executor_backend": "torchrun"}
            rank = {"RANK": str(i), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env |= rank | {"MASTER_ADDR": first_address, "MASTER_PORT": "29778"}
        programs.append((prefix, env, options))
    first, second = run_programs(programs)
    assert first.splitlines()[-1] == tokens_of_one
    assert "TOKENS" not in second
