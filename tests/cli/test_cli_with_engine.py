"""The commands with the real engine, on a tiny random model with a byte tokenizer."""

import io
import json
import shutil
import sys

import pytest

from tests.engine.engines import byte_tokenizer
from tests.tiny import checkpoint_folder, reference_greedy

OPTIONS = {"dtype": "float32", "threads": 1, "block_size": 4, "max-model-len": 64, "num_kv_blocks": 64, "quiet": True}
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}|{% endfor %}a"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of the model; config.yaml in it holds the options."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(checkpoint_folder("llama"), folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.yaml").write_text(json.dumps(OPTIONS | {"model": str(folder)}))  # JSON is YAML
    return folder


@pytest.fixture
def run(rorqual, model):
    """Run a command line with the model's options."""

    def run(*typed):
        code, out, err = rorqual(*typed, "--config", model / "config.yaml")
        assert code == 0, err
        return out, err

    return run


def encoded(text):
    return tuple(byte_tokenizer().encode(text).ids)


def test_generate_gives_the_models_greedy_tokens_streamed_and_as_json(run):
    out, err = run("generate", "--json", "abcabc", "x", "--max-tokens", "12")
    first, second = map(json.loads, out.splitlines())
    assert err == ""
    assert first["token_ids"] == reference_greedy("llama", encoded("abcabc"), 12, 1)
    assert second["token_ids"] == reference_greedy("llama", encoded("x"), 12, 1)
    assert (first["prompt_tokens"], first["completion_tokens"]) == (6, len(first["token_ids"]))
    assert first["ttft_s"] > 0
    streamed, _ = run("generate", "abcabc", "--max-tokens", "12")
    assert streamed == first["text"] + ("" if first["text"].endswith("\n") else "\n")


def test_generate_applies_the_models_chat_template(run):
    out, _ = run("generate", "--json", "--chat", "hi", "--max-tokens", "3")
    assert json.loads(out)["token_ids"] == reference_greedy("llama", encoded("uhi|a"), 3, 1)


def test_same_seed_gives_the_same_sample(run):
    typed = ("generate", "--json", "ab", "--temperature", "1", "--max-tokens", "8", "--ignore-eos")
    ids = [json.loads(run(*typed, "--seed", seed)[0])["token_ids"] for seed in (1, 1, 2)]
    assert ids[0] == ids[1] != ids[2]


def test_chat_goes_on_after_a_message_that_does_not_fit(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n" + "x" * 100 + "\nyo\n"))
    out, err = run("chat", "--max-tokens", "2", "--ignore-eos")
    assert "the context holds 64" in err
    assert "/reset starts over" in err
    first = reference_greedy("llama", encoded("uhi|a"), 2)
    assert out.startswith(byte_tokenizer().decode(first))
    assert err.count("[cut at --max-tokens 2]") == 2


def test_chat_says_when_an_answer_fills_the_context(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert run("chat", "--ignore-eos")[1] == "[the context is full: /reset starts over]\n"


def test_bench_accounts_for_every_stage(run, tmp_path):
    lengths = ("--num-seqs", "3", "--input-len", "2:8", "--output-len", "2:5")
    out, _ = run("bench", "throughput", *lengths, "--json-out", tmp_path / "r.json")
    result = json.loads((tmp_path / "r.json").read_text())
    assert set(result["stage_s"]) == {"schedule", "build", "forward", "sample", "update", "other"}
    assert all(f"\n{stage}" in out for stage in result["stage_s"])
    assert sum(result["stage_s"].values()) == pytest.approx(result["total_s"])
    computed = result["mean_tokens_per_step"] * result["num_steps"]
    assert computed == pytest.approx(result["prompt_tokens"] + result["output_tokens"] - 3)


def test_bench_needs_no_tokenizer_and_no_weights(run):
    typed = ("bench", "throughput", "--num-seqs", "2", "--input-len", "3", "--output-len", "2")
    out, _ = run(*typed, "--load-format", "dummy", "--skip-tokenizer-init")
    assert "output        4 tokens" in out
