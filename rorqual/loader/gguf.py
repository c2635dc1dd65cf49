"""A GGUF file read as a Hugging Face checkpoint: its names, row order and config. No torch before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rorqual.loader.gguf_config import ROPE_FACTORS, generation_config, synthesise_config
from rorqual.loader.gguf_file import GGUFFile, StoredType, TensorInfo, read_metadata

if TYPE_CHECKING:
    import torch

    from rorqual.loader.stored_tensor import StoredTensor
    from rorqual.quantization.gguf_blocks import BlockMatrix
    from rorqual.quantization.integer import IntegerFormat

__all__ = ["GGUFCheckpoint", "RawTensor", "read_metadata"]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_SPLIT_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class RawTensor(NamedTuple):
    """Stored bytes, uint8 [rows..., row bytes], rows in Hugging Face's order; their format; the shape of the values."""

    data: np.ndarray
    type: StoredType
    shape: tuple[int, ...]


class _Source(NamedTuple):
    """Where a Hugging Face name's values lie."""

    file: GGUFFile
    info: TensorInfo
    heads: int | None = None
    """Un-permute the rows within this many heads."""
    expert: int | None = None
    """Take this slice of the first dimension."""


class GGUFCheckpoint:
    """A .gguf file (any part of a split one) under Hugging Face names. Safe to use from several threads.

    Raises: ValueError naming file and tensor when the file is damaged, incomplete, or of an unknown architecture.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files = _open_parts(path)
        self.metadata: dict[str, Any] = files[0].metadata
        """As `read_metadata` gives it."""
        tensors = {name: info for file in files for name, info in file.tensors.items()}
        if len(tensors) < sum(len(file.tensors) for file in files):
            raise ValueError(f"{path}: two parts hold a tensor of the same name; fetch the model again")
        self.size_bytes = sum(info.size_bytes for info in tensors.values())
        factors = [float(v) for file in files if ROPE_FACTORS in file.tensors for v in _rope_factors(file)]
        try:
            self.config: dict[str, Any] = synthesise_config(self.metadata, tensors, rope_factors=factors or None)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        self.generation_config: dict[str, Any] = generation_config(self.metadata)
        self._sources = {
            name: source
            for file in files
            for info in file.tensors.values()
            if info.name != ROPE_FACTORS
            for name, source in self._places(file, info)
        }

    @cached_property
    def integer_formats(self) -> Mapping[str, IntegerFormat]:
        """The matrices that are stored as integers, and how."""
        from rorqual.quantization.integer import INTEGER_FORMATS

        return {
            name: INTEGER_FORMATS[source.info.type.name.lower()]
            for name, source in self._sources.items()
            if source.info.type.block_size > 1 and len(self.shape(name)) == 2
        }

    def names(self) -> Collection[str]:
        """Every tensor's Hugging Face name; one that has none keeps its GGUF name."""
        return self._sources.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor's values."""
        source = self._sources[name]
        return source.info.shape if source.expert is None else source.info.shape[1:]

    def load(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor's values on the CPU: F32, F16 and BF16 as stored (perhaps mapped), the rest as float32, of which
        only `rows` are computed if they are given."""
        import torch

        from rorqual.loader.gguf_dequantize import dequantize

        quantized = self._sources[name].info.type.block_size > 1
        raw = self.raw(name, rows if quantized else None)
        if quantized and rows is not None:
            values = torch.empty(raw.shape)
            values[rows] = torch.from_numpy(dequantize(raw.data, raw.type))
        elif quantized:
            values = torch.from_numpy(dequantize(raw.data, raw.type))
        else:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[raw.type.name]
            values = torch.from_numpy(raw.data.reshape(-1)).view(dtype)
        return values.view(raw.shape)

    def stored(self, name: str) -> StoredTensor | None:
        """Nowhere: rows lie in another order, or as blocks."""
        return None

    def load_blocks(self, name: str, rows: slice | None = None) -> BlockMatrix:
        """One of `integer_formats`, or some rows, as it is stored: mapped, unless rows have another order there."""
        import torch

        from rorqual.quantization.gguf_blocks import BlockMatrix

        return BlockMatrix(torch.from_numpy(self.raw(name, rows).data), self.integer_formats[name])

    def release(self, name: str) -> None:
        """Let go of the memory of a tensor's pages; what is mapped is read again when it is touched."""
        file, info, _, expert = self._sources[name]
        start, size = info.offset, info.size_bytes
        if expert is not None:
            size //= info.shape[0]
            start += expert * size
        file.release(start, start + size)

    def raw(self, name: str, rows: slice | None = None) -> RawTensor:
        """A tensor as stored, for a computation that reads the format itself; with `rows`, the bytes of those alone."""
        source = self._sources[name]
        data = source.file.bytes_of(source.info)
        if source.expert is not None:
            data = data[source.expert]
        if source.heads is not None:
            # The converter interleaved each head's two halves; rows move whole, so that blocks stay blocks.
            data = data.reshape(source.info.shape[0], -1)
            size = len(data) // source.heads
            if rows is not None:  # the heads that they are in
                first, last = rows.start // size, -(-rows.stop // size)
                data, rows = (
                    data[first * size : last * size],
                    slice(rows.start - first * size, rows.stop - first * size),
                )
            data = data.reshape(-1, size // 2, 2, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        if rows is not None:
            data = data[rows]
        return RawTensor(data, source.info.type, self.shape(name))

    def _places(self, file: GGUFFile, info: TensorInfo) -> list[tuple[str, _Source]]:
        """The Hugging Face names that a stored tensor answers to."""
        stem, _, kind = info.name.rpartition(".")
        if stem in _TOP:
            return [(f"{_TOP[stem]}.{kind}", _Source(file, info))]
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if found and found[2] in _LAYER:
            name = f"model.layers.{found[1]}.{_LAYER[found[2]]}.{kind}"
            return [(name, _Source(file, info, heads=self._permuted_heads(found[2])))]
        if found and found[2] in _EXPERTS:
            where = f"model.layers.{found[1]}.mlp.experts"
            what = f"{_EXPERTS[found[2]]}.{kind}"
            return [(f"{where}.{e}.{what}", _Source(file, info, expert=e)) for e in range(info.shape[0])]
        return [(info.name, _Source(file, info))]

    def _permuted_heads(self, stem: str) -> int | None:
        """How many heads the converter permuted; only Llama's rotation pairs neighbours in GGUF."""
        if self.metadata["general.architecture"] != "llama" or stem not in ("attn_q", "attn_k"):
            return None
        return int(self.config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"])


def _rope_factors(file: GGUFFile) -> np.ndarray:
    info = file.tensors[ROPE_FACTORS]
    if info.type.name != "F32" or len(info.shape) != 1:
        raise ValueError(f"{file.path}: {ROPE_FACTORS} must be a row of F32, got {info.type.name} {info.shape}")
    return file.bytes_of(info).view(np.float32)


def _open_parts(path: Path) -> list[GGUFFile]:
    """The file, or every part of the split model that it belongs to, in order."""
    first = GGUFFile.open(path)
    count = first.metadata.get("split.count", 1)
    if count <= 1:
        return [first]
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count:
        raise ValueError(f"{path} is one of {count} parts and must be named like MODEL-00001-of-{count:05d}.gguf")
    paths = [path.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise ValueError(f"{path} is one of {count} parts and these are missing beside it: {', '.join(missing)}")
    return [first if part == path else GGUFFile.open(part) for part in paths]
