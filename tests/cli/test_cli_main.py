"""The program around the commands: help, version, exit codes, what it imports."""

import os
import subprocess
import sys

import pytest

import rorqual as package
from tests.cli.conftest import ROOT, fake_program


def program(command, *, variables=None, **options):
    """Run it to its end in the checkout."""
    options = {"capture_output": True, "text": True} | options
    return subprocess.run(command, check=False, cwd=ROOT, timeout=60, env=os.environ | (variables or {}), **options)


def test_version(rorqual):
    assert rorqual("--version") == (0, f"rorqual {package.__version__}\n", "")


def test_overview_lists_every_command_and_no_command_is_a_mistake(rorqual):
    code, out, err = rorqual("--help")
    assert (code, err) == (0, "")
    for words in (
        "generate",
        "chat",
        "models",
        "models pull",
        "bench throughput",
        "bench kernels",
        "ops",
        "collect-env",
    ):
        assert f"\n  {words} " in out
    code, nothing, err = rorqual()
    assert (code, nothing, err) == (2, "", out)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["generat"], "unknown command 'generat': did you mean 'generate'?"),
        (
            ["bench", "speed"],
            "unknown command 'bench speed': allowed: bench throughput, bench latency, bench prefill, bench kernels",
        ),
        (["bench"], "allowed: bench throughput"),
        (["--model", "x", "generate"], "options come after the command, got '--model' first"),
        (["models", "pul", "x"], "unexpected argument 'pul'"),
    ],
)
def test_unknown_command_is_one_line_and_exit_2(rorqual, typed, said):
    code, out, err = rorqual(*typed)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_help_of_a_group_lists_its_commands(rorqual):
    code, out, _ = rorqual("bench", "--help")
    assert code == 0
    assert "bench throughput" in out
    assert "bench latency" in out
    assert "collect-env" not in out


def test_debug_shows_the_traceback(rorqual, monkeypatch):
    assert "Traceback" not in rorqual("generate")[2]
    assert "Traceback" in rorqual("generate", "--debug")[2]
    monkeypatch.setenv("RORQUAL_DEBUG", "1")
    assert "Traceback" in rorqual("generate")[2]


@pytest.mark.parametrize(
    "typed", [["--help"], ["--version"], ["generate", "--help"], ["generate", "x", "--max-num-seqs", "0"], ["models"]]
)
def test_light_commands_import_no_torch(typed):
    script = (
        "import sys; from rorqual.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    )
    done = program([sys.executable, "-c", script, *typed])
    assert done.returncode == 0, done.stderr


def test_python_m_rorqual_is_the_command():
    done = program([sys.executable, "-m", "rorqual", "--version"])
    assert (done.returncode, done.stdout) == (0, f"rorqual {package.__version__}\n")


def test_closed_pipe_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        command = fake_program(0, "generate", "--quiet", "hello")
        done = program(command, capture_output=False, stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, "")


def test_characters_the_terminal_lacks_are_no_error():
    done = program(fake_program(0, "generate", "--quiet", "é世"), variables={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "Ahoy ??\n")
