"""Models with FP8 and FP4 weights, from a folder to logits: against the same numbers, and against full precision."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from array import array
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from rorqual import LLM, SamplingParams
from rorqual.cache.spec import group_caches
from rorqual.cache.storage import KVStorage
from rorqual.distributed.mesh import Mesh
from rorqual.engine.batch_builder import build_batch
from rorqual.layers.decoder import Placement
from rorqual.loader.checkpoint import open_checkpoint
from rorqual.loader.quantization_config import read_weight_quantization
from rorqual.loader.weights import fill_with_dummy_weights, load_weights, prepare_weights, wanted_tensors
from rorqual.models.registry import build_model
from rorqual.ops.native._quantized_linear import PairedWeight
from rorqual.ops.native.library import missing
from rorqual.ops.registry import load_backends
from rorqual.quantization import QTensor
from rorqual.sequence import Chunk, Sequence
from tests.engine.engines import TINY_OPTIONS
from tests.quantized import SCHEMES, Tensors, edit_quantization, edited, quantized_folders

load_backends("native", "cpu")

VOCAB = 208
CPU = torch.device("cpu")
BASE = {
    "vocab_size": VOCAB, "hidden_act": "silu", "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None, "max_position_embeddings": 256, "num_hidden_layers": 3, "tie_word_embeddings": False,
    "head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2, "rope_theta": 1e6, "attention_bias": False,
    # more than a block of 128, and no multiple of it; queries, keys and values meet within blocks
    "hidden_size": 192, "intermediate_size": 320,
}  # fmt: skip
MODELS = {
    "qwen3": ("qwen3", BASE),
    "qwen3_moe": (
        "qwen3_moe",
        BASE
        | {
            "moe_intermediate_size": 160,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "llama_bias": ("llama", BASE | {"attention_bias": True, "mlp_bias": True}),
}
FP8 = SCHEMES["fp8"]


@functools.cache
def full_precision(model: str) -> Path:
    """A folder with the float32 model."""
    model_type, options = MODELS[model]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **options)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            draw = torch.Generator().manual_seed(sum(name.encode()))
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.dim() > 1:  # some blocks of 32 are several times larger than others
                rows, columns = (
                    torch.randn(-(-size // 32), generator=draw).exp().repeat_interleave(32)[:size]
                    for size in parameter.shape[-2:]
                )
                noise *= rows[:, None] * columns
                parameter.copy_(noise / noise.square().mean().sqrt() / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(noise * 0.1 + (0.0 if name.endswith("bias") else 1.0))
    folder = Path(tempfile.mkdtemp(prefix=f"rorqual-{model}-full-"))
    made.save_pretrained(folder)
    return folder


@functools.cache
def folders(model: str, scheme: str) -> tuple[Path, Path]:
    """(quantised, plain with the same numbers)."""
    target = Path(tempfile.mkdtemp(prefix=f"rorqual-{model}-{scheme}-"))
    return quantized_folders(full_precision(model), target, SCHEMES[scheme])


def built(folder: Path, *, weight_only: bool = False, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    checkpoint = open_checkpoint(folder)
    quantization = read_weight_quantization(checkpoint.config)
    if weight_only:
        both = {name: getattr(quantization, name)._replace(activation=None) for name in ("linear", "experts")}
        quantization = dataclasses.replace(quantization, **both)
    return build_model(checkpoint.config, Placement(Mesh.single(), dtype, CPU, dtype, 64, quantization=quantization))


def load(folder: Path, model: torch.nn.Module | None = None, **options) -> torch.nn.Module:
    model = model or built(folder, **options)
    load_weights(model, open_checkpoint(folder), tied_tensors=model.tied_tensors, num_threads=2)
    return model


def logits(folder: Path, token_ids: list[int], **options) -> torch.Tensor:
    """float32 [num_tokens, vocab] of a text at once."""
    model = load(folder, **options)
    prepare_weights(model)
    groups = group_caches(model.kv_specs)
    kv = KVStorage(groups, [16] * len(groups), block_size=4, device=CPU)
    seq = Sequence(0, list(token_ids), len(token_ids), 64)
    seq.block_tables = [array("i", range(16)) for _ in groups]
    paging = [group.paging(4) for group in groups]
    batch, _ = build_batch([Chunk(seq, 0, len(token_ids))], [True], paging=paging, device=CPU)
    with torch.inference_mode():
        return model.compute_logits(model(batch, kv)).float()


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Root mean square of the difference, in standard deviations of what is wanted."""
    return ((got - want).square().mean().sqrt() / want.std()).item()


