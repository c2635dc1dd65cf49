"""Formats in which a call is a JSON object with its name and its arguments."""

from __future__ import annotations

import random
import string

from rorqual.server.parsing.machine import Steps
from rorqual.server.parsing.tool_calls import ToolCallParser

_random = random.SystemRandom()


class Hermes(ToolCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen2.5, Qwen3."""

    starts = ("<tool_call>",)

    def _read_calls(self, tag: str) -> Steps[None]:
        yield from self._spaces()
        yield from self._read_call_object()
        yield from self._attempt(self._read_end())

    def _read_end(self) -> Steps[None]:
        yield from self._spaces()
        yield from self._expect_end("</tool_call>")


class Llama3Json(ToolCallParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer or after `<|python_tag|>`; several divided by `;`."""

    starts = ("<|python_tag|>",)

    def _read_start(self) -> Steps[None]:
        self._trimmed((yield from self._spaces()))
        if self._text.startswith("{", self._position):
            yield from self._attempt(self._read_call_object(strict=True))
            yield from self._read_more()

    def _read_calls(self, tag: str) -> Steps[None]:
        yield from self._spaces()
        yield from self._read_call_object()
        yield from self._read_more()

    def _read_more(self) -> Steps[None]:
        num_calls = 0
        while num_calls < self.num_calls:
            num_calls = self.num_calls
            yield from self._attempt(self._read_next())

    def _read_next(self) -> Steps[None]:
        yield from self._spaces()
        yield from self._expect(";")
        yield from self._spaces()
        yield from self._read_call_object(strict=True)


class JsonList(ToolCallParser):
    """`[{"name": ..., "parameters": {...}}, ...]` and nothing else, as structured output makes it for "required"."""

    def _read_start(self) -> Steps[None]:
        yield from self._attempt(self._read_list())

    def _read_list(self) -> Steps[None]:
        yield from self._spaces()
        yield from self._expect("[")
        while True:
            yield from self._spaces()
            yield from self._read_call_object()
            self._begin()
            yield from self._spaces()
            if not (yield from self._accept(",")):
                break
        yield from self._expect_end("]")


class Mistral(JsonList):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer `[TOOL_CALLS]name[ARGS]{...}`."""

    starts = ("[TOOL_CALLS]",)

    def _new_id(self) -> str:
        return "".join(_random.choices(string.ascii_letters + string.digits, k=9))

    def _read_start(self) -> Steps[None]:
        yield from ()

    def _read_calls(self, tag: str) -> Steps[None]:
        yield from self._spaces()
        first = yield from self._peek()
        if first == "[":
            yield from self._read_list()
        elif first == "{":
            yield from self._read_call_object()
        else:
            name = yield from self._name("[ARGS]", "[CALL_ID]")
            yield from self._spaces()
            if (yield from self._peek()) != "{":  # the call's id
                yield from self._name("[ARGS]")
                yield from self._spaces()
            yield from self._read_arguments(name)
