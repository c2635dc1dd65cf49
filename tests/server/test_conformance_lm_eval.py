"""What lm-eval's remote models ask of a server, call by call, and its numbers against transformers'."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.server.served import NAME, Served, reference_model, serve

TEXTS = ["Hello world", "The quick brown fox", "def f(x):\n    return x", "日本語", "It's 42 dogs!", "a"]
CONTINUATIONS = [" jumps over", "!", " 42", " naïve façade", "\n\n", " Köln"]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as server:
        yield server


def post(served: Served, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{served.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@torch.inference_mode()
def reference_logprobs(token_ids: list[int]) -> torch.Tensor:
    """[num_tokens, vocab]: of what follows each token."""
    logits = reference_model()(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1)


def tokenize(served: Served, text: str) -> list[int]:
    tokens: list[int] = post(served, "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    return tokens


def test_the_remote_tokenizer(served: Served) -> None:
    info = httpx.get(f"{served.url}/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["bos_token"] is None
    assert "im_start" in info["chat_template"]
    for text in TEXTS:
        ids = tokenize(served, text)
        assert post(served, "/detokenize", {"tokens": ids})["prompt"] == text


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihood(served: Served, batch_size: int) -> None:
    """`loglikelihood`: ids in, echo, one token more; sums and greediness from the answer's lists."""
    asked = [(tokenize(served, a), tokenize(served, b)) for a in TEXTS for b in CONTINUATIONS]
    random.Random(0).shuffle(asked)
    for i in range(0, len(asked), batch_size):
        batch = asked[i : i + batch_size]
        body = {
            "prompt": [context + rest for context, rest in batch],
            "model": NAME,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        }
        choices = sorted(post(served, "/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        assert len(choices) == len(batch)
        for (context, rest), choice in zip(batch, choices, strict=True):
            logprobs, ids = choice["logprobs"], context + rest
            assert logprobs["token_logprobs"][0] is None
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                assert len(logprobs[name]) == len(ids) + 1
            expected = reference_logprobs(ids)
            start = len(context)
            for place, (value, top) in enumerate(
                zip(logprobs["token_logprobs"][start:-1], logprobs["top_logprobs"][start:-1], strict=True), start
            ):
                of_reference = expected[place - 1]
                assert value == pytest.approx(float(of_reference[ids[place]]), abs=1e-3)
                assert max(top.values()) == pytest.approx(float(of_reference.max()), abs=1e-3)
                is_greedy = value == max(top.values())
                assert is_greedy == (int(of_reference.argmax()) == ids[place])


def test_the_order_of_many_prompts_is_kept(served: Served) -> None:
    ids = [tokenize(served, text) for text in TEXTS * 4]
    body = {"prompt": ids, "model": NAME, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    choices = post(served, "/v1/completions", body)["choices"]
    assert [c["index"] for c in choices] == list(range(len(ids)))
    for text, choice in zip(TEXTS * 4, choices, strict=True):
        assert choice["text"].startswith(text)


def test_generate_until(served: Served) -> None:
    """`generate_until`: greedy text up to the first of some strings, which is not in it."""
    body = {"prompt": [tokenize(served, TEXTS[0])], "model": NAME, "max_tokens": 24, "temperature": 0, "seed": 1234}
    whole = post(served, "/v1/completions", body)["choices"][0]["text"]
    until = whole[5:7]
    cut = post(served, "/v1/completions", body | {"stop": [until, "<|im_end|>"]})["choices"][0]["text"]
    assert cut == whole[: whole.index(until)]


def test_lm_eval_itself(served: Served, tmp_path: Path) -> None:
    """The real harness, where it is installed; RORQUAL_LM_EVAL names a folder that it was installed into."""
    extra = os.environ.get("RORQUAL_LM_EVAL", "")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), extra))),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "hf"),
        "OPENAI_API_KEY": "none",
    }
    found = subprocess.run([sys.executable, "-c", "import lm_eval"], env=environment, capture_output=True, check=False)
    if found.returncode != 0:
        pytest.skip("lm-eval is not installed")
    rows = [
        {"question": text, "choices": CONTINUATIONS[:4], "label": i % 4, "target": CONTINUATIONS[i % 4]}
        for i, text in enumerate(TEXTS)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
    (tasks / "mc.yaml").write_text(
        f"task: toy_mc\n{common}output_type: multiple_choice\ndoc_to_text: question\ndoc_to_target: label\n"
        'doc_to_choice: choices\ntarget_delimiter: ""\nmetric_list:\n  - metric: acc\n'
    )
    (tasks / "gen.yaml").write_text(
        f"task: toy_gen\n{common}output_type: generate_until\ndoc_to_text: question\ndoc_to_target: target\n"
        'generation_kwargs:\n  until: ["\\n\\n"]\n  max_gen_toks: 8\nmetric_list:\n  - metric: exact_match\n'
    )
    arguments = f"model={NAME},base_url={served.url}/v1/completions,tokenizer_backend=remote,num_concurrent=4"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
    command += ["--include_path", str(tasks), "--tasks", "toy_mc,toy_gen", "--output_path", str(tmp_path / "out")]
    command += ["--log_samples"]
    made = subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    (samples,) = (tmp_path / "out").rglob("samples_toy_mc*.jsonl")
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for argument, (answer, *_rest) in zip(_arguments(sample), sample["filtered_resps"], strict=True):
            context, rest = (tokenize(served, text) for text in argument)
            expected = reference_logprobs(context + rest)
            by_hand = sum(float(expected[len(context) + i - 1, t]) for i, t in enumerate(rest))
            assert float(answer) == pytest.approx(by_hand, abs=1e-3)


def _arguments(sample: dict[str, Any]) -> list[tuple[str, str]]:
    made = sample["arguments"]
    if isinstance(made, dict):
        return [(a["arg_0"], a["arg_1"]) for a in made.values()]
    return [(a[0], a[1]) for a in made]