MODEL_SCHEMES = [("qwen3", name) for name in SCHEMES] + [("qwen3_moe", n) for n in ("fp8", "mxfp8_tile", "mxfp4")]
MODEL_SCHEMES += [("llama_bias", n) for n in ("fp8", "fp8_ue8m0")]


@pytest.mark.parametrize(("model", "scheme"), MODEL_SCHEMES)
def test_weight_only_logits_are_those_of_the_same_numbers(model, scheme):
    """Same formulas in float32, sums in another order."""
    quantised, plain = folders(model, scheme)
    got, want = logits(quantised, tokens(40), weight_only=True), logits(plain, tokens(40))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize(("model", "scheme"), MODEL_SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_near_those_of_full_precision(model, scheme, dtype):
    """Weights and inputs rounded to 3 bits of mantissa (FP8), or weights to 1 (FP4), through three layers.

    The bounds are 1.5 to 2 times what was measured, 0.06 to 0.12 and 0.36; with experts, where a router may choose
    otherwise, up to 0.3 and 0.6. Scales that lie beside their blocks in one of the dense layers give 0.9 and more.
    """
    quantised, _ = folders(model, scheme)
    got, want = logits(quantised, tokens(40), dtype=dtype), logits(full_precision(model), tokens(40))
    bounds = {"mxfp4": 0.9, "other": 0.5} if model == "qwen3_moe" else {"mxfp4": 0.6, "other": 0.25}
    assert 0.02 < distance(got, want) < bounds.get(scheme, bounds["other"])


def test_inputs_are_quantised_as_the_config_says():
    """activation_scheme dynamic rounds them; mxfp4 may leave it out, and then does not."""
    quantised, plain = folders("qwen3", "mxfp4")
    exact, dynamic = logits(plain, tokens(40)), logits(quantised, tokens(40))
    assert 0.02 < distance(dynamic, exact) < 0.3
    with tempfile.TemporaryDirectory() as name:
        folder, _ = quantized_folders(full_precision("qwen3"), Path(name), SCHEMES["mxfp4"])
        edit_quantization(folder, {"quant_method": "mxfp4"})
        assert (logits(folder, tokens(40)) - exact).abs().max() < 1e-4 * exact.abs().max()


# --- what the checkpoint must hold

SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"


def fresh(tmp_path: Path, edit=None, **options) -> Path:
    folder, _ = quantized_folders(full_precision("qwen3"), tmp_path, FP8, **options)
    return edited(folder, edit) if edit else folder


def refused(folder: Path) -> str:
    model = built(folder)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(7)
    with pytest.raises(ValueError) as error:
        load(folder, model)
    assert all(bool((p.view(torch.uint8) == 7).all()) for p in model.parameters()), "touched before it was refused"
    return str(error.value)


def test_every_parameter_is_filled(tmp_path):
    folder = fresh(tmp_path)
    model = built(folder)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)
    load(folder, model)
    for name, parameter in model.named_parameters():
        assert not bool(parameter.float().isnan().any()), name


def test_a_missing_scale_is_named(tmp_path):
    said = refused(fresh(tmp_path, lambda tensors: tensors.pop(SCALE)))
    assert f"does not fit the model: 1 missing: {SCALE}" in said


