"""Weights that go to a device through a few buffers are those that a plain copy brings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.layers.stacked_weight import Part, StackedWeight
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.layer import WantedTensor
from rorqual.loader.staging import Staging
from rorqual.loader.stored_tensor import StoredTensor
from rorqual.loader.weights import load_weights
from rorqual.models.registry import build_model
from tests.quantized import SCHEMES, quantized_folders
from tests.tiny import checkpoint_folder
from tests.unit.tiny_gguf import write_llama

CPU = torch.device("cpu")
NUM_THREADS = 3


def loaded(
    path: Path, *, buffer_bytes: int | None, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> dict[str, torch.Tensor]:
    """A model's parameters, loaded through buffers of a size, or without any."""
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config, Placement(Mesh.single(), dtype, device, dtype, 64))
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data.view(torch.uint8).fill_(0x47)
    options = {"tied_tensors": model.tied_tensors, "num_threads": NUM_THREADS}
    if buffer_bytes is None:
        load_weights(model, checkpoint, **options)
    else:
        with Staging(device, buffer_bytes=buffer_bytes) as staging:
            load_weights(model, checkpoint, **options, staging=staging)
        assert 1 <= len(staging.lanes) <= NUM_THREADS
        assert all([len(buffer) for buffer in lane.buffers] == [buffer_bytes] * 2 for lane in staging.lanes)
    return {name: parameter.data for name, parameter in model.named_parameters() if not parameter.is_meta}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name].cpu().view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("buffer_bytes", [8, 1000, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "llama", "llama_bias", "qwen3_moe"])
def test_plain_weights(name, dtype, buffer_bytes):
    """Buffers that hold no row, several rows, and whole tensors."""
    folder = checkpoint_folder(name)
    assert_same(loaded(folder, buffer_bytes=buffer_bytes, dtype=dtype), loaded(folder, buffer_bytes=None, dtype=dtype))


@pytest.mark.parametrize("buffer_bytes", [100, 1 << 16])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_ue8m0", "mxfp4"])
def test_quantized_weights(scheme, buffer_bytes, tmp_path):
    folder = Path(checkpoint_folder("qwen3_tied"))
    quantised, _ = quantized_folders(folder, tmp_path, SCHEMES[scheme])
    assert_same(loaded(quantised, buffer_bytes=buffer_bytes), loaded(quantised, buffer_bytes=None))


def test_weights_that_only_the_checkpoint_can_read(tmp_path):
    path = write_llama(tmp_path / "m.gguf", lambda _name: Type.Q8_0)
    assert open_checkpoint(path).stored("model.norm.weight") is None
    assert_same(loaded(path, buffer_bytes=1000), loaded(path, buffer_bytes=None))


def test_no_tensor_of_a_file_is_read_whole(monkeypatch):
    folder, opened = checkpoint_folder("qwen3"), open_checkpoint(checkpoint_folder("qwen3"))
    monkeypatch.setattr(type(opened), "load", lambda _self, name, _rows: pytest.fail(f"{name} was read whole"))
    assert loaded(folder, buffer_bytes=1000)


def stored_in(folder: Path, tensor: torch.Tensor) -> StoredTensor:
    save_file({"before": torch.arange(7.0), "t": tensor, "u": torch.ones(3)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    stored = open_checkpoint(folder).stored("t")
    assert stored is not None
    return stored


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 5, 100])
def test_rows_come_in_order_and_fill_a_buffer_at_most(rows_at_once, tmp_path):
    whole = torch.randn(10, 6)
    source, got = stored_in(tmp_path, whole), []

    def copy_rows(some: torch.Tensor, first: int) -> None:
        assert len(some) <= rows_at_once
        got.append((first, some.clone()))

    wanted = WantedTensor("t", (10, 6), lambda _whole: pytest.fail("it takes rows"), copy_rows)
    with Staging(CPU, buffer_bytes=rows_at_once * 24 + 23) as staging, staging.lane() as lane:
        lane.hand_over(source, wanted)
    assert [first for first, _ in got] == list(range(0, 10, rows_at_once))
    assert torch.equal(torch.cat([some for _, some in got]), whole)


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), torch.empty(0, 4), torch.arange(5, dtype=torch.int8)])
def test_shapes_at_the_edge(tensor, tmp_path):
    got: list[torch.Tensor] = []
    with Staging(CPU, buffer_bytes=8) as staging, staging.lane() as lane:
        lane.hand_over(stored_in(tmp_path, tensor), WantedTensor("t", tuple(tensor.shape), got.append))
    assert torch.equal(got[0], tensor)


@pytest.mark.parametrize("rows_at_once", range(1, 13))
def test_a_rank_keeps_its_rows_and_columns_of_every_part(rows_at_once):
    parts = [Part("a", 12, slice(3, 9)), Part("b", 12, slice(8, 12))]
    tensors = [torch.randn(12, 8, dtype=torch.float64) for _ in parts]
    kept = []
    for pieces in ([12], [rows_at_once] * 12):
        layer = StackedWeight(8, parts, columns=slice(2, 7), dtype=torch.float32, device=CPU)
        layer.weight.fill_(7.0)
        for wanted, tensor in zip(layer.wanted_parts(["a", "b"]), tensors, strict=True):
            assert wanted.copy_rows is not None
            first = 0
            for some in tensor.split(pieces[0]):
                wanted.copy_rows(some, first)
                first += len(some)
        kept.append(layer.weight)
    assert torch.equal(kept[0], torch.cat([tensors[0][3:9, 2:7], tensors[1][8:, 2:7]]).float())
    assert torch.equal(kept[1], kept[0])


def test_a_file_that_is_cut_short_meanwhile_is_refused_by_name():
    folder = checkpoint_folder("qwen3", 5)
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config, Placement(Mesh.single(), torch.float32, CPU, torch.float32, 64))
    assert checkpoint.stored("lm_head.weight") is not None
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, 5000)
    with (
        Staging(CPU) as staging,
        pytest.raises(ValueError, match=r"tensor model\.\S+ in .*: the file has become shorter"),
    ):
        load_weights(model, checkpoint, tied_tensors={}, num_threads=1, staging=staging)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("buffer_bytes", [1000, 1 << 16])
@pytest.mark.parametrize("name", ["llama_bias", "qwen3_moe"])
def test_weights_on_the_gpu(name, dtype, buffer_bytes):
    folder, gpu = checkpoint_folder(name), torch.device("cuda", 0)
    got = loaded(folder, buffer_bytes=buffer_bytes, dtype=dtype, device=gpu)
    assert_same(got, loaded(folder, buffer_bytes=None, dtype=dtype))


@pytest.mark.gpu
def test_quantized_weights_on_the_gpu(tmp_path):
    quantised, _ = quantized_folders(checkpoint_folder("qwen3_tied"), tmp_path, SCHEMES["fp8"])
    got = loaded(quantised, buffer_bytes=1000, device=torch.device("cuda", 0))
    assert_same(got, loaded(quantised, buffer_bytes=None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_buffers_are_not_filled_anew_before_the_gpu_has_them(dtype, tmp_path):
    whole = torch.arange(1 << 24).view(-1, 1024).to(torch.bfloat16)
    layer = StackedWeight(1024, [Part("t", len(whole), slice(0, len(whole)))], dtype=dtype, device=torch.device("cuda"))
    (wanted,) = layer.wanted_parts(["t"])
    source = stored_in(tmp_path, whole)
    with Staging(torch.device("cuda", 0), buffer_bytes=1 << 18) as staging, staging.lane() as lane:
        lane.hand_over(source, wanted)
    assert torch.equal(layer.weight.cpu(), whole.to(dtype))
