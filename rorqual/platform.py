"""What this machine is: cores, memory, instruction sets, devices and their dtypes. No torch at import."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import mmap
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction-set flags as Linux names them ("avx2", "avx512_vnni", "amx_bf16"); empty where unknown."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def usable_cores() -> int:
    """Cores that this process may use: the affinity mask, cut by a cgroup CPU quota. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = cgroup_cpu_quota()
    return max(1, min(cores, int(quota + 0.5) if quota else cores))


def cgroup_cpu_quota() -> float | None:
    """Cores' worth of time that the cgroup grants, or None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((_CGROUP / "cpu/cpu.cfs_quota_us").read_text())
        return None if quota_us <= 0 else quota_us / int((_CGROUP / "cpu/cpu.cfs_period_us").read_text())
    return None


def memory_limit() -> int | None:
    """Bytes that the cgroup grants, or None without a limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int((_CGROUP / name).read_text())
            return limit if limit < 1 << 60 else None
    return None


def available_memory() -> int:
    """Bytes that can be allocated without swapping, cgroup limit included."""
    free = _memory_available()
    limit = memory_limit()
    return free if limit is None else max(0, min(free, limit - _cgroup_memory_used()))


def total_memory() -> int:
    """Bytes of memory in the machine, or what the cgroup grants if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, memory_limit() or total)


def _memory_available() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_memory()


def _cgroup_memory_used() -> int:
    """Bytes charged to the cgroup, without file pages that the kernel can drop."""
    for used_name, stat_name, key in (
        ("memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):
            used = int((_CGROUP / used_name).read_text())
            stat = dict(line.split() for line in (_CGROUP / stat_name).read_text().splitlines())
            return used - int(stat.get(key, 0))
    return 0


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Tell glibc to keep what this process frees in pieces below 32 MiB, instead of handing it back to the kernel.

    A step's activations come and go by the megabyte; fetched anew, each page costs a fault, a fifth of a long prompt's
    time. Elsewhere than with glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def trim_heap() -> None:
    """Hand back to the kernel what is free; only with glibc, which otherwise keeps what other threads have freed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def return_freed_memory() -> None:
    """Hand back to the kernel, once, what loading has used and nobody needs now; only with glibc.

    That is what is free, for loading frees as much as it keeps; and 60 MB of torch's code, of which its start reads a
    little everywhere. Code that runs again is mapped again, from the file's pages that the kernel keeps.
    """
    trim_heap()
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, size in _code_of("libtorch_cpu.so", "libtorch_python.so"):
            libc.madvise(start, size, mmap.MADV_DONTNEED)


def _code_of(*libraries: str) -> list[tuple[int, int]]:
    """(address, bytes) of what these files have mapped to run and not to write."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, *_, file = line.split(maxsplit=5)
        if permissions.startswith("r-x") and os.path.basename(file) in libraries:
            start, stop = (int(address, 16) for address in addresses.split("-"))
            found.append((start, stop - start))
    return found


def load_torch_library() -> None:
    """Let a thread load torch's library, unless torch is there; a later `import torch` finds it, or waits for the rest.

    Relocating and initialising its 400 MB takes a third of a second without a line of Python. The import would hold
    Python's lock all the while; a plain call of dlopen does not. Where it fails, the import says why.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return
    # In this order, and seen as widely, as torch itself does it.
    wanted = {"libtorch_global_deps.so": os.RTLD_GLOBAL, "libtorch_cpu.so": os.RTLD_LOCAL}
    files = {Path(spec.origin).parent / "lib" / name: seen for name, seen in wanted.items()}
    if not all(file.is_file() for file in files):
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p

    def load() -> None:
        for file, seen in files.items():
            dlopen(os.fsencode(file), os.RTLD_NOW | seen)

    threading.Thread(target=load, name="load torch").start()


def pick_device(wanted: str) -> torch.device:
    """Answer --device: "auto" is a usable CUDA device, else the CPU. Raises ValueError for a "cuda" there is not."""
    import torch

    if wanted == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if wanted == "cuda":
        raise ValueError(
            "device 'cuda' was asked for, but torch sees no CUDA device: use --device cpu or check the driver"
        )
    return torch.device("cpu")


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 matrices in hardware."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"})


def describe_device(device: torch.device) -> str:
    """One line for people: the device and what matters about it."""
    import torch

    if device.type == "cuda":
        gib = torch.cuda.get_device_properties(device).total_memory / 2**30
        return f"{torch.cuda.get_device_name(device)} ({gib:.0f} GiB)"
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    flags = [flag for flag in wanted if flag in cpu_flags()]
    return f"cpu ({torch.get_num_threads()} threads; {' '.join(flags) or 'no SIMD flags known'})"


def describe_exit(code: int) -> str:
    """A process's exit code for people, as subprocess has it: below 0 it is the signal that has killed it."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"
