"""Runs parsers over texts that are cut in every way, and checks what all of them promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hypothesis import strategies as st

from rorqual.server.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart, merged
from rorqual.server.parsing.factory import ParserFactory
from rorqual.server.parsing.machine import TextMachine
from rorqual.server.parsing.tool_calls import ToolCallParser

Call = tuple[str, str]
"""Name and arguments."""

BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
DSML = "｜DSML｜"
CALL = '{"name": "f", "arguments": {"a": 1}}'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"s": {"type": "string"}, "s2": {"type": "string"}, "n": {}, "o": {}},
            },
        },
    }
    for name in ("f", "get_weather", "now", "a.b-c")
]


def tool_call_parser(name: str) -> ToolCallParser:
    parser = ParserFactory.tool_call_parser(name, TOOLS)
    assert parser is not None
    return parser


def parse(machine: TextMachine, text: str, cuts: Iterable[int] = ()) -> list[Event]:
    """All events of a text pushed in pieces; ids are checked and then left out, and neighbours are one."""
    events: list[Event] = []
    begin = 0
    for end in [*sorted(cuts), len(text)]:
        events += machine.push(text[begin:end])
        begin = end
    events += machine.finish()
    num_calls, ids = 0, set()
    for i, event in enumerate(events):
        match event:
            case ToolCallStart(index, call_id, name):
                assert index == num_calls
                assert name
                assert call_id not in ids
                ids.add(call_id)
                num_calls += 1
                events[i] = ToolCallStart(index, "", name)
            case ToolCallArguments(index, piece):
                assert index == num_calls - 1
                assert piece
            case Content(piece) | Reasoning(piece):
                assert piece
    return merged(events)


def split_everywhere(make: Callable[[], TextMachine], text: str) -> list[Event]:
    """The events, which are the same for the whole text, for each two parts of it, and for single characters."""
    whole = parse(make(), text)
    assert parse(make(), text, range(1, len(text))) == whole
    for cut in range(len(text)):
        assert parse(make(), text, [cut]) == whole, repr(text[:cut])
    return whole


def content(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def reasoning(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls(events: Sequence[Event]) -> list[Call]:
    found: list[Call] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            found.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            name, arguments = found[event.index]
            found[event.index] = name, arguments + event.text
    return found


def cut_texts(texts: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, list[int]]]:
    """Texts with places to cut them."""
    return texts.flatmap(
        lambda text: st.tuples(st.just(text), st.lists(st.integers(0, len(text)), max_size=12, unique=True))
    )
