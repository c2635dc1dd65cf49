"""The kernels of rows, of the compressor and of products in groups compile for SM90, without a GPU: wide words, memory,
no spilled registers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rorqual.ops.triton.launch import INTERPRETING
from rorqual.quantization import FP8_BLOCK, FP8_ROW, QTensor
from rorqual.quantization.kv_record import V4
from tests.ops.row_cases import STORE_ROWS_CASES, compress_case
from tests.ops.test_triton_linear_sm90 import SHARED_MEMORY, Recorded, stack_bytes

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from rorqual.ops.triton import _grouped_kernels, compress_rows, grouped_linear, kv_transform, row_cache  # noqa: E402


def recorded(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> Recorded:
    kernel = Recorded(getattr(module, name))
    monkeypatch.setattr(module, name, kernel)
    return kernel


def checked(kernel: Recorded, folder: Any) -> str:
    """The kernel's instructions."""
    compiled = kernel.compiled()
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(compiled.asm["cubin"], folder) == 0
    return compiled.asm["ptx"]


@pytest.mark.parametrize(("case", "store"), [("latent", "v4.b32"), ("entry", "v4.b32"), ("record", "v2.b32")])
def test_rows_are_stored_in_wide_words(case, store, monkeypatch, tmp_path):
    kernel = recorded(monkeypatch, kv_transform, "transform_kernel")
    args, options = STORE_ROWS_CASES[case]()
    row_cache.store_rows_triton(*args, **options)
    assert f"st.global.{store}" in checked(kernel, tmp_path)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (128, False)])
@pytest.mark.parametrize("num_tokens", [1, 300])
def test_compressor_reads_and_writes_wide_words(ratio, overlap, num_tokens, monkeypatch, tmp_path):
    kernel = recorded(monkeypatch, compress_rows, "_compress_kernel")
    entries = recorded(monkeypatch, kv_transform, "transform_kernel")
    shape = {"ratio": ratio, "overlap": overlap, "width": 512, "rope_dims": 64, "record": V4}
    args, options = compress_case([num_tokens], [num_tokens + 1], **shape)
    compress_rows.compress_rows_triton(*args, **options)
    code = checked(kernel, tmp_path)
    assert "ld.global.v4.b32" in code
    assert "st.global.v4.b32" in code
    checked(entries, tmp_path)


@pytest.mark.parametrize("rows", [1, 48, 128, 300])
@pytest.mark.parametrize("activation", [None, FP8_ROW], ids=["weight_only", "both"])
def test_fp8_products_in_groups_compile(rows, activation, monkeypatch, tmp_path):
    name = "grouped_weight_only_kernel" if activation is None else "grouped_scaled_kernel"
    kernel = recorded(monkeypatch, _grouped_kernels, name)
    monkeypatch.setattr(grouped_linear, "quantize", QTensor.quantize)
    weights = tuple(QTensor.quantize(torch.zeros(256, 1024), FP8_BLOCK) for _ in range(3))
    x, out = torch.zeros(rows, 3, 1024, dtype=torch.bfloat16), torch.empty(rows, 3, 256, dtype=torch.bfloat16)
    grouped_linear._multiply_blocks(x, weights, out, activation)
    assert "cp.async" in checked(kernel, tmp_path)


@pytest.mark.parametrize("rows", [1, 16, 128, 300])
def test_plain_products_in_groups_compile(rows, monkeypatch, tmp_path):
    kernel = recorded(monkeypatch, _grouped_kernels, "grouped_plain_kernel")
    x, weights = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((rows, 8, 512), (8, 256, 512)))
    grouped_linear._multiply_plain(x, weights, torch.empty(rows, 8, 256, dtype=torch.bfloat16))
    assert "cp.async" in checked(kernel, tmp_path)
