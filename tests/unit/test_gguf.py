"""GGUF files: the header parser, dequantisation, names, row order and the synthesised config."""

from __future__ import annotations

import struct
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, LlamaForCausalLM

from rorqual.loader.gguf import GGUFCheckpoint, read_metadata
from rorqual.loader.gguf_dequantize import dequantize
from rorqual.loader.gguf_file import _OTHER_TYPES, STORED_TYPES, GGUFFile, matrix_formats
from rorqual.quantization.gguf_blocks import integer_weight
from rorqual.quantization.integer import INTEGER_FORMATS

from .tiny_gguf import EMBEDDING, smollm2_kinds, write_gguf, write_llama


def config_of(path: Path, arch: str = "llama", keys: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    return GGUFCheckpoint(write_gguf(path / "m.gguf", arch, keys, **options)).config


def random_blocks(kind: Type, rows: int, columns: int, *, seed: int = 0) -> np.ndarray:
    """Stored rows with any bits at all but finite float16 units."""
    rng = np.random.default_rng(seed)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
    two_units = kind in (Type.Q4_1, Type.Q5_1, Type.Q4_K, Type.Q5_K)
    for at in [208] if kind == Type.Q6_K else [0, 2] if two_units else [0]:
        units = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = units.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


# --- the header -----------------------------------------------------------------------------------------------------


def test_the_table_of_stored_types_is_ggml_s() -> None:
    for number, kind in STORED_TYPES.items():
        assert Type(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (kind.block_size, kind.block_bytes)


def test_metadata_of_every_value_type_comes_out_as_plain_python(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -(2**31))
    writer.add_uint64("u64", 2**64 - 1)
    writer.add_int64("i64", -(2**63))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "é 🐋")
    writer.add_array("words", ["a", "Ġb", "🐋", ""])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("flags", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected = {
        "general.architecture": "llama", "u8": 200, "i8": -5, "u16": 60000, "i16": -30000, "u32": 2**32 - 1,
        "i32": -(2**31), "u64": 2**64 - 1, "i64": -(2**63), "f32": 0.5, "f64": 0.1, "yes": True, "text": "é 🐋",
        "words": ["a", "Ġb", "🐋", ""], "ints": [1, -2, 3], "floats": [0.5, -1.5], "flags": [True, False],
    }  # fmt: skip
    found = read_metadata(path)
    assert found == expected
    assert found["yes"] is True
    assert all(type(v) is type(expected[k]) for k, v in found.items())


def test_empty_arrays_and_text_are_read(tmp_path: Path) -> None:
    entries = [(b"ints", struct.pack("<IIQ", 9, 5, 0)), (b"words", struct.pack("<IIQ", 9, 8, 0))]
    entries += [(b"text", struct.pack("<IQ", 8, 0)), (b"nested", struct.pack("<IIQIQB", 9, 9, 1, 0, 1, 7))]
    body = b"".join(struct.pack("<Q", len(key)) + key + value for key, value in entries)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body)
    assert read_metadata(path) == {"ints": [], "words": [], "text": "", "nested": [[7]]}


def test_lo6_empty_and_scalar_tensors_load(tmp_path: Path) -> None:
    infos = [("empty", (3, 0), 0), ("scalar", (), 0), ("token_embd.weight", (4, 1), 32)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0)
    for name, dims, offset in infos:
        head += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
        head += b"".join(struct.pack("<Q", d) for d in dims) + struct.pack("<IQ", 0, offset)
    head += bytes(-len(head) % 32)
    path = tmp_path / "m.gguf"
    path.write_bytes(head + struct.pack("<f", 2.5) + bytes(28) + struct.pack("<4f", 1, 2, 3, 4))
    file = GGUFFile.open(path)
    assert file.bytes_of(file.tensors["empty"]).size == 0
    assert file.tensors["empty"].shape == (0, 3)
    assert file.bytes_of(file.tensors["scalar"]).view(np.float32) == [2.5]
    assert file.bytes_of(file.tensors["token_embd.weight"]).view(np.float32).tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_alignment_is_honoured(tmp_path: Path, alignment: int | None) -> None:
    tensors = {
        "token_embd.weight": np.arange(640, dtype=np.float32).reshape(10, 64),
        "odd": np.arange(3, dtype=np.float16),
        "output_norm.weight": np.arange(64, dtype=np.float32),
    }
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors, alignment=alignment))
    assert torch.equal(checkpoint.load("model.norm.weight"), torch.arange(64.0))
    assert torch.equal(checkpoint.load("model.embed_tokens.weight"), torch.arange(640.0).view(10, 64))
    assert checkpoint.size_bytes == 4 * 640 + 2 * 3 + 4 * 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version must be 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF\x03\x00", "is cut short"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "is cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 77), "unknown metadata type 77"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<I", 0), "not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 6, 2**40), "is cut short"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**40), "is cut short"),
    ],
)
def test_a_damaged_header_is_refused_by_file_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_metadata(path)
    assert "bad.gguf" in str(caught.value)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", full_keys={"words": ["ab", "c"], "ints": [1, 2]}, tensors=EMBEDDING)
    whole = path.read_bytes()
    assert GGUFFile.open(path).tensors["token_embd.weight"].offset + 10 * 64 * 4 == len(whole)
    for size in range(1, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m\.gguf"):
            GGUFFile.open(path)


def test_lo1_tensor_data_past_the_end_is_refused_by_tensor_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cut short: tensor 'token_embd\.weight' ends at byte"):
        GGUFCheckpoint(path)


def test_a_type_that_does_not_load_is_refused_with_tensor_type_and_allowed_ones(tmp_path: Path) -> None:
    tensors = EMBEDDING | {"blk.0.ffn_up.weight": np.zeros((4, 84), np.uint8)}
    path = write_gguf(tmp_path / "m.gguf", tensors=tensors, types={"blk.0.ffn_up.weight": Type.Q2_K})
    with pytest.raises(ValueError, match=r"'blk\.0\.ffn_up\.weight' has type Q2_K; types that load: F32, F16, Q4_0"):
        GGUFCheckpoint(path)


def test_types_that_do_not_load_have_their_right_names():
    assert {number: Type(number).name for number in _OTHER_TYPES} == _OTHER_TYPES


def test_formats_of_the_matrices_are_told_by_the_number_of_their_values(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m.gguf", smollm2_kinds)
    assert matrix_formats(path) == ("Q4_1", "Q8_0")
    assert matrix_formats(write_llama(path, lambda name: Type.F16, num_layers=1)) == ("F16",)


def test_a_missing_file_is_a_value_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.gguf cannot be read"):
        read_metadata(tmp_path / "no.gguf")


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Type[k.name] for k in STORED_TYPES.values() if k.block_size > 1])
def test_dequantising_gives_the_gguf_package_s_bits(kind: Type) -> None:
    for rows, columns in ((3, 256), (130, 1024), (1100, 512)):  # the last is more than one pass
        data = random_blocks(kind, rows, columns, seed=rows)
        expected = gguf.dequantize(data, kind)
        found = dequantize(data, STORED_TYPES[kind])
        assert found.shape == (rows, columns)
        assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", [Type[k.name] for k in STORED_TYPES.values() if k.block_size > 1])
