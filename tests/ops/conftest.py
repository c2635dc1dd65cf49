"""Where Triton interprets kernels: each launch prepares its language once."""

from __future__ import annotations

from typing import Any

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


if INTERPRETING:
    prepare_once_a_launch()
