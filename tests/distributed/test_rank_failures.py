"""A rank that dies, stops or disagrees: the engine ends within seconds and says why, and nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rorqual import SamplingParams
from rorqual.distributed import launch
from rorqual.distributed.world import RankFailure
from tests.engine.engines import tiny_llm
from tests.server.served import SHORT, serve

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPTS = [[5 + i, 6, 7, 8] for i in range(6)]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
TIMEOUT_S = 2.0


def workers_of(llm: Any) -> list[int]:
    """Process ids by rank, from rank 1 on."""
    return [process.pid for process in llm.engine._world._children._processes.values()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def have_ended(pids: Iterable[int], seconds: float = 10) -> bool:
    """Whether none of the processes runs any more, within so many seconds."""
    end = time.monotonic() + seconds
    while (running := any(map(is_running, pids))) and time.monotonic() < end:
        time.sleep(0.05)
    return not running


def until_it_fails(llm: Any) -> tuple[str, float]:
    """What is raised, and after how many seconds of being busy."""
    start = time.monotonic()
    try:
        while time.monotonic() < start + 60:
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    except RankFailure as failure:
        return str(failure), time.monotonic() - start
    raise AssertionError("it goes on")


def check_it_has_ended(llm: Any, workers: list[int]) -> None:
    with pytest.raises(RankFailure):
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False)
    llm.close()
    assert not any(map(is_running, workers))


def fail_at(moment_s: float, kind: str, ranks: int = 2, victim: int = 0) -> None:
    with tiny_llm("qwen3", tensor_parallel_size=ranks, rank_timeout=TIMEOUT_S) as llm:
        workers = workers_of(llm)
        what = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
        timer = threading.Timer(moment_s, os.kill, (workers[victim], what))
        timer.start()
        text, seconds = until_it_fails(llm)
        timer.join()
        if kind == "kill":
            assert text == f"rank {victim + 1} has ended (killed by SIGKILL)"
        else:
            assert text == f"rank {victim + 1} has given no sign of life for {TIMEOUT_S:g} s"
        assert seconds < moment_s + TIMEOUT_S + 8
        check_it_has_ended(llm, workers)


def disagree(monkeypatch: pytest.MonkeyPatch, steps: int, ranks: int = 2) -> None:
    monkeypatch.setattr(launch, "WORKER", (sys.executable, "-m", "tests.distributed.faulty_worker"))
    monkeypatch.setenv("SOUND_STEPS", str(steps))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with tiny_llm("qwen3", tensor_parallel_size=ranks, check_ranks=True) as llm:
        workers = workers_of(llm)
        text, _ = until_it_fails(llm)
        assert f"rank {', '.join(map(str, range(1, ranks)))} is about to compute something else than rank 0" in text
        check_it_has_ended(llm, workers)


@pytest.mark.parametrize("kind", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_rank_that_is_lost_ends_the_engine(kind):
    fail_at(0.3, kind)


def test_a_rank_that_disagrees_ends_the_engine(monkeypatch):
    disagree(monkeypatch, 7)


def test_a_rank_that_raises_is_what_is_told(monkeypatch, tmp_path):
    """Its own words, not those of the others, who only see that it is gone."""
    (tmp_path / "raising_worker.py").write_text(
        "import os, rorqual.engine.worker as worker, rorqual.engine.scheduler as scheduler\n"
        "def fault(self, prompt_limit=None):\n"
        "    raise MemoryError('no memory is left on this rank')\n"
        "scheduler.Scheduler.schedule = fault\n"
        "os._exit(worker.main())\n"
    )
    monkeypatch.setattr(launch, "WORKER", (sys.executable, str(tmp_path / "raising_worker.py")))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with tiny_llm("qwen3", tensor_parallel_size=2) as llm:
        workers = workers_of(llm)
        text, seconds = until_it_fails(llm)
        assert text == "rank 1: MemoryError: no memory is left on this rank"
        assert seconds < 10
        check_it_has_ended(llm, workers)


def test_a_rank_that_cannot_start_is_told(monkeypatch):
    monkeypatch.setattr(launch, "WORKER", (sys.executable, "-c", "raise SystemExit(7)"))
    with pytest.raises(RankFailure, match=r"rank 1 has ended \(exit code 7\)"):
        tiny_llm("qwen3", tensor_parallel_size=2)


def test_a_checkpoint_that_cannot_be_split_is_a_plain_error():
    with pytest.raises(ValueError, match="num_attention_heads"):
        tiny_llm("qwen3", tensor_parallel_size=3)


def test_a_program_that_does_not_close_its_engine_ends_well():
    program = (
        "from tests.engine.engines import tiny_llm\n"
        "from tests.distributed.test_rank_failures import PARAMS, PROMPTS, workers_of\n"
        "llm = tiny_llm('qwen3', tensor_parallel_size=2)\n"
        "llm.generate(PROMPTS, PARAMS, use_tqdm=False)\n"
        "print(*workers_of(llm))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert have_ended(map(int, done.stdout.split()), 0)


@pytest.mark.slow
@pytest.mark.parametrize("ends_by", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_program_ends(ends_by):
    program = (
        "import time\n"
        "from tests.engine.engines import tiny_llm\n"
        "from tests.distributed.test_rank_failures import PARAMS, PROMPTS, workers_of\n"
        "with tiny_llm('qwen3', tensor_parallel_size=2) as llm:\n"
        "    print(*workers_of(llm), flush=True)\n"
        "    while True:\n"
        "        llm.generate(PROMPTS, PARAMS, use_tqdm=False)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 1
        time.sleep(0.3)
        process.send_signal(ends_by)
        assert process.wait(20) != 0
    assert have_ended(workers)


@pytest.mark.slow
def test_ranks_end_when_the_first_one_is_stopped():
    """Which answers nobody any more, and whose connections stay open."""
    program = (
        "from tests.engine.engines import tiny_llm\n"
        "from tests.distributed.test_rank_failures import workers_of\n"
        "llm = tiny_llm('qwen3', tensor_parallel_size=2, rank_timeout=2)\n"
        "print(*workers_of(llm), flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        (worker,) = map(int, process.stdout.readline().split())
        process.send_signal(signal.SIGSTOP)
        has_ended = have_ended([worker], 15)
        process.kill()
    assert has_ended


def engine_and_workers(served: Any) -> list[int]:
    engine = served.engine_pid
    children = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    return [engine, *map(int, children)]


@pytest.mark.parametrize("is_busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_says_that_its_engine_is_dead(is_busy):
    with serve("--tensor-parallel-size=2") as served:
        assert httpx.post(f"{served.url}/v1/completions", json=SHORT, timeout=60).status_code == 200
        engine, worker = engine_and_workers(served)
        body = SHORT | {"max_tokens": 240}
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(f"{served.url}/v1/completions", json=body)))
            for _ in range(4 * is_busy)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        os.kill(worker, signal.SIGKILL)
        end = time.monotonic() + 10
        while (health := httpx.get(f"{served.url}/health")).status_code == 200 and time.monotonic() < end:
            time.sleep(0.05)
        assert health.status_code == 503
        assert "rank 1 has ended (killed by SIGKILL)" in health.text
        for thread in threads:
            thread.join(20)
        assert all(answer.status_code in (200, 500, 503) for answer in answers)
        assert have_ended((engine, worker))
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) != 0


@pytest.mark.slow
def test_two_engines_on_one_host():
    with (
        tiny_llm("qwen3", tensor_parallel_size=2) as one,
        tiny_llm("llama", tensor_parallel_size=2) as other,
        tiny_llm("llama") as alone,
    ):
        for llm in (one, other, one):
            llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        params = SamplingParams(max_tokens=12, temperature=0)
        want, got = ([out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)] for llm in (alone, other))
        assert got == want


@pytest.mark.slow
def test_fifty_failures_at_random_moments(monkeypatch):
    draw = random.Random(29)
    for _ in range(50):
        kind, ranks = draw.choice(["kill", "stop", "disagree"]), draw.choice([2, 2, 4])
        if kind == "disagree":
            with monkeypatch.context() as patch:
                disagree(patch, draw.randint(0, 60), ranks)
        else:
            fail_at(draw.uniform(0, 1.5), kind, ranks, draw.randrange(ranks - 1))
