"""DeepSeek's formats with one token for each tag: R1, V3 and V3.1."""

from __future__ import annotations

from rorqual.server.parsing.machine import Steps
from rorqual.server.parsing.tool_calls import ToolCallParser

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class DeepSeekV31(ToolCallParser):
    """Calls within `calls begin` and `calls end`: `call begin` NAME `sep` ARGUMENTS `call end`."""

    starts = (_CALLS_BEGIN, _CALL_BEGIN)  # models forget the outer tag at times

    def _read_calls(self, tag: str) -> Steps[None]:
        if tag == _CALLS_BEGIN:
            yield from self._spaces()
            yield from self._expect(_CALL_BEGIN)
        yield from self._read_call()
        while True:
            self._begin()
            yield from self._spaces()
            if not (yield from self._accept(_CALL_BEGIN)):
                break
            yield from self._read_call()
        yield from self._expect_end(_CALLS_END)

    def _read_call(self) -> Steps[None]:
        name = yield from self._name(_SEPARATOR)
        yield from self._spaces()
        yield from self._read_arguments(name)
        self._begin()
        yield from self._spaces()
        yield from self._expect_end(_CALL_END)


class DeepSeekV3Calls(DeepSeekV31):
    """A call is `call begin` function `sep` NAME, a line break, ARGUMENTS in a code fence, `call end`: R1 and V3."""

    def _read_call(self) -> Steps[None]:
        yield from self._name(_SEPARATOR)
        name = yield from self._name("\n")
        yield from self._spaces()
        yield from self._accept("```json")
        yield from self._spaces()
        yield from self._read_arguments(name)
        self._begin()
        yield from self._spaces()
        if (yield from self._accept("```", may_be_cut=True)):
            self._begin()
            yield from self._spaces()
        yield from self._expect_end(_CALL_END)