def test_integer_weights_hold_the_blocks_values_to_the_bit(kind: Type) -> None:
    format = INTEGER_FORMATS[kind.name.lower()]
    for rows, columns in ((3, 256), (1100, 512)):
        data = random_blocks(kind, rows, columns, seed=rows)
        weight = integer_weight(data, format)
        assert weight.shape == (rows, columns)
        assert weight.codes.shape == (rows, columns * format.bits // 8)
        assert weight.scales.shape == (rows, columns // format.group)
        assert weight.scales.dtype == format.scale_dtype
        assert (weight.minima is not None) == format.has_minima
        found = weight.dequantize().numpy()
        assert np.array_equal(found.view(np.uint32), gguf.dequantize(data, kind).view(np.uint32))


def test_integer_weights_take_little_more_memory_than_the_file() -> None:
    for kind in STORED_TYPES.values():
        if kind.block_size > 1:
            data = random_blocks(Type[kind.name], 64, 512)
            kept = integer_weight(data, INTEGER_FORMATS[kind.name.lower()]).nbytes
            # Codes of five and six bits take whole bytes, scales of the K formats are products of four.
            most = {"Q4_0": 1, "Q4_1": 1, "Q8_0": 1, "Q4_K": 4 / 3}.get(kind.name, 20 / 11)
            assert data.nbytes <= kept <= most * data.nbytes


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0])
def test_a_quantised_tensor_loads_close_to_its_source(tmp_path: Path, kind: Type) -> None:
    source = np.random.default_rng(1).standard_normal((96, 64)).astype(np.float32)
    tensors = EMBEDDING | {"blk.0.ffn_up.weight": gguf.quantize(source, kind)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors, types={"blk.0.ffn_up.weight": kind}))
    name = "model.layers.0.mlp.up_proj.weight"
    loaded = checkpoint.load(name)
    assert loaded.dtype == torch.float32
    assert loaded.shape == checkpoint.shape(name) == (96, 64)
    bits = 8 if kind == Type.Q8_0 else int(kind.name[1])
    assert np.abs(loaded.numpy() - source).max() < 2 * np.abs(source).max() / 2**bits


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F16, torch.float16), (Type.BF16, torch.bfloat16)])
def test_plain_formats_load_in_their_own_dtype_and_writing_changes_no_file(
    tmp_path: Path, kind: Type, dtype: torch.dtype
) -> None:
    source = np.linspace(-2, 2, 640, dtype=np.float32).reshape(10, 64)
    path = write_gguf(
        tmp_path / "m.gguf",
        tensors={"token_embd.weight": gguf.quantize(source, kind)},
        types={"token_embd.weight": kind},
    )
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about memory that must not be written
        loaded = GGUFCheckpoint(path).load("model.embed_tokens.weight")
    assert loaded.dtype == dtype
    assert torch.equal(loaded, torch.from_numpy(source).to(dtype))
    loaded.zero_()
    assert path.read_bytes() == before


