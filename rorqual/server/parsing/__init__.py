"""A model's text, as it comes, to events: content, thinking, tool calls. No HTTP, no tensors."""

from rorqual.server.parsing.chat_output import ChatOutput
from rorqual.server.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from rorqual.server.parsing.factory import ParserFactory, ParserNames
from rorqual.server.parsing.reasoning import count_reasoning_tokens
from rorqual.server.parsing.tool_choice import ToolChoice, read_tool_choice, tool_choice_schema

__all__ = [
    "ChatOutput",
    "Content",
    "Event",
    "ParserFactory",
    "ParserNames",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolChoice",
    "count_reasoning_tokens",
    "read_tool_choice",
    "tool_choice_schema",
]
