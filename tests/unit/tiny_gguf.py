"""Small GGUF files, written by the gguf package's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

BASE = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
EMBEDDING = {"token_embd.weight": np.zeros((10, 64), np.float32)}


def write_gguf(
    path: Path,
    arch: str = "llama",
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    *,
    types: dict[str, Type] | None = None,
    full_keys: dict[str, Any] | None = None,
    alignment: int | None = None,
) -> Path:
    """A GGUF file from the gguf package's own writer; None drops a key of BASE."""
    writer = gguf.GGUFWriter(path, arch)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    values = {f"{arch}.{key}": value for key, value in (BASE | (keys or {})).items() if value is not None}
    for key, value in (values | (full_keys or {})).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in (EMBEDDING if tensors is None else tensors).items():
        writer.add_tensor(name, tensor, raw_dtype=(types or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SIX_BIT_ONES = [160] * 8 + [0] * 4
"""The twelve bytes of a Q4_K or Q5_K block in which every scale and every minimum is 32."""


def random_rows(rows: int, columns: int, kind: Type, *, seed: int = 0, gain: float = 1.0) -> np.ndarray:
    """Stored rows whose values have a mean near 0 and a standard deviation near gain / sqrt(columns)."""
    rng, spread = np.random.default_rng(seed), gain / columns**0.5
    if kind not in (Type.Q4_K, Type.Q5_K, Type.Q6_K):  # the package quantises to all but these
        return gguf.quantize((rng.standard_normal((rows, columns)) * spread).astype(np.float32), kind)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_size, block_bytes), dtype=np.uint8)
    levels = {Type.Q4_K: 16, Type.Q5_K: 32, Type.Q6_K: 64}[kind]
    unit = spread * 12**0.5 / levels / 32  # codes are uniform
    if kind == Type.Q6_K:
        blocks[:, 192:208] = 32
        blocks[:, 208:] = np.float16([unit]).view(np.uint8)
    else:
        blocks[:, :4] = np.float16([unit, unit * (levels - 1) / 2]).view(np.uint8)
        blocks[:, 4:16] = SIX_BIT_ONES
    return blocks.reshape(rows, -1)


def write_llama(
    path: Path,
    kind_of: Callable[[str], Type],
    *,
    hidden_size: int = 64,
    intermediate_size: int = 96,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 208,
    tied: bool = True,
    seed: int = 0,
) -> Path:
    """A whole Llama of random weights: F32 norms, and matrices in the formats that `kind_of` gives for their names."""
    kv_size = hidden_size // num_heads * num_kv_heads
    shapes = {"token_embd": (vocab_size, hidden_size)} | ({} if tied else {"output": (vocab_size, hidden_size)})
    for layer in range(num_layers):
        for name, shape in {
            "attn_q": (hidden_size, hidden_size),
            "attn_k": (kv_size, hidden_size),
            "attn_v": (kv_size, hidden_size),
            "attn_output": (hidden_size, hidden_size),
            "ffn_gate": (intermediate_size, hidden_size),
            "ffn_up": (intermediate_size, hidden_size),
            "ffn_down": (hidden_size, intermediate_size),
        }.items():
            shapes[f"blk.{layer}.{name}"] = shape
    tensors, types = {}, {}
    for i, (name, (rows, columns)) in enumerate(shapes.items()):
        full = f"{name}.weight"
        types[full] = kind_of(name)
        # Wide logits, so that a greedy token does not hang on the last bit.
        tensors[full] = random_rows(rows, columns, types[full], seed=1000 * seed + i, gain=2.0)
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(num_layers) for name in ("attn_norm", "ffn_norm"))]
    for i, name in enumerate(norms):
        noise = np.random.default_rng(seed + 100 + i).standard_normal(hidden_size)
        tensors[f"{name}.weight"] = (1 + 0.1 * noise).astype(np.float32)
    keys = {
        "block_count": num_layers,
        "embedding_length": hidden_size,
        "feed_forward_length": intermediate_size,
        "attention.head_count": num_heads,
        "attention.head_count_kv": num_kv_heads,
        "context_length": 256,
    }
    return write_gguf(path, keys=keys, tensors=tensors, types=types)


def smollm2_kinds(name: str) -> Type:
    """SmolLM2's: Q4_1, with a tied table of Q8_0."""
    return Type.Q8_0 if name == "token_embd" else Type.Q4_1


def mixed_kinds(name: str) -> Type:
    """As "Q4_K_M" files mix them: values and every other down projection in more bits. Needs 256 columns."""
    stem = name.rpartition(".")[2]
    if stem in ("token_embd", "output") or (stem == "ffn_down" and ".0." in name):
        return Type.Q6_K
    return {"attn_v": Type.Q6_K, "ffn_up": Type.Q5_K}.get(stem, Type.Q4_K)


MIXED_SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2}
