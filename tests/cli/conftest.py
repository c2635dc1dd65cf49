import os

import pytest
from fake_llm import installed

from rorqual.cli.main import main


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    """The person's own RORQUAL_ variables must not change what the tests see."""
    for name in [name for name in os.environ if name.startswith("RORQUAL_")]:
        monkeypatch.delenv(name)


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
