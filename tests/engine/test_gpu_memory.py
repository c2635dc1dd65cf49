"""On a GPU an engine takes what its share and the others on the card leave, and says so where that is too little."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.engine.memory import SLACK
from rorqual.engine.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

GIB = 1 << 30
DRIVER = GIB
"""What the driver may hold for this process beside torch's memory."""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 50000,
}
"""A block takes 512 KiB: a card holds some hundred thousand of them."""
HOLDER = """
import sys, torch
kept = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another(num_bytes: int) -> Iterator[None]:
    """Another process that holds memory of the card."""
    command = [sys.executable, "-c", HOLDER, str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            yield
        finally:
            other.stdin.close()


def free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def total() -> int:
    return torch.cuda.mem_get_info()[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def started(folder: Path, **options: Any) -> LLM:
    options = {"max_num_batched_tokens": 2048, "max_num_seqs": 32, "dtype": "bfloat16"} | options
    return LLM(
        str(folder), device="cuda", load_format="dummy", skip_tokenizer_init=True, seed=0, progress=False, **options
    )


def assert_works(llm: LLM) -> None:
    """Prompts that fill the largest step, with draws that need everything."""
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20, max_tokens=4, seed=1)
    outputs = llm.generate([[1 + i] * 200 for i in range(40)], params, use_tqdm=False)
    assert all(output.outputs[0].error is None for output in outputs)


@pytest.mark.parametrize("held", [0.0, 0.15])
def test_an_engine_keeps_to_its_share_beside_others(folder, held, caplog):
    with ExitStack() as stack:
        before = free()
        if held:
            stack.enter_context(held_by_another(int(total() * held)))
            before = free()
        with started(folder, gpu_memory_utilization=0.3) as llm:
            taken, share = before - torch.cuda.mem_get_info()[0], int(0.3 * total())
            assert share - SLACK - 2 * GIB < taken <= share + DRIVER
            kv_cache = llm.engine.resolved.kv_cache_bytes
            assert 0.8 * share < kv_cache < share
            assert_works(llm)
            assert before - torch.cuda.mem_get_info()[0] <= share + DRIVER
            (said,) = (line for line in llm.engine.banner().splitlines() if line.startswith("memory"))
            assert f"KV cache {kv_cache / GIB:.2f}" in said
            assert ("held by others" in said) == bool(held)
            assert ("are held by others" in caplog.text) == bool(held)


def test_an_engine_takes_what_others_leave_where_that_is_less_than_its_share(folder):
    with held_by_another(free() - 12 * GIB):
        left = free()
        with started(folder) as llm:
            assert 2 * GIB < llm.engine.resolved.kv_cache_bytes < left
            assert_works(llm)


def test_too_little_memory_is_refused_with_bytes_and_a_way_out(folder):
    with pytest.raises(ValueError, match=r"the weights need .* raise --gpu-memory-utilization"):
        started(folder, gpu_memory_utilization=0.001)
    with held_by_another(free() - 3 * GIB // 2):  # and its own context beside them
        with pytest.raises(ValueError, match=r"free memory that other processes hold on the GPU") as error:
            started(folder, max_num_batched_tokens=16384, max_num_seqs=1024)
        assert f"{total():,}" in str(error.value)


def test_a_process_that_comes_meanwhile_is_noticed(folder, caplog, monkeypatch):
    with ExitStack() as stack:
        load, most = ModelRunner._load, int(0.5 * total())

        def loaded(self: ModelRunner, *args: Any, **options: Any) -> None:
            load(self, *args, **options)
            stack.enter_context(held_by_another(most))

        monkeypatch.setattr(ModelRunner, "_load", loaded)
        with started(folder, gpu_memory_utilization=0.9) as llm:
            assert "were taken by other processes while this engine started" in caplog.text
            assert llm.engine.resolved.kv_cache_bytes < 0.5 * total()
            assert_works(llm)


def test_what_was_measured_is_what_steps_take(folder):
    with started(folder, gpu_memory_utilization=0.3, max_num_batched_tokens=8192, max_num_seqs=64) as llm:
        held = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20, max_tokens=40, seed=1)
        llm.generate([[1 + i] * (100 + 7 * i) for i in range(100)], params, use_tqdm=False)
        assert torch.cuda.max_memory_reserved() <= held + SLACK


def test_graphs_hold_what_was_planned(folder, caplog):
    with started(folder, gpu_memory_utilization=0.3, max_num_seqs=256) as llm:
        plan = llm.engine._runner._plan
        assert plan is not None
        assert 0 < plan.graphs < 2 * GIB
        assert "CUDA graphs hold" not in caplog.text
