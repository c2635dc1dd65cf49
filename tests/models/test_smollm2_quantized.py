"""A real model with its linear weights in each number format: what that costs it, on text it was not made for."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rorqual import LLM, SamplingParams
from rorqual.loader.checkpoint import open_checkpoint
from tests.quantized import SCHEMES, quantized

pytestmark = pytest.mark.slow

TEXTS = [
    "The blue whale is the largest animal that has ever lived. It feeds almost only on krill, which it takes in with "
    "its baleen.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "In the beginning of the nineteenth century, scientists in Europe began to study electricity.",
]
# Nats per token above the bfloat16 model's 2.7; a wrong scale anywhere costs several.
MOST_LOST = {"fp8": 0.1, "fp8_ue8m0": 0.15, "mxfp8": 0.15, "mxfp4": 0.9}


def loss(model: Path, tokenizer: Path, **options) -> float:
    """Mean negative log-likelihood of the texts, in nats per token."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with LLM(str(model), tokenizer=str(tokenizer), max_model_len=512, progress=False, **options) as llm:
        outputs = llm.generate(TEXTS, params, use_tqdm=False)
    found = [
        -known[token].logprob
        for out in outputs
        for token, known in zip(out.prompt_token_ids, out.prompt_logprobs, strict=True)
        if known is not None
    ]
    return sum(found) / len(found)


@functools.cache
def plain_loss(path: Path) -> float:
    return loss(path, path, dtype="bfloat16", quantization="none")


def save_plain(path: Path, folder: Path) -> None:
    """The model of a GGUF file as a bfloat16 checkpoint."""
    checkpoint = open_checkpoint(path)
    tensors = {name: checkpoint.load(name).to(torch.bfloat16).contiguous() for name in checkpoint.names()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.config))


@pytest.mark.parametrize("scheme", MOST_LOST)
def test_quantised_weights_cost_little(smollm2_path, tmp_path, scheme):
    checkpoint = open_checkpoint(smollm2_path)
    plain = {name: checkpoint.load(name).to(torch.bfloat16) for name in checkpoint.names()}
    files, _ = quantized(plain, SCHEMES[scheme], lambda name: name.endswith("proj.weight"))
    save_file({name: tensor.contiguous() for name, tensor in files.items()}, tmp_path / "model.safetensors")
    config = checkpoint.config | {"quantization_config": SCHEMES[scheme].options}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lost = loss(tmp_path, smollm2_path, dtype="bfloat16") - plain_loss(smollm2_path)
    assert -0.05 < lost < MOST_LOST[scheme]


def test_fp8_kv_cache_costs_little(smollm2_path):
    found = loss(smollm2_path, smollm2_path, dtype="bfloat16", quantization="none", kv_cache_dtype="fp8")
    assert -0.05 < found - plain_loss(smollm2_path) < 0.05


# Weights are the file's own: what may be lost is the rounding of inputs to 8 bits.
@pytest.mark.parametrize(("wanted", "most"), [("auto", 0.05), ("int8_weight_only", 0.001)])
def test_packed_weights_cost_nothing(smollm2_path, wanted, most):
    lost = loss(smollm2_path, smollm2_path, dtype="bfloat16", quantization=wanted) - plain_loss(smollm2_path)
    assert abs(lost) < most


# The model's weights were Q4_1 before, so int4 finds them again: it loses no more than packed weights do.
@pytest.mark.parametrize(("wanted", "most"), [("int8", 0.06), ("int8_weight_only", 0.01), ("int4", 0.05)])
def test_weights_rounded_at_load_cost_little(smollm2_path, tmp_path, wanted, most):
    save_plain(smollm2_path, tmp_path)
    lost = loss(tmp_path, smollm2_path, dtype="bfloat16", quantization=wanted) - plain_loss(smollm2_path)
    assert -0.05 < lost < most
