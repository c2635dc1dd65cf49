"""Tool calls are those of the whole text, wherever it is cut: hypothesis against regular expressions and json."""

# ruff: noqa: E501
from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server import tool_call_oracles as oracles
from tests.server.parsed import BEGIN, END, SEPARATOR, calls, content, cut_texts, parse, tool_call_parser

ORACLES = {
    "hermes": oracles.hermes,
    "llama3_json": oracles.llama3_json,
    "mistral": oracles.mistral,
    "deepseek_v3": oracles.deepseek_v3,
    "deepseek_v31": oracles.deepseek_v31,
    "deepseek_v32": oracles.dsml("function_calls"),
    "deepseek_v4": oracles.dsml("tool_calls"),
    "qwen3_coder": oracles.qwen3_coder,
}


# --- texts

# What looks like the end of a call, or the beginning of one, is in strings too.
STRINGS = st.lists(
    st.sampled_from(
        [
            *(
                "a",
                " ",
                "\n",
                '"',
                "\\",
                "{",
                "}",
                "]",
                "日本",
                "😀",
                "</tool_call>",
                "<tool_call>",
                ";",
                "[TOOL_CALLS]",
            ),
            *("<｜tool▁call▁end｜>", "```", "<function=f>", "<", "\u0001", "'", "<|python_tag|>", "</｜DSML｜invoke>"),
        ]
    ),
    max_size=6,
).map("".join)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), STRINGS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["f", "get_weather", "now", "a.b-c"])
PLAIN = st.lists(
    st.sampled_from(["Hi", " ", "\n", "<", "<to", "</tool_call>", "日本", "]", "<｜", "x;"]), max_size=4
).map("".join)


@st.composite
def json_texts(draw: st.DrawFn, values: st.SearchStrategy) -> str:
    value = draw(values)
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " : ")]))
    return json.dumps(
        value, ensure_ascii=draw(st.booleans()), separators=separators, indent=draw(st.sampled_from([None, 1]))
    )


OBJECTS = json_texts(st.dictionaries(STRINGS, VALUES, max_size=3))


@st.composite
def call_objects(draw: st.DrawFn, keys: tuple[str, ...] = ("arguments", "parameters")) -> str:
    members = [f'"name": {json.dumps(draw(NAMES))}', f'"{draw(st.sampled_from(keys))}": {draw(OBJECTS)}']
    if draw(st.booleans()):
        members.append('"type":"function"')
    return "{" + ", ".join(draw(st.permutations(members))) + draw(st.sampled_from(["}", " }", "\n}"]))


@st.composite
def between(draw: st.DrawFn, first: str, one: st.SearchStrategy[str], divider: str, last: str) -> str:
    space = draw(st.sampled_from(["", "\n"]))
    return first + space + (space + divider + space).join(draw(st.lists(one, min_size=1, max_size=3))) + space + last


def deepseek_call(form: str) -> st.SearchStrategy[str]:
    return st.tuples(NAMES, OBJECTS).map(lambda call: form.replace("NAME", call[0]).replace("ARGS", call[1]))


