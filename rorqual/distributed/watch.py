"""Signs of life: every rank gives them, and every rank looks for those that it depends on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch._C._distributed_c10d import Store

_INTERVAL_S = 0.5
_FAILURE = "failure"


class Watch:
    """A thread that tells the store that this rank lives, and looks whether others do.

    `on_failure` is called once, in a thread of the watch, with what happened: a rank has said what went wrong with it,
    or has given no sign for too long, or the store's host is gone.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        watched: Sequence[int],
        *,
        timeout_s: float,
        on_failure: Callable[[str], None],
        also: Callable[[], str | None] = lambda: None,
    ) -> None:
        """watched: the ranks that should live. also: asked each time; what it returns, if anything, is a failure. The
        store's connection must be this watch's own, as calls wait for each other."""
        self._store, self._rank, self._watched = store, rank, list(watched)
        self._timeout_s, self._on_failure, self._also = timeout_s, on_failure, also
        self._last: dict[int, tuple[bytes, float]] = {}
        self._done, self._ending = threading.Event(), threading.Lock()
        self._looked_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"watch of rank {rank}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_the_store, name=f"watch of rank {rank}'s store", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _INTERVAL_S)

    def _run(self) -> None:
        count = 0
        while not self._done.wait(_INTERVAL_S):
            failure = self._also()
            try:
                if failure is None:
                    count += 1
                    self._store.set(f"alive/{self._rank}", str(count))
                    failure = self._look()
            except Exception as error:  # of several types, by what torch was doing
                failure = failure or f"the rank that holds the others together is gone ({_first_line(error)})"
            self._looked_s = time.monotonic()
            if failure is not None:
                self._end(failure)

    def _watch_the_store(self) -> None:
        """Where the store's process is stopped, its connections stay open, and `_run` waits."""
        while not self._done.wait(_INTERVAL_S):
            if time.monotonic() - self._looked_s > self._timeout_s + 2 * _INTERVAL_S:
                self._end(f"the rank that holds the others together has not answered for {self._timeout_s:g} s")

    def _end(self, failure: str) -> None:
        with self._ending:
            if self._done.is_set():
                return
            self._done.set()
        self._on_failure(failure)

    def _look(self) -> str | None:
        if self._store.check([_FAILURE]):
            return self._store.get(_FAILURE).decode(errors="replace")
        now = time.monotonic()
        for rank in self._watched:
            key = f"alive/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            before, since = self._last.get(rank, (b"", now))
            if beat != before or rank not in self._last:
                self._last[rank] = (beat, now)
            elif before and now - since > self._timeout_s:  # one that never gave a sign is still starting
                return f"rank {rank} has given no sign of life for {self._timeout_s:g} s"
        return None


def tell_failure(store: Store, text: str, *, seconds: float = 1.0) -> str:
    """Have every rank's watch end with this; returns what was told first, by whomever.

    Waits for the store, which may be stopped or gone, for so long at most.
    """
    told: list[str] = []

    def tell() -> None:
        with suppress(Exception):
            told.append(store.compare_set(_FAILURE, "", text).decode(errors="replace"))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    thread.join(seconds)
    return told[0] if told else text


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
