"""`rorqual serve --data-parallel-size` and `rorqual route` as people start them, over real replicas."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests import tiny
from tests.server.fake_engine import CHAT_TEMPLATE, EOS
from tests.server.live import live
from tests.server.served import LONG, NAME, OPTIONS, complete, model_folder, serve
from tests.server.test_faults_signals import alive, soon
from tests.unit.tiny_tokenizers import byte_level, save

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="processes are looked up in /proc")
PROMPT = "the quick brown fox jumps over the lazy dog " * 4


def direct(pid: int) -> list[int]:
    """Processes that a process has started, from any thread."""
    return [int(p) for f in Path(f"/proc/{pid}/task").glob("*/children") for p in f.read_text().split()]


def children(pid: int) -> list[int]:
    """Those, and all that they have."""
    return [below for child in direct(pid) for below in (child, *children(child))]


def replicas(served) -> list[dict]:
    return served.load()["replicas"]


@pytest.mark.slow
def test_two_replicas_serve_as_one_and_leave_nothing_behind():
    with serve("--data-parallel-size=2", "--enable-reset-prefix-cache", "--api-key=key") as served:
        with httpx.Client(base_url=served.url, headers={"authorization": "Bearer key"}, timeout=30) as client:
            assert httpx.post(f"{served.url}/v1/completions", json=LONG).status_code == 401
            assert client.get("/v1/models").json()["data"][0]["id"] == NAME
            body = LONG | {"prompt": PROMPT, "max_tokens": 4}
            said = [client.post("/v1/completions", json=body).json() for _ in range(4)]
            assert len({answer["choices"][0]["text"] for answer in said}) == 1
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in said]
            assert cached[0] == 0
            assert all(cached[1:])  # it went to the same replica again
            assert client.post("/reset_prefix_cache").status_code == 200
            assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"] == {
                "cached_tokens": 0
            }
            firsts = [
                client.post("/v1/responses", json={"model": NAME, "input": f"{i}", "max_output_tokens": 2}).json()
                for i in range(3)
            ]
            for first in firsts:
                asked = {"model": NAME, "input": "on", "max_output_tokens": 2, "previous_response_id": first["id"]}
                assert client.post("/v1/responses", json=asked).status_code == 200
                assert client.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
            published = client.get("/metrics").text
            counts = re.findall(r"^vllm:generation_tokens_total\{.*\} (\d+)", published, re.MULTILINE)
            assert len(counts) == 2
            assert all(int(count) > 0 for count in counts)
        processes = children(served.process.pid)
        assert len(processes) >= 4  # two servers, each with an engine
        served.process.terminate()
        assert served.process.wait(20) == 0
        assert soon(lambda: not any(map(alive, processes)))


@pytest.mark.slow
def test_a_killed_replica_is_started_again():
    with serve("--data-parallel-size=2") as served:
        servers = direct(served.process.pid)
        assert len(servers) == 2
        url = httpx.URL(served.url)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            busy = next(r["url"] for r in replicas(served) if r["running"])
            port = int(busy.rsplit(":", 1)[1])
            victim = next(pid for pid in servers if listens(pid, port))
            engine = children(victim)
            os.kill(victim, signal.SIGKILL)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(rest[-1])["error"]["code"] == "replica_lost"
        assert soon(lambda: not any(map(alive, engine)))
        assert [complete(served, prompt=str(i)) for i in range(4)]  # the other one answers all
        assert soon(lambda: all(r["healthy"] for r in replicas(served)), timeout_s=30)
        assert {r["url"] for r in replicas(served)} >= {busy}  # on the same port
        assert "it is started again" in served.text()
        # An engine that dies alone takes its server with it.
        os.kill(direct(direct(served.process.pid)[0])[0], signal.SIGKILL)
        assert soon(lambda: not all(r["healthy"] for r in replicas(served)), timeout_s=10)
        assert soon(lambda: all(r["healthy"] for r in replicas(served)), timeout_s=30)
        processes = children(served.process.pid)
        served.process.kill()  # with no chance to say so
        served.process.wait(10)
        assert soon(lambda: not any(map(alive, processes)))


def listens(pid: int, port: int) -> bool:
    """Whether a process has the socket that listens on a port."""
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in table if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.add(os.readlink(fd))
        except OSError:
            continue
    return bool(inodes & found)


@pytest.mark.slow
def test_replicas_that_share_experts_say_what_one_server_says_and_end_together(tmp_path):
    tokenizer = byte_level("qwen2")
    eos = tokenizer.token_to_id(EOS)
    options = tiny._MOE | {"vocab_size": tokenizer.get_vocab_size(), "bos_token_id": None, "eos_token_id": eos}
    tiny.random_model("qwen3_moe", options).save_pretrained(tmp_path)
    folder = save(tokenizer, tmp_path, {"eos_token": EOS, "chat_template": CHAT_TEMPLATE})
    prompts = ["Hello", "the quick brown fox", "def f(x):", "1234567"]
    with serve(model=folder) as one:
        alone = [complete(one, prompt=prompt) for prompt in prompts]
    assert len(set(alone)) > 1
    with serve("--data-parallel-size=2", "--enable-expert-parallel", model=folder) as served:
        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(lambda prompt: complete(served, prompt=prompt), prompts * 2))
        assert said == alone * 2
        text = httpx.get(f"{served.url}/metrics").text
        counts = re.findall(r"^vllm:generation_tokens_total\{.*\} (\d+)", text, re.MULTILINE)
        assert all(int(count) > 0 for count in counts)
        processes = children(served.process.pid)
        os.kill(direct(direct(served.process.pid)[1])[0], signal.SIGKILL)
        assert served.process.wait(20) == 1
        assert "rorqual: error: replica" in served.text()
        assert soon(lambda: not any(map(alive, processes)))


@pytest.mark.slow
def test_ctrl_c_is_for_all_of_them():
    with serve("--data-parallel-size=2") as served:
        processes = children(served.process.pid)
        begun, said = threading.Event(), []

        def ask():
            with httpx.stream(
                "POST", f"{served.url}/v1/completions", json=LONG | {"stream": True}, timeout=30
            ) as answer:
                for line in answer.iter_lines():
                    begun.set()
                    said.append(line)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(10)
        served.process.send_signal(signal.SIGINT)
        asking.join(30)
        assert [line for line in said if line][-1] == "data: [DONE]"
        assert served.process.wait(20) == 0
        assert soon(lambda: not any(map(alive, processes)))


@pytest.mark.slow
def test_replicas_that_cannot_start_end_the_program():
    flags = ["--data-parallel-size=2", "--kv-cache-memory=1KiB"]
    options = [o for o in OPTIONS if not o.startswith("--num-kv-blocks")]
    command = [sys.executable, "-m", "rorqual", "serve", str(model_folder()), *options, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "rorqual: error: replica" in done.stderr
    assert "kv_cache_memory" in done.stderr or "--kv-cache-memory" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("rorqual: error: replica")


def test_route_serves_what_its_replicas_do():
    with live() as one, live() as other:
        command = [sys.executable, "-m", "rorqual", "route", f"--replicas={one.url},{other.url}", "--port=0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            said = next(line for line in process.stderr if line.startswith("routing"))
            url = said.split()[1]
            body = {"model": "fake", "messages": [{"role": "user", "content": PROMPT}]}
            answers = [httpx.post(f"{url}/v1/chat/completions", json=body).json() for _ in range(3)]
            assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
            assert sorted(len(live.engine.requests) for live in (one, other)) == [0, 3]
            start = time.monotonic()
            process.terminate()
            assert process.wait(10) == 0
            assert time.monotonic() - start < 5
        finally:
            process.kill()
            process.wait(10)
            process.stderr.close()