def marked_up(start: str, name_end: str, end: str, parameter: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    parameters = st.lists(parameter, max_size=3).map("\n".join)
    return st.tuples(NAMES, parameters).map(lambda call: f"{start}{call[0]}{name_end}\n{call[1]}\n{end}")


def dsml_parameter() -> st.SearchStrategy[str]:
    tag = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>'
    strings = st.tuples(st.sampled_from("sno"), STRINGS).map(lambda pair: tag.format(pair[0], "true", pair[1]))
    others = st.tuples(st.sampled_from("sno"), json_texts(VALUES) | st.sampled_from(["True", "[1,", " 5 ", ""]))
    return strings | others.map(lambda pair: tag.format(pair[0], "false", pair[1]))


def coder_parameter() -> st.SearchStrategy[str]:
    values = STRINGS | json_texts(VALUES) | st.sampled_from(["True", "\n\nx\n", " 5 "])
    form = st.sampled_from(["<parameter={}>\n{}\n</parameter>", "<parameter={}>{}</parameter>"])
    return st.tuples(form, st.sampled_from(["s", "n", "o", "s2"]), values).map(lambda p: p[0].format(p[1], p[2]))


def dsml_blocks(block: str) -> st.SearchStrategy[str]:
    call = marked_up('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>", dsml_parameter())
    return between(f"<｜DSML｜{block}>", call, "", f"</｜DSML｜{block}>")


BLOCKS = {
    "hermes": between("<tool_call>", call_objects(), "</tool_call>\n<tool_call>", "</tool_call>"),
    "llama3_json": between("<|python_tag|>", call_objects(), ";", ""),
    "mistral": between("[TOOL_CALLS][", call_objects(), ",", "]")
    | st.tuples(NAMES, OBJECTS).map(lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{call[1]}"),
    "deepseek_v3": between(
        "<｜tool▁calls▁begin｜>",
        deepseek_call(f"{BEGIN}function{SEPARATOR}NAME\n```json\nARGS\n```{END}"),
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": between(
        "<｜tool▁calls▁begin｜>", deepseek_call(f"{BEGIN}NAME{SEPARATOR}ARGS{END}"), "", "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": dsml_blocks("function_calls"),
    "deepseek_v4": dsml_blocks("tool_calls"),
    "qwen3_coder": between(
        "<tool_call>",
        marked_up("<function=", ">", "</function>", coder_parameter()),
        "</tool_call>\n<tool_call>",
        "</tool_call>",
    ),
}


@st.composite
def answers(draw: st.DrawFn, name: str) -> str:
    """Text and calls in turn."""
    text = draw(st.sampled_from(["", draw(call_objects()) if name == "llama3_json" else ""])) or draw(PLAIN)
    for _ in range(draw(st.integers(0, 3))):
        text += draw(BLOCKS[name]) + draw(PLAIN)
    return text


@pytest.mark.parametrize("name", ORACLES)
def test_every_split_gives_what_is_in_the_whole_text(name):
    @settings(max_examples=60, deadline=None)
    @given(cut_texts(answers(name)))
    def check(text_and_cuts):
        text, cuts = text_and_cuts
        events = parse(tool_call_parser(name), text, cuts)
        assert (content(events), calls(events)) == ORACLES[name](text)

    check()


PARTS = {
    "hermes": ["<tool_call>", "</tool_call>", "\n", '{"name": "f"', ', "arguments": ', "{}", '{"a": 1', "}", "[", "tru", "-", "1.", "e", '"\\', '"', "x", "null"],
    "llama3_json": ["<|python_tag|>", '{"name": "f", ', '"parameters": {', '"a": [1, ', "]", "}", ";", " ", "{", "x", '"', "null", "0"],
    "mistral": ["[TOOL_CALLS]", "[", '{"name": "f", "arguments": {', "}", "]", ",", "f[ARGS]{", '"a":1', "[ARGS]", " ", "x"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", BEGIN, "function", SEPARATOR, "f\n", "```json\n", '{"a":1', "}", "\n```", END, "<｜tool▁calls▁end｜>", "\n", "x"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜>", BEGIN, "f", SEPARATOR, '{"a":1', "}", END, "<｜tool▁calls▁end｜>", "\n", "x", "<｜tool▁"],
    "deepseek_v4": ["<｜DSML｜tool_calls>", '<｜DSML｜invoke name="', "f", '">', '<｜DSML｜parameter name="', '" string="true">', '" string="false">', "12", "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>", "\n", "<"],
    "qwen3_coder": ["<tool_call>", "<function=f>", "<parameter=", "s>", "n>", "\n", "</parameter>", "</function>", "</tool_call>", "x", "{", "<"],
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_every_split_of_any_text_gives_the_same(name):
    @settings(max_examples=100, deadline=None)
    @given(cut_texts(st.lists(st.sampled_from(PARTS[name]), max_size=14).map("".join)))
    def check(text_and_cuts):
        text, cuts = text_and_cuts
        events = parse(tool_call_parser(name), text, cuts)
        assert events == parse(tool_call_parser(name), text) == parse(tool_call_parser(name), text, range(1, len(text)))
        if not calls(events):  # what is no call is not changed
            assert content(events) == text

    check()
