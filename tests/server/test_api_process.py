"""The real server, `rorqual serve`, over the real engine in its process: answers are those of `LLM`."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from rorqual import LLM, SamplingParams
from tests.server.live import HTTP
from tests.server.served import NAME, model_folder, serve
from tests.server.test_api_chat import at_once, chunks_of, joined
from tests.server.test_api_completions import choices_of, streamed

ENGINE = {"dtype": "float32", "threads": 1, "block_size": 4, "max_model_len": 256, "num_kv_blocks": 1024}
PROMPTS = ["Hello world", "日本語", "the quick brown fox", "def f(x):", "1234567"]


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def llm():
    with LLM(str(model_folder()), progress=False, max_num_batched_tokens=64, max_num_seqs=16, **ENGINE) as opened:
        yield opened


def complete(server, prompt, **fields):
    return HTTP.post(f"{server.url}/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})


def test_greedy_text_is_the_llms_streamed_or_not(server, llm):
    expected = [o.text for o in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)]
    assert len(set(expected)) == len(PROMPTS)
    assert [c["text"] for c in choices_of(complete(server, PROMPTS, max_tokens=24))] == expected
    assert [c["text"] for c in streamed(server, PROMPTS, model=NAME, temperature=0, max_tokens=24)] == expected
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: complete(server, prompt, max_tokens=24), PROMPTS * 4))
    assert [choices_of(a)[0]["text"] for a in answers] == expected * 4


def test_seeds_logprobs_and_stops_are_the_llms(server, llm):
    params = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 16, "logprobs": 2, "prompt_logprobs": 1}
    output = llm.generate(PROMPTS[0], SamplingParams(**params), use_tqdm=False)[0]
    for choices in (
        choices_of(complete(server, PROMPTS[0], **params, return_token_ids=True)),
        streamed(server, PROMPTS[0], model=NAME, **params, return_token_ids=True),
    ):
        assert [c["text"] for c in choices] == [o.text for o in output.outputs]
        assert [c["token_ids"] for c in choices] == [o.token_ids for o in output.outputs]
        for choice, answer in zip(choices, output.outputs, strict=True):
            expected = [step[t].logprob for step, t in zip(answer.logprobs, answer.token_ids, strict=True)]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected)
        scored = choices[0]["prompt_logprobs"]
        assert scored[0] is None
        for got, entry in zip(scored[1:], output.prompt_logprobs[1:], strict=True):
            assert {int(k): v["logprob"] for k, v in got.items()} == pytest.approx(
                {k: v.logprob for k, v in entry.items()}
            )
    text = llm.generate(PROMPTS[2], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)[0].text
    stop = text[5:8]
    choice = choices_of(complete(server, PROMPTS[2], max_tokens=24, stop=stop))[0]
    assert (choice["text"], choice["stop_reason"]) == (text[: text.index(stop)], stop)


def test_chat_is_the_llms(server, llm):
    messages = [{"role": "user", "content": "Tell me of 日本"}]
    text = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)[0].text
    fields = {"messages": messages, "model": NAME, "temperature": 0, "max_tokens": 20}
    assert at_once(HTTP.post(f"{server.url}/v1/chat/completions", json=fields))[0]["content"] == text
    assert joined(chunks_of(server, **fields))[0]["content"] == text


def test_second_time_the_prefix_is_cached(server):
    prompt = "the lazy dog jumps over " * 4
    first, second = (complete(server, prompt, max_tokens=4).json() for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    details = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert details[0] < details[1] < second["usage"]["prompt_tokens"]


def test_form_is_kept(server):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", _strict_response_validation=True) as client:
        got = client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "hi"}],
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
            max_tokens=100,
            seed=1,
        )
    value = json.loads(got.choices[0].message.content)
    assert value["b"] in ("x", "y")
    assert 0 <= value["a"] <= 99
    for wrong in ({"guided_regex": "("}, {"guided_json": {"type": "nope"}}, {"guided_grammar": "start: nope"}):
        for stream in (False, True):
            response = complete(server, "x", stream=stream, **wrong)
            assert response.status_code == 400, response.text
            assert [response.json()["error"]["param"]] == list(wrong)
            assert response.json()["error"]["message"].startswith(f"{next(iter(wrong))}: ")
    assert complete(server, "x", max_tokens=1).status_code == 200


EXTREMES = [
    {"top_k": 2**31},
    {"top_k": 2**63},
    {"top_k": 2**70},
    {"max_tokens": 2**70, "stop": "e"},
    {"min_tokens": 2**40, "max_tokens": 2**41},
    {"min_tokens": 2**70},
    {"seed": 2**70},
    {"seed": -(2**70)},
    {"temperature": 1e308, "max_tokens": 3},
    {"temperature": 5e-324, "max_tokens": 3},
    {"repetition_penalty": 1e308, "max_tokens": 3},
    {"repetition_penalty": 5e-324, "max_tokens": 3},
    {"repetition_penalty": 1e6, "max_tokens": 3},
    {"repetition_penalty": 1e-6, "max_tokens": 3},
    {"top_p": 5e-324, "temperature": 1, "max_tokens": 3},
    {"logit_bias": {str(i): -100 for i in range(400)}, "max_tokens": 3},
    {"stop": ["x" * 100_000] * 20, "max_tokens": 3},
    {"stop": "\ud800", "max_tokens": 3},
    {"bad_words": ["\ud800"], "max_tokens": 3},
    {"bad_words": ["many words " * 50] * 50, "max_tokens": 3},
    {"cache_salt": "\ud800", "max_tokens": 3},
    {"stop_token_ids": list(range(400)), "max_tokens": 3},
    {"n": 128, "max_tokens": 2, "temperature": 1},
    {"prompt": ["x"] * 500, "max_tokens": 1},
]


@pytest.mark.parametrize("fields", EXTREMES, ids=lambda f: next(iter(f)))
def test_extreme_values_are_served_or_refused_and_hurt_nobody(server, fields):
    body = json.dumps({"prompt": "Hello", "temperature": 0} | fields)
    headers = {"content-type": "application/json"}
    response = HTTP.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=60)
    assert response.status_code in (200, 400), response.text
    assert HTTP.get(f"{server.url}/health").status_code == 200
    assert complete(server, "x", max_tokens=1).status_code == 200


def test_port_that_is_taken_ends_it_before_the_model_loads(server):
    port = server.url.rsplit(":", 1)[1]
    started = time.monotonic()
    command = [sys.executable, "-m", "rorqual", "serve", str(model_folder()), f"--port={port}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr
    assert "weights" not in ended.stderr
    assert time.monotonic() - started < 20


def test_model_that_cannot_be_loaded_ends_it_with_one_line():
    flags = [str(model_folder()), "--num-kv-blocks=1", "--max-model-len=256", "--threads=1", "--port=0"]
    command = [sys.executable, "-m", "rorqual", "serve", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("rorqual: error:")]
    assert len(errors) == 1, ended.stderr
    assert "--max-model-len" in errors[0]


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signal_lets_running_requests_end(sent):
    with serve() as running, ThreadPoolExecutor(1) as pool:
        engine = running.engine_pid
        answer = pool.submit(complete, running, "Hello", max_tokens=200, ignore_eos=True)
        while not running.load()["server_load"]:
            time.sleep(0.01)
        running.process.send_signal(sent)
        assert len(choices_of(answer.result())[0]["text"]) > 50
        assert running.process.wait(20) == 0
        assert not _lives(engine)
        with socket.socket() as sock:  # the port is free
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [1.0, 2.5])
def test_signal_while_it_starts_ends_it(after_s):
    with serve("--port=0", wait=False) as running:
        time.sleep(after_s)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) in (0, -signal.SIGTERM)  # the latter while Python itself starts


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_smollm2_answers_as_the_llm(smollm2_path):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompts = ["The blue whale is", "🐋🌊 A story told in emoji:"]
    greedy = SamplingParams(temperature=0, max_tokens=32)
    with LLM(str(smollm2_path), dtype="float32", max_model_len=1024, kv_cache_memory="256MiB", progress=False) as llm:
        texts = [o.text for o in llm.generate(prompts, greedy, use_tqdm=False)]
        said = llm.chat(messages, greedy, use_tqdm=False)[0].text
    flags = ("--max-model-len=1024", "--num-kv-blocks=2048")
    with serve(*flags, model=smollm2_path) as running:
        assert [c["text"] for c in choices_of(complete(running, prompts, max_tokens=32))] == texts
        assert [c["text"] for c in streamed(running, prompts, model=NAME, temperature=0, max_tokens=32)] == texts
        fields = {"messages": messages, "model": NAME, "temperature": 0, "max_tokens": 32}
        assert at_once(HTTP.post(f"{running.url}/v1/chat/completions", json=fields))[0]["content"] == said
        assert joined(chunks_of(running, **fields))[0]["content"] == said