def resident_kib(path: Path) -> int:
    """Memory that this process has of a mapped file."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    found = 0
    for line in lines:
        if line.endswith(str(path)):
            found += next(int(entry.split()[1]) for entry in lines if entry.startswith("Rss:"))
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux to tell of a mapping's memory")
def test_released_pages_leave_memory_and_come_back_with_the_same_bytes(tmp_path: Path) -> None:
    source = np.random.default_rng(2).standard_normal((4096, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", tensors={"token_embd.weight": source})
    checkpoint, name = GGUFCheckpoint(path), "model.embed_tokens.weight"
    loaded = checkpoint.load(name)
    total = loaded.double().sum()
    assert resident_kib(path) >= 1024
    checkpoint.release(name)
    assert resident_kib(path) < 64
    assert loaded.double().sum() == total


# --- names, row order, experts --------------------------------------------------------------------------------------


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: pair each head's first half with its second, row by row."""
    size = rows.shape[0] // heads
    order = [head * size + half * (size // 2) + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return np.ascontiguousarray(rows[order])


def gguf_tensors_of(state: dict[str, torch.Tensor], heads: dict[str, int]) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    found = {}
    for name, tensor in state.items():
        rows = tensor.numpy()
        for projection, count in heads.items():
            if projection in name:
                rows = interleave(rows, count)
        found[names.get_name(name, try_suffixes=(".weight", ".bias"))] = rows
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_a_converted_llama_comes_back_as_its_hugging_face_state(tmp_path: Path, bias: bool) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=bias, mlp_bias=bias, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tensors = gguf_tensors_of(state, {"q_proj": 4, "k_proj": 2})
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", keys={"block_count": 2}, tensors=tensors))
    assert set(checkpoint.names()) == set(state)
    for name, tensor in state.items():
        assert torch.equal(checkpoint.load(name), tensor), name
    assert checkpoint.config["attention_bias"] is checkpoint.config["mlp_bias"] is bias
    assert checkpoint.config["tie_word_embeddings"] is False


def test_quantised_rows_are_put_back_in_order_before_they_are_dequantised(tmp_path: Path) -> None:
    source = gguf.quantize(np.random.default_rng(2).standard_normal((64, 64)).astype(np.float32), Type.Q4_0)
    tensors = EMBEDDING | {"blk.0.attn_q.weight": interleave(source, 4)}
    checkpoint = GGUFCheckpoint(
        write_gguf(tmp_path / "m.gguf", tensors=tensors, types={"blk.0.attn_q.weight": Type.Q4_0})
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(checkpoint.load(name).numpy(), gguf.dequantize(source, Type.Q4_0))
    raw = checkpoint.raw(name)
    assert (raw.type.name, raw.shape) == ("Q4_0", (64, 64))
    assert np.array_equal(raw.data, source)


def test_qwen_rows_are_left_in_order(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).standard_normal((64, 64)).astype(np.float32)
    tensors = EMBEDDING | {"blk.0.attn_q.weight": rows, "blk.0.attn_q_norm.weight": rows[0, :16].copy()}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", "qwen3", tensors=tensors))
    assert np.array_equal(checkpoint.load("model.layers.0.self_attn.q_proj.weight").numpy(), rows)
    assert checkpoint.shape("model.layers.0.self_attn.q_norm.weight") == (16,)


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
def test_stacked_experts_appear_one_by_one(tmp_path: Path, kind: Type) -> None:
    rng = np.random.default_rng(4)
    shapes = {"gate": (3, 32, 64), "up": (3, 32, 64), "down": (3, 64, 32)}
    stacked = {k: rng.standard_normal(shape).astype(np.float32) for k, shape in shapes.items()}
    tensors = EMBEDDING | {f"blk.0.ffn_{k}_exps.weight": gguf.quantize(v, kind) for k, v in stacked.items()}
    tensors["blk.0.ffn_gate_inp.weight"] = rng.standard_normal((3, 64)).astype(np.float32)
    checkpoint = GGUFCheckpoint(
        write_gguf(
            tmp_path / "m.gguf",
            "qwen3moe",
            {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32},
            tensors,
            types={f"blk.0.ffn_{k}_exps.weight": kind for k in shapes},
        )
    )
    assert checkpoint.shape("model.layers.0.mlp.gate.weight") == (3, 64)
    assert len(checkpoint.names()) == 1 + 1 + 9
    for k, shape in shapes.items():
        expected = gguf.dequantize(gguf.quantize(stacked[k], kind), kind)
        for e in range(3):
            name = f"model.layers.0.mlp.experts.{e}.{k}_proj.weight"
            assert checkpoint.shape(name) == shape[1:]
            assert np.array_equal(checkpoint.load(name).numpy(), expected[e])


def test_an_unknown_tensor_keeps_its_name_so_that_it_is_missed_by_nobody(tmp_path: Path) -> None:
    tensors = EMBEDDING | {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors))
    assert set(checkpoint.names()) == {"model.embed_tokens.weight", "blk.0.attn_sinks.weight"}


# --- config ---------------------------------------------------------------------------------------------------------


def test_a_llama_s_config(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    assert config_of(tmp_path, full_keys=ids) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "max_position_embeddings": 128,
        "vocab_size": 10,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }


@pytest.mark.parametrize("arch", ["qwen2", "qwen3", "qwen3moe"])
def test_a_qwen_s_config(tmp_path: Path, arch: str) -> None:
    moe = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32} if arch == "qwen3moe" else {}
    config = config_of(tmp_path, arch, moe | {"attention.key_length": 32, "attention.value_length": 32})
    assert config["model_type"] == {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}[arch]
    assert config["head_dim"] == 32
    assert "mlp_bias" not in config
    assert ("attention_bias" in config) == (arch != "qwen2")
    if moe:
        expected = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        assert config.items() >= expected.items()


def test_head_dim_comes_from_key_length_then_rope_dimensions_then_the_hidden_size(tmp_path: Path) -> None:
    assert config_of(tmp_path, keys={"attention.key_length": 32, "rope.dimension_count": 32})["head_dim"] == 32
    assert config_of(tmp_path, keys={"rope.dimension_count": 24})["head_dim"] == 24
    assert config_of(tmp_path)["head_dim"] == 16


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
        ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": pytest.approx(0.5 * 1.1386294361)},
        ),
    ],
)
def test_rope_scaling_is_told_in_hugging_face_s_words(tmp_path: Path, keys: Any, expected: Any) -> None:
    assert config_of(tmp_path, "qwen3", keys).get("rope_scaling") == expected


