"""Schemas and instances at random: what a grammar allows, jsonschema finds valid."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rorqual.sampling_params import StructuredOutputs
from tests.structured.grammars import accepts, byte_compiler, byte_tokenizer, walk

_TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=["Cs"]), max_size=6)
_NAMES = st.sampled_from(["a", "b", "name", "long name", "é", '"', "x-1"])
_BOUNDS = st.integers(-1000, 1000)


def _between(low: int, high: int, least: str, most: str) -> dict[str, int]:
    return {least: min(low, high), most: max(low, high)}


_LEAVES = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda a, b: {"type": "string"} | _between(a, b, "minLength", "maxLength"), st.integers(0, 5), st.integers(0, 5)
    ),
    st.builds(lambda a, b: {"type": "integer"} | _between(a, b, "minimum", "maximum"), _BOUNDS, _BOUNDS),
    st.builds(lambda n: {"type": "integer", "multipleOf": n, "minimum": -100, "maximum": 100}, st.integers(1, 20)),
    st.builds(lambda a, b: {"type": "number"} | _between(a, b, "minimum", "maximum"), _BOUNDS, _BOUNDS),
    st.sampled_from(["^[a-f]{1,3}$", "^(x|yy)z?$", "\\d\\d-[A-Z]"]).map(
        lambda p: {"type": "string", "pattern": p, "maxLength": 8}
    ),
    st.sampled_from(["date", "time", "date-time", "uuid", "ipv4"]).map(lambda f: {"type": "string", "format": f}),
    st.lists(
        st.one_of(st.none(), st.booleans(), st.integers(-5, 5), _TEXTS), min_size=1, max_size=4, unique_by=repr
    ).map(lambda values: {"enum": values}),
    st.one_of(_TEXTS, st.lists(st.integers(0, 9), max_size=2), st.dictionaries(_NAMES, st.integers(), max_size=2)).map(
        lambda value: {"const": value}
    ),
)


def _larger(inner: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
    properties = st.dictionaries(_NAMES, inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda items, a, b: {"type": "array", "items": items} | _between(a, b, "minItems", "maxItems"),
            inner,
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        ),
        st.builds(
            lambda fields, kept: {
                "type": "object",
                "properties": fields,
                "required": [name for i, name in enumerate(fields) if kept >> i & 1],
                "additionalProperties": False,
            },
            properties,
            st.integers(0, 7),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches}),
    )


_TREES = st.recursive(_LEAVES, _larger, max_leaves=5)
SCHEMAS = st.one_of(
    _TREES,
    _TREES.map(
        lambda schema: {"$defs": {"it": schema}, "type": "array", "items": {"$ref": "#/$defs/it"}, "maxItems": 2}
    ),
)


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_what_is_written_at_random_is_valid(schema, seed):
    grammar = byte_compiler().compile(StructuredOutputs(json=schema))
    checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for i in range(3):
        text, complete = walk(grammar.matcher(), byte_tokenizer(), random.Random(seed + i), {256}, 3000)
        assert complete, text
        checker.validate(json.loads(text))
        assert accepts(grammar, text)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": ["string", "null"]}, ['"a"', "null"], ["1", "true"]),
        ({"type": "integer", "exclusiveMinimum": 3, "maximum": 12}, ["4", "12"], ["3", "13", "4.5", "-5", "04"]),
        ({"type": "number", "multipleOf": 0.25}, ["0.25", "1.50", "-2"], ["0.30", "1.1"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"日本語"', '"\\n\\""'], ['"a"', '"abcd"']),
        ({"type": "string", "pattern": "^a+$"}, ['"a"', '"aaa"'], ['"b"', '""', '"ab"']),
        ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2024-2-9"', '"x"']),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
            ["[1]", "[1, 2]"],
            ["[]", "[1,2,3]", '["a"]'],
        ),
        (
            {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "type": "array"},
            ["[]", '[1, "a"]'],
            ['["a"]', "[1, 2]"],
        ),
        (
            {"type": "object", "required": ["a"], "properties": {"a": {"type": "null"}}},
            ['{"a": null}', '{"a": null, "b": 1}'],
            ["{}", '{"a": 1}'],
        ),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ["{}", '{"x": 1}'], ['{"x": "y"}']),
        (
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
            ['{"xa": 1}'],
            ['{"a": 1}', '{"xa": "b"}'],
        ),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            ['{"a": 1}', '{"b": 1, "\\n": 2}'],
            ['{"a": "x"}', '{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}', '{"a": 1, "a": "x"}', '{"b": 1, "a": "x"}'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {}, "b": {}},
                "required": ["a", "b"],
                "minProperties": 2,
                "additionalProperties": False,
            },
            ['{"a": 1, "b": 2}'],
            ["{}", '{"a": 1}', '{"a": 1, "a": 2}'],
        ),
        ({"anyOf": [{"type": "integer"}, {"enum": ["a"]}]}, ["5", '"a"'], ['"b"', "null"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["5", '"b"'], ["null"]),
        ({"allOf": [{"minimum": 2}, {"type": "integer"}, {"maximum": 5}]}, ["2", "5"], ["1", "6"]),
        (
            {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
            ["[]", "[[], [[]]]"],
            ["[1]"],
        ),
        ({"const": {"a": [1, "b"]}}, ['{"a": [1, "b"]}'], ['{"a": [1]}', "{}"]),
    ],
)
def test_keywords_mean_what_jsonschema_says(schema, valid, invalid):
    grammar = byte_compiler().compile(StructuredOutputs(json=schema))
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for text in valid:
        validator.validate(json.loads(text))
        assert accepts(grammar, text), text
    for text in invalid:
        assert not accepts(grammar, text), text
