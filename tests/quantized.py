"""Quantised checkpoints, made from plain ones with the project's own packer and the tests' own decoding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from rorqual.quantization import FP8_BLOCK, FP8_BLOCK_UE8M0, MXFP4, MXFP8, MXFP8_TILE, QTensor, QuantFormat
from tests.ops.number_values import numbers

Tensors = dict[str, torch.Tensor]


class Scheme(NamedTuple):
    """How a kind of checkpoint stores its linear weights."""

    format: QuantFormat
    scale: str
    """The scales' name, beside "weight"."""
    scale_dtype: torch.dtype
    options: dict[str, Any]
    """config.json's quantization_config."""


def _fp8(block: list[int], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
    } | more


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme(FP8_BLOCK, "weight_scale_inv", torch.float32, _fp8([128, 128])),
    "fp8_bfloat16_scales": Scheme(FP8_BLOCK, "weight_scale_inv", torch.bfloat16, _fp8([128, 128])),
    "fp8_ue8m0": Scheme(FP8_BLOCK_UE8M0, "scale", torch.float8_e8m0fnu, _fp8([128, 128], scale_fmt="ue8m0")),
    "fp8_powers_as_numbers": Scheme(
        FP8_BLOCK_UE8M0, "weight_scale_inv", torch.float32, _fp8([128, 128], scale_fmt="ue8m0")
    ),
    "mxfp8_tile": Scheme(MXFP8_TILE, "scale", torch.float8_e8m0fnu, _fp8([32, 32], scale_fmt="ue8m0")),
    "mxfp8": Scheme(MXFP8, "weight_scale", torch.uint8, _fp8([1, 32], scale_fmt="ue8m0")),
    "mxfp4": Scheme(MXFP4, "weight_scale", torch.uint8, {"quant_method": "mxfp4", "activation_scheme": "dynamic"}),
}
"""The ways in which published checkpoints store such weights; the first one is Qwen3-FP8's and DeepSeek-V3's."""


def stored(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight as (values, scales) in a file, and the float32 numbers that these stand for."""
    made = QTensor.quantize(weight, scheme.format)
    scales = made.scales
    if scheme.scale_dtype == torch.float8_e8m0fnu:
        kept = scales.view(torch.float8_e8m0fnu)
    elif scales.dtype == torch.uint8 and scheme.scale_dtype == torch.float32:
        kept = 2.0 ** (scales.float() - 127)
    else:
        kept = scales.to(scheme.scale_dtype)
    if scales.dtype == torch.float32:
        made = QTensor(made.values, kept.float(), made.format)
    return made.values, kept, torch.from_numpy(numbers(made)).float()


def quantized(
    tensors: Mapping[str, torch.Tensor], scheme: Scheme, which: Callable[[str], bool]
) -> tuple[Tensors, Tensors]:
    """(the tensors with those weights quantised that `which` takes, the same tensors with the numbers instead)."""
    files: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if which(name):
            files[name], files[f"{name.removesuffix('.weight')}.{scheme.scale}"], plain[name] = stored(tensor, scheme)
        else:
            files[name] = plain[name] = tensor
    return files, plain


def is_linear(name: str) -> bool:
    """Whether published checkpoints quantise a tensor of this name: projections, but neither lm_head nor a router."""
    return name.endswith("_proj.weight")


def quantized_folders(source: Path, target: Path, scheme: Scheme, **options: Any) -> tuple[Path, Path]:
    """A saved model as two folders below `target`: quantised, and plain with the numbers of the quantised one."""
    (file,) = source.glob("*.safetensors")
    folders = []
    for name, tensors in zip(("quantized", "plain"), quantized(load_file(file), scheme, is_linear), strict=True):
        folder = target / name
        shutil.copytree(source, folder)
        save(folder, tensors)
        folders.append(folder)
    edit_quantization(folders[0], scheme.options | options)
    return folders[0], folders[1]


def edit_quantization(folder: Path, options: dict[str, Any] | None) -> None:
    """Put a quantization_config into a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}))


def save(folder: Path, tensors: Tensors) -> None:
    """Write a folder's tensors anew."""
    (file,) = folder.glob("*.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def edited(folder: Path, edit: Callable[[Tensors], Any]) -> Path:
    """Change a folder's tensors in place."""
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save(folder, tensors)
    return folder
