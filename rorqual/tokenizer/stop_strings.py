"""Stop strings in streamed text: nothing that could still become one is emitted too early."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watch one answer's text for stop strings.

    The rule: the stop string whose last character arrives first ends the answer; of several that end on the same
    character, the longest. The result depends on the text alone, never on how it is split over `push` calls.

    Args:
        stop: the stop strings; none means that all text passes at once.
        include_stop_str_in_output: whether the stop string itself is emitted.

    Raises:
        ValueError: a stop string is empty (it would match at once).
    """

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        if isinstance(stop, str):
            stop = [stop]
        if not all(stop):
            raise ValueError(f"a stop string must have at least one character, got {list(stop)!r}: leave it out")
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text.

        Returns:
            The text that is now safe to emit, and the stop string that was hit, or None. After a hit the text is
            always "" and the stop string stays.
        """
        if self._hit is not None:
            return "", self._hit
        if not self._stop:
            return text, None
        seen = self._held + text
        if match := self._first_match(seen):
            end, self._hit = match
            self._held = ""
            return seen[: end if self._include else end - len(self._hit)], self._hit
        safe = self._start_of_possible_stop(seen)
        self._held = seen[safe:]
        return seen[:safe], None

    def finish(self) -> str:
        """The text held back, when generation ends for another reason. "" after a hit."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, seen: str) -> tuple[int, str] | None:
        """Where the deciding stop string ends in `seen`, and which one it is."""
        ends = [(at + len(stop), -len(stop), stop) for stop in self._stop if (at := seen.find(stop)) != -1]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end, stop

    def _start_of_possible_stop(self, seen: str) -> int:
        """Index of the longest suffix that begins a stop string; len(seen) when there is none."""
        start = len(seen)
        for stop in self._stop:
            # A whole match was ruled out, so only the last len(stop) - 1 characters matter: the cost does not grow
            # with the text.
            at = seen.find(stop[0], max(0, len(seen) - len(stop) + 1), start)
            while at != -1 and not stop.startswith(seen[at:]):
                at = seen.find(stop[0], at + 1, start)
            if at != -1:
                start = at
        return start
