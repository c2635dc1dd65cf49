"""`rorqual serve`: which settings reach the server and the engine."""

from __future__ import annotations

import pytest

from rorqual.cli import serve
from tests.server.served import model_folder


@pytest.fixture
def served(monkeypatch, rorqual):
    """Run the command up to where it would serve: returns the engine's config and the server's settings."""
    found = []

    async def instead(config, options, tokenizer, sock, replica):
        found.append((config, options, sock.getsockname()[1]))
        return None, True

    monkeypatch.setattr(serve, "_serve", instead)
    # What it sets for its whole process must not outlive the test.
    monkeypatch.setattr(serve, "log_to_stderr", lambda: None)

    def run(*typed):
        code, _, err = rorqual("serve", *typed)
        assert code == 0, err
        return found[-1]

    return run


def test_flags_variables_and_file(served, monkeypatch, tmp_path):
    folder = str(model_folder())
    file = tmp_path / "serve.yaml"
    file.write_text(f"model: {folder}\nmax-model-len: 64\napi-key: [one, two]\nport: 0\nmax_queue: 5\n")
    monkeypatch.setenv("RORQUAL_MAX_QUEUE", "7")
    config, options, _ = served("--config", str(file), "--max-model-len", "32")
    assert (config.model, config.max_model_len) == (folder, 32)
    assert (options.api_key, options.max_queue) == (("one", "two"), 7)
    assert options.served_model_name == (folder,)
    config, options, _ = served(folder, "--port=0", "--served-model-name=a", "--served-model-name=b")
    assert options.served_model_name == ("a", "b")


def test_parsers_are_found_from_the_model(served):
    _, options, _ = served(str(model_folder()), "--port=0")
    assert (options.tool_call_parser, options.reasoning_parser) == ("none", "qwen3")  # by its chat template
    _, options, _ = served(str(model_folder()), "--port=0", "--tool-call-parser=hermes", "--reasoning-parser=none")
    assert (options.tool_call_parser, options.reasoning_parser) == ("hermes", "none")


def test_port_that_kubernetes_sets_for_a_service_is_none(served, monkeypatch):
    monkeypatch.setenv("RORQUAL_PORT", "tcp://10.0.0.1:8000")
    _, options, _ = served(str(model_folder()), "--host=127.0.0.1", "--max-queue=1", "--port=0")
    assert options.port == 0
    monkeypatch.setattr(serve.ServerSettings.model_fields["port"], "default", 0)
    assert served(str(model_folder()))[1].max_queue == 1024


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port=70000"], "--port must be less than or equal to 65535"),
        (["--api-key="], "--api-key"),
        (["--ssl-keyfile=x"], "--ssl-keyfile and ssl_certfile go together"),
        (["--enable-auto-tool-choice"], "leave it out"),
        (["--tool-call-parser=nope", "--port=0"], "tool_call_parser must be one of auto, none"),
        (["b"], "unexpected argument 'b'"),
        (["--model=b", "--port=0"], "the model is given twice"),
        (["--host=no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
    ],
)
def test_mistakes_are_said_before_a_model_is_opened(rorqual, flags, said):
    code, _, err = rorqual("serve", str(model_folder()), *flags)
    assert code == 2
    assert said in err
