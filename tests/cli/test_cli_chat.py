"""`rorqual chat`: through a pipe, and in a terminal with Ctrl-C and Ctrl-D."""

import fcntl
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time

import pytest

from tests.cli.conftest import ROOT, fake_program

CTRL_C, CTRL_D = "\x03", "\x04"


@pytest.fixture
def talk(rorqual, monkeypatch):
    """Send lines through a pipe: exit code, stdout, stderr."""

    def run(*lines, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return rorqual("chat", "--quiet", *options)

    return run


def prompts(llm_class):
    return ["".join(map(chr, ids)) for ids, _ in llm_class.made[-1].asked]


def test_pipe_gets_answers_only_and_history_is_sent(talk, llm_class):
    llm_class.answer = lambda self, ids: f"answer {len(self.asked)}"
    code, out, err = talk("one", "two")
    assert (code, out, err) == (0, "answer 1\nanswer 2\n", "")
    assert prompts(llm_class) == ["user:one|", "user:one|assistant:answer 1|user:two|"]
    assert llm_class.made[-1].closed


def test_reset_keeps_the_system_message(talk, llm_class):
    talk("one", "/reset", "two", options=("--system", "be kind"))
    assert prompts(llm_class) == ["system:be kind|user:one|", "system:be kind|user:two|"]


def test_exit_ends_and_help_lists(talk, llm_class):
    code, out, _ = talk("/help", "/exit", "not sent")
    assert code == 0
    for command in ("/reset", "/help", "/exit"):
        assert command in out
    assert prompts(llm_class) == []


def test_misspelt_command_is_not_sent_and_a_path_is(talk, llm_class):
    _, _, err = talk("/rest", "/etc/passwd is what?", "")
    assert "unknown command /rest: did you mean /reset?" in err
    assert prompts(llm_class) == ["user:/etc/passwd is what?|"]


def test_full_context_is_said_and_the_program_goes_on(talk, llm_class):
    llm_class.answer = lambda self, ids: "ok"
    code, out, err = talk("x" * 200, "short", "y" * 200, "/reset", "again")
    assert (code, out) == (0, "ok\nok\n")
    assert err.count("max_model_len is 100. /reset starts over") == 2
    assert prompts(llm_class)[1] == "user:short|"
    assert prompts(llm_class)[3] == "user:again|"


def test_answer_cut_by_max_tokens_says_so(talk, llm_class):
    _, out, err = talk("hello", options=("--max-tokens", "4"))
    assert (out, err) == ("Ahoy\n", "[cut at --max-tokens 4]\n")


def test_failed_answer_is_said_and_not_kept(talk, llm_class):
    llm_class.fault = "it broke"
    code, _, err = talk("one", "two")
    assert code == 0
    assert err.count("the answer failed: it broke") == 2
    assert prompts(llm_class) == ["user:one|", "user:two|"]


def test_wrong_option_ends_before_the_conversation(talk, llm_class):
    code, _, err = talk("one", options=("--temperature", "-1"))
    assert code == 2
    assert "--temperature" in err
    assert llm_class.made == []


def _own_terminal():
    """Make stdin the controlling terminal of a new session, so that typing ^C sends SIGINT."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """`rorqual chat` with the fake LLM on a pseudo-terminal."""

    def __init__(self, delay_s):
        self.fd, child = pty.openpty()
        self.process = subprocess.Popen(
            fake_program(delay_s, "chat"),
            cwd=ROOT,
            stdin=child,
            stdout=child,
            stderr=child,
            preexec_fn=_own_terminal,  # noqa: PLW1509  (the test runs one thread)
            env=os.environ | {"TERM": "dumb"},
        )
        os.close(child)
        self.seen = ""

    def read_until(self, text, timeout_s=60):
        """Everything up to and with `text`, which must come."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 1000).decode()
        head, _, self.seen = self.seen.partition(text)
        return head + text

    def type(self, text):
        os.write(self.fd, text.encode())


@pytest.fixture
def terminal():
    opened = Terminal(delay_s=0.05)
    yield opened
    if opened.process.poll() is None:
        opened.process.kill()
    opened.process.wait(timeout=20)
    os.close(opened.fd)


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal):
    terminal.read_until("> ")
    terminal.type("a question that is long to echo\n")
    terminal.read_until("Ahoy u")
    terminal.type(CTRL_C)
    stopped = terminal.read_until("[stopped]")
    assert "echo|" not in stopped  # the answer would have ended with the prompt's end
    terminal.read_until("> ")
    terminal.type("hi\n")
    answer = terminal.read_until("user:hi|")
    assert "assistant:Ahoy u" in answer  # what was said before the stop is part of the conversation
    terminal.read_until("> ")
    time.sleep(0.3)  # the prompt is printed just before the line editor listens
    terminal.type("half a line" + CTRL_C)
    terminal.read_until("/exit or Ctrl-D leaves")
    terminal.read_until("> ")
    terminal.type(CTRL_D)
    assert terminal.process.wait(timeout=20) == 0


def test_second_ctrl_c_ends_an_engine_that_does_not_answer():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(fake_program(60, "chat"), cwd=ROOT, **pipes) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        assert b"fake banner" in process.stderr.readline()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
