"""Parsers by name, and the names that fit a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rorqual.server.parsing import reasoning
from rorqual.server.parsing.deepseek_calls import DeepSeekV3Calls, DeepSeekV31
from rorqual.server.parsing.json_calls import Hermes, JsonList, Llama3Json, Mistral
from rorqual.server.parsing.markup_calls import DeepSeekV4Calls, DeepSeekV32, DeepSeekV41, Qwen3Coder
from rorqual.server.parsing.tool_calls import NamedCall, ToolCallParser
from rorqual.server.parsing.tool_choice import function_of, read_tool_choice

TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "deepseek_v3": DeepSeekV3Calls,
    "deepseek_v31": DeepSeekV31,
    "deepseek_v32": DeepSeekV32,
    "deepseek_v4": DeepSeekV4Calls,
    "deepseek_v41": DeepSeekV41,
    "qwen3_coder": Qwen3Coder,
}
REASONING_PARSERS: dict[str, type[reasoning.ReasoningParser]] = {
    "qwen3": reasoning.Qwen3,
    "deepseek_r1": reasoning.DeepSeekR1,
    "deepseek_v3": reasoning.DeepSeekV3,
    "deepseek_v4": reasoning.DeepSeekV4,
}


@dataclass(frozen=True)
class ParserNames:
    """Of the parsers that fit a model; None where it seems to need none."""

    tool_call: str | None
    reasoning: str | None


class ParserFactory:
    """Makes the parsers of one answer. A parser reads one answer only."""

    @staticmethod
    def names() -> dict[str, list[str]]:
        """What can be asked for: "tool_call" and "reasoning"."""
        return {"tool_call": list(TOOL_CALL_PARSERS), "reasoning": list(REASONING_PARSERS)}

    @staticmethod
    def tool_call_parser(
        name: str | None, tools: Sequence[Mapping[str, Any]] | None, choice: object = None
    ) -> ToolCallParser | None:
        """The parser for an answer.

        Args:
            name: of the model's own format; None: it has none.
            tools: the request's.
            choice: its `tool_choice`. A forced call's text is the JSON that `tool_choice_schema` describes, which is
                no model's own format.

        Returns:
            None if no call may come.

        Raises:
            ValueError: the name or the choice is not known.
        """
        checked = read_tool_choice(tools, choice)
        if checked.mode == "named":
            return NamedCall(function_of(checked.tools[0])["name"])
        if checked.mode == "required":
            return JsonList(checked.tools)
        parser = None if name is None else _find(TOOL_CALL_PARSERS, name, "tool-call-parser")
        return None if parser is None or checked.mode == "none" else parser(checked.tools)

    @staticmethod
    def reasoning_parser(
        name: str | None,
        prompt: str,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        continues: bool = False,
    ) -> reasoning.ReasoningParser | None:
        """The parser for an answer to a rendered prompt; None for no name.

        Args:
            name: of the model's style.
            prompt: as it was rendered; its end shows whether the answer begins within the thinking.
            template_kwargs: what the template was given.
            continues: whether the prompt ends within an assistant message (`continue_final_message`).

        Raises:
            ValueError: the name is not known.
        """
        if name is None:
            return None
        parser: type[reasoning.ReasoningParser] = _find(REASONING_PARSERS, name, "reasoning-parser")
        return parser(starts_inside=parser.is_opened_by(prompt, template_kwargs, continues=continues))

    @staticmethod
    def guess(config: Mapping[str, Any], chat_template: str | None) -> ParserNames:
        """The parsers that fit a model.

        Args:
            config: its config.json (`model_type`, `architectures`).
            chat_template: its source, with that for tools if it is another.
        """
        template = chat_template or ""
        kind = " ".join([str(config.get("model_type") or ""), *map(str, config.get("architectures") or ())]).lower()
        kind = kind.replace("_", "").replace("-", "")
        return ParserNames(_guess_tool_calls(kind, template), _guess_reasoning(kind, template))


def _find(parsers: Mapping[str, Any], name: str, option: str) -> Any:
    if name not in parsers:
        raise ValueError(f"{option} must be one of {', '.join(parsers)}, got {name!r}: choose one of these")
    return parsers[name]


def _guess_tool_calls(kind: str, template: str) -> str | None:
    if "｜DSML｜" in template:
        if "function_calls" in template:
            return "deepseek_v32"
        return "deepseek_v4" if "tool_calls>" in template else "deepseek_v41"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template and "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template and "arguments" in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in template or ("llama" in kind and '"parameters": ' in template):
        return "llama3_json"
    # These publish no template that says so.
    return next((name for word, name in _TOOL_CALLS_BY_KIND.items() if word in kind), None)


_TOOL_CALLS_BY_KIND = {"deepseekv4": "deepseek_v4", "deepseekv32": "deepseek_v32"}


def _guess_reasoning(kind: str, template: str) -> str | None:
    if "deepseekv4" in kind:
        return "deepseek_v4"
    if "</think>" not in template:
        return "deepseek_v3" if "deepseekv32" in kind else None
    if "deepseek" in kind or "<｜Assistant｜>" in template:
        return "deepseek_v3" if "thinking is defined" in template else "deepseek_r1"
    return "qwen3"
