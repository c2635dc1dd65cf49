"""Thinking and calls together, what tool_choice asks for, and which parsers fit a model."""

# ruff: noqa: E501
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.server.parsing import (
    ChatOutput,
    Content,
    ParserFactory,
    ParserNames,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    read_tool_choice,
    tool_choice_schema,
)
from rorqual.server.parsing.events import merged
from tests.server.parsed import CALL, TOOLS, calls, content, parse, reasoning, split_everywhere, tool_call_parser

PROMPT = "<|im_start|>assistant\n<think>\n"
ANSWER = f"I say <tool_call> at times\n</think>\n\nHere: <tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n"


def output(**options) -> ChatOutput:
    return ChatOutput(ParserFactory.reasoning_parser("qwen3", PROMPT), tool_call_parser("hermes"), **options)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(ANSWER)), max_size=10))
def test_thinking_then_content_then_calls(cuts):
    events = parse(output(), ANSWER, cuts)
    assert reasoning(events) == "I say <tool_call> at times"
    assert content(events) == "Here:"
    assert calls(events) == [("f", '{"a": 1}')] * 2


def test_the_answer_alone_is_content_without_parsers():
    assert split_everywhere(ChatOutput, ANSWER) == [Content(ANSWER)]
    assert parse(ChatOutput(), "") == []


def test_only_the_first_call_if_they_must_not_be_parallel():
    events = parse(output(parallel_tool_calls=False), ANSWER)
    assert calls(events) == [("f", '{"a": 1}')]
    assert content(events) == "Here:"


def test_the_finish_reason_tells_of_calls():
    parser = output()
    assert (parser.has_tool_calls, parser.finish_reason("stop")) == (False, "stop")
    parser.push(ANSWER)
    assert parser.has_tool_calls
    assert [parser.finish_reason(reason) for reason in ("stop", "length")] == ["tool_calls", "length"]


def test_neighbours_become_one():
    events = [Content("a"), Content("b"), Reasoning("c"), ToolCallStart(0, "x", "f"), ToolCallArguments(0, "1")]
    events += [ToolCallArguments(0, "2"), ToolCallStart(1, "y", "f"), ToolCallStart(2, "z", "f"), Content("d")]
    assert merged(events) == [Content("ab"), *events[2:4], ToolCallArguments(0, "12"), *events[6:]]


# --- tool_choice

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "all": {"$ref": "#"}}}
DEFINED = {
    "type": "function",
    "function": {
        "name": "walk",
        "parameters": {
            "type": "object",
            "properties": {"node": {"$ref": "#/$defs/node"}, "kind": {"const": {"$ref": "#/kept"}}},
            "required": ["node"],
            "$defs": {"node": NODE},
        },
    },
}
BARE = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("tools", "choice", "mode", "names"),
    [
        ([BARE], None, "auto", ["now"]),
        ([], None, "none", []),
        (None, "auto", "none", []),
        ([BARE], "none", "none", []),
        ([BARE, DEFINED], "required", "required", ["now", "walk"]),
        ([BARE, DEFINED], NAMED, "named", ["now"]),
        ([BARE, DEFINED], {"type": "function", "name": "walk"}, "named", ["walk"]),
        ([BARE, DEFINED], {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, "required", ["now"]),
        ([BARE, DEFINED], {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}, "auto", ["now"]),
    ],
)  # fmt: skip
def test_a_choice_is_read(tools, choice, mode, names):
    checked = read_tool_choice(tools, choice)
    assert (checked.mode, [tool["function"]["name"] for tool in checked.tools]) == (mode, names)
    assert checked.forced == (mode in ("required", "named"))


@pytest.mark.parametrize("choice", ["any", 5, {"type": "web_search"}, {"type": "function", "function": {"name": "x"}}])
def test_a_choice_that_cannot_be_is_refused(choice):
    with pytest.raises(ValueError, match="tool_choice must"):
        read_tool_choice([BARE], choice)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_needs_tools(choice):
    with pytest.raises(ValueError, match="tool_choice must"):
        tool_choice_schema([], choice)


def test_the_schema_of_required_takes_calls_and_nothing_else():
    jsonschema = pytest.importorskip("jsonschema")
    schema = tool_choice_schema([BARE, DEFINED], "required")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    walk = {"node": {"next": {"next": {"all": {"node": {}}}}}}
    for good in ([{"name": "now", "parameters": {}}], [{"name": "walk", "parameters": walk}] * 2):
        assert validator.is_valid(good)
    for bad in (
        [],
        [{"name": "x", "parameters": {}}],
        [{"name": "now"}],
        [{"name": "walk", "parameters": {"node": 5}}],
    ):
        assert not validator.is_valid(bad)
    assert not validator.is_valid([{"name": "walk", "parameters": {"node": {"all": {}}}}])  # "#" is the tool's schema
    assert tool_choice_schema([BARE, DEFINED], "required", parallel_tool_calls=False)["maxItems"] == 1
    assert schema["$defs"]["tool_1"]["properties"]["kind"] == {"const": {"$ref": "#/kept"}}


