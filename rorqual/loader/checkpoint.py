"""What a model's weights and config are read from, whatever the file format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rorqual.loader.json_file import read_generation_config, read_json_object

if TYPE_CHECKING:
    import torch

    from rorqual.loader.stored_tensor import StoredTensor
    from rorqual.quantization.gguf_blocks import BlockMatrix
    from rorqual.quantization.integer import IntegerFormat


class Checkpoint(Protocol):
    """Named tensors and a config, as Hugging Face names and shapes them."""

    path: Path
    """The folder or file that was opened."""
    config: dict[str, Any]
    """As in config.json; for GGUF made from the metadata."""
    generation_config: dict[str, Any]
    """As in generation_config.json; {} when there is none."""
    size_bytes: int
    """Stored bytes of all tensors."""

    @property
    def integer_formats(self) -> Mapping[str, IntegerFormat]:
        """The matrices that are stored as integers, and how."""
        ...

    def names(self) -> Collection[str]:
        """Every tensor's name, e.g. "model.layers.0.self_attn.q_proj.weight"."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        ...

    def load(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor on the CPU in its stored dtype (quantised GGUF: as float32). May be called from several threads.

        With `rows`, the others may be left undefined.
        """
        ...

    def stored(self, name: str) -> StoredTensor | None:
        """Where a tensor can be read as it is; None if only `load` knows how to."""
        ...

    def load_blocks(self, name: str, rows: slice | None = None) -> BlockMatrix:
        """One of `integer_formats`, or those rows alone, as it is stored, perhaps mapped. May be called from several
        threads."""
        ...

    def release(self, name: str) -> None:
        """Let the memory go that reading a tensor took; who has it mapped still, reads it anew. Nobody wrote to it."""
        ...


def open_checkpoint(path: Path, *, load_format: str = "auto") -> Checkpoint:
    """Open a folder or a .gguf file; headers are checked now, tensors are read later.

    Args:
        path: a folder with config.json and safetensors, a folder with one (perhaps split) GGUF model, or a .gguf file.
        load_format: "auto" takes safetensors if there are any, else GGUF; "safetensors" and "gguf" insist on one;
            "dummy" reads a config only, from config.json or a GGUF file.

    Raises: ValueError naming what is missing or damaged.
    """
    allowed = ("auto", "safetensors", "gguf", "dummy")
    if load_format not in allowed:
        raise ValueError(f"load_format must be one of {', '.join(allowed)}, got {load_format!r}")
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if load_format == "dummy":
        return _open_dummy(path)
    gguf = _find_gguf(path, must=load_format == "gguf")
    if load_format == "safetensors" and not path.is_dir():
        raise ValueError(f"load_format 'safetensors' needs a folder, got the file {path}")
    if gguf is not None and load_format != "safetensors":
        from rorqual.loader.gguf import GGUFCheckpoint

        return GGUFCheckpoint(gguf)
    from rorqual.loader.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)


def _open_dummy(path: Path) -> Checkpoint:
    from rorqual.loader.dummy import DummyCheckpoint

    if path.is_dir() and (path / "config.json").exists():
        config, generation_config = read_json_object(path / "config.json"), read_generation_config(path)
        return DummyCheckpoint(config, generation_config, path=path)
    gguf = _find_gguf(path, must=False)
    if gguf is None:
        raise ValueError(f"load_format 'dummy' needs a config: {path} holds neither config.json nor a .gguf file")
    from rorqual.loader.gguf import GGUFCheckpoint

    opened = GGUFCheckpoint(gguf)
    return DummyCheckpoint(opened.config, opened.generation_config, path=path, integer_formats=opened.integer_formats)


def _find_gguf(path: Path, *, must: bool) -> Path | None:
    """The GGUF file to open. In a folder, safetensors go first unless `must` says that it has to be GGUF."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ValueError(f"{path} is neither a folder nor a .gguf file; for safetensors pass the folder")
        return path
    from rorqual.loader.safetensors import has_safetensors

    if not must and has_safetensors(path):
        return None
    found = sorted(path.glob("*.gguf"))
    models = [file for file in found if "-of-" not in file.name or "-00001-of-" in file.name]
    if len(models) > 1:
        names = ", ".join(file.name for file in models)
        raise ValueError(f"{path} holds several GGUF models; pass one of them by its path: {names}")
    if must and not found:
        raise ValueError(f"{path} holds no .gguf file")
    return next(iter(models or found), None)
