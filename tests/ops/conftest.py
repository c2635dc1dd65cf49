"""Where Triton interprets kernels: each launch prepares its language once, and products are a row's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from rorqual.ops.triton.launch import INTERPRETING


def prepare_once_a_launch() -> None:
    """Triton's interpreter replaces the functions of `triton.language` when a kernel starts, and the same ones again
    with every call of a function from a kernel: half of the time that a kernel takes. Once for every module is enough,
    as nothing takes them back before the launch ends."""
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    prepared: set[str] = set()

    def prepare_new(fn: Any) -> Any:
        if fn.__module__ in prepared:
            return None
        prepared.add(fn.__module__)
        return prepare(fn)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = prepare_new
    interpreter.GridExecutor.__call__ = launch_anew


def multiply_in_float64() -> None:
    """On some processors numpy's float32 products of a row depend on where the row stands among others. Kernels promise
    that they do not; from float64 both round to the same float32."""
    from triton.runtime import interpreter

    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        if any(x.data.dtype.kind != "f" for x in (a, b, d)):  # integers, and FP8, which is kept as bytes
            return multiply(self, a, b, d, *precision)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


if INTERPRETING:
    prepare_once_a_launch()
    multiply_in_float64()
