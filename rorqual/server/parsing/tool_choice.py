"""What a request's `tool_choice` means, and the JSON schema that makes a model obey it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Tool = Mapping[str, Any]
_NOT_SCHEMAS = frozenset(("const", "enum", "default", "examples"))


@dataclass(frozen=True)
class ToolChoice:
    """A checked `tool_choice`."""

    mode: Literal["none", "auto", "required", "named"]
    tools: tuple[Tool, ...]
    """Those that may be called; the one that must be if it is named."""

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.mode in ("required", "named")


def function_of(tool: Tool) -> Mapping[str, Any]:
    """A tool's name, description and parameters, in either API's form."""
    function: Mapping[str, Any] = tool.get("function", tool)
    return function


def read_tool_choice(tools: Sequence[Tool] | None, choice: object) -> ToolChoice:
    """Check `choice` against the tools.

    Args:
        tools: the request's.
        choice: "none", "auto", "required", {"type": "function", "function": {"name": ...}} (or with "name" beside
            "type"), {"type": "allowed_tools", ...}; None: "auto" if there are tools.

    Raises:
        ValueError: it is something else, or asks for a tool that is not there.
    """
    tools = tuple(tools or ())
    if choice is None:
        choice = "auto" if tools else "none"
    if choice in ("none", "auto") or (choice == "required" and tools):
        mode: Literal["none", "auto", "required"] = choice if tools else "none"
        return ToolChoice(mode, tools if mode != "none" else ())
    if isinstance(choice, Mapping):
        kind = choice.get("type")
        if kind == "function":
            return ToolChoice("named", (_named(tools, choice),))
        if kind == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            subset = [_named(tools, item) for item in allowed.get("tools") or ()]
            return read_tool_choice(subset, allowed.get("mode", "auto"))
    raise ValueError(
        "tool_choice must be 'none', 'auto', 'required' (with tools) or "
        f"{{'type': 'function', 'function': {{'name': ...}}}}, got {choice!r}: name one of the request's tools"
    )


def _named(tools: Sequence[Tool], choice: Mapping[str, Any]) -> Tool:
    name = function_of(choice).get("name")
    names = [function_of(tool).get("name") for tool in tools]
    if name not in names:
        raise ValueError(
            f"tool_choice must name one of the request's tools ({', '.join(map(repr, names)) or 'it has none'}), "
            f"got {name!r}: add that tool, or choose another"
        )
    return tools[names.index(name)]


def tool_choice_schema(
    tools: Sequence[Tool] | None, choice: object, *, parallel_tool_calls: bool = True
) -> dict[str, Any] | None:
    """The JSON schema of the whole text of an answer that has to be a call; None where it need not be.

    A named tool's text is its arguments. "required" is a list of {"name": ..., "parameters": {...}}.
    It is the same for every model, whatever format its own calls have.

    Raises:
        ValueError: as `read_tool_choice`.
    """
    checked = read_tool_choice(tools, choice)
    if checked.mode == "named":
        return dict(_parameters(checked.tools[0]))
    if checked.mode != "required":
        return None
    names = [f"tool_{i}" for i in range(len(checked.tools))]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "name": {"const": function_of(tool)["name"]},
                        "parameters": {"$ref": f"#/$defs/{name}"},
                    },
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
                for name, tool in zip(names, checked.tools, strict=True)
            ]
        },
        # Each tool's schema stays whole, with its own definitions; its references are to where it now is.
        "$defs": {
            name: _moved(_parameters(tool), f"#/$defs/{name}") for name, tool in zip(names, checked.tools, strict=True)
        },
    }
    if not parallel_tool_calls:
        schema["maxItems"] = 1
    return schema


def _parameters(tool: Tool) -> Mapping[str, Any]:
    return function_of(tool).get("parameters") or {"type": "object", "properties": {}}


def _moved(schema: Any, root: str) -> Any:
    """The schema with references to its root as references to `root`."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else (value if key in _NOT_SCHEMAS else _moved(value, root))
            for key, value in schema.items()
        }
    if isinstance(schema, list | tuple):
        return [_moved(item, root) for item in schema]
    return schema
