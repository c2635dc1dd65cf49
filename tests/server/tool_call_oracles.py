"""Tool calls found in whole texts by regular expressions and the json module: what the parsers have to agree with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tests.server.parsed import Call

Found = tuple[list[Call], int]
"""Calls, and where they end."""
Oracle = Callable[[str], tuple[str, list[Call]]]
"""A text's content and calls."""

_decoder = json.JSONDecoder(strict=False)
_space = re.compile(r"[ \t\n\r]*")


def _value(text: str, position: int) -> tuple[object, str, int]:
    begin = _space.match(text, position).end()
    value, end = _decoder.raw_decode(text, begin)
    return value, text[begin:end], end


def _members(text: str, position: int) -> tuple[dict[str, tuple[object, str]], int]:
    """An object's members with their texts; of several with one name the first. ValueError if it is none."""
    if not text.startswith("{", position):
        raise ValueError
    members: dict[str, tuple[object, str]] = {}
    position += 1
    while True:
        key, _, position = _value(text, position)
        colon = re.compile(r"[ \t\n\r]*:").match(text, position)
        if not isinstance(key, str) or colon is None:
            raise ValueError
        value, raw, position = _value(text, colon.end())
        members.setdefault(key, (value, raw))
        divider = re.compile(r"[ \t\n\r]*([,}])").match(text, position)
        if divider is None:
            raise ValueError
        position = divider.end()
        if divider[1] == "}":
            return members, position


def _object(text: str, position: int, strict: bool = False) -> Found | None:
    try:
        members, end = _members(text, position)
    except ValueError:
        return None
    name = members.get("name", (None, ""))[0]
    arguments, raw = next((members[key] for key in members if key in ("arguments", "parameters")), ({}, "{}"))
    if isinstance(arguments, str):
        raw = arguments
    if not isinstance(name, str) or not (arguments is None or isinstance(arguments, dict | str)):
        return None
    if strict and not set(members) <= {"name", "type", "id", "arguments", "parameters"}:
        return None
    if strict and not {"arguments", "parameters"} & set(members):
        return None
    return [(name, "{}" if arguments is None else raw)], end


def _after(pattern: str, text: str, position: int) -> int:
    """Where a pattern ends that may come next; else `position`."""
    match = re.compile(pattern).match(text, position)
    return match.end() if match else position


def _search(text: str, start: str, read: Callable[[str, re.Match[str]], Found | None]) -> tuple[str, list[Call]]:
    """All calls that begin with a match of `start`, and the text around them."""
    content, calls, position, begin = "", [], 0, 0
    pattern = re.compile(start)
    while match := pattern.search(text, position):
        found = read(text, match)
        if found is None:
            position = match.end()
            continue
        content += text[begin : match.start()].rstrip()
        calls += found[0]
        begin = position = found[1]
    rest = text[begin:]
    return content + ("" if calls and rest.isspace() and begin else rest), calls


def hermes(text: str) -> tuple[str, list[Call]]:
    def read(text: str, match: re.Match[str]) -> Found | None:
        found = _object(text, match.end())
        return found and (found[0], _after(r"\s*</tool_call>", text, found[1]))

    return _search(text, r"<tool_call>\s*", read)


def llama3_json(text: str) -> tuple[str, list[Call]]:
    def read(text: str, match: re.Match[str]) -> Found | None:
        bare = "python_tag" not in match[0]
        found = _object(text, match.end(), strict=bare)
        while found and (more := _object(text, _after(r"\s*;\s*", text, found[1]), strict=True)):
            found = found[0] + more[0], more[1]
        return found

    return _search(text, r"<\|python_tag\|>\s*|\A\s*(?=\{)", read)


def mistral(text: str) -> tuple[str, list[Call]]:
    def read(text: str, match: re.Match[str]) -> Found | None:
        position = match.end()
        if named := re.compile(r"([^\n<\[]+)\[ARGS\]\s*(?=\{)").match(text, position):
            _, raw, end = _value(text, named.end())
            return [(named[1], raw)], end
        if not text.startswith("[", position):
            return _object(text, position)
        calls: list[Call] = []
        divider = "["
        while divider in ("[", ","):
            found = _object(text, _after(r"\s*", text, position + 1))
            if found is None:
                return None
            calls += found[0]
            position = _after(r"\s*", text, found[1])
            divider = text[position : position + 1]
        return calls, position + 1

    return _search(text, r"\[TOOL_CALLS\]\s*", read)


def deepseek_v31(text: str, start: str = "", name: str = "(?P<name>[^\n<]+)<｜tool▁sep｜>", end: str = "") -> tuple:
    def read(text: str, match: re.Match[str]) -> Found | None:
        if not text.startswith("{", match.end()):
            return None
        _, raw, position = _value(text, match.end())
        position = _after(end + r"\s*<｜tool▁call▁end｜>", text, position)
        return [(match["name"].strip(), raw)], _after(r"\s*<｜tool▁calls▁end｜>", text, position)

    return _search(text, rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>{name}\s*", read)


def deepseek_v3(text: str) -> tuple[str, list[Call]]:
    return deepseek_v31(text, name="[^\n<]+<｜tool▁sep｜>(?P<name>[^\n<]+)\n\\s*(?:```json)?", end=r"\s*(?:```)?")


def _markup(text: str, tags: tuple[str, str, str, str], parameter: str, value: Callable[[re.Match[str]], str]) -> tuple:
    block, block_end, call, call_end = tags

    def read(text: str, match: re.Match[str]) -> Found | None:
        pairs = [f"{json.dumps(p[1], ensure_ascii=False)}: {value(p)}" for p in re.finditer(parameter, match[2], re.S)]
        return [(match[1], "{" + ", ".join(pairs) + "}")], _after(rf"\s*{block_end}", text, match.end())

    no_groups = re.sub(r"\((?!\?)", "(?:", parameter)
    return _search(text, rf"(?s)(?:{block}\s*)?{call}\s*((?:{no_groups}\s*)*){call_end}", read)


def _json_or_string(text: str) -> str:
    stripped = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text.strip())
    try:
        json.loads(stripped, strict=False)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return stripped


def dsml(block: str) -> Oracle:
    mark = "｜DSML｜"
    tags = f"<{mark}{block}>", f"</{mark}{block}>", rf'<{mark}invoke name="([^"\n<]+)">', f"</{mark}invoke>"

    def value(match: re.Match[str]) -> str:
        return json.dumps(match[3], ensure_ascii=False) if match[2] == "true" else _json_or_string(match[3])

    def oracle(text: str) -> tuple[str, list[Call]]:
        parameter = rf'<{mark}parameter name="([^"\n<]+)" string="(true|false)">(.*?)</{mark}parameter>'
        return _markup(text, tags, parameter, value)

    return oracle


def qwen3_coder(text: str) -> tuple[str, list[Call]]:
    """Parameters named s... are strings, others are declared without a type."""

    def value(match: re.Match[str]) -> str:
        return json.dumps(match[2], ensure_ascii=False) if match[1].startswith("s") else _json_or_string(match[2])

    tags = "<tool_call>", "</tool_call>", r"<function=([^>\n<]+)>", "</function>"
    return _markup(text, tags, r"<parameter=([^>\n<]+)>\n?(.*?)\n?</parameter>", value)