def test_a_scale_under_two_names_is_left_over(tmp_path):
    other = SCALE.replace("weight_scale_inv", "weight_scale")
    said = refused(fresh(tmp_path, lambda tensors: tensors.update({other: tensors[SCALE].clone()})))
    assert f"1 left over: {other}" in said


def test_scales_of_a_layer_that_is_not_to_be_quantised_are_left_over(tmp_path):
    skipped = ["model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj"]
    said = refused(fresh(tmp_path, modules_to_not_convert=skipped))
    assert f"2 left over: {SCALE.replace('up_', 'gate_')}, {SCALE}" in said


def test_a_quantised_head_is_left_over(tmp_path):
    said = refused(fresh(tmp_path, lambda tensors: tensors.update({"lm_head.weight_scale_inv": torch.ones(2, 2)})))
    assert "1 left over: lm_head.weight_scale_inv" in said


def test_quantised_tensors_without_a_config_are_left_over(tmp_path):
    folder = fresh(tmp_path)
    edit_quantization(folder, None)
    said = refused(folder)
    assert "21 left over: model.layers.0.mlp.down_proj.weight_scale_inv" in said


@pytest.mark.parametrize("shape", [(3, 1), (2, 3), (3, 2, 1), (320, 2), ()])
def test_a_misshapen_scale_is_named_with_both_shapes(tmp_path, shape):
    said = refused(fresh(tmp_path, lambda tensors: tensors.update({SCALE: torch.ones(shape)})))
    assert f"tensor {SCALE} has shape {list(shape)}" in said
    assert "wants [3, 2]" in said


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (
            lambda tensors: tensors.update({SCALE: torch.ones(3, 2, dtype=torch.int64)}),
            rf"tensor {SCALE} in .*: format fp8_block has float32 scales, got torch.int64",
        ),
        (
            lambda tensors: tensors.update({SCALE.removesuffix("_scale_inv"): torch.zeros(320, 192)}),
            r"tensor model.layers.1.mlp.up_proj.weight in .*: format fp8_block has values of float8_e4m3fn, got",
        ),
    ],
)
def test_tensors_of_a_wrong_dtype_are_named(tmp_path, edit, sentence):
    with pytest.raises(ValueError, match=sentence):
        load(fresh(tmp_path, edit))


def test_scales_that_the_config_calls_powers_of_two_must_be(tmp_path):
    folder = fresh(tmp_path, scale_fmt="ue8m0")
    with pytest.raises(
        ValueError, match=r"tensor model\.layers\..*weight_scale_inv in .*are powers of two, got 0\.\d+"
    ):
        load(folder)


def test_modules_to_not_convert_stay_plain(tmp_path):
    skipped = [f"model.layers.2.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")]

    def put_back(tensors: Tensors) -> None:
        (file,) = full_precision("qwen3").glob("*.safetensors")
        with safe_open(file, framework="pt") as whole:
            for name in skipped:
                tensors[f"{name}.weight"] = whole.get_tensor(f"{name}.weight")
                del tensors[f"{name}.weight_scale_inv"]

    model = load(fresh(tmp_path, put_back, modules_to_not_convert=[*skipped, "lm_head"]))
    attention = [layer.self_attn for layer in model.model.layers]
    assert [isinstance(each.qkv_proj.operand, QTensor) for each in attention] == [True, True, False]
    assert all(isinstance(each.o_proj.operand, QTensor) for each in attention)
    assert model.lm_head.weight.dtype == model.model.embed_tokens.weight.dtype == torch.float32


