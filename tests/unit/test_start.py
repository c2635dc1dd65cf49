"""Starting: what happens before torch is imported, and what is told about it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from rorqual import LLM
from rorqual.ops.native import library
from rorqual.ops.native.library import using
from tests.unit.tiny_gguf import smollm2_kinds, write_llama

BEFORE_TORCH = """
import sys, threading
from rorqual.config import EngineConfig
from rorqual.engine.model_files import open_model
files = open_model(EngineConfig(model=sys.argv[1], skip_tokenizer_init=True))
assert "torch" not in sys.modules
assert files.checkpoint.shape("model.embed_tokens.weight")[1] == 64
loading = [thread for thread in threading.enumerate() if thread.name == "load torch"]
for thread in loading:
    thread.join(60)
mapped = open("/proc/self/maps").read().count("libtorch_cpu.so") if sys.platform == "linux" else 1
import torch
from rorqual.platform import load_torch_library
load_torch_library()
print(bool(mapped), torch.ones(3).sum().item(), threading.active_count())
"""


UNMAPPED_CODE = """
import re, torch
from rorqual.platform import return_freed_memory
def mapped_kb(permissions):
    maps = re.split(r"^(?=[0-9a-f]+-)", open("/proc/self/smaps").read(), flags=re.M)[1:]
    torchs = [m for m in maps if "/libtorch" in m.splitlines()[0] and m.split()[1].startswith(permissions)]
    return sum(int(re.search(r"^Rss: +(\\d+)", m, re.M)[1]) for m in torchs)
def answer():
    return torch.linspace(0, 1, 64).view(8, 8).softmax(1).matmul(torch.eye(8)).sum().item()
before, written, found = mapped_kb("r-x"), mapped_kb("rw"), answer()
return_freed_memory()
print(mapped_kb("r-x") < before / 4, mapped_kb("rw") >= written > 0, answer() == found)
"""


@pytest.fixture
def model(tmp_path):
    return write_llama(tmp_path / "m.gguf", smollm2_kinds)


def test_files_are_opened_before_torch_is_imported_and_its_library_is_loaded_beside(model):
    done = subprocess.run([sys.executable, "-c", BEFORE_TORCH, model], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "3.0", "1"], done.stderr


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="Linux says what of a file is mapped")
def test_code_that_only_torchs_start_has_read_is_unmapped():
    done = subprocess.run([sys.executable, "-c", UNMAPPED_CODE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


def test_every_stage_of_the_start_is_told(model):
    with LLM(str(model), skip_tokenizer_init=True, num_kv_blocks=64, device="cpu", progress=False) as llm:
        assert list(llm.engine.start_seconds) == ["resolve", "open", "tokenizer", "import", "weights", "warm-up"]
        assert f"import {llm.engine.start_seconds['import']:.2f} s" in llm.engine.banner()


def test_the_start_says_that_compiled_kernels_are_missing_and_what_to_do(model, monkeypatch):
    with LLM(str(model), skip_tokenizer_init=True, num_kv_blocks=64, device="cpu", progress=False) as llm:
        assert "\nslow " not in llm.engine.banner()
        with using(None):
            assert "\nslow     the compiled kernels are switched off\n" in llm.engine.banner()
            monkeypatch.setattr(library, "usable_isas", tuple)
            assert "\nslow     the compiled kernels were not built (installing again where" in llm.engine.banner()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_is_left_as_it_was(was_on, tmp_path):
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with pytest.raises(ValueError, match="does not exist"):
            LLM(str(tmp_path / "none.gguf"), progress=False)
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
