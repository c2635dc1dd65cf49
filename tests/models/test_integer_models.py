"""Models whose matrices are integers: lossless where they came so, close to the model where they were rounded."""

from __future__ import annotations

import functools
import pydoc_data.topics
import tempfile
from array import array
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.config import EngineConfig
from rorqual.engine.batch_builder import build_batch
from rorqual.engine.model_runner import ModelRunner
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.quantization.integer import Q4_1, Q8_0, IntegerWeight
from rorqual.sequence import Chunk, Sequence
from tests.models.test_against_transformers import tokens
from tests.tiny import CONFIGS, random_model
from tests.unit.tiny_gguf import MIXED_SIZES, mixed_kinds, smollm2_kinds, write_llama

CHUNK = 256
WIDE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 96, "intermediate_size": 160},
    "qwen2": {"hidden_size": 96, "intermediate_size": 160},
    "qwen3": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
}
"""Sizes that split into groups of 32, as those of tests/tiny.py do not."""


@functools.cache
def wide_model(name: str) -> Any:
    model_type, options = CONFIGS[name]
    return random_model(model_type, options | WIDE[name])


@functools.cache
def wide_folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"rorqual-wide-{name}-"))
    wide_model(name).save_pretrained(folder)
    return folder


def logits(path: Path, token_ids: SequenceOf[int], **options: Any) -> torch.Tensor:
    """float32 [num_tokens, vocabulary], as the engine's model computes them, in chunks."""
    num_blocks = -(-len(token_ids) // 16)
    config = EngineConfig(
        model=str(path), device="cpu", num_kv_blocks=num_blocks, max_model_len=len(token_ids), **options
    )
    runner = ModelRunner(config, open_checkpoint(path), progress=False)
    seq = Sequence(0, list(token_ids), len(token_ids), len(token_ids))
    seq.block_tables = [array("i", range(num_blocks)) for _ in runner.resolved.groups]
    found = []
    for start in range(0, len(token_ids), CHUNK):
        chunk = Chunk(seq, start, min(start + CHUNK, len(token_ids)))
        batch, _ = build_batch([chunk], [True], paging=runner.resolved.paging, device=runner.resolved.device)
        found.append(runner.run(batch).float())
    return torch.cat(found)


def distance(found: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference, over the spread of the logits."""
    return float((found - want).square().mean().sqrt() / want.std())


@torch.inference_mode()
def rounded_reference(name: str, kind_of, token_ids: SequenceOf[int]) -> torch.Tensor:
    """transformers' logits with every matrix but the routers' rounded to its format and back."""
    model_type, options = CONFIGS[name]
    model = random_model(model_type, options | WIDE[name])
    for weight_name, weight in model.named_parameters():
        if weight.dim() == 3:  # all experts of a layer, gate over up
            for expert in weight:
                expert.copy_(IntegerWeight.quantize(expert, kind_of(weight_name)).dequantize())
        elif weight.dim() == 2 and not weight_name.endswith("mlp.gate.weight"):
            weight.copy_(IntegerWeight.quantize(weight, kind_of(weight_name)).dequantize())
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]


KINDS = {"int8": lambda _name: Q8_0, "int4": lambda name: Q8_0 if "embed" in name or "head" in name else Q4_1}


@pytest.mark.parametrize("wanted", KINDS)
@pytest.mark.parametrize("name", WIDE)
def test_weight_only_is_transformers_with_rounded_weights(name, wanted):
    token_ids = tokens(24)
    found = logits(wide_folder(name), token_ids, quantization=f"{wanted}_weight_only", dtype="float32")
    assert (found - rounded_reference(name, KINDS[wanted], token_ids)).abs().max() < 2e-4


# Of the spread of the logits. These random models amplify any rounding: bfloat16 alone moves them by 0.02 to 0.04.
FURTHEST = {"int8": 0.13, "int4": 0.8}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", FURTHEST)
@pytest.mark.parametrize("name", WIDE)
def test_rounded_models_are_close(name, wanted, dtype):
    token_ids = tokens(40)
    with torch.inference_mode():
        want = wide_model(name)(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    found = logits(wide_folder(name), token_ids, quantization=wanted, dtype=dtype)
    far = distance(found, want)
    assert FURTHEST[wanted] / 20 < far < FURTHEST[wanted]


@pytest.fixture(scope="module", params=["smollm2", "mixed", "untied"])
def packed(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    if request.param == "mixed":
        return write_llama(path, mixed_kinds, **MIXED_SIZES)
    return write_llama(path, smollm2_kinds, tied=request.param == "smollm2")


def test_packed_weights_are_the_files_values(packed):
    token_ids = tokens(40)
    kept = logits(packed, token_ids, quantization="int8_weight_only", dtype="float32")
    want = logits(packed, token_ids, quantization="none", dtype="float32")
    assert torch.allclose(kept, want, rtol=0, atol=1e-4)
    assert torch.equal(want, logits(packed, token_ids, dtype="float32")), "float32 dequantises by itself"


def test_products_of_integers_are_close(packed):
    token_ids = tokens(40)
    want = logits(packed, token_ids, quantization="none", dtype="float32")
    assert 0.01 < distance(logits(packed, token_ids, quantization="int8", dtype="float32"), want) < 0.1
    found = logits(packed, token_ids)
    assert 0.01 < distance(found, want) < 0.1
    assert torch.equal(found, logits(packed, token_ids, dtype="bfloat16", quantization="int8")), "auto keeps them"


# --- the real model

PROMPTS = [
    "The blue whale is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "In the beginning of the nineteenth century, scientists in Europe began to",
    "<|im_start|>user\nWhy is the sea salty?<|im_end|>\n<|im_start|>assistant\n",
]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
NUM_POSITIONS = 2000
TEXT = "\n".join(pydoc_data.topics.topics[name] for name in ("for", "exceptions", "naming", "class", "debugger"))


@functools.cache
def real(path: Path, **options: Any) -> tuple[torch.Tensor, list[list[int]]]:
    """Log-probabilities of every position of the text, and the greedy tokens of the prompts."""
    with LLM(str(path), max_model_len=512, num_kv_blocks=128, progress=False, **options) as llm:
        token_ids = llm.get_tokenizer().encode(TEXT)[:NUM_POSITIONS]
        greedy = [out.token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert len(token_ids) == NUM_POSITIONS
    return logits(path, token_ids, **options).log_softmax(-1), greedy


def divergence(found: torch.Tensor, want: torch.Tensor) -> float:
    """Mean over the positions of KL(want, found), in nats."""
    return float((want.exp() * (want - found)).sum(-1).mean())


def agreeing(found: list[list[int]], want: list[list[int]]) -> int:
    """Tokens before the first difference, over all prompts."""
    return sum(
        next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), len(mine))
        for mine, theirs in zip(found, want, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "largest", "nats", "tokens_alike"),
    [
        ({"quantization": "auto"}, 2.0, 0.005, 64),
        ({"quantization": "int8_weight_only", "dtype": "float32"}, 0.01, 1e-7, 128),
    ],
    ids=["products of integers", "weights alone"],
)
def test_smollm2_packed_answers_as_dequantised(smollm2_path, options, largest, nats, tokens_alike):
    want, greedy = real(smollm2_path, quantization="none", dtype="float32")
    found, mine = real(smollm2_path, **options)
    print((found - want).abs().max(), divergence(found, want), agreeing(mine, greedy))
    assert float((found - want).abs().max()) < largest
    assert divergence(found, want) < nats
    assert agreeing(mine, greedy) >= tokens_alike
