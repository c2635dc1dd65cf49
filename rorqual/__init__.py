"""Rorqual: an LLM inference and serving engine, from a laptop's CPU to Hopper GPUs.

    from rorqual import LLM, SamplingParams

The names below are the whole public API. They are imported on first use, so that `import rorqual` stays quick.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rorqual.config import EngineConfig
    from rorqual.llm import LLM
    from rorqual.outputs import CompletionOutput, Logprob, RequestOutput, StreamDelta
    from rorqual.sampling_params import SamplingParams

# The compiled kernels have threads of their own (ops/native). After each of its ops, torch's would go on spinning on
# the same cores for some 16 ms; libgomp reads this when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Products on a GPU must be told not to split K (ops/vendor/linear.py), which cuBLASLt alone can be. torch reads this
# when it is imported; told later, it warns.
os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "__version__",
]

_HOME = {
    "LLM": "rorqual.llm",
    "EngineConfig": "rorqual.config",
    "SamplingParams": "rorqual.sampling_params",
    "CompletionOutput": "rorqual.outputs",
    "Logprob": "rorqual.outputs",
    "RequestOutput": "rorqual.outputs",
    "StreamDelta": "rorqual.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'rorqual' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