def test_rope_factors_move_from_the_tensors_to_the_config(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 8.0], np.float32)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=EMBEDDING | {"rope_freqs.weight": factors}))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "gguf_factors", "factors": [1.0, 1.5, 8.0]}
    assert set(checkpoint.names()) == {"model.embed_tokens.weight"}


def test_a_llama_with_a_sliding_window_is_a_mistral(tmp_path: Path) -> None:
    config = config_of(tmp_path, keys={"attention.sliding_window": 32})
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 32)
    assert not {"attention_bias", "mlp_bias"} & config.keys()


def test_a_qwen_with_a_sliding_window_uses_it_in_every_layer(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen2", {"attention.sliding_window": 32})
    expected = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}
    assert config.items() >= expected.items()


def test_an_architecture_key_that_nobody_knows_reaches_the_config_under_its_name(tmp_path: Path) -> None:
    keys = {"attention.scale": 0.5, "vocab_size": 10, "tensor_data_layout": "Meta AI original pth"}
    config = config_of(tmp_path, keys=keys)
    assert {key: value for key, value in config.items() if "." in key} == {"llama.attention.scale": 0.5}


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("gemma", {}, "unknown GGUF architecture 'gemma'; known ones: llama, qwen2, qwen3, qwen3moe"),
        ("llama", {"expert_count": 8}, "'llama' with 8 experts is not supported"),
        ("llama", {"block_count": None}, r"llama\.block_count must be a number above 0, got None"),
        ("llama", {"attention.head_count": [4, 8]}, "head_count must be the same in every layer"),
        ("llama", {"rope.dimension_count": 8, "attention.key_length": 16}, "must equal the head size 16, got 8"),
        ("llama", {"rope.scaling.type": "longrope"}, "must be none, linear or yarn, got 'longrope'"),
    ],
)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, arch: str, keys: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, arch, keys)


