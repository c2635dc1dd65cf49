"""The compiled kernels: found, and matched to the processor.

The package's installation compiles kernels/*.c once for each instruction set (without a compiler it installs without
them), and this module picks the best set that the processor has. RORQUAL_CPU_ISA names another one: for comparisons,
and to find out whether a kernel is at fault.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int, c_int64, c_void_p

import torch

from rorqual.platform import cpu_flags

_AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"}
_ISAS: dict[str, set[str]] = {
    "amx": _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
    "avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "avx512": _AVX512,
    "avx2": {"avx2", "fma", "f16c"},
    "generic": set(),
}
"""Best first -> the processor flags that it needs."""

_SIGNATURES: dict[str, list[type]] = {
    "linear": [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int],
    "linear_float32": [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int],
    "linear_quantized": [c_void_p, c_int64, *[c_void_p] * 4, *[c_int64] * 5, *[c_int] * 3],
    "embedding": [c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 5, c_int, c_void_p, c_int],
    "pack_integers": [*[c_void_p, c_int64] * 3, *[c_int64] * 5, c_void_p, c_int],
    "embedding_packed": [c_void_p, c_int64, c_void_p, c_void_p, c_int],
    "embedding_blocks": [c_void_p, *[c_int64] * 2, c_void_p, *[c_int64] * 2, c_void_p, c_int],
    "split_blocks": [c_int64, c_void_p, c_int64, *[c_void_p] * 3, c_int],
    "round_to_e4m3": [c_void_p, c_int64, c_void_p, *[c_int64] * 3, c_int, c_int],
    "rms_norm": [c_void_p, *[c_int64] * 2, c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3, c_float, c_int],
    "silu_and_mul": [c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float, c_int],
    "rope": [*[c_void_p, c_void_p, *[c_int64] * 3] * 2, c_void_p, c_void_p, *[c_int64] * 5, c_int, c_int],
    "store_kvcache": [*[c_void_p, c_int64, c_int64] * 2, *[c_void_p] * 3, *[c_int64] * 4, c_int],
    "attention_block": [c_void_p, c_void_p, c_int64, *[c_void_p] * 4],
    "gated_mlp_block": [*[c_void_p] * 5, c_int64, c_int],
    "decoder_layers": [c_void_p, c_int64, c_void_p, c_float, c_int, *[c_void_p] * 4],
    "fused_experts": [c_void_p, c_void_p, c_int64, *[c_void_p] * 2, c_int, *[c_int64] * 2, c_void_p, c_int],
    "sparse_moe_block": [*[c_void_p] * 5, c_int64, c_int],
    "route_softmax": [c_void_p, *[c_int64] * 4, c_int, *[c_void_p] * 2, c_int],
    "row_max": [c_void_p, *[c_int64] * 3, c_int, *[c_void_p] * 2, c_int],
    "narrow": [c_void_p, *[c_int64] * 3, c_int, *[c_void_p] * 7, c_int],
    "attention": [c_void_p, c_int64, c_int64, *[c_void_p] * 5, *[c_int64] * 6, c_float, c_int64, c_void_p, c_int],
}


class Operand(ctypes.Structure):
    """A weight as the kernels read it: `operand_t` of kernels/operand.h.

    It does not keep the tensors alive that it points to: it lies beside them, in what `prepare_weight` made.
    """

    _fields_ = (
        *((name, c_int64) for name in ("kind", "out_features", "in_features")),
        ("data", c_void_p),
        ("bias", c_void_p),
        *((name, c_int64) for name in ("block_bytes", "bits", "group", "offset", "has_minima", "wide_scales")),
        ("next", c_void_p),
    )

    def __init__(self, **fields: int) -> None:
        super().__init__(**fields)
        self.address = ctypes.addressof(self)
        """What the kernels are given."""

    def __deepcopy__(self, memo: dict[int, object]) -> Operand:
        """Itself: a tensor's copy finds that the operand is not of its own memory."""
        return self


class Kernels:
    """The kernels of one instruction set, as ctypes functions."""

    def __init__(self, library: ctypes.CDLL, isa: str) -> None:
        self.isa = isa
        (
            self.linear,
            self.linear_float32,
            self.linear_quantized,
            self.embedding,
            self.pack_integers,
            self.embedding_packed,
            self.embedding_blocks,
            self.split_blocks,
            self.round_to_e4m3,
            self.rms_norm,
            self.silu_and_mul,
            self.rope,
            self.store_kvcache,
            self.attention_block,
            self.gated_mlp_block,
            self.decoder_layers,
            self.fused_experts,
            self.sparse_moe_block,
            self.route_softmax,
            self.row_max,
            self.narrow,
            self.attention,
        ) = (self._function(library, name, signature) for name, signature in _SIGNATURES.items())

    def _function(self, library: ctypes.CDLL, name: str, signature: list[type]) -> Callable[..., int]:
        function = library[f"rorqual_{name}_{self.isa}"]
        function.argtypes, function.restype = signature, c_int
        return function


@functools.cache
def usable_isas() -> tuple[str, ...]:
    """The instruction sets that the processor has kernels for, best first; empty without compiled kernels."""
    library = _library()
    if library is None:
        return ()
    return tuple(isa for isa, needs in _ISAS.items() if needs <= cpu_flags() and _works(library, isa))


@functools.cache
def _chosen() -> Kernels | None:
    wanted = os.environ.get("RORQUAL_CPU_ISA")
    if wanted and wanted not in (*usable_isas(), "none"):
        allowed = ", ".join([*usable_isas(), "none"])
        raise ValueError(f"RORQUAL_CPU_ISA={wanted} is not to be had here; allowed: {allowed}; or leave it unset")
    return None if wanted == "none" else _best(wanted)


def _best(isa: str | None = None) -> Kernels | None:
    library, usable = _library(), usable_isas()
    return Kernels(library, isa or usable[0]) if library is not None and usable else None


_forced: list[Kernels | None] = []


def kernels() -> Kernels | None:
    """The kernels in use; None where there are no compiled ones.

    Raises ValueError if RORQUAL_CPU_ISA asks for what is not there.
    """
    return _forced[-1] if _forced else _chosen()


@contextmanager
def using(isa: str | None) -> Iterator[None]:
    """While the block runs, use another of `usable_isas`, or, with None, no compiled kernels."""
    _forced.append(_best(isa) if isa else None)
    try:
        yield
    finally:
        _forced.pop()


def missing() -> str | None:
    """Why there are no kernels, or None."""
    if kernels() is not None:
        return None
    if usable_isas():
        return "the compiled kernels are switched off"
    return "the compiled kernels were not built (installing again where there is a C compiler builds them)"


def missing_on(device: torch.device) -> str | None:
    """Why a model on this device goes without kernels that it could have, or None."""
    return missing() if device.type == "cpu" else None


_SHARED_FROM = 1 << 14
"""Values that are worth waking a second thread for."""


def threads_for(num_values: int) -> int:
    """Threads for a kernel that passes over so many values once."""
    return torch.get_num_threads() if num_values >= _SHARED_FROM else 1


@functools.cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("rorqual.ops.native._kernels")
    if spec is None or spec.origin is None:
        return None
    return ctypes.CDLL(spec.origin)


def _works(library: ctypes.CDLL, isa: str) -> bool:
    if not hasattr(library, f"rorqual_linear_{isa}"):
        return False
    return isa != "amx" or library.rorqual_request_amx() == 0
