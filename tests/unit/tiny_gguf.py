"""Small GGUF files, written by the gguf package's own writer."""

from __future__ import annotations

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
