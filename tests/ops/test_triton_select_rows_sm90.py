"""The indexer's kernels compile for SM90, without a GPU: instructions, memory, no spilled registers in products."""

from __future__ import annotations

import re

import pytest

from rorqual.ops.triton.launch import INTERPRETING
from rorqual.quantization.kv_record import INDEX_FP4, INDEX_FP8
from tests.ops.select_cases import select_case
from tests.ops.test_triton_linear_sm90 import SHARED_MEMORY, Recorded, stack_bytes

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from rorqual.ops.triton import select_rows  # noqa: E402


class RecordedLaunch(Recorded):
    """Of launches that leave the number of stages to their loops, and may bound registers."""

    def __getitem__(self, grid):
        launch = super().__getitem__(grid)

        def record(*args, maxnreg=None, **options):
            launch(*args, **{"num_stages": 3} | options)
            self.options["maxnreg"] = maxnreg

        return record


@pytest.mark.parametrize("query_len", [1, 20], ids=["answer", "prompt"])
@pytest.mark.parametrize("record", [None, INDEX_FP8, INDEX_FP4], ids=["bfloat16", "fp8", "fp4"])
def test_scores_compile_for_sm90(record, query_len, monkeypatch, tmp_path):
    kernel = RecordedLaunch(select_rows.scores_kernel)
    monkeypatch.setattr(select_rows, "scores_kernel", kernel)
    monkeypatch.setattr(select_rows, "select_kernel", RecordedLaunch(select_rows.select_kernel))
    args, options = select_case([query_len], [700], top_k=512, heads=64, dim=128, rows_per_block=16, record=record)
    select_rows.select_rows_triton(*args, **options)
    compiled = kernel.compiled()
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0
    code = compiled.asm["ptx"]
    assert "cp.async" in code  # read ahead
    # One kind of instruction for all, so that a token gets the same from both.
    assert re.search(r"wgmma\S*m64n64k16\S*bf16", code)
    assert "mma.sync" not in code


def test_choice_compiles_for_sm90(monkeypatch, tmp_path):
    kernel = RecordedLaunch(select_rows.select_kernel)
    monkeypatch.setattr(select_rows, "scores_kernel", RecordedLaunch(select_rows.scores_kernel))
    monkeypatch.setattr(select_rows, "select_kernel", kernel)
    args, options = select_case([1], [40_000], top_k=512)
    select_rows.select_rows_triton(*args, **options)
    assert kernel.arguments["LEVEL"] == 1
    compiled = kernel.compiled()
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert stack_bytes(compiled.asm["cubin"], tmp_path) <= 256  # a chunk fills the registers
