"""Triton kernels without a GPU: the parity tests once more, in a process where Triton interprets them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rorqual.ops.triton.launch import INTERPRETING

REPOSITORY = Path(__file__).parents[2]


_PRODUCTS = "linear or attention or experts"
_MIXTURES = "streams or route_ or compress or select_rows or store_rows"
_RARE = (
    "what_layers_share or (streams and many) or (narrow and (equals or hot or crowds or nearly or strided or excluded "
    "or behind or bfloat16)) or native_long_wide_heads or native_long_blocks or spread_contexts_bfloat16 "
    "or native_wider or (linear and (_16] or _33]) and not fp8_block_d) or (mxfp8_tile and (_wider] or uneven))"
)
"""Cases that take long and differ little from others: a format's sizes within one tile of rows stay with `fp8_block`
(the others keep 1, 7 and 130), and the shapes of its tiles' panels with `mxfp8`, whose kernel it shares."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(INTERPRETING, reason="this process interprets already")
@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        ("test_parity.py", f"triton and ({_PRODUCTS}) and not ({_RARE})"),
        ("test_parity.py", f"triton and ({_MIXTURES}) and not ({_PRODUCTS} or {_RARE})"),
        ("test_parity.py", f"triton and not ({_PRODUCTS} or {_MIXTURES} or {_RARE})"),
        pytest.param("test_parity.py", f"triton and ({_RARE})", marks=pytest.mark.slow),
        ("test_triton_linear.py", "triton"),
        ("test_triton_attention.py", "triton"),
        ("test_triton_company.py", "triton"),
        ("test_triton_decoder.py", "triton"),
        # Most of what these say of kernels is theirs by the parity tests too.
        *(
            pytest.param(file, "triton", marks=pytest.mark.slow)
            for file in (
                "test_triton_moe.py",
                "test_triton_quantized_experts.py",
                "test_triton_row_attention.py",
                "test_triton_select_rows.py",
            )
        ),
    ],
)
def test_kernels_equal_their_references_in_the_interpreter(file, chosen):
    """Triton decides when a kernel is defined whether to interpret it, hence processes of their own: several, which
    can run at the same time."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", chosen, f"tests/ops/{file}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 0