def test_the_schema_of_a_named_tool_is_its_own():
    assert (
        tool_choice_schema([BARE, DEFINED], {"type": "function", "name": "walk"}) == DEFINED["function"]["parameters"]
    )
    assert tool_choice_schema([BARE], NAMED) == {"type": "object", "properties": {}}
    assert tool_choice_schema([BARE], "auto") is None
    assert tool_choice_schema([BARE], "none") is None


def test_the_grammar_takes_the_schema():
    llguidance = pytest.importorskip("llguidance")
    schema = json.dumps(tool_choice_schema([BARE, DEFINED], "required"))
    assert not llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(schema))


@pytest.mark.parametrize("name", [None, *ParserFactory.names()["tool_call"]])
def test_forced_calls_are_read_whatever_the_models_own_format(name):
    def required():
        return ParserFactory.tool_call_parser(name, TOOLS, "required")

    text = '[{"name": "f", "parameters": {"a": [1]}}, {"name":"now","parameters":{}}]'
    assert calls(split_everywhere(required, text)) == [("f", '{"a": [1]}'), ("now", "{}")]
    assert content(parse(required(), text)) == ""
    assert split_everywhere(required, "no list") == [Content("no list")]

    def named():
        return ParserFactory.tool_call_parser(name, TOOLS, {"type": "function", "function": {"name": "f"}})

    events = split_everywhere(named, ' {"a": {"b": "}"}} ')
    assert (calls(events), content(events)) == ([("f", '{"a": {"b": "}"}}')], "")
    assert split_everywhere(named, "") == []


def test_calls_are_not_looked_for_without_tools():
    assert ParserFactory.tool_call_parser("hermes", []) is None
    assert ParserFactory.tool_call_parser("hermes", TOOLS, "none") is None
    assert ParserFactory.tool_call_parser(None, TOOLS) is None
    with pytest.raises(ValueError, match="tool-call-parser must be one of hermes, .*, got 'x'"):  # noqa: RUF043
        ParserFactory.tool_call_parser("x", TOOLS)


# --- guesses


@pytest.mark.parametrize(
    ("model_type", "template", "tool_call", "thinking"),
    [
        ("qwen2", "...<tool_call>\n{\"name\": ..., \"arguments\": ...}", "hermes", None),
        ("qwen3", "<think>...</think>...<tool_call>{\"name\": , \"arguments\": }", "hermes", "qwen3"),
        ("qwen3_moe", "<tool_call>\n<function=example>", "qwen3_coder", None),
        ("glm4_moe", "<tool_call>{name}<arg_key>... arguments", None, None),
        ("llama", '{"name": function name, "parameters": dictionary}', "llama3_json", None),
        ("llama", "<|python_tag|>", "llama3_json", None),
        ("llama", "{{ messages }}", None, None),
        ("mistral", "[TOOL_CALLS]", "mistral", None),
        ("deepseek_v3", "<｜Assistant｜></think> <｜tool▁call▁begin｜>function\n```json", "deepseek_v3", "deepseek_r1"),
        ("qwen2", "<｜Assistant｜><think> </think><｜tool▁call▁begin｜>function\n```json", "deepseek_v3", "deepseek_r1"),
        ("deepseek_v3", "{% if not thinking is defined %}</think><｜tool▁call▁begin｜>", "deepseek_v31", "deepseek_v3"),
        ("deepseek_v32", None, "deepseek_v32", "deepseek_v3"),
        ("deepseek_v4", None, "deepseek_v4", "deepseek_v4"),
        ("deepseek_v4", "'｜DSML｜' + 'tool_calls>' </think> thinking is defined", "deepseek_v4", "deepseek_v4"),
        ("deepseek_v32", "'｜DSML｜' + 'function_calls' </think> thinking is defined", "deepseek_v32", "deepseek_v3"),
        ("opt", None, None, None),
    ],
)  # fmt: skip
def test_guess(model_type, template, tool_call, thinking):
    assert ParserFactory.guess({"model_type": model_type}, template) == ParserNames(tool_call, thinking)


def test_a_guess_by_architecture():
    assert ParserFactory.guess({"architectures": ["DeepseekV4ForCausalLM"]}, None).tool_call == "deepseek_v4"
    assert ParserFactory.guess({}, None) == ParserNames(None, None)
