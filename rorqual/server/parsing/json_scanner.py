"""JSON read as it comes: where a value ends, and the first character that cannot belong to one."""

from __future__ import annotations

import re

# What may come next. In a string everything does, so that a model's raw line breaks and wrong escapes stay its own.
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END, _STRING, _ESCAPED, _NUMBER, _WORD = range(10)
_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\]*')
_WORDS = {"t": "true", "f": "false", "n": "null"}
# A number's states by what was read last, and by the class of the next character: the state after it.
_NUMBER_STATES = {
    "-": {"0": "zero", "1": "integer"},
    "zero": {".": ".", "e": "e"},
    "integer": {"0": "integer", "1": "integer", ".": ".", "e": "e"},
    ".": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "e"},
    "e": {"0": "exponent", "1": "exponent", "-": "sign", "+": "sign"},
    "sign": {"0": "exponent", "1": "exponent"},
    "exponent": {"0": "exponent", "1": "exponent"},
}
_NUMBER_CLASSES = {**dict.fromkeys("123456789", "1"), **{c: c for c in "0.-+e"}, "E": "e"}
_NUMBER_ENDS = frozenset(("zero", "integer", "fraction", "exponent"))


class JsonScanner:
    """Reads one JSON value, in pieces of any size, with a stack of its own (nesting has no limit)."""

    def __init__(self) -> None:
        self.done = False
        """The value is complete. A number is when something follows that does not belong to it."""
        self.failed = False
        """What follows cannot belong to a JSON value."""
        self._state = _VALUE
        self._open: list[str] = []
        self._is_key = False
        self._number = ""
        self._word = ""

    def feed(self, text: str, start: int = 0) -> int:
        """Read text from `start` on; returns where the value or what can belong to it ends."""
        position, length = start, len(text)
        while position < length and not (self.done or self.failed):
            state = self._state
            if state == _STRING:
                match = _PLAIN.match(text, position)
                assert match is not None
                position = match.end()
                if position < length:
                    if text[position] == "\\":
                        self._state = _ESCAPED
                    elif self._is_key:
                        self._is_key, self._state = False, _COLON
                    else:
                        self._value_ended()
                    position += 1
            elif state == _ESCAPED:
                self._state = _STRING
                position += 1
            elif state == _NUMBER:
                position += self._number_goes_on(text[position])
            elif state == _WORD:
                position += self._word_goes_on(text[position])
            else:
                match = _SPACE.match(text, position)
                assert match is not None
                position = match.end()
                if position < length:
                    position += self._punctuate(text[position])
        return position

    def finish(self) -> bool:
        """Nothing follows: whether that was one complete value."""
        if self._state == _NUMBER and self._number in _NUMBER_ENDS and not self._open:
            self.done = True
        return self.done

    def _value_ended(self) -> None:
        if self._open:
            self._state = _COMMA_OR_END
        else:
            self.done = True

    def _punctuate(self, char: str) -> bool:
        """Read a character between strings, numbers and words; False if it cannot be there."""
        state = self._state
        if state in (_VALUE, _VALUE_OR_END) and self._begin_value(char):
            return True
        if state in (_KEY, _KEY_OR_END) and char == '"':
            self._is_key, self._state = True, _STRING
        elif state == _COLON and char == ":":
            self._state = _VALUE
        elif state == _COMMA_OR_END and char == ",":
            self._state = _KEY if self._open[-1] == "}" else _VALUE
        elif state in (_VALUE_OR_END, _KEY_OR_END, _COMMA_OR_END) and char == self._open[-1]:
            self._open.pop()
            self._value_ended()
        else:
            self.failed = True
            return False
        return True

    def _begin_value(self, char: str) -> bool:
        if char == '"':
            self._state = _STRING
        elif char == "{":
            self._open.append("}")
            self._state = _KEY_OR_END
        elif char == "[":
            self._open.append("]")
            self._state = _VALUE_OR_END
        elif char in _WORDS:
            self._word, self._state = _WORDS[char][1:], _WORD
        elif char == "-" or char in "0123456789":
            self._number = {"-": "-", "0": "zero"}.get(char, "integer")
            self._state = _NUMBER
        else:
            return False
        return True

    def _number_goes_on(self, char: str) -> bool:
        """Whether this character belongs to the number."""
        after = _NUMBER_STATES[self._number].get(_NUMBER_CLASSES.get(char, ""))
        if after is not None:
            self._number = after
        elif self._number in _NUMBER_ENDS:
            self._value_ended()
        else:
            self.failed = True
        return after is not None

    def _word_goes_on(self, char: str) -> bool:
        if not self._word.startswith(char):
            self.failed = True
            return False
        self._word = self._word[1:]
        if not self._word:
            self._value_ended()
        return True


def is_json(text: str) -> bool:
    """Whether a text is one JSON value, perhaps with white space around it."""
    scanner = JsonScanner()
    end = scanner.feed(text)
    return scanner.finish() and not text[end:].strip(" \t\n\r")