# --- the engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "scheme"), [("qwen3", "fp8"), ("qwen3_moe", "fp8"), ("qwen3", "mxfp8"), ("qwen3", "mxfp4")]
)
def test_engine_runs_and_chunks_do_not_matter(model, scheme, dtype):
    """In bfloat16, blocks of 32 are for the compiled kernels, whose rows are independent to the bit.

    Those of torch's own products are not, and rounding inputs to e4m3 makes a step of 6 % out of a last bit.
    """
    quantised, _ = folders(model, scheme)
    prompts = [tokens(length, seed=length) for length in (1, 5, 20, 33)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = []
    promised = dtype == "bfloat16" and scheme.startswith("mx") and missing() is None
    for chunk in (16, 5, 4) if promised else (16,):
        options = TINY_OPTIONS | {"dtype": dtype, "max_num_batched_tokens": chunk, "max_num_seqs": 4}
        options |= {"block_size": 16}  # which the compiled kernels want
        with LLM(str(quantised), **options) as llm:
            answers.append([out.token_ids for out in llm.generate(prompts, params, use_tqdm=False)])
            weights = llm.engine.resolved.weight_bytes
            layer = llm.engine._runner.model.model.layers[0]
            compiled = isinstance(layer.self_attn.o_proj.operand, PairedWeight)
    assert all(answer == answers[0] for answer in answers)
    assert {len(ids) for ids in answers[0]} == {16}
    assert compiled == (scheme.startswith("mx") and missing() is None)
    sketch = built(quantised, dtype=getattr(torch, dtype))
    assert weights == sum(p.numel() * p.element_size() for p in sketch.parameters())


def test_greedy_tokens_are_those_of_the_same_numbers():
    """Without rounding the inputs, a quantised folder and its dequantised twin give the same text."""
    with tempfile.TemporaryDirectory() as name:
        quantised, plain = quantized_folders(full_precision("qwen3"), Path(name), SCHEMES["mxfp4"])
        edit_quantization(quantised, {"quant_method": "mxfp4"})
        texts = []
        for folder in (quantised, plain):
            with LLM(str(folder), **TINY_OPTIONS) as llm:
                params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
                texts.append(llm.generate([tokens(9)], params, use_tqdm=False)[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sizing_counts_packed_bytes(scheme):
    """A byte or half a byte per value of a projection, and its scales."""
    quantised, plain = folders("qwen3", scheme)
    model, twin = built(quantised), built(plain)
    linear = {n: w for n, w in wanted_tensors(twin).items() if n.endswith("_proj.weight")}
    values = sum(w.shape[0] * w.shape[1] for w in linear.values())
    whole = sum(p.numel() * 4 for p in twin.parameters())
    packed = sum(p.numel() * p.element_size() for p in model.parameters())
    scales = packed - (whole - 4 * values) - values // (2 if scheme == "mxfp4" else 1)
    assert 0 < scales < values // 8


# --- dummy weights


@pytest.mark.parametrize("scheme", ["fp8", "fp8_ue8m0", "mxfp8", "mxfp4"])
def test_dummy_weights_are_seeded_and_of_a_sensible_size(scheme):
    quantised, _ = folders("qwen3", scheme)
    first, second, other = (built(quantised) for _ in range(3))
    seen: list[int] = []
    fill_with_dummy_weights(first, seed=3, on_tensor=seen.append)
    fill_with_dummy_weights(second, seed=3)
    fill_with_dummy_weights(other, seed=4)
    assert sum(seen) == sum(p.numel() for p in first.parameters())
    for layer in range(3):
        weights = [model.model.layers[layer].mlp.down_proj.operand for model in (first, second, other)]
        dense = [weight.dequantize() for weight in weights]
        assert torch.equal(dense[0], dense[1])
        assert not torch.equal(dense[0], dense[2])
        assert 0.7 < dense[0].std() * 320**0.5 < 1.42, "as far as a power of two comes"
        assert len(dense[0].unique()) >= 13, "more values than signs"
    assert torch.equal(first.model.norm.weight, second.model.norm.weight)


def test_engine_runs_on_dummy_quantised_weights():
    quantised, _ = folders("qwen3", "fp8")
    with LLM(str(quantised), **(TINY_OPTIONS | {"load_format": "dummy"})) as llm:
        out = llm.generate([tokens(9)], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(out[0].token_ids) == 4
