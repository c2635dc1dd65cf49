"""A chat answer's text to events: thinking first, then content and tool calls."""

from __future__ import annotations

from rorqual.server.parsing.events import Content, Event, ToolCallArguments, ToolCallStart, merged
from rorqual.server.parsing.reasoning import ReasoningParser
from rorqual.server.parsing.tool_calls import ToolCallParser


class ChatOutput:
    """Parses one answer, however it is split.

    Args:
        reasoning: a new parser. None: the text is not searched for thinking.
        tools: a new parser. None, as for requests without tools: the text is not searched for calls.
        parallel_tool_calls: whether more than the first call is reported.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolCallParser | None = None,
        *,
        parallel_tool_calls: bool = True,
    ) -> None:
        self._reasoning, self._tools = reasoning, tools
        self._max_calls = None if parallel_tool_calls else 1

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has begun."""
        return self._tools is not None and self._tools.num_calls > 0

    def finish_reason(self, reason: str) -> str:
        """The API's word for why an answer with these calls ended, given the engine's."""
        return "tool_calls" if reason == "stop" and self.has_tool_calls else reason

    def push(self, text: str) -> list[Event]:
        """More text."""
        if self._reasoning is None or self._reasoning.done:
            return self._parse_calls(text)
        return merged(self._after_reasoning(self._reasoning.push(text)))

    def finish(self) -> list[Event]:
        """The end of the text."""
        events = self._after_reasoning(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is not None:
            events += self._shown(self._tools.finish())
        return merged(events)

    def _after_reasoning(self, events: list[Event]) -> list[Event]:
        parsed: list[Event] = []
        for event in events:
            parsed += self._parse_calls(event.text) if isinstance(event, Content) else [event]
        return parsed

    def _parse_calls(self, text: str) -> list[Event]:
        if self._tools is None:
            return [Content(text)] if text else []
        return self._shown(self._tools.push(text))

    def _shown(self, events: list[Event]) -> list[Event]:
        if self._max_calls is None:
            return events
        calls = (ToolCallStart, ToolCallArguments)
        return [event for event in events if not isinstance(event, calls) or event.index < self._max_calls]
