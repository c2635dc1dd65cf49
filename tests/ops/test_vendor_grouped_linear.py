"""Products in groups as cuBLAS is asked for them, on the CPU."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from rorqual.ops.grouped_linear import grouped_linear
from tests.ops.grouped_cases import FOR_CUBLAS, GROUPED_CASES

MODULE = "rorqual.ops.vendor.grouped_linear"


@pytest.fixture
def vendor():
    """The module, and no trace of it afterwards where it was not loaded before."""
    loaded, before = MODULE in sys.modules, list(grouped_linear.impls)
    yield importlib.import_module(MODULE)
    if not loaded:
        grouped_linear.impls[:] = before
        del sys.modules[MODULE]


@pytest.mark.parametrize("case", ["plain", "plain_of_slices", "plain_transposed", "plain_many_rows"])
def test_groups_lie_side_by_side_in_the_output(case, vendor):
    (x, weights), options = GROUPED_CASES[case]()
    got, want = vendor.grouped_linear_vendor(x, weights, **options), grouped_linear.reference(x, weights, **options)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1.6e-2, atol=1e-2)


def test_the_cpu_is_refused(vendor):
    (x, weights), options = GROUPED_CASES["plain_many_rows"]()
    assert "needs tensors on cuda" in vendor._refuse(x, weights, **options)


def test_the_listed_cases_are_those_that_it_takes(vendor, monkeypatch):
    """On a GPU the parity tests rely on the list."""
    monkeypatch.setattr(vendor, "_elsewhere", lambda *tensors: None)
    taken = {
        case for case, make in GROUPED_CASES.items() if (made := make()) and vendor._refuse(*made[0], **made[1]) is None
    }
    assert taken == FOR_CUBLAS
