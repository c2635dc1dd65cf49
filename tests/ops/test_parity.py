"""Every implementation of every op against its reference, on every case. Registering a kernel is what tests it.

A new implementation needs no test of its own; a new op needs cases in tests/ops/cases.py. Compiled kernels are tried
once for every instruction set that this processor has, as backends "native avx2", "native amx" and so on; the others
are tried as on a machine without compiled kernels. Triton kernels and the GPU's own libraries are tried on a GPU where
there is one (run with -m gpu), Triton kernels also in their interpreter (tests/ops/test_triton_interpreted.py).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from rorqual.batch import Batch
from rorqual.ops.hyper_connection import StreamMix
from rorqual.ops.linear import unpack_weight
from rorqual.ops.native.library import usable_isas, using
from rorqual.ops.registry import OPS, Impl, Op, load_backends
from rorqual.ops.triton.launch import INTERPRETING, available
from rorqual.platform import native_bfloat16
from rorqual.quantization import QTensor
from tests.ops.cases import CASES
from tests.ops.gemm_cases import (
    GEMM_CASES,
    GEMM_NOT_FOR_ONEDNN,
    NOT_FOR_CUBLASLT,
    NOT_FOR_TRITON,
    TAKEN_BY_HOPPER_TILES,
    WEIGHTS_NOT_FOR_TRITON,
    WEIGHTS_TRITON_LEAVES_AS_THEY_ARE,
)
from tests.ops.grouped_cases import FOR_CUBLAS, GROUPED_CASES, GROUPED_REFUSED
from tests.ops.kv_cases import RECORD_STORE_REFUSED, TRANSFORM_REFUSED
from tests.ops.latent_cases import LATENT_CASES, LATENTS_EXPANDED_BY_VENDOR
from tests.ops.linear_cases import (
    NOT_FOR_NATIVE,
    NOT_FOR_ONEDNN,
    WEIGHTS_NOT_FOR_NATIVE,
    WEIGHTS_NOT_FOR_ONEDNN,
)
from tests.ops.norm_cases import NORM_REFUSED
from tests.ops.paged_cases import CAPPED_OR_SUNK_CASES
from tests.ops.quantize_cases import REFUSED_BY_TRITON as NOT_QUANTISED_BY_TRITON
from tests.ops.row_cases import STORE_ROWS_REFUSED

LOADED = {
    "native": True,
    "cpu": True,
    "triton": available(),
    "vendor": torch.cuda.is_available(),
}
load_backends(*(backend for backend, there in LOADED.items() if there))
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

BF16 = torch.bfloat16
EXACT = (0.0, 0.0)
TOLERANCES: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    # op -> dtype of the result -> (relative, absolute); what is not listed must be equal to the last bit.
    "paged_attention": {torch.float32: (1e-5, 2e-6), BF16: (2**-6, 2e-2)},  # scores are rounded to bfloat16
    "latent_attention": {torch.float32: (1e-5, 2e-6), BF16: (2**-6, 4e-2)},  # roundings in other places
    "row_attention": {torch.float32: (1e-5, 2e-6), BF16: (2**-6, 1e-2)},  # weights are rounded to bfloat16
    "rms_norm": {  # sums in another order, so that a rounding may fall on the other side
        torch.float32: (1e-5, 1e-6),
        BF16: (2**-7, 1e-6),
        torch.float16: (2**-10, 1e-6),
        torch.float8_e4m3fn: (2**-3, 2**-9),
    },
    "linear": {torch.float32: (1e-5, 1e-4), BF16: (2**-7, 2e-2), torch.float16: (2**-10, 1e-4)},  # order of sums
    "grouped_linear": {BF16: (2**-7, 2e-2)},
    "silu_and_mul": {  # one step in silu, another in the product; in float32 another exponential
        BF16: (2**-6, 1e-6),
        torch.float16: (2**-9, 1e-6),
        torch.float32: (1e-6, 1e-6),
    },
    # One step of the dtype; the absolute part is for sums that cancel where nothing fuses multiply and add.
    "rotary_embedding": {torch.float32: (2**-23, 1e-6), BF16: (2**-7, 1e-6), torch.float16: (2**-10, 1e-6)},
    # As rms_norm and rotary_embedding; the absolute part is a step of the largest value, which a rotation may cancel.
    "transform_kv": {BF16: (2**-7, 2**-5), torch.float32: (1e-5, 1e-5)},
    "transform_and_store_kv": {BF16: (2**-7, 2**-5)},
    "store_rows": {torch.float32: (1e-5, 1e-5)},
    "compress_rows": {torch.float32: (1e-5, 1e-5), BF16: (2**-7, 2**-5)},  # as transform_kv, and sums in another order
    # Sums in another order; bfloat16 streams are rounded once, and once more behind the norm.
    "mix_streams": {torch.float32: (1e-4, 2e-5), BF16: (2**-6, 1e-2)},
    "collapse_streams": {torch.float32: (1e-4, 2e-5), BF16: (2**-6, 1e-2)},
    "merge_streams": {torch.float32: (1e-5, 1e-5), BF16: (2**-7, 1e-4)},
    "merge_and_mix_streams": {torch.float32: (1e-4, 2e-5), BF16: (2**-6, 1e-2)},
    # Another exponential, which has no denormals everywhere; its argument's error counts.
    "route_scores": {torch.float32: (2e-5, 1e-37)},  # another exponential and logarithm
    "route_softmax": {BF16: (2**-7, 1e-37), torch.float32: (2e-5, 1e-37)},
}
ON_GPU: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    # Hopper's FP8 products keep about 13 bits of a sum while they add up to 128 products.
    "linear": {torch.float32: (1e-3, 2e-3), torch.float16: (2**-8, 2e-3)},
}
"""In place of TOLERANCES where the hardware adds otherwise than the interpreter."""
UNINITIALISED = {"allocate_kvcache", "allocate_experts"}
"""Ops whose results have a shape and no values yet."""
_FOR_NATIVE = "native_"
REFUSED: dict[tuple[str, str], set[str]] = {
    ("paged_attention", "cpu"): {"layout_of_the_gpu", "cache_of_another_dtype"} | CAPPED_OR_SUNK_CASES.keys(),
    ("store_kvcache", "cpu"): {"layout_of_the_gpu", "odd_heads_layout_of_the_gpu", "fp8_cache_bfloat16"},
    ("transform_kv", "triton"): TRANSFORM_REFUSED,
    ("transform_and_store_kv", "triton"): RECORD_STORE_REFUSED,
    ("grouped_linear", "triton"): GROUPED_REFUSED,
    ("grouped_linear", "vendor"): GROUPED_CASES.keys() - FOR_CUBLAS,
    ("latent_attention", "vendor"): LATENT_CASES.keys() - LATENTS_EXPANDED_BY_VENDOR,
    ("store_rows", "triton"): STORE_ROWS_REFUSED,
    ("quantize", "triton"): NOT_QUANTISED_BY_TRITON,
    **{("rms_norm", backend): cases for backend, cases in NORM_REFUSED.items()},
    ("prepare_weight", "cpu"): WEIGHTS_NOT_FOR_ONEDNN,
    ("unpack_weight", "cpu"): WEIGHTS_NOT_FOR_ONEDNN,
    ("linear", "cpu"): NOT_FOR_ONEDNN | GEMM_NOT_FOR_ONEDNN,
    ("linear", "native"): NOT_FOR_NATIVE | (GEMM_CASES.keys() - {"gemm_fp8_block_for_cublas"}),
    ("prepare_weight", "native"): WEIGHTS_NOT_FOR_NATIVE,
    ("unpack_weight", "native"): WEIGHTS_NOT_FOR_NATIVE,
    ("linear", "triton"): NOT_FOR_TRITON,
    ("linear", "vendor"): NOT_FOR_CUBLASLT | (TAKEN_BY_HOPPER_TILES if ON_HOPPER else set()),
    ("prepare_weight", "triton"): WEIGHTS_NOT_FOR_TRITON,
    ("unpack_weight", "triton"): WEIGHTS_TRITON_LEAVES_AS_THEY_ARE,
    ("gumbel_argmax", "cpu"): {"short_rows", "short_rows_kept", "some_greedy_short"},
    # Compiled kernels are for bfloat16, and products and caches of certain sizes: these cases are named after them.
    **{
        (op, "native"): {case for case in CASES[op] if not case.startswith(_FOR_NATIVE)}
        for op in ("paged_attention", "store_kvcache", "allocate_kvcache", "embedding", "split_blocks")
    },
    **{
        (op, "native"): {case for case in CASES[op] if "bfloat16" not in case}
        for op in ("silu_and_mul", "route_softmax")
    },
    ("rotary_embedding", "native"): {case for case in CASES["rotary_embedding"] if "bfloat16" not in case}
    | {"inplace_strided_bfloat16"},
}
NEEDS_BFLOAT16 = {("prepare_weight", "cpu"), ("unpack_weight", "cpu"), ("linear", "cpu")}
OF_PREPARED_WEIGHTS = {"linear", "unpack_weight"}
WRITE_ROWS = {"store_rows", "compress_rows"}
"""Ops whose results are in a cache, with tolerances as a result has them."""
COMPOSED = {
    *("attention_block", "gated_mlp_block", "decoder_layers", "gated_linear", "rotate_and_store"),
    *("fused_experts", "prepare_experts", "sparse_moe_block"),
}
"""Ops whose references are made of others: test_decoder_blocks.py, test_triton_decoder.py and test_moe.py have them."""


def device_of(backend: str) -> str:
    """Where a backend's implementations take tensors."""
    on_gpu = backend == "vendor" or (backend == "triton" and not INTERPRETING)
    return "cuda" if on_gpu else "cpu"


