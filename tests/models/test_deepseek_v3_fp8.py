"""DeepSeek-V3 and V3.2 checkpoints in FP8 with 128 x 128 blocks, as they are published: kv_b_proj included."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.quantization_config import read_weight_quantization
from tests.models.scattered import loaded_model, logits_by_chunks, tokens
from tests.quantized import SCHEMES, edit_quantization, quantized, save
from tests.tiny import DEEPSEEK_CONFIGS, edit_config, random_deepseek

# More than a block of 128 and no multiple of it; heads, and queries and latents in one product, meet within blocks.
WIDE: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 200,
    "q_lora_rank": 144,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 136,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
}
_ALL = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "index_topk": 64}
"""Nothing to choose, so that roundings change numbers and not choices."""
MODELS = {
    "deepseek_v3": WIDE,
    "deepseek_v3_noqlora": WIDE | {"q_lora_rank": None, "n_group": 1},
    "deepseek_v32": WIDE | {"index_head_dim": 32, "index_topk": 16},
}
UNCHOOSING = {
    name: options | {k: v for k, v in _ALL.items() if k in DEEPSEEK_CONFIGS[name][1]}
    for name, options in MODELS.items()
}
LENGTH = 60


@functools.cache
def folders(name: str, scheme: str, *, choosing: bool = True) -> tuple[Path, Path]:
    """(quantised, plain with the same numbers)."""
    target, (model_type, options) = Path(tempfile.mkdtemp(prefix=f"rorqual-{name}-")), DEEPSEEK_CONFIGS[name]
    source = target / "source"
    random_deepseek(model_type, options | (MODELS if choosing else UNCHOOSING)[name]).save_pretrained(source)
    (file,) = source.glob("*.safetensors")
    made = quantized(load_file(file), SCHEMES[scheme], is_quantised)
    for kind, tensors in zip(("quantized", "plain"), made, strict=True):
        (target / kind).mkdir()
        for each in source.iterdir():
            (target / kind / each.name).write_bytes(each.read_bytes())
        save(target / kind, tensors)
    edit_quantization(target / "quantized", SCHEMES[scheme].options)
    return target / "quantized", target / "plain"


def is_quantised(name: str) -> bool:
    """As in the published checkpoints: no norms, no router, no head, no weights_proj, but the indexer's other ones."""
    projection = name.endswith(
        ("_proj.weight", "kv_a_proj_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight")
    )
    return projection and "weights_proj" not in name


def logits(folder: Path, *, weight_only: bool = False, **options: Any) -> torch.Tensor:
    quantization = read_weight_quantization(open_checkpoint(folder).config)
    if weight_only:
        both = {name: getattr(quantization, name)._replace(activation=None) for name in ("linear", "experts")}
        quantization = dataclasses.replace(quantization, **both)
    return logits_by_chunks(loaded_model(folder, quantization=quantization, **options), tokens(LENGTH), 32).float()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scheme", ["fp8", "fp8_powers_as_numbers"])
def test_weight_only_logits_are_those_of_the_same_numbers(name, scheme):
    """Same formulas in float32: equal where products dequantise, 1e-5 apart where they add up in another order."""
    quantised, plain = folders(name, scheme)
    assert (logits(quantised, weight_only=True) - logits(plain)).abs().max() < 5e-5


def test_scales_count_for_kv_b_proj(tmp_path):
    """Which no product reads as it is stored: half a scale is half of all keys and values."""
    quantised, _ = folders("deepseek_v3", "fp8")
    for each in quantised.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    scale = "model.layers.1.self_attn.kv_b_proj.weight_scale_inv"
    assert tensors[scale].shape == (2, 2)
    tensors[scale][1, 1] *= 0.5
    save(tmp_path, tensors)
    assert (logits(tmp_path, weight_only=True) - logits(quantised, weight_only=True)).abs().max() > 0.1


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_inputs_stay_near(name, dtype):
    """Inputs of products rounded to FP8 in groups of 128: 0.16 to 0.26 standard deviations of the logits, through three
    layers of sharp attention. Unrelated logits are 1.4 apart.
    """
    quantised, plain = folders(name, "fp8", choosing=False)
    want = logits(plain)
    apart = (logits(quantised, dtype=dtype) - want).square().mean().sqrt() / want.std()
    assert 0.02 < apart < 0.4


def test_a_projection_that_is_not_converted_has_a_product_of_its_own(tmp_path):
    """modules_to_not_convert may name q_a_proj alone, which is one product with kv_a_proj_with_mqa elsewhere."""
    quantised, plain = folders("deepseek_v3", "fp8")
    for each in quantised.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    tensors, others = (load_file(next(folder.glob("*.safetensors"))) for folder in (quantised, plain))
    for name in [name for name in tensors if "q_a_proj.weight" in name]:
        del tensors[name]
        if name in others:
            tensors[name] = others[name]
    save(tmp_path, tensors)
    edit_config(
        tmp_path, quantization_config=SCHEMES["fp8"].options | {"modules_to_not_convert": ["self_attn.q_a_proj"]}
    )
    assert (logits(tmp_path, weight_only=True) - logits(plain)).abs().max() < 1e-4
