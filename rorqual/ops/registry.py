"""Ops: a named computation, the reference that defines it, and any number of faster answers to the same question.

    @op
    def rms_norm(x, weight, *, eps): ...          # ops/rms_norm.py: contract and plain PyTorch reference

    @rms_norm.impl("cpu", refuse=...)             # ops/cpu/rms_norm.py: one faster answer
    def rms_norm_cpu(x, weight, *, eps): ...

A call takes the first implementation that does not refuse, in the order of BACKENDS; the reference never refuses.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

BACKENDS = ("vendor", "tilelang", "triton", "native", "cpu")
"""Order of preference. The reference always comes last."""


class Impl(NamedTuple, Generic[P, R]):
    """A faster answer: where it comes from, the function, and when it cannot take a call."""

    backend: str
    fn: Callable[P, R]
    refuse: Callable[..., str | None]
    """Called with the op's own arguments; returns why it cannot take them, or None."""


class Op(Generic[P, R]):
    """Call it like its reference. `explain` says which implementation a call gets, and why not the others."""

    def __init__(self, reference: Callable[P, R]) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self.name = reference.__name__
        self.impls: list[Impl[P, R]] = []

    def impl(
        self, backend: str, *, refuse: Callable[..., str | None] = lambda *_a, **_k: None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Register a faster answer. Raises ValueError for an unknown or repeated backend."""
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; allowed: {', '.join(BACKENDS)}")
        if any(known.backend == backend for known in self.impls):
            raise ValueError(f"op {self.name!r} already has a {backend!r} implementation")

        def register(fn: Callable[P, R]) -> Callable[P, R]:
            self.impls.append(Impl(backend, fn, refuse))
            self.impls.sort(key=lambda known: BACKENDS.index(known.backend))
            return fn

        return register

    def choose(self, *args: P.args, **kwargs: P.kwargs) -> Callable[P, R]:
        """The function that a call with these arguments runs."""
        for known in self.impls:
            if known.refuse(*args, **kwargs) is None:
                return known.fn
        return self.reference

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, str]:
        """Backend -> "ok" or the sentence with which it refuses these arguments."""
        verdicts = {known.backend: known.refuse(*args, **kwargs) or "ok" for known in self.impls}
        return verdicts | {"reference": "ok"}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the implementation that `choose` picks."""
        for tell in _watchers:
            verdicts = self.explain(*args, **kwargs)
            tell(self, next(backend for backend, verdict in verdicts.items() if verdict == "ok"), verdicts)
        if _arounds:
            return cast(R, _arounds[-1](self, self.choose(*args, **kwargs), args, kwargs))
        for known in self.impls:  # as `choose`, without its call: a decode step comes by here hundreds of times
            if known.refuse(*args, **kwargs) is None:
                return known.fn(*args, **kwargs)
        return self.reference(*args, **kwargs)


OPS: dict[str, Op[..., Any]] = {}
"""Every declared op by name; complete after `load_backends`."""


Watcher = Callable[[Op[..., Any], str, dict[str, str]], None]
_watchers: list[Watcher] = []


@contextmanager
def watch(tell: Watcher) -> Iterator[None]:
    """While the block runs, tell of every call: the op, the backend that runs it, and what `explain` says about it."""
    _watchers.append(tell)
    try:
        yield
    finally:
        _watchers.remove(tell)


Around = Callable[[Op[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_arounds: list[Around] = []


@contextmanager
def around(run: Around) -> Iterator[None]:
    """While the block runs, every call of an op is run(op, the function chosen for it, args, kwargs); the innermost
    block's run counts.
    """
    _arounds.append(run)
    try:
        yield
    finally:
        _arounds.pop()


def are_calls_observed() -> bool:
    """Whether someone looks at the calls of ops one by one (`around`): what runs several as one may leave that then."""
    return bool(_arounds)


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Declare an op by its reference: plain, obviously right, and runnable on any device."""
    if reference.__name__ in OPS:
        raise ValueError(f"op {reference.__name__!r} is declared twice")
    made = Op(reference)
    OPS[made.name] = made
    return made


def load_backends(*backends: str) -> None:
    """Import every op and the implementations of the named backends (folders beside this file)."""
    import rorqual.ops as package

    for folder in ("", *backends):
        where = [f"{path}/{folder}" if folder else path for path in package.__path__]
        for module in pkgutil.iter_modules(where):
            if not module.ispkg and not module.name.startswith("_"):
                importlib.import_module(".".join(filter(None, ("rorqual.ops", folder, module.name))))
