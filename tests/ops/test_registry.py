"""How a call finds its implementation."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

import rorqual.ops
from rorqual.ops.registry import BACKENDS, OPS, Op, load_backends, op, watch


def double(x: int, *, shift: int = 0) -> str:
    """The reference."""
    return f"reference {2 * x + shift}"


@pytest.fixture
def made() -> Op:
    return Op(double)


def answer(name: str):
    def fn(x: int, *, shift: int = 0) -> str:
        return f"{name} {2 * x + shift}"

    return fn


def test_op_is_named_and_documented_like_its_reference(made):
    assert (made.name, made.__name__, made.__doc__) == ("double", "double", "The reference.")


def test_without_implementations_the_reference_answers(made):
    assert made(3, shift=1) == "reference 7"
    assert made.choose(3) is double
    assert made.explain(3) == {"reference": "ok"}


def test_backends_are_tried_in_the_order_of_preference_whatever_the_order_of_registration(made):
    for backend in ("cpu", "vendor", "triton", "tilelang", "native"):
        made.impl(backend)(answer(backend))
    assert [impl.backend for impl in made.impls] == list(BACKENDS) == ["vendor", "tilelang", "triton", "native", "cpu"]
    assert made(1) == "vendor 2"
    assert list(made.explain(1)) == [*BACKENDS, "reference"]


def test_refusal_passes_the_call_on(made):
    made.impl("vendor", refuse=lambda x, *, shift=0: "takes even numbers" if x % 2 else None)(answer("vendor"))
    made.impl("cpu", refuse=lambda x, *, shift=0: f"takes no shift, got {shift}" if shift else None)(answer("cpu"))
    assert made(2) == "vendor 4"
    assert made(2, shift=1) == "vendor 5"
    assert made(3) == "cpu 6"
    assert made(3, shift=1) == "reference 7"


def test_explain_says_why_not(made):
    made.impl("vendor", refuse=lambda x, *, shift=0: "takes even numbers" if x % 2 else None)(answer("vendor"))
    made.impl("cpu", refuse=lambda x, *, shift=0: f"takes no shift, got {shift}" if shift else None)(answer("cpu"))
    assert made.explain(3, shift=4) == {
        "vendor": "takes even numbers",
        "cpu": "takes no shift, got 4",
        "reference": "ok",
    }
    assert made.explain(2) == {"vendor": "ok", "cpu": "ok", "reference": "ok"}


def test_implementation_is_returned_as_it_is(made):
    fn = answer("cpu")
    assert made.impl("cpu")(fn) is fn
    assert made.choose(1) is fn


def test_unknown_backend_is_refused_with_the_allowed_ones(made):
    with pytest.raises(ValueError, match=r"unknown backend 'cuda'; allowed: vendor, tilelang, triton, native, cpu"):
        made.impl("cuda")


def test_second_implementation_of_a_backend_is_refused(made):
    made.impl("cpu")(answer("cpu"))
    with pytest.raises(ValueError, match=r"op 'double' already has a 'cpu' implementation"):
        made.impl("cpu")
    assert len(made.impls) == 1


def test_second_op_of_a_name_is_refused():
    load_backends("cpu")
    before = OPS["rms_norm"]

    def rms_norm() -> None:
        """A usurper."""

    with pytest.raises(ValueError, match=r"op 'rms_norm' is declared twice"):
        op(rms_norm)
    assert OPS["rms_norm"] is before


def test_declared_op_is_found_by_name():
    load_backends("cpu")
    assert OPS["linear"] is importlib.import_module("rorqual.ops.linear").linear
    assert all(made.name == name for name, made in OPS.items())


def test_every_backend_file_answers_an_op_of_the_file_of_its_name():
    """ops/cpu/NAME.py holds implementations of ops in ops/NAME.py, so that one is found from the other."""
    load_backends("native", "cpu")
    ops_folder = Path(rorqual.ops.__file__).parent
    for module in pkgutil.iter_modules([str(ops_folder / "cpu"), str(ops_folder / "native")]):
        if not module.name.startswith("_") and module.name != "library":  # parts, and what loads kernels
            assert (ops_folder / f"{module.name}.py").exists()
    for made in OPS.values():
        for impl in made.impls:
            folder, file = impl.fn.__module__.split(".")[-2:]
            if impl.backend in ("native", "cpu"):  # others are there where another test has loaded them
                assert (folder, file) == (impl.backend, made.reference.__module__.rpartition(".")[2])


def test_every_op_says_what_it_computes():
    load_backends("cpu")
    assert len(OPS) >= 15
    for made in OPS.values():
        assert len(made.__doc__ or "") > 40, made.name


def test_watchers_are_told_of_every_call_while_they_watch(made):
    made.impl("cpu", refuse=lambda x, *, shift=0: "takes even numbers" if x % 2 else None)(answer("cpu"))
    told = []
    with watch(lambda *what: told.append(what)):
        made(2)
        made(3)
    made(4)
    assert told == [
        (made, "cpu", {"cpu": "ok", "reference": "ok"}),
        (made, "reference", {"cpu": "takes even numbers", "reference": "ok"}),
    ]
