"""`rorqual generate`: what lands on stdout and stderr, for one prompt, several, and as JSON."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT, fake_program
from tests.cli.fake_llm import BANNER


def test_one_prompt_streams_to_stdout_and_the_summary_goes_to_stderr(rorqual, llm_class):
    code, out, err = rorqual("generate", "hi")
    assert (code, out) == (0, "Ahoy hi\n")
    assert err.startswith(f"{BANNER}\n[2 prompt + 7 new tokens, first after ")
    assert err.endswith("finish: stop]\n")
    llm = llm_class.made[-1]
    assert (llm.closed, llm.closed_streams, llm.progress) == (True, 1, True)


def test_quiet_leaves_stderr_empty(rorqual, llm_class):
    assert rorqual("generate", "hi", "--quiet") == (0, "Ahoy hi\n", "")
    assert llm_class.made[-1].progress is False


def test_several_prompts_come_in_order_under_headers(rorqual, llm_class):
    code, out, err = rorqual("generate", "one", "--temperature", "0", "two\nlines")
    assert code == 0
    assert out == "=== 1/2: one\nAhoy one\n=== 2/2: two lines\nAhoy two\nlines\n"
    assert "[2 prompts: 12 prompt + 22 new tokens in " in err


def test_prompt_file_is_one_prompt_without_its_last_line_break(rorqual, llm_class, tmp_path, monkeypatch):
    (tmp_path / "p").write_text("a\n\nb\n\n")
    assert rorqual("generate", "-q", "--prompt-file", tmp_path / "p")[1] == "Ahoy a\n\nb\n"
    assert llm_class.made[-1].asked[0][0] == [ord(c) for c in "a\n\nb\n"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    assert rorqual("generate", "-q", "--prompt-file", "-")[1] == "Ahoy from stdin\n"


def test_prompts_after_two_dashes_may_look_like_flags(rorqual, llm_class):
    assert rorqual("generate", "-q", "--", "--model")[1] == "Ahoy --model\n"


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_chat_applies_the_template(rorqual, llm_class, json_flag):
    assert rorqual("generate", "hi", "--chat", *json_flag)[0] == 0
    assert llm_class.made[-1].asked[0][0] == [ord(c) for c in "user:hi|"]


def strict(line):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_json_is_one_strict_object_per_prompt_in_order(rorqual, llm_class):
    code, out, err = rorqual("generate", "--json", "--max-tokens", "7", "hi", "é")
    assert code == 0
    assert BANNER in err
    first, second = map(strict, out.splitlines())
    assert first == {
        "text": "Ahoy hi",
        "token_ids": [ord(c) for c in "Ahoy hi"],
        "finish_reason": "stop",
        "prompt_tokens": 2,
        "completion_tokens": 7,
        "cached_tokens": 3,
        "ttft_s": 0.25,
        "decode_tokens_per_s": 2.0,
        "error": None,
    }
    assert second["text"] == "Ahoy é"


def test_json_is_null_where_a_rate_is_undefined(rorqual, llm_class):
    _, out, _ = rorqual("generate", "--json", "--max-tokens", "1", "hi")
    assert strict(out)["decode_tokens_per_s"] is None
    assert strict(out)["ttft_s"] == 0.25


def test_temperature_is_flag_then_generation_config_then_greedy(rorqual, llm_class):
    def used(*typed):
        rorqual("generate", "x", *typed)
        return llm_class.made[-1].asked[-1][1]

    assert used().temperature == 0
    llm_class.generation_config = {"temperature": 0.7, "top_k": 20, "stop": "END"}
    assert (used().temperature, used().top_k, used().stop) == (0.7, 20, ("END",))
    assert (used("--temperature", "0.2").temperature, used("--temperature", "0.2").top_k) == (0.2, 20)
    assert used().max_tokens is None


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([], "no prompt"),
        (["--prompt-file", "/nowhere/at/all"], "cannot read the prompt file /nowhere/at/all"),
        (["x" * 200], "max_model_len is 100"),
        (["bad \udcff byte"], "must be valid UTF-8"),
    ],
)
def test_wrong_prompts_are_one_line_and_exit_2(rorqual, llm_class, typed, said):
    code, out, err = rorqual("generate", "--quiet", *typed)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("typed", [["hi"], ["hi", "ho"], ["hi", "--json"]])
def test_a_request_that_fails_is_reported_and_exit_1(rorqual, llm_class, typed):
    llm_class.fault = "it broke"
    code, _, err = rorqual("generate", "-q", *typed)
    assert code == 1
    assert "rorqual: error: it broke\n" in err


def test_tokens_are_flushed_as_they_come_and_ctrl_c_exits_130_quietly():
    command = fake_program(0.2, "generate", "--quiet", "hello")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert os.read(process.stdout.fileno(), 100) == b"A"  # through a pipe, at once, long before the end
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, b"")
