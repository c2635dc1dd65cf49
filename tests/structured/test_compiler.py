"""What a form allows, and what is refused with which sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rorqual import SamplingParams
from rorqual.sampling_params import StructuredOutputs
from tests.structured.grammars import accepts, byte_compiler, compile_for_bytes

PET = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "must have exactly one of json, json_object, regex, grammar and choice, got none"),
        ({"json": {}, "regex": "a"}, "got json and regex"),
        ({"json": None, "choice": None}, "got none"),
        ({"json": "{"}, "this text is not JSON"),
        ({"json": "[" * 100_000}, "this text is not JSON"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": {1: 2}}, "whose keys are strings"),
        ({"json_object": False}, "json_object must be true, or left out"),
        ({"regex": " "}, "regex must not be empty"),
        ({"regex": 3}, "regex must be a string"),
        ({"grammar": ""}, "grammar must not be empty"),
        ({"choice": []}, "choice must hold at least one string"),
        ({"choice": "ab"}, "choice must be a list of strings"),
        ({"choice": ["a", 3]}, "choice must be a list of strings, got 3"),
        ({"regexp": "a"}, "did you mean 'regex'?"),
        ("json", "must be StructuredOutputs, or an object"),
    ],
)
def test_a_wrong_form_is_one_sentence(given, said):
    with pytest.raises(ValueError, match=r"^structured_outputs: ") as caught:
        SamplingParams(structured_outputs=given)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_form_survives_the_way_to_another_process():
    for form in ({"json": PET}, {"json": json.dumps(PET)}, {"json_object": True}, {"choice": ["a"]}, {"regex": "a"}):
        params = SamplingParams(structured_outputs=form)
        sent = json.loads(json.dumps(params.model_dump(exclude_unset=True)))
        assert SamplingParams(**sent) == params
        assert params.clone(n=2).structured_outputs == params.structured_outputs
    assert StructuredOutputs(json=json.dumps(PET)) == StructuredOutputs(json=PET)


@pytest.mark.parametrize(
    ("form", "texts", "not_texts"),
    [
        ({"choice": ["yes", "no"]}, ["yes", "no"], ["", "ye", "yesno", "Yes"]),
        ({"choice": ["a", "ab", "ab"]}, ["a", "ab"], ["b", "aab"]),
        ({"choice": ['"\\\n\x00/é👩', "x|y", "[a]", "$"]}, ['"\\\n\x00/é👩', "x|y", "[a]", "$"], ["x", "y", "a", ""]),
        ({"regex": "[a-c]{2,3}\\d"}, ["ab1", "abc2"], ["a1", "abcd", "ab12"]),
        ({"regex": "^ab?$"}, ["a", "ab"], ["b", "abb"]),
        ({"regex": "(?i)ja|nein"}, ["JA", "nein", "NeIn"], ["j", "yes"]),
        ({"regex": "é+.😀"}, ["éx😀", "éé日😀"], ["e", "é😀"]),
        ({"grammar": 'root ::= "(" root ")" | [0-9]+'}, ["1", "((12))"], ["(1", "()", "1)"]),
        ({"grammar": 'start: "a" start | "b"'}, ["b", "aab"], ["a", "ba"]),
        ({"grammar": 'start: NUMBER "," word\nNUMBER: /[0-9]+/\nword: "x" | "y"'}, ["12,x"], ["12", ",x"]),
        ({"json_object": True}, ["{}", '{"a": [1, null]}'], ["[]", "1", "null", "{"]),
        ({"json": True}, ["1", "[]", '"a"', "null", "{}"], ["", "nul", "'a'"]),
        ({"json": {}}, ["1", '{"a": {}}'], [""]),
        (
            {"json": PET},
            [
                '{"name": "Mia", "age": 3, "kind": "cat"}',
                '{"name":"","kind":"dog"}',
                '{\n  "name": "a",\n  "kind": "dog"\n}',
            ],
            ["{}", '{"name": "a", "kind": "cow"}', '{"name": "a", "kind": "cat", "x": 1}', '{"age": 1.5}'],
        ),
    ],
)
def test_a_form_has_these_texts(form, texts, not_texts):
    grammar = compile_for_bytes(**form)
    for text in texts:
        assert accepts(grammar, text), text
    for text in not_texts:
        assert not accepts(grammar, text), text


def test_ap10_white_space_between_the_parts_of_json_is_bounded():
    grammar = compile_for_bytes(json=PET)
    text = '{"name":%s"a","kind":"cat"}'
    for gap in ("", " ", "\n", "\n" + " " * 40, "\n\t\t"):
        assert accepts(grammar, text % gap), repr(gap)
    for gap in ("  ", "\n\n", " \n", "\n" + " " * 41, "\t", "\r\n"):
        assert not accepts(grammar, text % gap), repr(gap)
    assert not accepts(grammar, " " + text % "")
    assert not accepts(grammar, text % "" + "\n")


NESTED: dict = {}
for _ in range(3000):
    NESTED = {"items": NESTED}


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": {"not": {}}}, "this JSON schema cannot be followed: its keyword 'not' is not supported"),
        ({"json": {"properties": {"a": {"uniqueItems": True}}}}, "its keyword 'uniqueItems' is not supported"),
        ({"json": {"if": {}, "then": {}}}, "its keywords 'if', 'then' are not supported"),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, "'not' is not supported"),
        ({"json": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}, "'oneOf' is supported only where"),
        ({"json": {"type": "nope"}}, "Invalid type: nope"),
        ({"json": {"multipleOf": True}}, "multipleOf"),
        ({"json": {"properties": {"a": {"minProperties": 2}}}}, "minProperties above 1, here 2, is supported only"),
        ({"json": {"anyOf": [{"const": "\x07"}]}}, "const and enum may hold no control characters"),
        ({"json": {"enum": [["\x1b"]]}}, "const and enum may hold no control characters"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"$ref": "https://example.com/a"}}, "not present in a registry"),
        ({"json": {"$ref": "#"}}, "no text has this form"),
        ({"json": False}, "no value has this form"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
        ({"json": {"type": "string", "pattern": "("}}, "unclosed group"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "look-ahead"),
        ({"json": {"type": "string", "format": "nope"}}, "Unknown format: nope"),
        ({"json": {"const": "\ud800"}}, "cannot be followed"),
        ({"json": NESTED}, "nested too deeply"),
        ({"json": {"items": [{"multipleOf": 999_983}]}}, "multipleOf may have 5 digits, got 999983"),
        ({"json": {"items": {1, 2}}}, "it is not JSON"),
        ({"json": {"title": "x" * 300_000}}, "may have 262144 bytes, got 300013"),
        ({"regex": "("}, "this regular expression cannot be followed"),
        ({"regex": "(a)\\1"}, "backreferences are not supported"),
        ({"regex": "\ud800"}, "half of a surrogate pair"),
        ({"choice": ["\ud800"]}, "half of a surrogate pair"),
        ({"grammar": "start: nope"}, 'unknown name: "nope"'),
        ({"grammar": 'root ::= "a"\nroot ::= "b"'}, "2 rules are called 'root'"),
        ({"grammar": "hello"}, "this grammar cannot be followed"),
        ({"grammar": 'start: "a" | start: "b"'}, "this grammar cannot be followed"),
        ({"grammar": 'start: %json {"not": {}}'}, "not"),
    ],
)
def test_va5_what_cannot_be_followed_is_refused_by_name(form, said):
    with pytest.raises(ValueError, match=r"^structured_outputs: ") as caught:
        compile_for_bytes(**form)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)


def test_compiling_goes_on_beside_other_work():
    """Several at once, one of them slow: the others do not wait for it, and a fault is the future's own."""
    slow = {"type": "object", "properties": {f"value{i}": {"type": "string"} for i in range(2500)}}
    first = byte_compiler().prepare(StructuredOutputs(json=slow))
    bad = byte_compiler().prepare(StructuredOutputs(regex="("))
    good = byte_compiler().prepare(StructuredOutputs(regex="a"))
    assert good.result(timeout=30).matcher() is not None
    assert not first.done(), "this schema takes a second"
    with pytest.raises(ValueError, match="unclosed group"):
        bad.result(timeout=30)
    counted, start = 0, time.perf_counter()
    while not first.done() and time.perf_counter() - start < 60:
        counted += 1
        time.sleep(0.001)
    assert counted > 10, "this thread went on meanwhile"
    assert first.result().matcher().fault is None


