"""docs/lineage.md names files and tests that exist, and has a row for every claim."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCUMENT = (REPOSITORY / "docs/lineage.md").read_text()
VERDICTS = ("Same", "Differs", "Not here yet", "Nothing to build")
HERE = ("Same", "Differs")
NUMBERS = {
    "Linear layers": [str(number) for number in range(1, 27)],
    "RMSNorm": [str(number) for number in range(27, 49)],
    "Rotary embedding and the fused transform": [str(number) for number in range(49, 77)],
    "Worked examples": ["A.1", "A.2", "A.3", "A.11", "A.15"],
    "Contracts": [f"2.{number}" for number in range(1, 10)],
}
"""Section -> what its rows are called, in order."""


class Row(NamedTuple):
    """One row of a table."""

    section: str
    number: str
    claim: str
    here: str
    files: str
    tests: str


def rows_of(document: str) -> list[Row]:
    """Every row of every table with five columns, below its section's name."""
    rows, section = [], ""
    for line in document.splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells and cells[0] not in ("#", "---"):
            assert len(cells) == 5, f"a row has five cells: {line}"
            rows.append(Row(section, *cells))
    return rows


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@functools.cache
def names_of_tests(file: str) -> frozenset[str]:
    """The names of a file's test functions, without parameters."""
    path = REPOSITORY / file
    if not path.is_file():
        return frozenset()
    nodes = ast.parse(path.read_text()).body
    return frozenset(n.name for n in nodes if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))


def faults(document: str) -> list[str]:
    """What is wrong with names in a document: files and tests that do not exist, verdicts that are none."""
    found = []
    named = [name for name in quoted(document) if re.match(r"(rorqual|tests|docs|benchmarks)/", name)]
    for name in named:
        file, _, test = name.partition("::")
        if not (REPOSITORY / file).is_file():
            found.append(f"there is no file {file}")
        elif test and test not in names_of_tests(file):
            found.append(f"there is no test {name}")
    for row in rows_of(document):
        if not row.here.startswith(VERDICTS):
            found.append(f"row {row.number} does not begin with one of {', '.join(VERDICTS)}")
        if row.here.startswith(HERE) and not (quoted(row.files) and quoted(row.tests)):
            found.append(f"row {row.number} says that it is here, and not in which file and test")
        found += [f"row {row.number} has no test {name}" for name in quoted(row.tests) if "::test_" not in name]
        found += [f"row {row.number} has no file {name}" for name in quoted(row.files) if not name.endswith(".py")]
        if any(left for left in (re.sub(r"`[^`]+`|[, ]", "", cell) for cell in (row.files, row.tests))):
            found.append(f"row {row.number} has more than names in its last two columns")
    return found


def test_every_claim_has_one_row():
    numbers: dict[str, list[str]] = {}
    for row in rows_of(DOCUMENT):
        numbers.setdefault(row.section, []).append(row.number)
    assert numbers == NUMBERS


def test_files_and_tests_that_are_named_exist():
    assert faults(DOCUMENT) == []
    assert sum("::" in name for name in quoted(DOCUMENT)) > 100


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("| 1 | c | Same | `rorqual/ops/no_such.py` | `tests/unit/test_lineage.py::test_every_claim_has_one_row` |",
         "there is no file rorqual/ops/no_such.py"),
        ("| 1 | c | Same | `rorqual/ops/linear.py` | `tests/unit/test_lineage.py::test_no_such` |",
         "there is no test tests/unit/test_lineage.py::test_no_such"),
        ("| 1 | c | Same | `rorqual/ops/linear.py` | `tests/unit/test_lineage.py::names_of_tests` |",
         "there is no test tests/unit/test_lineage.py::names_of_tests"),
        ("| 1 | c | Same | `rorqual/ops/linear.py` | `tests/unit/test_lineage.py` |",
         "row 1 has no test tests/unit/test_lineage.py"),
        ("| 1 | c | Same | `rorqual/ops/linear.py` | |", "row 1 says that it is here, and not in which file and test"),
        ("| 1 | c | Perhaps | | |", "row 1 does not begin with one of Same, Differs, Not here yet, Nothing to build"),
        ("| 1 | c | Not here yet: x | soon | |", "row 1 has more than names in its last two columns"),
    ],
)  # fmt: skip
def test_faults_of_a_row_are_found(row, fault):
    assert fault in faults(row)


def test_rows_of_parts_that_are_not_here_may_name_nothing():
    assert faults("| 18 | c | Not here yet: x | | |") == []
