"""Parsers look at no text more than a bounded number of times, however it comes."""

from __future__ import annotations

import time

import pytest

from rorqual.server.parsing import ChatOutput
from rorqual.server.parsing.reasoning import Qwen3
from tests.server.parsed import BEGIN, CALL, END, SEPARATOR, calls, parse, tool_call_parser
from tests.server.parsed import DSML as D


def repeated(name: str, count: int) -> str:
    blocks = {
        "hermes": f"<tool_call>{CALL}</tool_call>\n",
        "llama3_json": f"{CALL};",
        "deepseek_v31": f'{BEGIN}f{SEPARATOR}{{"a": 1}}{END}',
        "deepseek_v4": f'<{D}invoke name="f"><{D}parameter name="a" string="true">1</{D}parameter></{D}invoke>',
        "qwen3_coder": "<tool_call><function=f><parameter=s>1</parameter></function></tool_call>",
    }
    return blocks[name] * count


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "deepseek_v31", "deepseek_v4", "qwen3_coder"])
@pytest.mark.parametrize("piece", [7, 10**9], ids=["pieces", "whole"])
def test_thousands_of_calls_take_linear_time(name, piece):
    def seconds(count: int) -> float:
        text = repeated(name, count)
        begin = time.process_time()
        events = parse(tool_call_parser(name), text, range(piece, len(text), piece))
        elapsed = time.process_time() - begin
        assert len(calls(events)) == count
        return elapsed

    short = min(seconds(200) for _ in range(3))
    assert seconds(2000) < 40 * short


LONG = {
    "content": ("", "a"),
    "white space": ("", "\n"),
    "beginnings of tags": ("", "<"),
    "calls that are none": ("", "<tool_call>x"),
    "an argument": ('<tool_call>{"name": "f", "arguments": {"a": "', "a"),
    "digits": ('<tool_call>{"name": "f", "arguments": {"a": ', "1"),
    "depth": ('<tool_call>{"name": "f", "arguments": {"a": ', "["),
    "arguments before the name": ('<tool_call>{"arguments": {"a": "', "a"),
    "a name": ('<tool_call>{"name": "', "a"),
    "space in a call": ("<tool_call>", " "),
    "space after a call": (f"<tool_call>{CALL}", " "),
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("piece", [1, 10**9], ids=["characters", "whole"])
def test_long_texts_take_linear_time(kind, piece):
    def seconds(length: int) -> float:
        start, unit = LONG[kind]
        text = start + unit * (length // len(unit))
        parser = tool_call_parser("hermes")
        begin = time.process_time()
        for position in range(0, len(text), piece):
            parser.push(text[position : position + piece])
        parser.finish()
        return time.process_time() - begin

    short = min(seconds(10_000) for _ in range(3))
    assert seconds(100_000) < 40 * short + 0.01


def test_a_quarter_of_a_megabyte_by_characters():
    """About half a second; the bound allows for a slow machine, and a quadratic parser takes far longer."""
    text = (
        "<think>" + "thought " * 10_000 + "</think>" + "word <b> " * 10_000 + f"<tool_call>{CALL[:-3]}" + "1" * 100_000
    )
    output = ChatOutput(Qwen3(starts_inside=False), tool_call_parser("hermes"))
    begin = time.process_time()
    for char in text:
        output.push(char)
    output.finish()
    assert output.has_tool_calls
    assert time.process_time() - begin < 10
