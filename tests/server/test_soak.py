"""Many clients for a while: nothing leaks, nothing stalls, and every answer is the right one.

`python -m tests.server.test_soak --seconds 600` runs it for longer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from rorqual import LLM, SamplingParams
from tests.server.served import NAME, Served, model_folder, serve
from tests.unit.tiny_tokenizers import TEXTS

NUM_CLIENTS = 64
NUM_QUESTIONS = 40
MAX_GROWTH_MIB = 24
MAX_ITL_S = 3.0
"""At the 99th percentile, on a busy machine of two cores."""

BAD: list[tuple[dict[str, Any], int]] = [
    ({"prompt": ""}, 400),
    ({"prompt": "x", "temperature": -1}, 400),
    ({"prompt": [10**9]}, 400),
    ({"prompt": "word " * 2000}, 400),
    ({"prompt": "x", "model": "other"}, 404),
    ({"prompt": "x", "logit_bias": {"a": 1}}, 400),
    ({"prompt": "x", "structured_outputs": {"regex": "("}}, 400),
]


@dataclass(frozen=True)
class Question:
    """A prompt, how long its answer may be, and what it is."""

    prompt: str
    max_tokens: int
    text: str


@dataclass
class Tally:
    """What happened."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    left: int = 0
    refused: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between the chunks of streams."""


def questions() -> list[Question]:
    """With answers from an engine in this process, one at a time."""
    draw = random.Random(1)
    prompts = [
        " ".join(draw.choices([t for t in TEXTS if t.strip()], k=draw.randint(1, 6))) for _ in range(NUM_QUESTIONS)
    ]
    lengths = [draw.choice((1, 4, 16, 40, 80)) for _ in prompts]
    made = []
    with LLM(str(model_folder()), dtype="float32", threads=1, max_model_len=256, progress=False) as llm:
        for prompt, length in zip(prompts, lengths, strict=True):
            params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            made.append(Question(prompt, length, llm.generate(prompt, params, use_tqdm=False)[0].text))
    return made


async def client(
    served: Served, known: list[Question], tally: Tally, seed: int, until: float, http: httpx.AsyncClient
) -> None:
    """Asks one thing after the other; now and then leaves in the middle, or asks for what cannot be."""
    draw = random.Random(seed)
    while time.monotonic() < until:
        question, kind = draw.choice(known), draw.random()
        body: dict[str, Any] = {
            "model": NAME,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if kind < 0.1:
            fields, status = draw.choice(BAD)
            answer = await http.post("/v1/completions", json=fields)
            tally.refused += 1
            if answer.status_code != status:
                tally.wrong.append(f"{fields}: {answer.status_code}")
        elif kind < 0.25:
            await _leave(http, body | {"max_tokens": 200, "stream": draw.random() < 0.7}, draw)
            tally.left += 1
        elif kind < 0.5:
            answer = await http.post("/v1/completions", json=body)
            _judge(tally, question, answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)
        else:
            _judge(tally, question, await _stream(http, body, tally))


def _judge(tally: Tally, question: Question, text: str) -> None:
    if text == question.text:
        tally.right += 1
    else:
        tally.wrong.append(f"{question!r} got {text[:200]!r}")


async def _stream(http: httpx.AsyncClient, body: dict[str, Any], tally: Tally) -> str:
    text, last = [], None
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            return (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            now = time.monotonic()
            if last is not None:
                tally.gaps_s.append(now - last)
            last = now
            text.append(httpx.Response(200, content=line.removeprefix("data: ")).json()["choices"][0]["text"])
    return "".join(text)


async def _leave(http: httpx.AsyncClient, body: dict[str, Any], draw: random.Random) -> None:
    try:
        async with asyncio.timeout(draw.uniform(0.01, 1.0)):
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    if draw.random() < 0.05:
                        return
    except TimeoutError:
        pass


@dataclass(frozen=True)
class Footprint:
    """Of both processes: resident MiB, and open files."""

    mib: tuple[float, float]
    files: tuple[int, int]


def footprint(served: Served) -> Footprint:
    """As it is now."""
    folders = [Path(f"/proc/{pid}") for pid in (served.process.pid, served.engine_pid)]
    pages = [int((folder / "statm").read_text().split()[1]) for folder in folders]
    files = [len(list((folder / "fd").iterdir())) for folder in folders]
    return Footprint((pages[0] * 4096 / 2**20, pages[1] * 4096 / 2**20), (files[0], files[1]))


async def load(served: Served, known: list[Question], tally: Tally, seconds: float, first_seed: int) -> None:
    """All clients for so long."""
    limits = httpx.Limits(max_connections=NUM_CLIENTS * 2, max_keepalive_connections=NUM_CLIENTS)
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=served.url, timeout=120, limits=limits) as http:
        clients = [client(served, known, tally, first_seed + i, until, http) for i in range(NUM_CLIENTS)]
        await asyncio.gather(*clients)


def at_rest(served: Served) -> Footprint:
    """The footprint when all has ended; no block is held then."""
    assert served.is_idle(20)
    end = time.monotonic() + 5
    while served.load()["kv_cache_usage"] and time.monotonic() < end:
        time.sleep(0.1)
    assert served.load()["kv_cache_usage"] == 0
    time.sleep(7)  # idle connections are closed after 5
    return footprint(served)


def soak(seconds: float) -> str:
    """Run it; returns what was seen. Raises AssertionError."""
    known, tally = questions(), Tally()
    assert len({q.text for q in known}) > NUM_QUESTIONS / 2
    with serve() as served:
        asyncio.run(load(served, known, Tally(), seconds / 3, 10_000))  # until buffers have their size
        before = at_rest(served)
        asyncio.run(load(served, known, tally, seconds * 2 / 3, 0))
        after = at_rest(served)
    gaps = sorted(tally.gaps_s)
    said = (
        f"{tally.right} right, {len(tally.wrong)} wrong, {tally.left} left, {tally.refused} refused; ITL p50 "
        f"{gaps[len(gaps) // 2] * 1e3:.1f} p99 {gaps[len(gaps) * 99 // 100] * 1e3:.1f} max {gaps[-1] * 1e3:.1f} ms; "
        f"MiB (server, engine) {before.mib[0]:.1f} {before.mib[1]:.1f} -> {after.mib[0]:.1f} {after.mib[1]:.1f}; "
        f"files {before.files} -> {after.files}"
    )
    assert not tally.wrong, f"{said}\n" + "\n".join(tally.wrong[:5])
    assert tally.right > NUM_CLIENTS, said
    assert tally.left > NUM_CLIENTS / 4, said
    assert gaps[len(gaps) * 99 // 100] < MAX_ITL_S, said
    for was, now in zip(before.mib, after.mib, strict=True):
        assert now - was < MAX_GROWTH_MIB, said
    for was, now in zip(before.files, after.files, strict=True):
        assert now <= was + 1, said
    return said


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_soak() -> None:
    print(soak(60.0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    print(soak(parser.parse_args().seconds))
