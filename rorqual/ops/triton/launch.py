"""When a Triton kernel may run: on CUDA tensors, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os

import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in the interpreter: Triton reads the same variable when a kernel is defined."""

DEVICE = "cpu" if INTERPRETING else "cuda"
"""The type of device whose tensors kernels take."""


def available() -> bool:
    """Whether Triton is installed, and a GPU or the interpreter is there to run it."""
    return importlib.util.find_spec("triton") is not None and (INTERPRETING or torch.cuda.is_available())


def refuses(*tensors: torch.Tensor | None) -> str | None:
    """Why Triton kernels cannot take these tensors, or None."""
    for tensor in tensors:
        if tensor is not None and tensor.device.type != DEVICE:
            return f"needs tensors on {DEVICE}, got one on {tensor.device.type}"
    return None