def parameters(ops: Mapping[str, Op[..., Any]]) -> Iterator[tuple[str, str, str | None]]:
    """(op, backend, case) of every implementation; one with None where there is no case."""
    for name, op in ops.items():
        for impl in () if name in COMPOSED else op.impls:
            variants = [f"native {isa}" for isa in usable_isas()] if impl.backend == "native" else [impl.backend]
            for backend in variants:
                for case in CASES.get(name) or [None]:
                    yield name, backend, case


def marked(rows: Iterable[tuple[Any, ...]], backend: int = 1) -> list[Any]:
    """Parameters of a test, those marked that need a GPU; `backend` is the position of the backend's name."""
    return [pytest.param(*row, marks=pytest.mark.gpu if device_of(row[backend]) == "cuda" else ()) for row in rows]


def require_cases(op: str, case: str | None) -> None:
    if case is None:
        pytest.fail(f"no cases for op {op!r}: add some to tests/ops/cases.py")


def clone(value: Any) -> Any:
    """A copy that shares nothing and keeps strides, so that writing to one call's arguments cannot touch another's."""
    return copy.deepcopy(value)


def moved(value: Any, device: str, memo: dict[tuple[int, torch.dtype], torch.Tensor] | None = None) -> Any:
    """The same on a device: every tensor inside keeps its strides, its gaps and whom it shares memory with."""
    memo = {} if memo is None else memo
    if isinstance(value, torch.Tensor):
        key = (value.untyped_storage().data_ptr(), value.dtype)
        if key not in memo:
            size = value.untyped_storage().nbytes() // value.element_size()
            memo[key] = value.as_strided((size,), (1,), 0).to(device)
        return memo[key].as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, torch.device):
        return torch.device(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **{name: moved(each, device, memo) for name, each in fields.items()})
    if isinstance(value, Mapping):
        return {name: moved(each, device, memo) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(each, device, memo) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(each, device, memo) for each in value)
    return value


