"""JSON-Schema-Test-Suite, which jsonschema's source distribution contains: never a wrong accept.

A schema is followed exactly, or refused by the name of what is not supported.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rorqual.sampling_params import StructuredOutputs
from tests.structured.grammars import accepts, byte_compiler

pytestmark = pytest.mark.slow

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
}
NARROWER = {
    "properties come in the order of the schema": {
        ("allOf.json", "allOf"),
        ("allOf.json", "allOf with base schema"),
        ("const.json", "const with object"),
    },
    "a number that is given is written as it is given": {
        ("const.json", "const with 0 does not match other zero-like types"),
        ("const.json", "const with 1 does not match true"),
        ("const.json", "const with -2.0 matches integer and float types"),
        ("const.json", "float and integers are equal up to 64-bit representation limits"),
        ("enum.json", "enum with 0 does not match false"),
        ("enum.json", "enum with [0] does not match [false]"),
        ("enum.json", "enum with 1 does not match true"),
        ("enum.json", "enum with [1] does not match [true]"),
    },
    "keywords beside $ref count, as they do since 2019-09": {("ref.json", "ref overrides any sibling keywords")},
    "an integer is written without a point": {("type.json", "integer type matches integers")},
}
"""Valid texts that are refused, and why: a model could write them, and is led to another way of writing the same."""
FORMATS_ARE_FOLLOWED = "format.json"
"""They are annotations to a validator; here they are what was asked for."""
KNOWN = ("not supported", "supported only where", "not present in a registry", "Unsatisfiable", "Unknown format")
REASONS = (
    *KNOWN,
    "minProperties above 1",
    "control characters",
    "Expected positive integer",
    "no value has this form",
    "not disjoint",
    "digits",
    "Pointer",
)
"""What refusals of a schema may say."""


@functools.cache
def suite() -> Path:
    """The suite's folder, fetched once per run."""
    folder = Path(tempfile.mkdtemp(prefix="rorqual-json-schema-suite-"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest"]
    done = subprocess.run(
        [*command, str(folder), "jsonschema==4.26.0"], capture_output=True, text=True, timeout=180, check=False
    )
    archives = list(folder.glob("jsonschema-*.tar.gz"))
    if not archives:
        pytest.skip(f"the suite cannot be fetched: {done.stderr[-300:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("jsonschema-*/json/tests"))


def with_draft(schema: Any, draft: str) -> Any:
    return {"$schema": DRAFTS[draft]} | schema if isinstance(schema, dict) else schema


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_schema_is_followed_or_refused_by_name(draft):
    counts: Counter[str] = Counter()
    unexpected = []
    narrower = set().union(*NARROWER.values())
    for path in sorted((suite() / draft).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            what = (path.name, group["description"])
            try:
                grammar = byte_compiler().compile(StructuredOutputs(json=with_draft(group["schema"], draft)))
            except ValueError as error:
                counts["schemas refused"] += 1
                if not any(reason in str(error) for reason in REASONS):
                    unexpected.append((*what, str(error)))
                continue
            counts["schemas followed"] += 1
            for test in group["tests"]:
                text = json.dumps(test["data"], ensure_ascii=False)
                accepted = accepts(grammar, text)
                counts[f"{'valid' if test['valid'] else 'invalid'} {'accepted' if accepted else 'refused'}"] += 1
                if accepted and not test["valid"]:
                    unexpected.append((*what, test["description"], "accepted", text))
                if test["valid"] and not accepted and what not in narrower and path.name != FORMATS_ARE_FOLLOWED:
                    unexpected.append((*what, test["description"], "refused", text))
    print(draft, dict(counts))
    assert not unexpected
    assert counts["schemas followed"] > 140
    assert counts["valid accepted"] > 280
    assert counts["invalid refused"] > 200
