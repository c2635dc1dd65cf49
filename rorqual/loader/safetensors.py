"""A folder of safetensors files, as Hugging Face lays it out."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from rorqual.loader.json_file import read_generation_config, read_json_object
from rorqual.loader.stored_tensor import StoredTensor

if TYPE_CHECKING:
    import torch

    from rorqual.quantization.gguf_blocks import BlockMatrix
    from rorqual.quantization.integer import IntegerFormat

_log = logging.getLogger(__name__)
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


class SafetensorsCheckpoint:
    """A folder with config.json and safetensors files, mapped and read when asked. Safe to use from several threads.

    An index decides alone which files are read. Without one it is model.safetensors, or else every *.safetensors.

    Raises: ValueError naming the files, before any tensor is read: no weights, a missing or damaged file, a tensor that
    the index promises and its file lacks, one name in two files, or a config that is missing or not JSON.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.integer_formats: Mapping[str, IntegerFormat] = {}
        self.config: dict[str, Any] = read_json_object(folder / "config.json")
        self.generation_config: dict[str, Any] = read_generation_config(folder)
        if (folder / _INDEX).exists():
            weight_map = _read_index(folder)
            _note_strays(folder, set(weight_map.values()))
            self._files = _open_all(folder, weight_map.values())
            _check_index(folder, weight_map, self._files)
        else:
            self._files = _open_all(folder, _unindexed_files(folder))
            weight_map = _names_of(folder, self._files)
        self._file_of = weight_map
        self._mapped: dict[str, Any] = {}
        """Files that tensors were loaded from, opened once more: for torch, which is imported by that."""
        self._stored: dict[str, dict[str, StoredTensor]] = {}
        """By file, and in it by name."""
        self.size_bytes = sum(_data_bytes(folder / name) for name in self._files)

    def names(self) -> Collection[str]:
        """Every tensor's name."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; () for a scalar."""
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def load(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """A tensor on the CPU in its stored dtype, mapped from the file, so that what nobody looks at is not read."""
        file = self._file_of[name]
        if file not in self._mapped:
            self._mapped[file] = safe_open(self.path / file, framework="pt")  # perhaps by several threads
        tensor: torch.Tensor = self._mapped[file].get_tensor(name)
        return tensor

    def stored(self, name: str) -> StoredTensor | None:
        """Where a tensor lies in its file."""
        file = self._file_of[name]
        if file not in self._stored:
            self._stored[file] = _read_header(self.path / file)  # perhaps by several threads, to the same end
        return self._stored[file].get(name)

    def load_blocks(self, name: str, rows: slice | None = None) -> BlockMatrix:
        """Never answers: nothing is stored so."""
        raise KeyError(name)

    def release(self, name: str) -> None:
        """Does nothing: the mapping is the safetensors package's."""


def has_safetensors(folder: Path) -> bool:
    """Whether a folder holds safetensors, or something that only SafetensorsCheckpoint can refuse well."""
    return (folder / _INDEX).exists() or any(folder.glob("*.safetensors"))


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name to file name."""
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise ValueError(f"{folder / _INDEX} must map tensor names to file names under 'weight_map'")
    if outside := sorted({name for name in weight_map.values() if Path(name).name != name}):
        raise ValueError(f"{folder / _INDEX} names files outside its folder: {', '.join(outside)}")
    return weight_map


def _unindexed_files(folder: Path) -> list[str]:
    if (folder / _WHOLE).exists():
        _note_strays(folder, {_WHOLE})
        return [_WHOLE]
    if found := sorted(path.name for path in folder.glob("*.safetensors")):
        return found
    if pickles := sorted(path.name for path in folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder} holds its weights as {', '.join(pickles)}, which is not read because unpickling runs code; "
            "convert them to safetensors (load with transformers and save_pretrained)"
        )
    raise ValueError(f"{folder} holds no weights: expected {_WHOLE}, {_INDEX} with its shards, or a .gguf file")


def _note_strays(folder: Path, wanted: set[str]) -> None:
    if strays := sorted(path.name for path in folder.glob("*.safetensors") if path.name not in wanted):
        _log.warning("%s: not read, because not part of the model: %s", folder, ", ".join(strays))


def _open_all(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """File name to opened file. safe_open checks the header, and that the data ends where the file does."""
    wanted = sorted(set(names))
    if missing := [name for name in wanted if not (folder / name).is_file()]:
        raise ValueError(
            f"{folder} lacks files of the model (or they are no files): {', '.join(missing)}; "
            f"fetch them, or remove {_INDEX} if the model is whole without"
        )
    files = {}
    for name in wanted:
        try:
            files[name] = safe_open(folder / name, framework="np")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{folder / name} is damaged or cut short ({error}); fetch it again") from error
    return files


def _check_index(folder: Path, weight_map: dict[str, str], files: dict[str, Any]) -> None:
    held = {file: set(opened.keys()) for file, opened in files.items()}
    if absent := sorted(f"{name} in {file}" for name, file in weight_map.items() if name not in held[file]):
        shown = ", ".join(absent[:5]) + (f" and {len(absent) - 5} more" if len(absent) > 5 else "")
        raise ValueError(f"{folder / _INDEX} names tensors that its files do not hold: {shown}")
    extra = sum(name not in weight_map for names in held.values() for name in names)
    if extra:
        _log.warning("%s: %d tensors of the shards are not in %s and are not read", folder, extra, _INDEX)


def _names_of(folder: Path, files: dict[str, Any]) -> dict[str, str]:
    file_of: dict[str, str] = {}
    for file, opened in files.items():
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if name in file_of:
                raise ValueError(
                    f"{folder}: tensor {name!r} is in both {file_of[name]} and {file}; "
                    f"remove one, or add {_INDEX} to say which counts"
                )
            file_of[name] = file
    return file_of


def _data_bytes(path: Path) -> int:
    """Size of the tensors: what follows the header, whose own size is the first eight bytes."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Where the tensors of an opened file lie; those of dtypes that torch has no plain one for are left out."""
    import torch

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
    }
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    return {
        name: StoredTensor(path, 8 + length + entry["data_offsets"][0], dtypes[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in entries.items()
        if name != "__metadata__" and entry["dtype"] in dtypes
    }
