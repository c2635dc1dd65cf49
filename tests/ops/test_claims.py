"""What contracts of DeepInfer's operators say and the tests beside each op do not: addresses, widths, compiled kernels.

`docs/lineage.md` lists every claim with its test.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rorqual.ops.linear import linear, prepare_weight
from rorqual.ops.registry import load_backends
from rorqual.ops.rms_norm import rms_norm
from rorqual.ops.rope import rotary_embedding
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.quantization import QTensor
from tests.ops.linear_cases import FORMATS
from tests.ops.number_values import numbers
from tests.ops.values import normal

load_backends("native", "cpu")
if available():
    load_backends("triton")
if torch.cuda.is_available():
    load_backends("vendor")

BF16 = torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def array(x: torch.Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("first", [0, 1, 3, 8])
@pytest.mark.parametrize("kind", ["plain", *FORMATS])
def test_an_accumulator_may_start_at_any_address(kind, first, device):
    """Only the distance between rows is bound to 32 bytes: the first row may lie anywhere, and nothing beside it
    changes."""
    weight = normal(20, 64, seed=1)
    weight = weight.to(BF16) if kind == "plain" else QTensor.quantize(weight, FORMATS[kind][0])
    factors = array(weight) if isinstance(weight, torch.Tensor) else numbers(weight)
    x, start = normal(5, 64, dtype=BF16), normal(5, 20, dtype=BF16, seed=3)
    memory = torch.full((first + 5 * 32 + 32,), float("nan"), dtype=BF16, device=device)
    acc = memory.as_strided((5, 20), (32, 1), first).copy_(start)
    assert linear(x.to(device), prepare_weight(weight.to(device)), out_acc=acc) is acc
    want, sizes = array(x) @ factors.T + array(start), np.abs(array(x)) @ np.abs(factors).T
    assert (np.abs(array(acc) - want) <= 2**-8 * np.abs(want) + 1e-5 * sizes).all()
    acc.fill_(float("nan"))
    assert memory.isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [8192, 8193, 16384, 20000])
def test_norms_may_be_wider_than_8192(size, device):
    x, residual = normal(2, size, dtype=BF16), normal(2, size, dtype=BF16, seed=1)
    weight = normal(size, dtype=BF16, seed=2)
    total = array((x.double() + residual.double()).to(BF16))
    want = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * array(weight)
    got = rms_norm(x.to(device), weight.to(device), eps=1e-6, residual=residual.to(device))
    np.testing.assert_array_equal(array(got.residual), total)
    np.testing.assert_allclose(array(got.out), want, rtol=2**-8 * 1.01, atol=1e-7)


# --- what Triton kernels are compiled for

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or INTERPRETING, reason="kernels are not compiled here"
)
POINTERS = {BF16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64"}
Launch = dict[str, Any]


class Recorded:
    """In a kernel's place: keeps what it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            self.launches.append(dict(zip(self.kernel.arg_names, args, strict=False)) | constants)

        return launch

    def compiled_for(self, launch: Launch) -> Launch:
        """All that a launch's arguments tell the compiler: Triton compiles once per answer."""
        known: Launch = {}
        for parameter in self.kernel.params:
            value = launch[parameter.name]
            if parameter.is_constexpr or value is None:
                known[parameter.name] = ("constant", value)
            elif isinstance(value, torch.Tensor):
                known[parameter.name] = ("pointer", POINTERS[value.dtype])
            elif isinstance(value, float):
                known[parameter.name] = ("number", "fp32")
            elif parameter.do_not_specialize:
                known[parameter.name] = ("number", "i32")
            else:
                known[parameter.name] = ("constant", 1) if value == 1 else ("number", "i32", value % 16 == 0)
        return known


@pytest.fixture
def recorded(monkeypatch) -> Iterator[Any]:
    """(implementation, recorder of its kernel) by the name of a file in ops/triton, which stays unregistered."""

    def of(name: str, op: Any, kernel: str) -> tuple[Any, Recorded]:
        module = f"rorqual.ops.triton.{name}"
        monkeypatch.setattr(op, "impls", [])
        monkeypatch.setitem(sys.modules, module, None)  # so that what was there is put back
        del sys.modules[module]
        loaded = importlib.import_module(module)
        recorder = Recorded(getattr(loaded, kernel))
        monkeypatch.setattr(loaded, kernel, recorder)
        return op.impls[0].fn, recorder

    return of


def gaps(rows: int, size: int, gap: int, seed: int = 0) -> torch.Tensor:
    """[rows, size] in rows that are size + gap values apart."""
    return normal(rows, size + gap, dtype=BF16, seed=seed)[:, :size]


@needs_compiler
def test_rows_and_strides_compile_no_norm_anew(recorded):
    """Any number of rows, and strides that are a multiple of 16, as DeepInfer asks for: one kernel for all."""
    run, recorder = recorded("rms_norm", rms_norm, "_rms_norm_kernel")
    weight = torch.ones(512, dtype=BF16)
    for rows in (1, 2, 7, 16, 33, 1000):
        for gap, beside in ((0, 0), (16, 0), (0, 48), (512, 32)):
            run(gaps(rows, 512, gap), weight, eps=1e-6, residual=gaps(rows, 512, beside, 1))
    assert len(recorder.launches) == 24
    first = recorder.compiled_for(recorder.launches[0])
    assert all(recorder.compiled_for(launch) == first for launch in recorder.launches)
    run(gaps(7, 512, 0), weight, eps=1e-6)
    assert recorder.compiled_for(recorder.launches[-1]) != first, "what is not there is known to the compiler"


@needs_compiler
def test_tokens_and_strides_compile_no_rotation_anew(recorded):
    run, recorder = recorded("rope", rotary_embedding, "_rotary_embedding_kernel")
    for tokens in (1, 2, 16, 33, 500):
        for table in (40, 64, 1000):
            merged = normal(tokens, 4 + 2 + 2 * (tokens % 2), 64, dtype=BF16)
            query, key = merged[:, :4], merged[:, 4:6]
            run(query, torch.zeros(tokens, dtype=torch.int64), torch.ones(table, 64), key=key)
    first = recorder.compiled_for(recorder.launches[0])
    assert len(recorder.launches) == 15
    assert all(recorder.compiled_for(launch) == first for launch in recorder.launches)


@needs_compiler
@pytest.mark.parametrize("residual", [False, True])
def test_a_norm_reads_and_writes_every_tensor_once_and_no_other(recorded, residual):
    """1,024 bfloat16 values on 128 threads are one access of 16 bytes per thread and tensor. A residual adds one that
    is read and one that is written; without it nothing of either is left."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    run, recorder = recorded("rms_norm", rms_norm, "_rms_norm_kernel")
    x, weight = normal(8, 1024, dtype=BF16), torch.ones(1024, dtype=BF16)
    run(x, weight, eps=1e-6, residual=x if residual else None)
    (launch,) = recorder.launches
    signature, constants, hints = {}, {}, {}
    for position, (name, (kind, value, *aligned)) in enumerate(recorder.compiled_for(launch).items()):
        signature[name] = "constexpr" if kind == "constant" else value
        if kind == "constant":
            constants[(position,)] = value
        if kind == "pointer" or aligned == [True]:
            hints[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(recorder.kernel, signature, constants, hints)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    loads, stores = (re.findall(rf"\b{access}\.global\S*", code) for access in ("ld", "st"))
    assert (len(loads), len(stores)) == ((3, 2) if residual else (2, 1))
    assert all(access.endswith("v4.b32") for access in loads + stores)
