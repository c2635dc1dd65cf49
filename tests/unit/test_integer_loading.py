"""Loading matrices as integers: from GGUF as they are, from others rounded, made up; never as floats first."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from rorqual.config import EngineConfig
from rorqual.distributed.mesh import Mesh
from rorqual.engine.resolved_config import resolve
from rorqual.layers.decoder import Placement
from rorqual.layers.stacked_weight import StackedWeight
from rorqual.loader.checkpoint import Checkpoint, open_checkpoint
from rorqual.loader.integer_quantization import IntegerQuantization
from rorqual.loader.weights import fill_with_dummy_weights, load_weights, prepare_weights, wanted_tensors
from rorqual.models.registry import build_model
from rorqual.ops.linear import unpack_weight
from rorqual.ops.registry import load_backends
from rorqual.quantization.integer import Q4_1, Q8_0, IntegerStack, IntegerWeight
from tests.tiny import checkpoint_folder
from tests.unit.tiny_gguf import MIXED_SIZES, Type, mixed_kinds, smollm2_kinds, write_llama

load_backends("native", "cpu")
KINDS = {"smollm2": (smollm2_kinds, {}), "mixed": (mixed_kinds, MIXED_SIZES | {"tied": False})}


@pytest.fixture(params=KINDS)
def packed(request, tmp_path: Path) -> Checkpoint:
    kind_of, sizes = KINDS[request.param]
    return open_checkpoint(write_llama(tmp_path / "m.gguf", kind_of, **sizes))


def built(checkpoint: Checkpoint, quantization: IntegerQuantization | None, device: str = "cpu") -> torch.nn.Module:
    place = Placement(
        Mesh.single(), torch.bfloat16, torch.device(device), torch.bfloat16, 64, quantization=quantization
    )
    return build_model(checkpoint.config, place)


def load(model: torch.nn.Module, checkpoint: Checkpoint, **options) -> torch.nn.Module:
    load_weights(model, checkpoint, tied_tensors=model.tied_tensors, num_threads=2, **options)
    return model


def stacks(model: torch.nn.Module) -> dict[str, StackedWeight]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, StackedWeight)}


def test_packed_tensors_go_to_the_layers_as_they_are(packed, monkeypatch):
    def refuse(*_args):
        raise AssertionError("dequantised as a whole")

    model, seen = built(packed, IntegerQuantization(dynamic=True, stored=packed.integer_formats)), []
    with monkeypatch.context() as patched:
        patched.setattr("rorqual.loader.gguf_dequantize.dequantize", refuse)
        load(model, packed, on_tensor=seen.append)
    assert sum(seen) == sum(math.prod(packed.shape(name)) for name in packed.names())
    assert all(parameter.dim() == 1 for parameter in model.parameters()), "matrices are no parameters"
    layer = model.model.layers[1]
    for stack, names in (
        (layer.self_attn.qkv_proj, [f"self_attn.{n}_proj" for n in "qkv"]),
        (layer.mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"]),
        (layer.mlp.down_proj, ["mlp.down_proj"]),
    ):
        want = torch.cat([packed.load(f"model.layers.1.{name}.weight") for name in names])
        assert torch.equal(stack.operand.dequantize(), want)
        assert all(part.dynamic for part in stack._kept)
    table = packed.load("model.embed_tokens.weight")
    assert torch.equal(model.model.embed_tokens.table.dequantize(), table)
    head = packed.load("lm_head.weight") if "lm_head.weight" in packed.names() else table
    assert torch.equal(model.lm_head.operand.dequantize(), head)


def test_layers_are_laid_out_as_they_are_filled(packed):
    ids = torch.tensor([3, 0, 62])
    want = packed.load("model.embed_tokens.weight")[ids].bfloat16()
    loaded, prepared = (
        load(built(packed, IntegerQuantization(dynamic=True, stored=packed.integer_formats)), packed, prepare=prepare)
        for prepare in (False, True)
    )
    assert torch.equal(loaded.model.embed_tokens(ids), want)
    prepare_weights(loaded)
    for model in (loaded, prepared):
        assert torch.equal(model.model.embed_tokens(ids), want)
        for stack in stacks(model).values():
            assert not any(stack._kept), "the weights are held once"
    for name, stack in stacks(prepared).items():
        if name != "model.embed_tokens":
            assert torch.equal(
                unpack_weight(stack.operand).dequantize(), unpack_weight(stacks(loaded)[name].operand).dequantize()
            )


def test_a_table_has_no_memory_of_its_own(packed):
    model = load(built(packed, IntegerQuantization(dynamic=True, stored=packed.integer_formats)), packed, prepare=True)
    table = model.model.embed_tokens
    if packed.config["tie_word_embeddings"]:
        assert table._blocks is None
        assert table.operand is model.lm_head.operand
    else:
        mapped = packed.load_blocks("model.embed_tokens.weight")
        assert table._blocks.data.data_ptr() == mapped.data.data_ptr(), "in the file"


def test_parts_of_different_formats_are_a_stack(tmp_path):
    checkpoint = open_checkpoint(write_llama(tmp_path / "m.gguf", mixed_kinds, **MIXED_SIZES))
    model = load(built(checkpoint, IntegerQuantization(dynamic=True, stored=checkpoint.integer_formats)), checkpoint)
    qkv = model.model.layers[0].self_attn.qkv_proj.operand
    assert isinstance(qkv, IntegerStack)
    assert [part.format.name for part in qkv] == ["q4_k", "q6_k"]
    assert isinstance(model.model.layers[0].mlp.down_proj.operand, IntegerWeight)


def test_a_product_with_a_plain_part_is_plain(tmp_path, caplog):
    path = write_llama(tmp_path / "m.gguf", lambda name: Type.F16 if "attn_v" in name else smollm2_kinds(name))
    checkpoint = open_checkpoint(path)
    config = EngineConfig(model=str(path), quantization="int8", device="cpu", num_kv_blocks=64)
    assert resolve(config, checkpoint.config, checkpoint.integer_formats).weight_formats == ("q4_1", "q8_0")
    kept = IntegerQuantization(dynamic=True, stored=checkpoint.integer_formats)
    model = load(built(checkpoint, kept), checkpoint)
    attention = model.model.layers[0].self_attn
    want = torch.cat([checkpoint.load(f"model.layers.0.self_attn.{n}_proj.weight").bfloat16() for n in "qkv"])
    assert torch.equal(attention.qkv_proj.operand, want)
    assert attention.o_proj.integers


@pytest.mark.parametrize(("wanted", "linear"), [("int8", Q8_0), ("int4", Q4_1)])
def test_a_plain_checkpoint_is_rounded_tensor_by_tensor(wanted, linear, tmp_path):
    """Plain GGUF stands for any unquantised checkpoint: 64 columns, where the tiny safetensors have 48."""
    path = write_llama(tmp_path / "m.gguf", lambda _name: Type.BF16, tied=False)
    checkpoint = open_checkpoint(path)
    assert checkpoint.integer_formats == {}
    config = EngineConfig(model=str(path), quantization=wanted, device="cpu", num_kv_blocks=64)
    resolved = resolve(config, checkpoint.config, checkpoint.integer_formats)
    model = load(built(checkpoint, resolved.quantization), checkpoint)
    assert all(parameter.dim() == 1 for parameter in model.parameters())
    names = {"model.embed_tokens": Q8_0, "lm_head": Q8_0, "model.layers.2.mlp.down_proj": linear}
    for name, format in names.items():
        kept = stacks(model)[name].operand
        assert kept.format == format
        want = IntegerWeight.quantize(checkpoint.load(f"{name}.weight"), format).dequantize()
        assert torch.equal(kept.dequantize(), want)


def test_a_tensor_that_cannot_be_rounded_is_refused_by_name(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(write_llama(tmp_path / "m.gguf", lambda _name: Type.F32))
    load_plain = checkpoint.load
    name = "model.layers.1.mlp.up_proj.weight"
    monkeypatch.setattr(checkpoint, "load", lambda n, _rows: load_plain(n) * (1e9 if n == name else 1))
    model = built(checkpoint, IntegerQuantization(dynamic=True, linear=Q8_0))
    with pytest.raises(ValueError, match=rf"tensor {name} in .*format q8_0 cannot hold"):
        load(model, checkpoint)


def test_a_model_without_a_matrix_that_fits_is_refused():
    path = checkpoint_folder("llama")  # 48 and 80 columns
    config = EngineConfig(model=str(path), quantization="int4", device="cpu", num_kv_blocks=64)
    with pytest.raises(ValueError, match=r"'int4' needs matrices with a multiple of 32 input features.* leave it"):
        resolve(config, open_checkpoint(path).config)


def test_what_stays_plain_is_said(caplog):
    path = checkpoint_folder("qwen3")  # heads of 64 columns in all
    config = EngineConfig(model=str(path), quantization="int8", device="cpu", num_kv_blocks=64)
    resolved = resolve(config, open_checkpoint(path).config)
    assert "matrices stay in torch.bfloat16, such as model.embed_tokens" in caplog.text
    assert set(resolved.weight_formats) == {"q8_0", "bfloat16"}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float32"])
def test_memory_is_known_before_loading(packed, dtype):
    config = EngineConfig(model=str(packed.path), device="cpu", dtype=dtype, num_kv_blocks=64, quantization="int8")
    resolved = resolve(config, packed.config, packed.integer_formats)
    model = load(built(packed, resolved.quantization), packed)
    held = sum(stack.operand.nbytes for stack in stacks(model).values())
    norms = sum(parameter.numel() for parameter in model.parameters()) * resolved.dtype.itemsize
    assert resolved.weight_bytes == held + norms
    assert resolved.num_parameters == sum(math.prod(packed.shape(name)) for name in packed.names())
    assert resolved.dtype == (torch.float32 if dtype == "float32" else torch.bfloat16)
    plain = resolve(config.model_copy(update={"quantization": "none"}), packed.config, packed.integer_formats)
    assert resolved.weight_bytes < 0.6 * plain.weight_bytes


def test_dummy_weights_have_the_files_formats_and_repeat(packed):
    dummy = open_checkpoint(packed.path, load_format="dummy")
    assert dummy.integer_formats == packed.integer_formats
    kept = IntegerQuantization(dynamic=True, stored=dummy.integer_formats)
    models, seen = [built(dummy, kept) for _ in range(3)], []
    for model, seed in zip(models, (3, 3, 4), strict=True):
        fill_with_dummy_weights(model, seed=seed, on_tensor=seen.append)
    assert sum(seen) == 3 * sum(math.prod(packed.shape(name)) for name in packed.names())
    first, same, other = (stacks(model) for model in models)
    for name, stack in first.items():
        values = stack.operand.dequantize()
        assert torch.equal(values, same[name].operand.dequantize())
        assert not torch.equal(values, other[name].operand.dequantize())
        assert values.std().item() == pytest.approx(values.shape[1] ** -0.5, rel=0.15)
        assert abs(values.mean().item()) < 0.1 * values.std().item()


def test_layers_of_integers_name_their_format_for_every_tensor(packed):
    model = built(packed, IntegerQuantization(dynamic=True, stored=packed.integer_formats), "meta")
    found = {name: want.format for name, want in wanted_tensors(model).items() if want.format is not None}
    assert found == packed.integer_formats
