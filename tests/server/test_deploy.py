"""deploy/: the files say what the server does."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from rorqual.cli.main import commands
from rorqual.server.app import create_app
from rorqual.server.engine_client import RESPONSE_S
from rorqual.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngineClient, chat_tokenizer

DEPLOY = Path(__file__).parents[2] / "deploy"
OPTIONS = {flag: option for option in commands()[("serve",)].options() for flag in option.flags}
VARIABLES = {option.variable for option in OPTIONS.values()}


@pytest.fixture(scope="module")
def paths():
    return create_app(FakeEngineClient(), ServerSettings(), chat_tokenizer()).openapi()["paths"].keys()


@pytest.fixture(scope="module")
def kubernetes():
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}


def test_probes_ask_paths_that_exist_and_wait_longer_than_the_server_takes(kubernetes, paths):
    (container,) = kubernetes["Deployment"]["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    asked = {}
    for kind in ("startup", "readiness", "liveness"):
        probe = container[f"{kind}Probe"]
        asked[kind] = probe["httpGet"]["path"]
        assert ports[probe["httpGet"]["port"]] == ServerSettings().port
        if kind != "startup":
            assert probe["timeoutSeconds"] > RESPONSE_S
    assert asked == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    assert set(asked.values()) <= set(paths)
    annotations = kubernetes["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in paths


def test_the_grace_period_covers_the_pause_and_the_drain(kubernetes):
    pod = kubernetes["Deployment"]["spec"]["template"]["spec"]
    pause = float(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + ServerSettings().drain_timeout + 10
    assert pod["enableServiceLinks"] is False  # a Service of this name would set RORQUAL_PORT, an option
    assert "RORQUAL_PORT" in VARIABLES


def test_the_service_finds_the_pods_and_their_arguments_are_options(kubernetes):
    template = kubernetes["Deployment"]["spec"]["template"]
    assert kubernetes["Service"]["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    container = template["spec"]["containers"][0]
    assert {argument for argument in container["args"] if argument.startswith("-")} <= OPTIONS.keys()
    assert {each["name"] for each in container["env"]} <= VARIABLES
    assert all(isinstance(argument, str) for argument in container["args"])


def instructions():
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def test_the_image_runs_the_server_itself_without_rights_and_asks_for_its_health(paths):
    last = dict(instructions())  # of each kind the last one
    assert json.loads(last["ENTRYPOINT"]) == ["rorqual", "serve"]
    assert last["USER"] not in ("root", "0")
    flags, _, command = last["HEALTHCHECK"].partition(" CMD ")
    assert "--start-period=600s" in flags
    assert float(re.search(r"--timeout=(\d+)s", flags)[1]) > RESPONSE_S
    python, dash_c, code = json.loads(command)
    assert (python, dash_c) == ("python", "-c")
    compile(code, "HEALTHCHECK", "exec")
    assert re.search(r"\}(/[a-z]+)'", code)[1] in paths
    set_there = dict(part.split("=", 1) for part in shlex.split(last["ENV"]))
    assert set_there.keys() - {"PATH"} <= VARIABLES
    assert (set_there["RORQUAL_HOST"], int(set_there["RORQUAL_PORT"])) == ("0.0.0.0", int(last["EXPOSE"]))


def test_what_the_image_is_built_from_is_there():
    root, allowed = DEPLOY.parent, (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for kind, rest in instructions():
        if kind == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (root / source).exists()
                assert f"!{source}" in allowed