HOSTILE = {
    "rules that follow each other": lambda n: {
        "grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(n)) + f'r{n}: "a"\n'
    },
    "rules with text that follow each other": lambda n: {
        "grammar": "start: r0\n" + "".join(f'r{i}: r{i + 1} "b"\n' for i in range(n)) + f'r{n}: "a"\n'
    },
    "tokens that follow each other": lambda n: {
        "grammar": "start: R0\n" + "".join(f'R{i}: R{i + 1} "b"\n' for i in range(n)) + f'R{n}: "a"\n'
    },
    "parentheses": lambda n: {"grammar": "start: " + "(" * n + '"a"' + ")" * n},
    "parentheses in GBNF": lambda n: {"grammar": "root ::= " + "(" * n + '"a"' + ")" * n},
    "parentheses of an expression": lambda n: {"regex": "(" * n + "a" + ")" * n},
    "repetitions": lambda _: {"regex": "((a{1,1000}){1,1000}){1,1000}b"},
    "many branches": lambda n: {"regex": "|".join(f"{i}x" for i in range(n))},
    "many states": lambda _: {"regex": "(a|b)*a(a|b){500}"},
    "references": lambda n: {
        "json": {"$defs": {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(n)} | {f"{n}": {}}, "$ref": "#/$defs/0"}
    },
    "nested references": lambda n: {
        "json": {
            "$defs": {f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(n)} | {f"{n}": {}},
            "$ref": "#/$defs/0",
        }
    },
    "doubling references": lambda n: {
        "json": {
            "$defs": {f"{i}": {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(n // 4)} | {f"{n // 4}": {}},
            "$ref": "#/$defs/0",
        }
    },
    "a product of branches": lambda _: {
        "json": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {}}} for j in range(10)]} for i in range(10)
            ]
        }
    },
    "many properties": lambda n: {"json": {"properties": {f"p{i}": {} for i in range(n // 2)}}},
    "large counts": lambda _: {"json": {"minItems": 10**7, "maxItems": 10**8, "type": "array"}},
    "long strings": lambda _: {"json": {"type": "string", "minLength": 10**7, "maxLength": 10**9}},
    "a large multiple": lambda _: {"json": {"type": "integer", "multipleOf": 99_991}},
}
_TRY = """
import random, sys, time
from tests.structured.grammars import allowed, compile_for_bytes
from tests.structured.test_compiler import HOSTILE
for n in (8000, 6000, 4000, 2000):  # the first that is not too long
    start = time.perf_counter()
    try:
        grammar = compile_for_bytes(**HOSTILE[sys.argv[1]](n))
    except ValueError as error:
        print(n, f"{time.perf_counter() - start:.2f} s", str(error)[:200])
        if "may have" in str(error):
            continue
        break
    print(n, f"{time.perf_counter() - start:.2f} s")
    matcher, slowest = grammar.matcher(), 0.0
    for _ in range(2000):
        start = time.perf_counter()
        ids = allowed(matcher)
        if not ids or matcher.finished:
            break
        matcher.accept(random.Random(0).choice(ids))
        slowest = max(slowest, time.perf_counter() - start)
    print(f"slowest token {slowest:.3f} s", matcher.fault)
    break
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_that_is_asked_for_ends_the_process(name):
    """In a process of its own: a stack that overflows cannot be caught."""
    done = subprocess.run(
        [sys.executable, "-c", _TRY, name],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
