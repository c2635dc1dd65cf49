"""Several ranks on this machine, each a process, that run one function of a test and give back what it returns."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rorqual.distributed.mesh import Mesh
from rorqual.distributed.rank_group import RankGroup

REPOSITORY = Path(__file__).resolve().parents[2]
LONGEST_S = 300


def on_ranks(count: int, function: Callable[..., Any], *args: Any, threads: int = 1) -> list[Any]:
    """function(rank, store, *args) on each rank, in processes of their own; results by rank.

    The function is one of a module; it, its arguments and results are pickled. Raises AssertionError with the errors of
    all ranks that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        torch.save((count, function.__module__, function.__qualname__, args, threads), call)
        env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-m", "tests.distributed.ranks", folder]
        processes = [
            subprocess.Popen([*command, str(rank)], cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True)
            for rank in range(count)
        ]
        try:
            errors = [process.communicate(timeout=LONGEST_S)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [f"rank {rank}:\n{errors[rank]}" for rank, process in enumerate(processes) if process.returncode]
        assert not failed, "\n".join(failed)
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(count)]


def connect(rank: int, store: Any, *, tp: int = 1, dp: int = 1, expert_parallel: bool = False) -> Mesh:
    """The mesh of a rank, with its groups, which are closed when the function of `on_ranks` is done."""
    mesh = Mesh.of_rank(rank, tp_size=tp, dp_size=dp, expert_parallel=expert_parallel)

    def group(name: str, ranks: tuple[int, ...]) -> RankGroup | None:
        if len(ranks) == 1:
            return None
        made = RankGroup(dist.PrefixStore(f"{name}{ranks[0]}", store), ranks.index(rank), len(ranks))
        atexit.register(made.close)
        return made

    return mesh.connected(tp=group("tp", mesh.tp_ranks), ep=group("ep", mesh.ep_ranks))


def _main(folder: str, rank: int) -> None:
    import importlib

    count, module, name, args, threads = torch.load(Path(folder) / "call", weights_only=False)
    torch.set_num_threads(threads)
    store = dist.FileStore(str(Path(folder) / "store"), count)
    function = getattr(importlib.import_module(module), name)
    torch.save(function(rank, store, *args), Path(folder) / f"result{rank}")


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
