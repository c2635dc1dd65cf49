"""What parsers make of a model's text."""

from __future__ import annotations

from itertools import groupby

import msgspec


class Content(msgspec.Struct, frozen=True):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text of the model's thinking."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True):
    """A call begins; said once, before its arguments."""

    index: int
    """0, 1, ... within the answer."""
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallStart | ToolCallArguments


def _kind(event: Event) -> tuple[type, int]:
    return type(event), getattr(event, "index", 0)


def merged(events: list[Event]) -> list[Event]:
    """The same with neighbours of one kind as one."""
    if len(events) < 2:
        return events
    result: list[Event] = []
    for (kind, index), group in groupby(events, _kind):
        if kind is ToolCallStart:
            result += group
            continue
        text = "".join(event.text for event in group if not isinstance(event, ToolCallStart))
        if kind is ToolCallArguments:
            result.append(ToolCallArguments(index, text))
        else:
            result.append(Content(text) if kind is Content else Reasoning(text))
    return result
