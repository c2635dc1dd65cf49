"""Items of /v1/responses as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rorqual.server.errors import bad_value
from rorqual.server.schemas.responses import ContentPart, InputItem

Message = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(items: str | Sequence[InputItem]) -> list[Message]:
    """The conversation's messages. What one turn of the model consists of (thinking, text, calls) is one message.

    Raises: APIError (400) for items that have no meaning here.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    turns = _Turns()
    for i, item in enumerate(items):
        path = f"input.{i}"
        kind = item.type or ("message" if item.role is not None else None)
        if kind == "message":
            turns.message(_role(item, path), _text(item.content, f"{path}.content"))
        elif kind == "reasoning":
            turns.reasoning(_text(item.content or item.summary or [], f"{path}.content"))
        elif kind == "function_call":
            turns.call(*(_required(item, name, path) for name in ("call_id", "name", "arguments")))
        elif kind == "function_call_output":
            turns.output(_required(item, "call_id", path), _text(item.output, f"{path}.output"))
        else:
            known = "message, function_call, function_call_output and reasoning"
            raise bad_value(f"{path}.type must be one of {known}, got {kind!r}", param=f"{path}.type")
    return turns.messages


class _Turns:
    """Messages made item by item."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open: Message | None = None
        """The assistant's message, while more of the same turn may come."""

    def message(self, role: str, text: str) -> None:
        if role == "assistant":
            turn = self._turn()
            if turn["content"] is not None or "tool_calls" in turn:
                self._open = None
                turn = self._turn()
            turn["content"] = text
            return
        self._append({"role": role, "content": text})

    def reasoning(self, text: str) -> None:
        turn = self._turn()
        if turn["content"] is not None or "tool_calls" in turn or "reasoning_content" in turn:
            self._open = None
            turn = self._turn()
        turn["reasoning_content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def output(self, call_id: str, text: str) -> None:
        self._append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _append(self, message: Message) -> None:
        self._open = None
        self.messages.append(message)

    def _turn(self) -> Message:
        if self._open is None:
            self._open = {"role": "assistant", "content": None}
            self.messages.append(self._open)
        return self._open


def _role(item: InputItem, path: str) -> str:
    if item.role not in ROLES:
        raise bad_value(f"{path}.role must be one of {', '.join(ROLES)}, got {item.role!r}", param=f"{path}.role")
    return "system" if item.role == "developer" else item.role


def _required(item: InputItem, name: str, path: str) -> str:
    value = getattr(item, name)
    if value is None:
        raise bad_value(f"{path}.{name} is required", param=f"{path}.{name}")
    return str(value)


def _text(content: str | Sequence[ContentPart] | None, path: str) -> str:
    if content is None:
        raise bad_value(f"{path} is required", param=path)
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type == "refusal" and part.refusal is not None:
            texts.append(part.refusal)
            continue
        if part.type not in _TEXT_PARTS:
            message = f"{path}.{i}.type must be text (input_text or output_text), got {part.type!r}"
            raise bad_value(f"{message}: this model reads nothing else", param=f"{path}.{i}.type")
        if part.text is None:
            raise bad_value(f"{path}.{i}.text is required", param=f"{path}.{i}.text")
        texts.append(part.text)
    return "".join(texts)


def without_oldest(messages: Sequence[Message], turns: int) -> list[Message]:
    """The same without what lies before the user's message number `turns`, but with the system messages at its front.

    Calls and their outputs stay together, as a turn begins with the user.
    """
    front = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    starts = turn_starts(messages)
    return [*messages[:front], *messages[starts[turns] :]]


def turn_starts(messages: Sequence[Message]) -> list[int]:
    """The places of the user's messages."""
    return [i for i, message in enumerate(messages) if message["role"] == "user"]
