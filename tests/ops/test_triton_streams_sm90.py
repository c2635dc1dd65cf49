"""mHC's kernels compile for SM90, without a GPU: the product's instruction, memory, hardly a spilled register."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rorqual.ops.hyper_connection import StreamMix
from rorqual.ops.kv_transform import NormStage
from rorqual.ops.triton.launch import INTERPRETING
from tests.ops.test_triton_linear_sm90 import SHARED_MEMORY, Recorded, stack_bytes

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETING, reason="kernels are not compiled in the interpreter")]

from rorqual.ops.triton import _stream_kernels, hyper_connection  # noqa: E402

COUNT = 4


@pytest.mark.parametrize("dims", [4096, 7168])
@pytest.mark.parametrize("merge", [True, False], ids=["merge", "mix"])
@pytest.mark.parametrize("num_tokens", hyper_connection.TILES)
def test_stream_kernels_compile_for_sm90(num_tokens, merge, dims, monkeypatch, tmp_path):
    num_tokens = num_tokens or 2048
    names = ("project_kernel", "finish_kernel", "merge_kernel")
    kernels = {name: Recorded(getattr(_stream_kernels, name)) for name in names}
    monkeypatch.setattr(hyper_connection, "_stream_kernels", SimpleNamespace(**kernels))
    streams, output = (torch.empty(num_tokens, *size, dtype=torch.bfloat16) for size in ((COUNT, dims), (dims,)))
    rows = COUNT * (COUNT + 2)
    mix = StreamMix(torch.empty(rows, COUNT * dims), torch.empty(rows), torch.empty(3), 1e-6, 1e-6, 20)
    norm = NormStage(torch.empty(dims, dtype=torch.bfloat16), 1e-6)
    weights = torch.empty(num_tokens, COUNT), torch.empty(num_tokens, COUNT, COUNT)
    if merge:
        hyper_connection.merge_and_mix_streams_triton(output, streams, *weights, mix, norm)
    else:
        hyper_connection.mix_streams_triton(streams, mix, norm)
        hyper_connection.merge_streams_triton(output, streams, *weights)
    for name, kernel in kernels.items():
        if name == "merge_kernel" and merge:
            continue
        compiled = kernel.compiled()
        assert compiled.metadata.shared <= SHARED_MEMORY
        assert stack_bytes(compiled.asm["cubin"], tmp_path) == 0, name
        if name == "project_kernel":  # one instruction, which adds up 16 after 16
            assert "wgmma.mma_async.sync.aligned.m64n" in compiled.asm["ptx"]
            assert "mma.sync.aligned" not in compiled.asm["ptx"].replace("wgmma.", "")
            # Copied to shared memory once, not in the small rounds of a change of layout.
            assert compiled.asm["ptx"].count("bar.sync") <= 12
