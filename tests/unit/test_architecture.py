"""The shape of the code base: imports point down, names say something, and importing is quick."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import rorqual

PACKAGE = Path(rorqual.__file__).parent
REPOSITORY = PACKAGE.parent

TIERS = [
    ["__init__", "__main__", "cli"],
    ["server"],
    ["llm"],
    ["engine"],
    ["structured"],
    ["models"],
    ["layers"],
    ["cache", "loader", "tokenizer"],
    ["ops"],
    ["quantization", "distributed"],
    ["sequence", "batch", "sampling_params", "outputs", "config", "platform"],
]
"""From the top down. A file imports from its own folder and from lower tiers."""
TIER_OF = {name: i for i, names in enumerate(TIERS) for name in names}
BESIDE = {
    ("sampling_params", "config"): "StrictModel is how every set of options is checked",
}
"""Imports within a tier that are meant, and why."""
TYPES_ONLY = {
    ("rorqual.sequence", "rorqual.cache.prefix"): "a sequence carries the names of its blocks and never looks inside",
}
"""Imports that point up and serve the type checker alone."""
ASKS_FOR_DEVICES = {
    "engine/model_runner.py": "where memory is measured, and whether steps are recorded as CUDA graphs",
    "engine/resolved_config.py": "dtypes that it is slow in, and whether it works by itself",
    "loader/staging.py": "pinned memory and streams, which the CPU has none of",
    "engine/transfer.py": "copies that nobody waits for want pinned memory, and on the CPU there is nothing to copy",
}
"""Files outside ops/ and platform.py that ask which device it is, and what for."""


class Import(NamedTuple):
    """One module naming another."""

    importer: str
    imported: str
    types_only: bool


def modules() -> dict[str, Path]:
    """Every module of the package, by dotted name."""
    return {".".join(path.relative_to(REPOSITORY).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


MODULES = modules()


def imports_of(name: str, tree: ast.AST, *, types_only: bool = False) -> list[Import]:
    """Every import in a tree, wherever it stands: at the top, in a function, under TYPE_CHECKING."""
    found: list[Import] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found += [Import(name, alias.name, types_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative imports hide where they point"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append(Import(name, inner if inner in MODULES else str(node.module), types_only))
        else:
            checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            found += imports_of(name, node, types_only=types_only or checking)
    return found


IMPORTS = [found for name, path in MODULES.items() for found in imports_of(name, ast.parse(path.read_text()))]
OWN = [found for found in IMPORTS if found.imported.split(".")[0] == "rorqual"]


def part(module: str) -> str:
    """The folder or file directly under rorqual/ that a module belongs to."""
    return (module.removesuffix(".__init__").split(".")[1:2] or ["__init__"])[0]


def test_the_parser_sees_the_imports_it_should():
    assert Import("rorqual.layers.linear", "rorqual.ops.linear", False) in IMPORTS
    assert Import("rorqual.sequence", "rorqual.cache.prefix", True) in IMPORTS
    assert any(found.importer == "rorqual.cli.main" and found.imported.startswith("rorqual.cli.") for found in IMPORTS)
    assert len(OWN) > 100


def test_every_part_has_a_tier():
    assert {part(module) for module in MODULES} <= TIER_OF.keys()


def test_imports_point_down_only():
    wrong = []
    for importer, imported, types_only in OWN:
        above, below = part(importer), part(imported)
        allowed = (
            above == below
            or TIER_OF[above] < TIER_OF[below]
            or (above, below) in BESIDE
            or (types_only and (importer, imported) in TYPES_ONLY)
            or above in TIERS[0]
        )
        if not allowed:
            wrong.append(f"{importer} imports {imported}")
    assert not wrong


def test_exceptions_are_still_needed():
    assert {(part(found.importer), part(found.imported)) for found in OWN} >= BESIDE.keys()
    for importer, imported in TYPES_ONLY:
        kinds = {found.types_only for found in OWN if found[:2] == (importer, imported)}
        assert kinds == {True}


def test_no_module_imports_itself_in_a_circle():
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for importer, imported, types_only in OWN:
        if not types_only and imported in MODULES:
            graph[importer].add(imported)
    assert len(list(TopologicalSorter(graph).static_order())) == len(MODULES)  # raises CycleError


@pytest.mark.parametrize("name", ["transformers", "pytest", "hypothesis", "tests"])
def test_package_does_not_import_what_only_tests_have(name):
    assert not [found for found in IMPORTS if found.imported.split(".")[0] == name]


def test_no_name_that_says_nothing():
    empty = {"util", "utils", "helper", "helpers", "common", "misc", "base", "shared", "stuff"}
    folders = [PACKAGE, *(path for name in ("tests", "benchmarks") if (path := REPOSITORY / name).is_dir())]
    named = [path for folder in folders for path in folder.rglob("*") if path.stem.lower() in empty]
    assert not named


def test_only_ops_and_platform_ask_which_device_it_is():
    asking = set()
    for path in MODULES.values():
        file = path.relative_to(PACKAGE).as_posix()
        if file.startswith(("ops/", "server/")) or file == "platform.py":  # a server knows no tensors, but other types
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                text = ast.unparse(node)
                if ".type ==" in text or ".type !=" in text or ".type in" in text:
                    asking.add(file)
            elif isinstance(node, ast.Attribute) and node.attr in ("is_cuda", "is_cpu"):
                asking.add(file)
    assert asking == set(ASKS_FOR_DEVICES)


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_rorqual_is_quick_and_light():
    code = (
        "import sys, time; start = time.perf_counter(); import rorqual; took = time.perf_counter() - start\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(took)"
    )
    assert min(float(run_python(code)) for _ in range(3)) < 1.0


def test_public_names_are_found_on_first_use():
    code = "import rorqual; print(*(type(getattr(rorqual, name)).__name__ for name in rorqual.__all__))"
    assert len(run_python(code).split()) == len(rorqual.__all__)


def test_modules_that_promise_to_do_without_torch_do():
    promised = [
        name
        for name, path in MODULES.items()
        if "no torch" in (ast.get_docstring(ast.parse(path.read_text())) or "").lower()
    ]
    assert {"rorqual.engine.scheduler", "rorqual.cache.block_pool", "rorqual.sequence"} <= set(promised)
    code = f"import sys\nimport {', '.join(promised)}\nassert 'torch' not in sys.modules"
    run_python(code)
