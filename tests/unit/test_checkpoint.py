"""Opening checkpoints: safetensors folders, what is refused before a tensor is read, and made-up weights."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.dummy import DummyCheckpoint, fill_dummy
from rorqual.loader.gguf import GGUFCheckpoint
from rorqual.loader.safetensors import SafetensorsCheckpoint

from .tiny_gguf import write_gguf

CONFIG = {"model_type": "llama", "hidden_size": 4}
FIRST = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
SECOND = {"c": torch.full((3,), 7, dtype=torch.float16)}
SHARDS = {"model-00001-of-00002.safetensors": FIRST, "model-00002-of-00002.safetensors": SECOND}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    """Two shards and their index."""
    for name, tensors in SHARDS.items():
        save_file(tensors, folder / name)
    write_index(folder, {tensor: shard for shard, tensors in SHARDS.items() for tensor in tensors})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_a_single_file_is_read(folder: Path) -> None:
    save_file(FIRST, folder / "model.safetensors")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    assert (checkpoint.path, checkpoint.config) == (folder, CONFIG)
    assert checkpoint.generation_config == {"temperature": 0.6}
    assert set(checkpoint.names()) == {"a", "b"}
    assert checkpoint.shape("a") == (2, 3)
    assert torch.equal(checkpoint.load("a"), FIRST["a"])
    assert checkpoint.load("b").dtype == torch.bfloat16
    assert checkpoint.size_bytes == 6 * 4 + 2 * 2


def test_indexed_shards_are_read(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded, load_format="safetensors")
    assert set(checkpoint.names()) == {"a", "b", "c"}
    assert torch.equal(checkpoint.load("c"), SECOND["c"])
    assert checkpoint.generation_config == {}
    assert checkpoint.size_bytes == 6 * 4 + 2 * 2 + 3 * 2


def test_tensors_load_from_several_threads(folder: Path) -> None:
    tensors = {str(i): torch.full((50, 50), float(i)) for i in range(64)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    with ThreadPoolExecutor(4) as pool:
        loaded = pool.map(checkpoint.load, list(tensors) * 4)
        assert all(torch.equal(tensors[n], t) for n, t in zip(list(tensors) * 4, loaded, strict=True))


def test_lo6_empty_and_scalar_tensors_load(folder: Path) -> None:
    save_file({"empty": torch.empty(0), "scalar": torch.tensor(2.5)}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.shape("empty"), checkpoint.shape("scalar")) == ((0,), ())
    assert checkpoint.load("empty").shape == (0,)
    assert checkpoint.load("scalar").item() == 2.5


# --- LO1: everything is refused before a tensor is read -------------------------------------------------------------


def test_lo1_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks files.*: model-00002-of-00002\.safetensors; fetch"):
        open_checkpoint(sharded)


def test_lo1_a_folder_without_weights_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no weights: expected model\.safetensors"):
        open_checkpoint(folder)


def test_lo1_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "x.safetensors"])
def test_lo1_a_directory_named_like_a_weight_file_is_refused(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=rf"lacks files of the model \(or they are no files\): {name}"):
        open_checkpoint(folder)


def test_lo1_an_index_that_names_an_unknown_tensor_is_refused(sharded: Path) -> None:
    write_index(sharded, {"a": "model-00001-of-00002.safetensors", "nope": "model-00002-of-00002.safetensors"})
    with pytest.raises(ValueError, match=r"do not hold: nope in model-00002-of-00002\.safetensors"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}])
def test_lo1_an_index_without_a_map_is_refused(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(ValueError, match=r"index\.json must map tensor names to file names"):
        open_checkpoint(sharded)


def test_an_index_may_not_lead_out_of_its_folder(sharded: Path) -> None:
    write_index(sharded, {"a": "../model-00001-of-00002.safetensors"})
    with pytest.raises(ValueError, match="names files outside its folder"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("keep", [0, 4, 8, 30, -1])
def test_lo1_a_file_cut_short_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    save_file(FIRST, path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        open_checkpoint(folder)


def test_lo1_a_damaged_header_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(FIRST, path)
    data = bytearray(path.read_bytes())
    data[9] ^= 0xFF
    path.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        open_checkpoint(folder)


def test_pickled_weights_are_refused_with_the_way_out(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "\ufeff{}"])
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str) -> None:
    save_file(FIRST, folder / "model.safetensors")
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json (is not valid JSON|must hold a JSON object)"):
        open_checkpoint(folder)


# --- LO3: which files count -----------------------------------------------------------------------------------------


def test_lo3_only_indexed_files_are_read_and_strays_are_noted(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"a": torch.zeros(2, 3), "d": torch.zeros(1)}, sharded / "stray.safetensors")
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(sharded)
    assert torch.equal(checkpoint.load("a"), FIRST["a"])
    assert "d" not in checkpoint.names()
    assert "stray.safetensors" in caplog.text


def test_lo3_without_an_index_the_whole_file_goes_before_others(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file(FIRST, folder / "model.safetensors")
    save_file({"a": torch.zeros(1)}, folder / "adapter.safetensors")
    with caplog.at_level(logging.WARNING):
        assert open_checkpoint(folder).shape("a") == (2, 3)
    assert "adapter.safetensors" in caplog.text


def test_lo3_a_stale_index_says_how_to_get_rid_of_it(sharded: Path) -> None:
    for shard in SHARDS:
        (sharded / shard).unlink()
    save_file(FIRST, sharded / "model.safetensors")
    with pytest.raises(ValueError, match=rf"remove {INDEX} if the model is whole without"):
        open_checkpoint(sharded)
    (sharded / INDEX).unlink()
    assert set(open_checkpoint(sharded).names()) == {"a", "b"}


def test_shards_without_an_index_are_all_read_and_may_not_clash(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert set(open_checkpoint(sharded).names()) == {"a", "b", "c"}
    save_file({"c": torch.zeros(1)}, sharded / "more.safetensors")
    with pytest.raises(ValueError, match=r"'c' is in both model-00002-of-00002\.safetensors and more\.safetensors"):
        open_checkpoint(sharded)


# --- which format ---------------------------------------------------------------------------------------------------


def test_a_folder_with_one_gguf_file_opens_it_unless_it_has_safetensors(folder: Path) -> None:
    gguf = write_gguf(folder / "m.gguf")
    assert isinstance(open_checkpoint(folder), GGUFCheckpoint)
    assert isinstance(open_checkpoint(gguf), GGUFCheckpoint)
    save_file(FIRST, folder / "model.safetensors")
    assert isinstance(open_checkpoint(folder), SafetensorsCheckpoint)
    assert isinstance(open_checkpoint(folder, load_format="gguf"), GGUFCheckpoint)


def test_a_folder_with_several_gguf_models_asks_which(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(ValueError, match=r"several GGUF models.*m-Q4_0\.gguf, m-Q8_0\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "load_format", "message"),
    [
        ("nowhere", "auto", "does not exist"),
        ("config.json", "auto", "neither a folder nor a .gguf file"),
        ("m.gguf", "safetensors", "needs a folder"),
        ("empty", "gguf", "holds no .gguf file"),
        ("empty", "dummy", "holds neither config.json nor a .gguf file"),
        ("m.gguf", "pickle", "load_format must be one of auto, safetensors, gguf, dummy, got 'pickle'"),
    ],
)
def test_what_cannot_be_opened_is_refused(folder: Path, name: str, load_format: str, message: str) -> None:
    write_gguf(folder / "m.gguf")
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=message):
        open_checkpoint(folder / name, load_format=load_format)


# --- made-up weights ------------------------------------------------------------------------------------------------


def test_a_dummy_checkpoint_needs_only_a_config(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, load_format="dummy")
    assert isinstance(checkpoint, DummyCheckpoint)
    assert checkpoint.config == CONFIG
    assert (len(checkpoint.names()), checkpoint.size_bytes) == (0, 0)
    from_gguf = open_checkpoint(write_gguf(folder / "m.gguf"), load_format="dummy")
    assert from_gguf.config["hidden_size"] == 64


def filled(name: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.full(shape, float("nan"), dtype=dtype)
    fill_dummy(tensor, name, seed=seed)
    return tensor


def test_dummy_weights_depend_on_name_and_seed_alone() -> None:
    first = filled("layers.0.q_proj.weight", 64, 32)
    filled("something.else", 10, 10)
    assert torch.equal(filled("layers.0.q_proj.weight", 64, 32), first)
    assert not torch.equal(filled("layers.1.q_proj.weight", 64, 32), first)
    assert not torch.equal(filled("layers.0.q_proj.weight", 64, 32, seed=1), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dummy_weights_have_the_size_of_trained_ones(dtype: torch.dtype) -> None:
    for columns in (64, 4096):
        matrix = filled("q_proj.weight", 512, columns, dtype=dtype).float()
        assert matrix.std().item() == pytest.approx(columns**-0.5, rel=0.05)
        assert abs(matrix.mean().item()) < 0.05 * columns**-0.5
    for name in ("model.norm.weight", "layers.0.input_layernorm.weight", "q_norm.weight"):
        norm = filled(name, 2048, dtype=dtype).float()
        assert norm.mean().item() == pytest.approx(1, abs=0.02)
        assert norm.std().item() == pytest.approx(0.1, rel=0.1)
    assert filled("q_proj.bias", 2048, dtype=dtype).float().std().item() == pytest.approx(0.02, rel=0.1)


def test_dummy_weights_past_the_pool_are_filled_and_no_two_rows_are_equal() -> None:
    table = filled("embed_tokens.weight", 1200, 4096, dtype=torch.float16)  # 4.9 M values, pool 4.2 M
    assert table.isfinite().all()
    assert len(torch.unique(table[:, :8], dim=0)) == 1200


def test_dummy_weights_fill_an_empty_tensor_and_refuse_integers() -> None:
    assert filled("w", 0, 4).numel() == 0
    with pytest.raises(ValueError, match=r"'w' must be contiguous and floating, got torch\.int32"):
        fill_dummy(torch.zeros(3, dtype=torch.int32), "w")
