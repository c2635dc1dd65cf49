"""Text that comes in pieces, read as if it were all there: parsers are generators that wait for more of it.

What is held back is only what may still turn out to be something else, and no text is looked at more than a bounded
number of times, however it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from rorqual.server.parsing.events import Content, Event, Reasoning, ToolCallArguments, merged
from rorqual.server.parsing.json_scanner import JsonScanner

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Yields where it needs more text, and then returns a result."""

_SPACE = re.compile(r"\s*")
LINE_BREAKS = re.compile(r"\n*")


class Mismatch(Exception):
    """The text is not what a parser looks for, or has ended before it was; nothing went wrong."""


class Tags:
    """Literal texts to look for; none is the beginning of another."""

    def __init__(self, *tags: str) -> None:
        beginnings = (re.escape(tag[:n]) for tag in tags for n in range(len(tag) - 1, 0, -1))
        whole = "|".join(map(re.escape, tags))
        self._pattern = re.compile(rf"(?P<whole>{whole})|(?:{'|'.join(beginnings) or '(?!)'})\Z")
        self._first = "".join({tag[0] for tag in tags})

    def search(self, text: str, start: int) -> tuple[int, int]:
        """The first of them in `text`, from `start` on.

        Returns:
            Where it begins and ends. If there is none, its end is -1, and it may begin where `text` ends with the
            beginning of one; that is the length of `text` if it does not.
        """
        if len(self._first) == 1 and text.find(self._first, start) < 0:  # the usual case
            return len(text), -1
        match = self._pattern.search(text, start)
        if match is None:
            return len(text), -1
        return match.start(), match.end() if match["whole"] is not None else -1


class TextMachine:
    """A parser: `push` text as it comes, then `finish`; both return the events that became certain.

    A subclass says in `_read` how the text is read, with the steps below. The events of one text are the same, but for
    where their texts are cut, however it was split.
    """

    def __init__(self) -> None:
        self._text, self._position, self._ended = "", 0, False
        self._events: list[Event] = []
        self._raw: list[str] | None = None
        """What was taken since `_begin`."""
        self._steps = self._read()

    def push(self, text: str) -> list[Event]:
        """Read more text."""
        self._text = self._text[self._position :] + text if self._position < len(self._text) else text
        self._position = 0
        return self._advance()

    def finish(self) -> list[Event]:
        """Read the end of the text: what was held back comes out."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        self._events = []
        next(self._steps, None)
        return self._events if len(self._events) == 1 else merged(self._events)

    def _read(self) -> Steps[None]:
        raise NotImplementedError

    # --- events

    def _content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    def _reasoning(self, text: str) -> None:
        if text:
            self._events.append(Reasoning(text))

    def _arguments(self, index: int, text: str) -> None:
        if text:
            self._events.append(ToolCallArguments(index, text))

    # --- steps

    def _begin(self, *taken: str) -> None:
        """Remember what is taken from here on, as it may have to become content."""
        self._raw = list(taken)

    def _take(self, end: int) -> str:
        """The text up to `end`, a position in `_text`."""
        text = self._text[self._position : end]
        self._position = end
        if self._raw is not None:
            self._raw.append(text)
        return text

    def _peek(self) -> Steps[str]:
        """The next character; Mismatch at the end of the text."""
        while self._position >= len(self._text):
            yield from self._more()
        return self._text[self._position]

    def _more(self) -> Steps[None]:
        if self._ended:
            raise Mismatch
        yield

    def _spaces(self, spaces: re.Pattern[str] = _SPACE) -> Steps[str]:
        """White space, up to the next character that is none or to the end of the text."""
        pieces = []
        while True:
            match = spaces.match(self._text, self._position)
            assert match is not None
            pieces.append(self._take(match.end()))
            if self._ended or self._position < len(self._text):
                return "".join(pieces)
            yield

    def _accept(self, literal: str, *, may_be_cut: bool = False) -> Steps[bool]:
        """Take a literal if it comes next, and nothing otherwise.

        Args:
            literal: the text to take.
            may_be_cut: whether at the end of the text its beginning is enough.
        """
        while True:
            text, position = self._text, self._position
            if text.startswith(literal, position):
                self._take(position + len(literal))
                return True
            rest = text[position : position + len(literal)]
            if not literal.startswith(rest):
                return False
            if self._ended:
                if may_be_cut:
                    self._take(len(text))
                return may_be_cut and bool(rest)
            yield

    def _expect(self, literal: str) -> Steps[None]:
        if not (yield from self._accept(literal)):
            raise Mismatch

    def _expect_end(self, literal: str) -> Steps[None]:
        """Take a closing tag; at the end of the text its beginning is enough."""
        if not (yield from self._accept(literal, may_be_cut=True)):
            raise Mismatch

    def _until(self, tags: Tags, sink: Callable[[str], object], *, take: bool = True) -> Steps[str]:
        """Give text to `sink` until one of the tags, which is taken and returned; "" if the text ended before."""
        while True:
            begin, end = tags.search(self._text, self._position)
            if begin > self._position:
                sink(self._take(begin))
            if end >= 0:
                return self._take(end) if take else self._text[begin:end]
            if self._ended:
                if begin < len(self._text):
                    sink(self._take(len(self._text)))
                return ""
            yield

    def _json(self, sink: Callable[[str], object]) -> Steps[None]:
        """Give one JSON value to `sink`."""
        scanner = JsonScanner()
        while True:
            end = scanner.feed(self._text, self._position)
            if end > self._position:
                sink(self._take(end))
            if scanner.done:
                return
            if scanner.failed:
                raise Mismatch
            yield from self._more()


class Trimmed:
    """A sink before a sink, that holds white space back until something else follows."""

    def __init__(self, sink: Callable[[str], object], chars: str | None = None) -> None:
        self._sink, self._chars = sink, chars
        self._held: list[str] = []

    def __call__(self, text: str) -> None:
        """Pass text on, but for white space at its end."""
        body = text.rstrip(self._chars)
        if len(body) == len(text) and not self._held:
            if text:
                self._sink(text)
            return
        if body:
            if self._held:
                self._sink(self.take_held())
            self._sink(body)
        if len(body) < len(text):
            self._held.append(text[len(body) :])

    def take_held(self) -> str:
        """What is held back, which then is no more."""
        text = "".join(self._held)
        self._held = []
        return text
