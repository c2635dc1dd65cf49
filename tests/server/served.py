"""`rorqual serve` as users start it, with a tiny random model that has a tokenizer and a chat template."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests import tiny
from tests.server.fake_engine import CHAT_TEMPLATE, EOS
from tests.unit.tiny_tokenizers import byte_level, save

NAME = "tiny"
OPTIONS = (
    "--dtype=float32",
    "--threads=1",
    "--block-size=4",
    "--max-model-len=256",
    "--max-num-batched-tokens=64",
    "--max-num-seqs=16",
    "--num-kv-blocks=1024",
    f"--served-model-name={NAME}",
    "--port=0",
)


@functools.cache
def reference_model() -> Any:
    """The transformers model, in float32."""
    tokenizer = byte_level("qwen2")
    options = tiny._BASE | {
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(EOS),
        "max_position_embeddings": 512,
        "rope_theta": 1e5,
    }
    return tiny.random_model("llama", options)


@functools.cache
def model_folder() -> Path:
    """The model and its tokenizer as a checkpoint."""
    folder = Path(tempfile.mkdtemp(prefix="rorqual-served-"))
    reference_model().save_pretrained(folder)
    return save(byte_level("qwen2"), folder, {"eos_token": EOS, "chat_template": CHAT_TEMPLATE})


class Served:
    """A running `rorqual serve`."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path | None, url: str) -> None:
        self.process, self.log, self.url = process, log, url

    @property
    def engine_pid(self) -> int:
        """The engine's process."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def load(self) -> dict[str, Any]:
        """What /load says."""
        said: dict[str, Any] = httpx.get(f"{self.url}/load").json()
        return said

    def is_idle(self, timeout_s: float = 5.0) -> bool:
        """Whether nothing runs, waits or holds a block within so many seconds."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            said = self.load()
            if not any(said[k] for k in ("server_load", "num_requests_running", "num_requests_waiting")):
                return True
            time.sleep(0.05)
        return False

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text(errors="replace") if self.log is not None else ""


@contextlib.contextmanager
def serve(*flags: str, model: Path | None = None, stderr: str | None = None, wait: bool = True) -> Iterator[Served]:
    """Start a server, and kill what is left of it in the end.

    Args:
        flags: added to `OPTIONS`.
        model: a checkpoint. Default: the tiny one.
        stderr: the file that its log goes to. Then, or without `wait`, the address must be among the flags.
        wait: until it is ready.
    """
    log = None if stderr else Path(tempfile.mkstemp(prefix="rorqual-serve-", suffix=".log")[1])
    command = [sys.executable, "-m", "rorqual", "serve", str(model or model_folder()), *OPTIONS, *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(stderr or str(log), "wb") as sink:
        process = subprocess.Popen(command, stderr=sink, stdout=sink, env=environment)
    port = next((f.removeprefix("--port=") for f in reversed(flags) if f.startswith("--port=")), None)
    served = Served(process, log, f"http://127.0.0.1:{port}")
    try:
        if wait:
            _wait(served)
        yield served
    finally:
        if process.poll() is None:
            engines = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            process.kill()
            process.wait(10)
            for pid in engines:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        if log is not None:
            log.unlink()


def _wait(served: Served, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        assert served.process.poll() is None, served.text()
        if served.log is not None and (said := re.search(r"^serving  (\S+)$", served.text(), re.MULTILINE)):
            served.url = said[1]
        if not served.url.endswith("None"):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{served.url}/health").status_code == 200:
                    return
        time.sleep(0.05)
    raise AssertionError(f"the server is not ready after {timeout_s} s:\n{served.text()}")


LONG: dict[str, Any] = {"model": NAME, "prompt": "Hello", "temperature": 0, "ignore_eos": True, "max_tokens": 240}
"""An answer that takes a while."""
SHORT = LONG | {"max_tokens": 8}


def complete(served: Served, **fields: Any) -> str:
    """The text of a short answer."""
    answer = httpx.post(f"{served.url}/v1/completions", json=SHORT | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text