def test_recommended_sampling_becomes_the_generation_config(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20}
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", full_keys=keys))
    assert checkpoint.generation_config == {"temperature": 0.6, "top_k": 20}


# --- split files ----------------------------------------------------------------------------------------------------


def write_parts(folder: Path) -> list[Path]:
    paths = [folder / f"m-{i:05d}-of-00002.gguf" for i in (1, 2)]
    norm = {"output_norm.weight": np.ones(64, np.float32)}
    write_gguf(paths[0], full_keys={"split.count": 2, "split.no": 0})
    write_gguf(paths[1], tensors=norm, full_keys={"split.count": 2, "split.no": 1})
    return paths


def test_any_part_of_a_split_model_opens_the_whole(tmp_path: Path) -> None:
    for path in write_parts(tmp_path):
        checkpoint = GGUFCheckpoint(path)
        assert set(checkpoint.names()) == {"model.embed_tokens.weight", "model.norm.weight"}
        assert torch.equal(checkpoint.load("model.norm.weight"), torch.ones(64))


def test_lo1_a_missing_part_is_refused_by_name(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    second.unlink()
    with pytest.raises(ValueError, match=r"missing beside it: m-00002-of-00002\.gguf"):
        GGUFCheckpoint(first)


# --- the real file --------------------------------------------------------------------------------------------------


def test_the_real_file_reads_as_the_gguf_package_reads_it(smollm2_path: Path) -> None:
    start = time.process_time()
    metadata = read_metadata(smollm2_path)
    ours = time.process_time() - start
    assert len(metadata["tokenizer.ggml.tokens"]) == 49152
    assert metadata["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "<|im_start|>"]
    reader = gguf.GGUFReader(smollm2_path)
    assert ours < (time.process_time() - start) / 5  # it is forty times as quick
    assert metadata["tokenizer.ggml.merges"] == reader.fields["tokenizer.ggml.merges"].contents()
    infos = GGUFFile.open(smollm2_path).tensors
    assert len(infos) == len(reader.tensors)
    for tensor in reader.tensors:
        info = infos[tensor.name]
        assert info.shape == tuple(int(d) for d in reversed(tensor.shape))
        assert (info.type.name, info.offset, info.size_bytes) == (
            tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes,
        )  # fmt: skip


def test_the_real_file_s_tensors_load_from_two_threads(smollm2_path: Path) -> None:
    checkpoint = GGUFCheckpoint(smollm2_path)
    assert checkpoint.config["model_type"] == "llama"
    names = sorted(checkpoint.names())
    assert len(names) == 272
    with ThreadPoolExecutor(2) as pool:
        loaded = dict(zip(names, pool.map(checkpoint.load, names), strict=True))
    assert sum(tensor.numel() for tensor in loaded.values()) == 134_515_008
    for name in ("model.layers.7.self_attn.k_proj.weight", "model.layers.3.mlp.down_proj.weight"):
        assert torch.equal(loaded[name], checkpoint.load(name))
        assert loaded[name].abs().max() > 0
