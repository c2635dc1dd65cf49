"""`rorqual collect-env`: what a bug report needs to know about this machine. Also the header of every benchmark."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform as python_platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rorqual import __version__, platform
from rorqual.cli.command import Command
from rorqual.cli.settings import Settings
from rorqual.config import StrictModel

_PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "gguf",
    "pydantic",
    "huggingface_hub",
    "transformers",
    "triton",
)
_ISA = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx_vnni",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
    "asimd",
    "sve",
    "bf16",
)
_VARIABLES = ("RORQUAL_", "HF_", "OMP_", "KMP_", "MKL_", "GOMP_", "CUDA_", "TORCH_", "LD_PRELOAD", "TRANSFORMERS_")
_SECRET_ENDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")


class CollectEnvOptions(StrictModel):
    """What `rorqual collect-env` itself takes."""

    json_: bool = False
    """Print one JSON object instead of a table."""


def run(settings: Settings) -> int:
    """Print everything about the machine."""
    facts = environment()
    if settings.build(CollectEnvOptions).json_:
        print(json.dumps(facts, indent=2))
        return 0
    for heading, content in facts.items():
        if not isinstance(content, dict):
            print(f"{heading:<20} {_shown(content)}")
            continue
        print(f"{heading}:{'' if content else ' none'}")
        for name, value in content.items():
            print(f"  {name:<26} {_shown(value)}")
    return 0


def environment() -> dict[str, Any]:
    """Versions, machine and environment variables, as JSON values; variables that hold secrets say only "set"."""
    return {
        "rorqual": __version__,
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "machine": machine(),
        "variables": _variables(),
    }


def versions() -> dict[str, str | None]:
    """Python's version and those of the packages that matter; None where one is not installed."""
    return {"python": python_platform.python_version()} | package_versions(_PACKAGES)


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """The installed version of each package, or None; nothing is imported."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Operating system, CPU, cores, memory in bytes, and GPUs."""
    return {
        "os": python_platform.platform(),
        "cpu": _cpu_model(),
        "isa": [flag for flag in _ISA if flag in platform.cpu_flags()],
        "compiled_kernels": _compiled_kernels(),
        "cores_in_machine": os.cpu_count(),
        "cores_usable": platform.usable_cores(),
        "cgroup_cpu_quota": platform.cgroup_cpu_quota(),
        "memory_total_bytes": platform.total_memory(),
        "memory_available_bytes": platform.available_memory(),
        "memory_cgroup_limit_bytes": platform.memory_limit(),
        "gpus": _gpus(),
    }


def git_commit() -> str | None:
    """The commit of the checkout that this package runs from, "-dirty" behind it if files differ; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        return commit + ("-dirty" if _git(root, "status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or no commit yet


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # no Linux
    return python_platform.processor() or python_platform.machine()


def _compiled_kernels() -> str | None:
    """The instruction set that the compiled kernels use here; None without them."""
    if importlib.util.find_spec("torch") is None:
        return None
    from rorqual.ops.native.library import kernels

    found = kernels()
    return found.isa if found else None


def _gpus() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    return [platform.describe_device(torch.device("cuda", i)) for i in range(torch.cuda.device_count())]


def _variables() -> dict[str, str]:
    shown = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            public = re.sub(r"//[^/@\s]*@", "//***@", value)  # a mirror's URL may carry a password
            shown[name] = "(set)" if name.upper().endswith(_SECRET_ENDS) else public
    return shown


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value / 2**30:.2f} GiB"
    return str(value)


COMMAND = Command(
    words=("collect-env",),
    summary="versions and hardware, for bug reports",
    details="Print versions, hardware and the environment variables that matter, for bug reports. Secrets stay unread.",
    models=(CollectEnvOptions,),
    run=run,
)
