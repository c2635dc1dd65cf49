"""Tool calls in a model's text: what all formats share.

A text is a call as soon as its name and the beginning of its arguments are there. What turns out to be none before
that is content, with its tags, to the letter; what cannot belong to the arguments after that ends them, and is content
from that character on. No text is lost but tags, what is around names and arguments, and white space beside calls.
Arguments are the JSON text that the model wrote. Strings in it are let through as they are, with raw line breaks or
wrong escapes if there are any.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from rorqual.server.parsing.events import Content, ToolCallStart
from rorqual.server.parsing.json_scanner import is_json
from rorqual.server.parsing.machine import Mismatch, Steps, Tags, TextMachine, Trimmed

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = frozenset((*_ARGUMENT_KEYS, "name", "type", "id"))


class ToolCallParser(TextMachine):
    """Text in which `starts` begin calls.

    Args:
        tools: the request's, as the API has them ({"type": "function", "function": {...}}).
    """

    starts: ClassVar[tuple[str, ...]] = ()
    """The texts that begin one or several calls."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.num_calls = 0
        self._tools = tools
        self._trimmed = Trimmed(self._content)
        self._after_call = False
        super().__init__()

    def _read(self) -> Steps[None]:
        yield from self._read_start()
        tags = Tags(*self.starts) if self.starts else None
        while tags is not None and (tag := (yield from self._until(tags, self._trimmed))):
            yield from self._attempt(self._read_calls(tag), tag)
        while not self._ended:
            self._trimmed(self._take(len(self._text)))
            yield
        self._trimmed(self._take(len(self._text)))
        space = self._trimmed.take_held()
        if not self._after_call:
            self._content(space)

    def _read_start(self) -> Steps[None]:
        """What an answer may begin with."""
        yield from ()

    def _read_calls(self, tag: str) -> Steps[None]:
        """Read what follows one of the `starts`. Raises Mismatch where it is no call, or no more of it."""
        raise NotImplementedError

    def _attempt(self, steps: Steps[None], *taken: str) -> Steps[None]:
        """Go these steps; what they took in vain is content."""
        self._begin(self._trimmed.take_held(), *taken)
        try:
            yield from steps
        except Mismatch:
            if self._raw is not None:
                self._trimmed("".join(self._raw))
        self._raw = None

    def _content(self, text: str) -> None:
        if text:
            self._after_call = False
            self._events.append(Content(text))

    # --- calls

    def _new_id(self) -> str:
        return f"call_{uuid.uuid4().hex}"

    def _start_call(self, name: str) -> Callable[[str], None]:
        """Report a call; returns the sink of its arguments. What was taken so far is not content any more."""
        index = self.num_calls
        self.num_calls += 1
        self._after_call = True
        self._raw = None
        self._events.append(ToolCallStart(index, self._new_id(), name))
        return lambda text: self._arguments(index, text)

    def _string(self) -> Steps[str]:
        """A JSON string's value."""
        if (yield from self._peek()) != '"':
            raise Mismatch
        pieces: list[str] = []
        yield from self._json(pieces.append)
        try:
            value: str = json.loads("".join(pieces), strict=False)
            value.encode()  # half a surrogate pair is no text
        except ValueError:
            raise Mismatch from None
        return value

    def _name(self, *ends: str) -> Steps[str]:
        """A name up to one of `ends`, which is taken; it has no line breaks and no tags."""
        pieces: list[str] = []
        yield from self._until(Tags(*{"\n", "<", *(end[0] for end in ends)}), pieces.append, take=False)
        name = "".join(pieces).strip()
        for end in ends:
            if (yield from self._accept(end)) and name:
                return name
        raise Mismatch

    def _read_arguments(self, name: str) -> Steps[None]:
        """The JSON object of the arguments of a call, which is reported when the object has begun."""
        if (yield from self._peek()) != "{":
            raise Mismatch
        yield from self._json(_Beginning(lambda: self._start_call(name)))

    def _read_call_object(self, *, strict: bool = False) -> Steps[None]:
        """{"name": ..., "arguments": {...}}, where arguments may be called parameters, and may come first.

        Args:
            strict: whether it must have arguments, and no keys that are not a call's, to be one.
        """
        yield from self._expect("{")
        name: str | None = None
        arguments: list[str] | None = None
        while True:
            yield from self._spaces()
            key = yield from self._string()
            yield from self._spaces()
            yield from self._expect(":")
            yield from self._spaces()
            if strict and key not in _CALL_KEYS:
                raise Mismatch
            if key == "name" and name is None:
                name = yield from self._string()
                if arguments is not None:
                    self._start_call(name)("".join(arguments))
            elif key in _ARGUMENT_KEYS and arguments is None:
                arguments = yield from self._read_argument_value(name)
            else:
                yield from self._json(_nowhere)
            yield from self._spaces()
            if (yield from self._peek()) != ",":
                break
            yield from self._expect(",")
        yield from self._expect("}")
        if name is None or (strict and arguments is None):
            raise Mismatch
        if arguments is None:
            self._start_call(name)("{}")

    def _read_argument_value(self, name: str | None) -> Steps[list[str]]:
        """The arguments; returned as well unless they could be reported at once."""
        first = yield from self._peek()
        if first == "{" and name is not None:
            yield from self._read_arguments(name)
            return []
        pieces: list[str] = []
        if first == "{":
            yield from self._json(pieces.append)
        elif first == '"':  # an object written into a string, as templates sometimes show it to models
            text = yield from self._string()
            if not (text.lstrip().startswith("{") and is_json(text)):
                raise Mismatch
            pieces.append(text.strip())
        else:
            yield from self._expect("null")
            pieces.append("{}")
        if name is not None:
            self._start_call(name)("".join(pieces))
        return pieces


class _Beginning:
    """A sink for an object that opens the real one when more than its brace is there."""

    def __init__(self, open_sink: Callable[[], Callable[[str], None]]) -> None:
        self._open_sink = open_sink
        self._sink: Callable[[str], None] | None = None
        self._held: list[str] = []
        self._in_object = False

    def __call__(self, text: str) -> None:
        if self._sink is None:
            self._held.append(text)
            if not self._in_object:
                self._in_object, text = True, text[1:]
            if not text.strip():
                return
            self._sink, text = self._open_sink(), "".join(self._held)
        self._sink(text)


def _nowhere(text: str) -> None:
    pass


class NamedCall(ToolCallParser):
    """A text that is nothing but the arguments of one call, as structured output makes it."""

    def __init__(self, name: str) -> None:
        self._function = name
        super().__init__()

    def _read_start(self) -> Steps[None]:
        yield from self._attempt(self._read_call())

    def _read_call(self) -> Steps[None]:
        yield from self._spaces()
        yield from self._read_arguments(self._function)