def arguments(op: str, case: str, backend: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A case's arguments where the backend takes them."""
    made = CASES[op][case]()
    device = device_of(backend)
    return made if device == "cpu" else moved(made, device)


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
    if isinstance(value, QTensor) and type(value) is not QTensor:
        return tensors(unpack_weight(value))
    if isinstance(value, StreamMix):  # beside what an implementation laid out for itself
        return tensors(tuple(value[:3]))
    if dataclasses.is_dataclass(value):
        # A batch's scratch is the kernels' own.
        return tensors([getattr(value, field.name) for field in dataclasses.fields(value) if field.name != "scratch"])
    if isinstance(value, Mapping):
        return tensors(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def widened(value: torch.Tensor) -> torch.Tensor:
    """float8 as float32, since float8 has little arithmetic of its own; other tensors as they are."""
    return value.float() if value.is_floating_point() and value.dtype.itemsize == 1 else value


def opposite(value: torch.Tensor) -> torch.Tensor:
    """The negative, of float8 too."""
    return (-widened(value)).to(value.dtype)


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
    """The arguments as this backend's ops get them: weights laid out by its own `prepare_weight`."""
    if op not in OF_PREPARED_WEIGHTS:
        return args
    at = 1 if op == "linear" else 0
    for prepare in OPS["prepare_weight"].impls:
        if prepare.backend == backend.partition(" ")[0] and prepare.refuse(args[at]) is None:
            return (*args[:at], prepare.fn(args[at]), *args[at + 1 :])
    return args


def assert_close(op: str, got: Any, want: Any, *, equal_nan: bool = False) -> None:
    for ours, theirs in zip(tensors(got), tensors(want), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        tolerances = TOLERANCES.get(op, {}) | (ON_GPU.get(op, {}) if theirs.is_cuda else {})
        rtol, atol = tolerances.get(theirs.dtype, EXACT)
        torch.testing.assert_close(widened(ours), widened(theirs), rtol=rtol, atol=atol, equal_nan=equal_nan)


@pytest.mark.parametrize(("op", "backend", "case"), marked(parameters(OPS)))
def test_implementation_equals_its_reference(op, backend, case):
    require_cases(op, case)
    if (op, backend) in NEEDS_BFLOAT16 and not native_bfloat16(torch.device("cpu")):
        pytest.skip("this processor has no bfloat16 matrix instructions")
    args, options = arguments(op, case, backend)
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
    want_options, got_options = clone(options), clone(options)
    want = OPS[op].reference(*want_args, **want_options)
    got_args = packed(op, backend, clone(args))
    got = impl.fn(*got_args, **got_options)

    assert isinstance(got, type(want))
    if op in UNINITIALISED:
        assert [(t.shape, t.dtype) for t in tensors(got)] == [(t.shape, t.dtype) for t in tensors(want)]
        return
    assert_close(op, got, want, equal_nan="nan" in case)
    assert_close(op, got_options, want_options, equal_nan=True)  # some are written to
    if op not in OF_PREPARED_WEIGHTS:
        for ours, theirs in zip(tensors(got_args), tensors(want_args), strict=True):
            if options.get("inplace") or op in WRITE_ROWS:
                assert_close(op, ours, theirs, equal_nan=True)
                continue
            same = {"rtol": 0, "atol": 0, "equal_nan": True, "msg": "an argument was changed"}
            torch.testing.assert_close(widened(ours), widened(theirs), **same)


_PARAMETERS = {op: set(inspect.signature(made.reference).parameters) for op, made in OPS.items()}
SHARES_WORK = {op: names for op, names in _PARAMETERS.items() if names & {"scratch", "batch"}}
PER_LAYER = {"x", "query", "key", "value", "key_cache", "value_cache"}


@pytest.mark.parametrize(
    ("op", "backend", "case"),
    marked(
        (op, backend, case)
        for op, backend, case in parameters(OPS)
        if op in SHARES_WORK and case not in REFUSED.get((op, backend.partition(" ")[0]), ())
    ),
)
def test_what_layers_share_is_right_for_each_of_them(op, backend, case):
    """Two layers, one batch: the second finds what the first has worked out, and has other keys and values."""
    args, options = arguments(op, case, backend)
    impl = impl_of(op, backend)
    scratch: dict[Any, Any] = next((a.scratch for a in args if isinstance(a, Batch)), {})
    shared = {"scratch": scratch} if "scratch" in SHARES_WORK[op] else {}
    names = list(inspect.signature(OPS[op].reference).parameters)
    other_layer = [opposite(a) if name in PER_LAYER else a for name, a in zip(names, args, strict=False)]
    sizes = []
    for layer in (args, other_layer):
        want_args = clone(layer)
        want = OPS[op].reference(*want_args, **clone(options))
        got = impl.fn(*layer, **clone(options), **shared)
        assert_close(op, got, want)
        assert_close(op, [a for a in layer if isinstance(a, torch.Tensor)],
                     [a for a in want_args if isinstance(a, torch.Tensor)], equal_nan=True)  # fmt: skip
        sizes.append(len(scratch))
    assert sizes[0] == sizes[1]
    # Compiled kernels start from the tensors.
    assert sizes[0] > 0 or impl.backend in ("native", "triton"), "nothing was shared"


@pytest.mark.parametrize(
    "backend", marked(sorted({(b,) for op, b, _ in parameters(OPS) if op == "paged_attention"}), backend=0)
)
def test_layers_with_and_without_a_window_share_a_batch(backend):
    args, options = arguments("paged_attention", "native_mixed" if backend.startswith("native") else "mixed", backend)
    for window in (None, 4, 7, None, 4):
        got = impl_of("paged_attention", backend).fn(*args, **options, sliding_window=window)
        assert_close("paged_attention", got, OPS["paged_attention"].reference(*args, **options, sliding_window=window))


@pytest.mark.parametrize(
    "backend", marked(sorted({(b,) for op, b, _ in parameters(OPS) if op == "paged_attention"}), backend=0)
)
def test_attention_lands_where_it_is_told_to(backend):
    args, options = arguments("paged_attention", "native_mixed" if backend.startswith("native") else "mixed", backend)
    for run in (impl_of("paged_attention", backend).fn, OPS["paged_attention"].reference):
        want = run(*args, **options)
        out = torch.full(args[0].shape, torch.nan, dtype=args[0].dtype, device=args[0].device)
        assert run(*args, **options, out=out).data_ptr() == out.data_ptr()
        torch.testing.assert_close(out, want, rtol=0, atol=0)


@pytest.mark.parametrize("op", [name for name in OPS if name not in COMPOSED])
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
        got = OPS[op].reference(*as_given, **clone(options))
        want = OPS[op].reference(*as_dense, **clone(options))
        for ours, theirs in zip(tensors((got, as_given)), tensors((want, as_dense)), strict=True):
            assert ours.dtype == theirs.dtype
            close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True, "msg": f"{op}, case {case}"}
            torch.testing.assert_close(widened(ours), widened(theirs), **close)
        if "nan" not in case:
            assert not any(bool(t.isnan().any()) for t in tensors(got)), case


def test_every_listed_refusal_names_a_case():
    for (op, backend), cases in REFUSED.items():
        assert not LOADED[backend] or impl_of(op, backend)
        assert cases <= CASES[op].keys()


def test_moved_arguments_keep_strides_and_share_memory():
    wide = torch.arange(40.0).reshape(4, 10)
    views = {"a": wide[:, 1:4], "b": [wide.t()]}
    for device in ("cpu", "meta"):
        got = moved(views, device)
        for ours, theirs in zip(tensors(got), tensors(views), strict=True):
            assert (ours.shape, ours.stride(), ours.device.type) == (theirs.shape, theirs.stride(), device)
            assert ours.storage_offset() == theirs.storage_offset()
        assert got["a"]._base is got["b"][0]._base
    assert torch.equal(moved(views, "cpu")["a"], views["a"])


def test_implementation_without_cases_fails():
    orphan = Op(test_every_listed_refusal_names_a_case)
    orphan.impl("cpu")(lambda: None)
    assert list(parameters({"orphan": orphan})) == [("orphan", "cpu", None)]
    with pytest.raises(pytest.fail.Exception, match="no cases for op 'orphan'"):
        require_cases("orphan", None)
