"""Models that cannot be loaded: one line on stderr that says why, exit code 2, and ValueError in Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from rorqual import LLM
from tests.tiny import checkpoint_folder, edit_config


def no_such_file(folder: Path) -> tuple[str, str]:
    return str(folder / "nothing.gguf"), "nothing.gguf"


def truncated_safetensors(folder: Path) -> tuple[str, str]:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return str(folder), "model.safetensors"


def garbage_safetensors(folder: Path) -> tuple[str, str]:
    (folder / "model.safetensors").write_bytes(b"not a header at all")
    return str(folder), "model.safetensors"


def no_weights(folder: Path) -> tuple[str, str]:
    (folder / "model.safetensors").unlink()
    return str(folder), "safetensors"


def broken_config(folder: Path) -> tuple[str, str]:
    (folder / "config.json").write_text("{")
    return str(folder), "config.json"


def unknown_model_type(folder: Path) -> tuple[str, str]:
    edit_config(folder, model_type="qwen33")
    return str(folder), "did you mean 'qwen3'"


def unknown_setting(folder: Path) -> tuple[str, str]:
    edit_config(folder, attention_magic=2)
    return str(folder), "attention_magic"


def quantised(folder: Path) -> tuple[str, str]:
    edit_config(folder, quantization_config={"quant_method": "awq"})
    return str(folder), "quantization_config"


def other_shape(folder: Path) -> tuple[str, str]:
    edit_config(folder, intermediate_size=84)
    return str(folder), "model.layers.0.mlp.gate_proj.weight has shape"


def gguf_of_an_unknown_architecture(folder: Path) -> tuple[str, str]:
    writer = gguf.GGUFWriter(folder / "strange.gguf", "strangenet")
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(folder / "strange.gguf"), "strangenet"


def misspelt_short_name(_folder: Path) -> tuple[str, str]:
    return "smolm2", "smollm2"


CASES = [
    no_such_file,
    truncated_safetensors,
    garbage_safetensors,
    no_weights,
    broken_config,
    unknown_model_type,
    unknown_setting,
    quantised,
    other_shape,
    gguf_of_an_unknown_architecture,
    misspelt_short_name,
]


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(checkpoint_folder("llama"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("case", CASES)
def test_a_model_that_cannot_be_loaded_is_one_sentence(case, folder):
    model, expected = case(folder)
    with pytest.raises(ValueError) as caught:
        LLM(model, skip_tokenizer_init=True, threads=1, progress=False)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", [truncated_safetensors, gguf_of_an_unknown_architecture])
def test_on_the_command_line_it_is_exit_code_2(case, folder):
    model, expected = case(folder)
    command = [sys.executable, "-m", "rorqual", "generate", "hello", "--model", model, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("rorqual: error: ")
    assert expected in line
