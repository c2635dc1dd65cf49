import os
import sys
from pathlib import Path

import pytest

from rorqual.cli.main import main
from tests.cli.fake_llm import installed


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    """The person's own RORQUAL_ variables must not change what the tests see."""
    for name in [name for name in os.environ if name.startswith("RORQUAL_")]:
        monkeypatch.delenv(name)


ROOT = Path(__file__).resolve().parents[2]


def fake_program(delay_s, *typed):
    """The command that runs `rorqual` with the fake LLM as a program of its own; start it in ROOT."""
    return [sys.executable, "-m", "tests.cli.fake_rorqual", str(delay_s), *typed]


@pytest.fixture
def llm_class():
    """The fake LLM's class, in place of the real one; `.made[-1]` is the engine that the command opened."""
    with installed() as made:
        yield made


@pytest.fixture
def rorqual(capsys):
    """Run a command line in this process: returns exit code, stdout, stderr."""

    def run(*typed):
        code = main([str(part) for part in typed])
        out, err = capsys.readouterr()
        return code, out, err

    return run
