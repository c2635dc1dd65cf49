"""Every implementation of every op against its reference, on every case. Registering a kernel is what tests it.

A new implementation needs no test of its own; a new op needs cases in tests/ops/cases.py. Compiled kernels are tried
once for every instruction set that this processor has, as backends "native avx2", "native amx" and so on; the others
are tried as on a machine without compiled kernels.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from rorqual.batch import Batch
from rorqual.ops.native.library import usable_isas, using
from rorqual.ops.registry import OPS, Impl, Op, load_backends
from rorqual.platform import native_bfloat16
from tests.ops.cases import CASES

load_backends("native", "cpu")

BF16 = torch.bfloat16
EXACT = (0.0, 0.0)
TOLERANCES: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    # op -> dtype of the result -> (relative, absolute); what is not listed must be equal to the last bit.
    "paged_attention": {torch.float32: (1e-5, 2e-6), BF16: (2**-6, 2e-2)},  # scores are rounded to bfloat16
    "rms_norm": {torch.float32: (1e-5, 1e-6), BF16: (2**-7, 1e-6)},  # one step: weight before or after rounding
    "add_rms_norm": {torch.float32: (1e-5, 1e-6), BF16: (2**-7, 1e-6)},
    "linear": {torch.float32: (1e-5, 1e-4), BF16: (2**-7, 2e-2)},  # sums in another order
    "silu_and_mul": {BF16: (2**-6, 1e-6)},  # one step in silu, another in the product
    "rotary_embedding": {torch.float32: (1e-6, 1e-6), BF16: (2**-7, 1e-6)},  # a fused multiply and add
    "total_mass": {torch.float64: (1e-12, 0.0)},
}
UNINITIALISED = {"allocate_kvcache"}
"""Ops whose results have a shape and no values yet."""
_FOR_NATIVE = "native_"
REFUSED: dict[tuple[str, str], set[str]] = {
    ("paged_attention", "cpu"): {"layout_of_the_gpu", "cache_of_another_dtype"},
    ("rotary_embedding", "cpu"): {"part_of_the_head", "part_of_the_head_bfloat16", "half_of_the_head_bfloat16"},
    ("store_kvcache", "cpu"): {"layout_of_the_gpu"},
    ("prepare_weight", "cpu"): {"float32"},
    ("linear", "cpu"): {"float32", "float32_bias"},  # such a weight is not packed
    ("gumbel_argmax", "cpu"): {"short_rows", "candidates", "many_candidates"},
    # Compiled kernels are for bfloat16, and products and caches of certain sizes: these cases are named after them.
    **{
        (op, "native"): {case for case in CASES[op] if not case.startswith(_FOR_NATIVE)}
        for op in ("paged_attention", "store_kvcache", "allocate_kvcache", "linear", "prepare_weight")
    },
    **{
        (op, "native"): {case for case in CASES[op] if "bfloat16" not in case}
        for op in ("rms_norm", "add_rms_norm", "silu_and_mul", "rotary_embedding")
    },
}
NEEDS_BFLOAT16 = {("prepare_weight", "cpu"), ("linear", "cpu")}


def parameters(ops: Mapping[str, Op[..., Any]]) -> Iterator[tuple[str, str, str | None]]:
    """(op, backend, case) of every implementation; one with None where there is no case."""
    for name, op in ops.items():
        for impl in op.impls:
            variants = [f"native {isa}" for isa in usable_isas()] if impl.backend == "native" else [impl.backend]
            for backend in variants:
                for case in CASES.get(name) or [None]:
                    yield name, backend, case


def require_cases(op: str, case: str | None) -> None:
    if case is None:
        pytest.fail(f"no cases for op {op!r}: add some to tests/ops/cases.py")


def clone(value: Any) -> Any:
    """A copy that shares nothing and keeps strides, so that writing to one call's arguments cannot touch another's."""
    return copy.deepcopy(value)


def unpacked(value: torch.Tensor) -> torch.Tensor:
    """What `prepare_weight` was given, from what any of its implementations made of it; other tensors as they are."""
    if value.is_mkldnn:
        return value.to_dense()
    if value.dim() == 4 and value.shape[2:] == (16, 2):
        return value.transpose(1, 2).reshape(value.shape[0] * 16, -1)
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor inside a result or arguments, in order."""
    if isinstance(value, torch.Tensor):
        return [unpacked(value)]
    if dataclasses.is_dataclass(value):
        # A batch's scratch is the kernels' own.
        return tensors([getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "scratch"])
    if isinstance(value, Mapping):
        return tensors(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def impl_of(op: str, backend: str) -> Impl[..., Any]:
    return next(impl for impl in OPS[op].impls if impl.backend == backend.partition(" ")[0])


@pytest.fixture(autouse=True)
def _instruction_set(request):
    """The compiled kernels that the case is about; none if it is about other implementations."""
    callspec = getattr(request.node, "callspec", None)
    backend = callspec.params.get("backend", "") if callspec else ""
    with using(backend.removeprefix("native ") if backend.startswith("native") else None):
        yield


def packed(op: str, backend: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as this backend's `linear` gets them: weights laid out by its own `prepare_weight`."""
    if op != "linear":
        return args
    prepare = impl_of("prepare_weight", backend)
    x, weight, *bias = args
    return (x, weight if prepare.refuse(weight) else prepare.fn(weight), *bias)


def assert_close(op: str, got: Any, want: Any, *, equal_nan: bool = False) -> None:
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        assert ours.shape == theirs.shape
        rtol, atol = TOLERANCES.get(op, {}).get(theirs.dtype, EXACT)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, equal_nan=equal_nan)


@pytest.mark.parametrize(("op", "backend", "case"), list(parameters(OPS)))
def test_implementation_equals_its_reference(op, backend, case):
    require_cases(op, case)
    if (op, backend) in NEEDS_BFLOAT16 and not native_bfloat16(torch.device("cpu")):
        pytest.skip("this processor has no bfloat16 matrix instructions")
    args, options = CASES[op][case]()
    impl = impl_of(op, backend)
    own_args = packed(op, backend, args)
    refusal = impl.refuse(*own_args, **options)
    assert (refusal is not None) == (case in REFUSED.get((op, impl.backend), ())), (
        refusal or "takes a case listed as refused"
    )
    if refusal is not None:
        assert OPS[op].explain(*own_args, **options)[impl.backend] == refusal
        return

    want_args = clone(args)
    want = OPS[op].reference(*want_args, **clone(options))
    got_args = packed(op, backend, clone(args))
    got = impl.fn(*got_args, **clone(options))

    assert type(got) is type(want)
    if op in UNINITIALISED:
        assert [(t.shape, t.dtype) for t in tensors(got)] == [(t.shape, t.dtype) for t in tensors(want)]
        return
    assert_close(op, got, want, equal_nan="nan" in case)
    if op != "linear":  # whose arguments are packed
        for ours, theirs in zip(tensors(got_args), tensors(want_args), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True, msg="an argument was changed")


_PARAMETERS = {op: set(inspect.signature(made.reference).parameters) for op, made in OPS.items()}
SHARES_WORK = {op: names for op, names in _PARAMETERS.items() if names & {"scratch", "batch"}}
PER_LAYER = {"x", "query", "key", "value", "key_cache", "value_cache"}


@pytest.mark.parametrize(
    ("op", "backend", "case"),
    [
        (op, backend, case)
        for op, backend, case in parameters(OPS)
        if op in SHARES_WORK and case not in REFUSED.get((op, backend.partition(" ")[0]), ())
    ],
)
def test_what_layers_share_is_right_for_each_of_them(op, backend, case):
    """Two layers, one batch: the second finds what the first has worked out, and has other keys and values."""
    args, options = CASES[op][case]()
    impl = impl_of(op, backend)
    scratch: dict[Any, Any] = next((a.scratch for a in args if isinstance(a, Batch)), {})
    shared = {"scratch": scratch} if "scratch" in SHARES_WORK[op] else {}
    names = list(inspect.signature(OPS[op].reference).parameters)
    other_layer = [-a if name in PER_LAYER else a for name, a in zip(names, args, strict=False)]
    sizes = []
    for layer in (args, other_layer):
        want_args = clone(layer)
        want = OPS[op].reference(*want_args, **options)
        got = impl.fn(*layer, **options, **shared)
        assert_close(op, got, want)
        assert_close(op, [a for a in layer if isinstance(a, torch.Tensor)],
                     [a for a in want_args if isinstance(a, torch.Tensor)], equal_nan=True)  # fmt: skip
        sizes.append(len(scratch))
    assert sizes[0] == sizes[1]
    assert sizes[0] > 0 or impl.backend == "native", "nothing was shared"  # compiled kernels start from the tensors


@pytest.mark.parametrize("backend", sorted({b for op, b, _ in parameters(OPS) if op == "paged_attention"}))
def test_layers_with_and_without_a_window_share_a_batch(backend):
    args, options = CASES["paged_attention"]["native_mixed" if backend.startswith("native") else "mixed"]()
    for window in (None, 4, 7, None, 4):
        got = impl_of("paged_attention", backend).fn(*args, **options, sliding_window=window)
        assert_close("paged_attention", got, OPS["paged_attention"].reference(*args, **options, sliding_window=window))


@pytest.mark.parametrize("op", OPS)
def test_reference_does_not_care_about_strides(op):
    """On every case, and on cases alike with dense arguments. Also keeps the cases of ops without kernels alive."""
    require_cases(op, next(iter(CASES.get(op, ())), None))
    if op in UNINITIALISED:
        return
    for case, make in CASES[op].items():
        if case.startswith(("spread", "chunk_beyond")):
            continue  # large, for the kernels' sake
        args, options = make()
        dense = [a.contiguous() if isinstance(a, torch.Tensor) and "cache" not in case else a for a in args]
        as_given, as_dense = clone(args), clone(dense)
        got = OPS[op].reference(*as_given, **options)
        want = OPS[op].reference(*as_dense, **options)
        for ours, theirs in zip(tensors((got, as_given)), tensors((want, as_dense)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True, msg=f"{op}, case {case}")
        if "nan" not in case:
            assert not any(bool(t.isnan().any()) for t in tensors(got)), case


def test_every_listed_refusal_names_a_case():
    for (op, backend), cases in REFUSED.items():
        assert impl_of(op, backend)
        assert cases <= CASES[op].keys()


def test_implementation_without_cases_fails():
    orphan = Op(test_every_listed_refusal_names_a_case)
    orphan.impl("cpu")(lambda: None)
    assert list(parameters({"orphan": orphan})) == [("orphan", "cpu", None)]
    with pytest.raises(pytest.fail.Exception, match="no cases for op 'orphan'"):
        require_cases("orphan", None)
