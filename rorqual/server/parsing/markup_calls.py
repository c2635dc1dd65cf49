"""Formats in which each parameter has tags of its own: DeepSeek's DSML, and Qwen3-Coder's.

The arguments are written as JSON from them: {"name": value, ...}. Values that are known to be strings come out as they
come in; others are held until they are complete, and are then JSON if they can be, or else strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rorqual.server.parsing.json_scanner import is_json
from rorqual.server.parsing.machine import Mismatch, Steps, Tags
from rorqual.server.parsing.tool_calls import ToolCallParser

_quoted = json.JSONEncoder(ensure_ascii=False).encode
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


@dataclass(frozen=True)
class Markup:
    """The tags of a format."""

    block_start: str
    block_end: str
    call_start: str
    """Before a call's name."""
    name_end: str
    call_end: str
    parameter_start: str
    """Before a parameter's name."""
    parameter_ends: tuple[str, ...]
    """Each ends a value."""


class MarkupCalls(ToolCallParser):
    """Calls within a block, parameters within a call, values within a parameter, all between tags."""

    markup: ClassVar[Markup]

    def _read_calls(self, tag: str) -> Steps[None]:
        if tag == self.markup.block_start:
            yield from self._spaces()
            yield from self._expect(self.markup.call_start)
        yield from self._read_call()
        while True:
            self._begin()
            yield from self._spaces()
            if not (yield from self._accept(self.markup.call_start)):
                break
            yield from self._read_call()
        yield from self._expect_end(self.markup.block_end)

    def _read_call(self) -> Steps[None]:
        """From after `call_start` up to and with `call_end`."""
        name = yield from self._name(self.markup.name_end)
        yield from self._spaces()
        sink: Callable[[str], None] | None = None
        while (yield from self._accept(self.markup.parameter_start)):
            key, types = yield from self._read_parameter_start(name)
            if sink is None:
                sink = self._start_call(name)
                sink("{")
            else:
                sink(", ")
            self._raw = None
            sink(f"{_quoted(key)}: ")
            yield from self._read_value(sink, types)
            self._begin()
            yield from self._spaces()
        yield from self._expect_end(self.markup.call_end)
        if sink is None:
            self._start_call(name)("{}")
        else:
            sink("}")

    def _read_parameter_start(self, function: str) -> Steps[tuple[str, frozenset[str]]]:
        """From after `parameter_start` to the value: the name, and the JSON types that the value may have."""
        raise NotImplementedError

    def _read_value(self, sink: Callable[[str], None], types: frozenset[str]) -> Steps[None]:
        """A value and its closing tag."""
        ends = Tags(*self.markup.parameter_ends)
        if types == {"string"}:
            sink('"')
            found = yield from self._until(ends, lambda text: sink(_quoted(text)[1:-1]))
            if found:
                sink('"')
        else:
            pieces: list[str] = []
            found = yield from self._until(ends, pieces.append)
            text = "".join(pieces)
            sink(_as_json(text, types) if found else text)
        if not found:
            raise Mismatch


def _as_json(text: str, types: frozenset[str]) -> str:
    """The JSON for a value that is written without quotes if it is a string; no types: any."""
    value = text.strip()
    value = _PYTHON_WORDS.get(value, value)
    if is_json(value):
        kind = _KINDS.get(value[0], "number")
        if "string" not in types or (kind != "string" and kind in types):
            return value
    return _quoted(text)


def _dsml(mark: str, block: str) -> Markup:
    return Markup(
        block_start=f"<{mark}{block}>",
        block_end=f"</{mark}{block}>",
        call_start=f'<{mark}invoke name="',
        name_end='">',
        call_end=f"</{mark}invoke>",
        parameter_start=f'<{mark}parameter name="',
        parameter_ends=(f"</{mark}parameter>",),
    )


class DeepSeekV32(MarkupCalls):
    """`<｜DSML｜invoke name="...">` with `<｜DSML｜parameter name="..." string="true">`, in block `function_calls`."""

    markup = _dsml("｜DSML｜", "function_calls")
    starts = (markup.block_start, markup.call_start)

    def _read_parameter_start(self, function: str) -> Steps[tuple[str, frozenset[str]]]:
        key = yield from self._name('"')
        if (yield from self._accept(' string="true">')):
            return key, frozenset({"string"})
        if not (yield from self._accept(' string="false">')):
            yield from self._expect(">")
        return key, frozenset()


class DeepSeekV4Calls(DeepSeekV32):
    """The same in a block `tool_calls`."""

    markup = _dsml("｜DSML｜", "tool_calls")
    starts = (markup.block_start, markup.call_start)


class DeepSeekV41(DeepSeekV32):
    """The same in a block `calls`, with a space before each tag's name."""

    markup = _dsml("｜DSML｜ ", "calls")
    starts = (markup.block_start, markup.call_start)


class Qwen3Coder(MarkupCalls):
    """`<function=...>` with `<parameter=...>`, in `<tool_call>`; the tools' schemas say what is a string."""

    markup = Markup(
        block_start="<tool_call>",
        block_end="</tool_call>",
        call_start="<function=",
        name_end=">",
        call_end="</function>",
        parameter_start="<parameter=",
        parameter_ends=("\n</parameter>", "</parameter>"),
    )
    starts = (markup.block_start, markup.call_start)

    def _read_parameter_start(self, function: str) -> Steps[tuple[str, frozenset[str]]]:
        key = yield from self._name(">")
        yield from self._accept("\n")
        return key, self._types(function, key)

    def _types(self, function: str, key: str) -> frozenset[str]:
        for tool in self._tools:
            declared = tool.get("function", tool)
            if declared.get("name") == function:
                properties = (declared.get("parameters") or {}).get("properties") or {}
                return frozenset(_types_of(properties[key])) if key in properties else frozenset({"string"})
        return frozenset({"string"})


def _types_of(schema: Any) -> Iterator[str]:
    """The JSON types that a schema names; none if it does not say."""
    if not isinstance(schema, Mapping):
        return
    types = schema.get("type", [])
    for name in [types] if isinstance(types, str) else types:
        yield "number" if name == "integer" else name
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key) or ():
            yield from _types_of(part)
    if "type" not in schema and isinstance(schema.get("enum"), list):
        yield from ("string" if isinstance(value, str) else "object" for value in schema["enum"])
