"""Tool calls in single texts: what is one, what is not, and when it is known."""

# ruff: noqa: E501
from __future__ import annotations

import json

import pytest

from rorqual.server.parsing import Content, ParserFactory, ToolCallArguments, ToolCallStart
from tests.server.parsed import (
    BEGIN,
    CALL,
    END,
    SEPARATOR,
    calls,
    content,
    parse,
    split_everywhere,
    tool_call_parser,
)
from tests.server.parsed import (
    DSML as D,
)


@pytest.mark.parametrize(
    ("name", "text", "expected_content", "expected_calls"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', "", [("now", "{}")]),
        ("hermes", '<tool_call>{"name":"now"}</tool_call>', "", [("now", "{}")]),
        ("hermes", '<tool_call>{"name":"now","arguments":null}</tool_call>', "", [("now", "{}")]),
        ("hermes", '<tool_call>{"arguments": { "a" : [ 1,2 ] }, "name": "f"}</tool_call>', "", [("f", '{ "a" : [ 1,2 ] }')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "\\u0066", "arguments": {"\\u00fc": "\\ud83d\\ude00"}}', "", [("f", '{"\\u00fc": "\\ud83d\\ude00"}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak \\d"}}', "", [("f", '{"a": "line\nbreak \\d"}')]),
        ("hermes", f"Sure. \n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n Done.\n", "Sure.\n Done.\n", [("f", '{"a": 1}')] * 2),
        ("hermes", f"<tool_call>{CALL}<tool_call>{CALL}", "", [("f", '{"a": 1}')] * 2),
        ("hermes", f"<tool_call>{CALL}</tool_c", "", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "x', "", [("f", '{"a": [1, "x')]),
        ("hermes", "a <tool_c", "a <tool_c", []),
        ("hermes", "<tool_call>", "<tool_call>", []),
        ("hermes", ' \n<tool_call>\n{"name": "f", "arguments": {', ' \n<tool_call>\n{"name": "f", "arguments": {', []),
        ("hermes", "<tool_call>not json</tool_call>\n", "<tool_call>not json</tool_call>\n", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>', '<tool_call>{"name": "f", "arguments": {bad}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": "[1]"}', '<tool_call>{"name": "f", "arguments": "[1]"}', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call> x', "1}}</tool_call> x", [("f", '{"a": 0')]),
        ("hermes", f"<tool_call>oops <tool_call>{CALL}</tool_call>", "<tool_call>oops", [("f", '{"a": 1}')]),
        ("hermes", f"{CALL}", CALL, []),
        ("llama3_json", '{"name": "f", "parameters": {"a": "x"}}', "", [("f", '{"a": "x"}')]),
        ("llama3_json", ' {"type": "function", "name": "f", "parameters": {}}\n', "", [("f", "{}")]),
        ("llama3_json", f"<|python_tag|>{CALL}; {CALL};{CALL}", "", [("f", '{"a": 1}')] * 3),
        ("llama3_json", f"{CALL}; {{x", "; {x", [("f", '{"a": 1}')]),
        ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
        ("llama3_json", '{"name": "Bob"}', '{"name": "Bob"}', []),
        ("llama3_json", "{", "{", []),
        ("llama3_json", f"See: {CALL}", f"See: {CALL}", []),
        ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("mistral", f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("f", '{"a": 1}')] * 2),
        ("mistral", "Hm [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}", "Hm", [("f", "{}"), ("g", "{}")]),
        ("mistral", f"[TOOL_CALLS][{CALL}, oops]", ", oops]", [("f", '{"a": 1}')]),
        ("mistral", "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
        ("deepseek_v3", f"<｜tool▁calls▁begin｜>{BEGIN}function{SEPARATOR}f\n```json\n{{\"a\": 1}}\n``", "", [("f", '{"a": 1}')]),
        ("deepseek_v3", f"{BEGIN}function{SEPARATOR}f\n{{}}\n{END} x", " x", [("f", "{}")]),
        ("deepseek_v31", f"<｜tool▁calls▁begin｜>{BEGIN}f{SEPARATOR}no{END}", f"<｜tool▁calls▁begin｜>{BEGIN}f{SEPARATOR}no{END}", []),
        ("deepseek_v4", f'\n\n<{D}tool_calls>\n<{D}invoke name="f">\n\n</{D}invoke>\n</{D}tool_calls>', "", [("f", "{}")]),
        ("deepseek_v4", f'<{D}invoke name="f"><{D}parameter name="s">[1]</{D}parameter></{D}invoke>', "", [("f", '{"s": [1]}')]),
        ("deepseek_v4", f'<{D}invoke name="f"><{D}parameter name="s" string="true">cut "of', "", [("f", '{"s": "cut \\"of')]),
        ("deepseek_v41", f'<{D} calls>\n<{D} invoke name="f">\n</{D} invoke>\n</{D} calls>', "", [("f", "{}")]),
        ("qwen3_coder", "<function=f>\n<parameter=n>\n[1]\n</parameter>\n</function>\n</tool_call>", "", [("f", '{"n": [1]}')]),
        ("qwen3_coder", "<function=x><parameter=n>1</parameter></function>", "", [("x", '{"n": "1"}')]),
        ("qwen3_coder", "<function=f>\n<parameter=s>\n\n  x\n\n</parameter>", "", [("f", '{"s": "\\n  x\\n"')]),
        ("qwen3_coder", f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL}</tool_call>", []),
    ],
)  # fmt: skip
def test_case(name, text, expected_content, expected_calls):
    events = split_everywhere(lambda: tool_call_parser(name), text)
    assert (content(events), calls(events)) == (expected_content, expected_calls)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "True", True),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, '{"a": 1}', {"a": 1}),
        (True, "1", 1),
    ],
)
def test_coder_values_have_the_declared_type(schema, text, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"p": schema}}}}
    parser = ParserFactory.tool_call_parser("qwen3_coder", [tool])
    ((_, arguments),) = calls(parse(parser, f"<function=f><parameter=p>\n{text}\n</parameter></function>"))
    assert json.loads(arguments) == {"p": value}


def test_characters_are_out_as_soon_as_they_are_certain():
    parser = tool_call_parser("hermes")
    assert parser.push("Hi <") == [Content("Hi")]
    assert not parser.push('tool_call>{"name": "f", "arguments": {')
    start, arguments = parser.push('"a')
    assert (start.name, arguments) == ("f", ToolCallArguments(0, '{"a'))
    assert parser.push('": "b') == [ToolCallArguments(0, '": "b')]
    assert parser.push('</tool_call>"}') == [ToolCallArguments(0, '</tool_call>"}')]
    assert not parser.push("}\n</tool_")
    assert not parser.push("call>\n")
    assert parser.push("x<") == [Content("\nx")]
    assert parser.finish() == [Content("<")]


def test_a_json_answer_that_is_no_call_is_not_held_to_its_end():
    parser = tool_call_parser("llama3_json")
    assert not parser.push('{"ans')
    assert parser.push('wer": "long') == [Content('{"answer": "long')]


def test_ids():
    events = [e for name in ("hermes", "mistral") for e in tool_call_parser(name).push(f"<tool_call>[TOOL_CALLS]{CALL}".replace("<tool_call>[TOOL_CALLS]", "<tool_call>" if name == "hermes" else "[TOOL_CALLS]"))]  # fmt: skip
    first, second = (event.id for event in events if isinstance(event, ToolCallStart))
    assert first.startswith("call_")
    assert len(second) == 9
    assert second.isalnum()
