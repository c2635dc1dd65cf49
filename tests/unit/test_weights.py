"""Joining a checkpoint to a model: nothing missing, nothing left over, nothing touched before that is certain."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rorqual.distributed.mesh import Mesh
from rorqual.layers.decoder import Placement
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.weights import fill_with_dummy_weights, load_weights, prepare_weights, wanted_tensors
from rorqual.models.registry import build_model
from tests.tiny import checkpoint_folder

Tensors = dict[str, torch.Tensor]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
UNTIED, TIED = "qwen3", "llama"


def edited(name: str, folder: Path, edit: Callable[[Tensors], Tensors | None]) -> Path:
    """A copy of a tiny checkpoint with other tensors; `edit` changes them in place or returns new ones."""
    folder = folder / name
    shutil.copytree(checkpoint_folder(name), folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors = edit(tensors) or tensors
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def built(folder: Path) -> torch.nn.Module:
    """The model of a folder, all of whose parameters are a marker."""
    cpu = torch.device("cpu")
    place = Placement(Mesh.single(), torch.float32, cpu, torch.float32, 64)
    model = build_model(open_checkpoint(folder).config, place)
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data.fill_(7.0)
    return model


def load(folder: Path, model: torch.nn.Module | None = None, **options) -> torch.nn.Module:
    model = model or built(folder)
    load_weights(model, open_checkpoint(folder), tied_tensors=model.tied_tensors, num_threads=2, **options)
    return model


def untouched(model: torch.nn.Module) -> bool:
    return all(parameter.is_meta or bool((parameter == 7.0).all()) for parameter in model.parameters())


def assert_refused(folder: Path, sentence: str) -> str:
    model = built(folder)
    with pytest.raises(ValueError, match=sentence) as error:
        load(folder, model)
    assert untouched(model), "refused, but only after parameters were changed"
    return str(error.value)


@pytest.mark.parametrize("name", [UNTIED, TIED, "qwen3_moe"])
def test_every_parameter_is_filled_with_its_tensor(name):
    folder = checkpoint_folder(name)
    model = load(folder)
    assert not any(bool((p == 7.0).any()) for p in model.parameters() if not p.is_meta)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    assert set(wanted_tensors(model)) == set(tensors)
    assert torch.equal(model.model.embed_tokens.weight, tensors[EMBED])
    assert torch.equal(model.model.norm.weight, tensors["model.norm.weight"])
    qkv = [tensors[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    assert torch.equal(model.model.layers[1].self_attn.qkv_proj.weight, torch.cat(qkv))


def test_progress_is_told_every_value():
    seen: list[int] = []
    checkpoint = open_checkpoint(checkpoint_folder(UNTIED))
    load(checkpoint_folder(UNTIED), on_tensor=seen.append)
    assert sum(seen) == checkpoint.size_bytes // 4  # float32
    assert len(seen) == len(checkpoint.names())


def test_loading_leaves_torch_its_threads():
    def threads_elsewhere() -> int:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        load(checkpoint_folder(UNTIED))
        assert (torch.get_num_threads(), threads_elsewhere()) == (3, 3)
    finally:
        torch.set_num_threads(before)


# --- LO4: tied, and yet a head in the file


@pytest.mark.parametrize("different", [False, True])
def test_lo4_tied_model_with_a_head_in_the_file(different, tmp_path, caplog):
    def add_head(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBED] + 1 if different else tensors[EMBED]

    folder = edited(TIED, tmp_path, add_head)
    with caplog.at_level(logging.WARNING):
        model = load(folder)
    prepare_weights(model)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    warned = [record for record in caplog.records if HEAD in record.message]
    assert len(warned) == different
    if different:
        assert EMBED in warned[0].message


def test_lo4_tied_head_of_another_shape_counts_as_different(tmp_path, caplog):
    folder = edited(TIED, tmp_path, lambda tensors: tensors.update({HEAD: torch.zeros(3, 3)}))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert HEAD in caplog.text


# --- LO5: names that do not fit


def test_lo5_untied_model_without_a_head(tmp_path):
    folder = edited(UNTIED, tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != HEAD})
    assert_refused(folder, rf"does not fit the model: 1 missing: {HEAD}")


def test_lo5_renamed_tensor_is_both_missing_and_left_over(tmp_path):
    old, new = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.upp_proj.weight"
    folder = edited(UNTIED, tmp_path, lambda tensors: tensors.update({new: tensors.pop(old)}))
    assert_refused(folder, rf"1 missing: {old}; 1 left over: {new}")


def test_lo5_flat_names_are_refused_and_shown(tmp_path):
    folder = edited(UNTIED, tmp_path, lambda tensors: {k.removeprefix("model."): t for k, t in tensors.items()})
    said = assert_refused(folder, r"\d+ missing: model\.\S+, .*; \d+ left over: embed_tokens\.weight")
    assert "more" in said, "the lists are cut"
    assert len(said) < 2000


def test_lo5_layer_too_many_is_left_over(tmp_path):
    def add_layer(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.2.")]:
            tensors[name.replace("layers.2.", "layers.3.")] = tensors[name]

    folder = edited(UNTIED, tmp_path, add_layer)
    assert_refused(folder, r"left over: model\.layers\.3\.")


def test_extra_bias_is_left_over(tmp_path):
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = edited(UNTIED, tmp_path, lambda tensors: tensors.update({name: torch.zeros(4)}))
    assert_refused(folder, rf"1 left over: {name}")


def test_stored_rotary_tables_are_passed_over(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = edited(UNTIED, tmp_path, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert not untouched(load(folder))


@pytest.mark.parametrize(
    "name",
    ["model.layers.2.mlp.down_proj.weight", "model.norm.weight", "model.layers.0.self_attn.k_proj.weight", EMBED],
)
def test_misshapen_tensor_is_refused_by_name_and_shapes(name, tmp_path):
    folder = edited(UNTIED, tmp_path, lambda tensors: tensors.update({name: tensors[name][:-1]}))
    whole = list(load_file(next(checkpoint_folder(UNTIED).glob("*.safetensors")))[name].shape)
    cut = [whole[0] - 1, *whole[1:]]
    said = assert_refused(folder, f"tensor {name} has shape ")
    assert str(cut) in said
    assert str(whole) in said


# --- dummy weights


def test_dummy_weights_fill_everything_and_repeat():
    first, second, other = (built(checkpoint_folder(TIED)) for _ in range(3))
    fill_with_dummy_weights(first, seed=3)
    fill_with_dummy_weights(second, seed=3)
    fill_with_dummy_weights(other, seed=4)
    same = dict(second.named_parameters())
    changed = dict(other.named_parameters())
    for name, parameter in first.named_parameters():
        if not parameter.is_meta:
            assert bool(parameter.isfinite().all())
            assert not bool((parameter == 7.0).all())
            assert torch.equal(parameter, same[name])
            assert not torch.equal(parameter, changed[name])


# --- a model that knows its checkpoints' other names


def renaming(folder: Path) -> torch.nn.Module:
    """A model that takes names with "old." in front for its own, and leaves those of drafts unread."""
    model = built(folder)
    model.own_name = lambda name: None if name.startswith("draft.") else name.removeprefix("old.")
    return model


def test_tensors_go_under_the_names_that_the_model_has_for_them(tmp_path, caplog):
    def rename(tensors):
        return {f"old.{k}" if "layers.1." in k else k: v for k, v in tensors.items()} | {"draft.x": torch.ones(2)}

    folder = edited(UNTIED, tmp_path, rename)
    with caplog.at_level(logging.INFO):
        model = load(folder, renaming(folder))
    assert "the model does not read 1 tensors: draft.x" in caplog.text
    want = load(checkpoint_folder(UNTIED))
    for got, wanted in zip(model.parameters(), want.parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda t: t | {"old.model.norm.weight": torch.ones(48)},
            r"model\.norm\.weight and old\..*, which are the same",
        ),
        (lambda t: t | {"old.other": torch.ones(2)}, "1 left over: old.other"),
        (lambda t: {k: v for k, v in t.items() if k != HEAD}, f"1 missing: {HEAD}"),
        (
            lambda t: {f"old.{k}" if k == HEAD else k: v[:3] if k == HEAD else v for k, v in t.items()},
            rf"tensor old\.{HEAD} has shape \[3, 48\]",
        ),
    ],
)
def test_other_names_hide_no_tensor_that_does_not_fit(tmp_path, edit, sentence):
    folder = edited(UNTIED, tmp_path, edit)
    model = renaming(folder)
    with pytest.raises(ValueError, match=sentence):
        load(folder, model)
    assert untouched(model)
