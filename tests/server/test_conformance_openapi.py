"""Whatever a client sends, answers are as /openapi.json declares them. schemathesis makes up the requests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fastapi import FastAPI

from rorqual.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngineClient
from tests.server.live import live

pytest.importorskip("schemathesis")

CHECKS = "not_a_server_error,response_schema_conformance,status_code_conformance,content_type_conformance"


def run(url: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """schemathesis against a server. Its exit status is 0 if nothing was found."""
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    command += ["run", f"{url}/openapi.json", f"--checks={CHECKS}", "--no-color"]
    command += ["--seed=1", "--suppress-health-check=all", *more]
    environment = os.environ | {
        "HYPOTHESIS_STORAGE_DIRECTORY": str(folder),
        "SCHEMATHESIS_HOOKS": "tests.server.likely_requests",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=150, check=False
    )


@pytest.mark.parametrize(
    "options",
    [
        ("--phases=fuzzing", "--max-examples=12"),
        pytest.param(("--phases=coverage,fuzzing", "--max-time=60"), marks=pytest.mark.slow),
    ],
    ids=["short", "a minute"],
)
def test_the_api_is_as_it_says(tmp_path: Path, options: tuple[str, ...]) -> None:
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with live(settings=parsers | {"enable_reset_prefix_cache": True}) as server:
        made = run(server.url, tmp_path, *options)
        assert made.returncode == 0, made.stdout[-6000:] + made.stderr[-1000:]
        assert "passed" in made.stdout
        assert len(server.engine.requests) > 10, "hardly any made-up request was served"


def test_a_planted_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.server import live as module

    real = module.create_app

    def faulty(engine: FakeEngineClient, settings: ServerSettings, tokenizer: object) -> FastAPI:
        app = real(engine, settings, tokenizer)

        @app.get("/planted")
        def planted(number: int) -> dict[str, int]:
            return {"quotient": 1 // (number - number)}

        return app

    monkeypatch.setattr(module, "create_app", faulty)
    with live() as server:
        made = run(server.url, tmp_path, "--phases=coverage", "--include-path=/planted")
    assert made.returncode == 1, made.stdout[-3000:]
    assert "/planted" in made.stdout
