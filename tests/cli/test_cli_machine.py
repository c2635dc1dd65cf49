"""`rorqual models`, `ops` and `collect-env`: what is on this machine."""

import json
import sys
import types
from typing import NamedTuple

import pytest

from rorqual.loader import source
from tests.unit.tiny_gguf import smollm2_kinds, write_llama


@pytest.fixture
def empty_caches(monkeypatch, tmp_path):
    """A home without models; returns the folder for short names."""
    monkeypatch.setenv("RORQUAL_CACHE", str(tmp_path / "short"))
    monkeypatch.setattr(source, "_hub_models", list)
    return tmp_path / "short"


def test_models_without_any_names_what_can_be_fetched(rorqual, empty_caches):
    code, out, _ = rorqual("models")
    assert code == 0
    assert str(empty_caches) in out
    assert "can be fetched by short name: smollm2" in out


def test_models_lists_name_size_and_place(rorqual, empty_caches):
    empty_caches.mkdir()
    path = empty_caches / source.SMOLLM2.file_name
    path.write_bytes(b"x" * (3 << 20))
    _, out, _ = rorqual("models")
    assert out.splitlines()[0] == f"smollm2    3.0 MiB  {path}"
    assert "can be fetched" not in out


def test_models_names_the_formats_of_a_gguf_file(rorqual, empty_caches):
    empty_caches.mkdir()
    path = write_llama(empty_caches / source.SMOLLM2.file_name, smollm2_kinds)
    _, out, _ = rorqual("models")
    assert out.splitlines()[0].endswith(f"{path}  (Q4_1, Q8_0)")


def test_pull_prints_the_path(rorqual, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(source, "pull", lambda name, *, revision=None: asked.append((name, revision)) or tmp_path)
    code, out, _ = rorqual("models", "pull", "org/model", "--revision", "main")
    assert (code, out, asked) == (0, f"{tmp_path}\n", [("org/model", "main")])


@pytest.mark.parametrize(("typed", "said"), [([], "which model?"), (["smolm2"], "did you mean 'smollm2'?")])
def test_pull_of_nothing_known_is_one_line(rorqual, typed, said):
    code, out, err = rorqual("models", "pull", *typed)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


class Verdict(NamedTuple):
    op: str
    backend: str
    verdict: str


@pytest.fixture
def report(monkeypatch):
    """The configs that op_report was asked about."""
    asked = []

    def op_report(config):
        asked.append(config)
        return [
            Verdict("rope", "reference", "ok"),
            Verdict("linear", "cpu", "needs AVX-512"),
            Verdict("linear", "a", "ok"),
        ]

    monkeypatch.setitem(sys.modules, "rorqual.engine.op_report", types.SimpleNamespace(op_report=op_report))
    return asked


def test_ops_prints_an_aligned_sorted_table(rorqual, report):
    code, out, _ = rorqual("ops", "some/folder", "--dtype", "float32")
    assert code == 0
    assert out.splitlines() == [
        "op      backend    verdict",
        "linear  a          ok",
        "linear  cpu        needs AVX-512",
        "rope    reference  ok",
    ]
    assert (report[0].model, report[0].dtype) == ("some/folder", "float32")


def test_collect_env_hides_secrets_and_shows_settings(rorqual, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    monkeypatch.setenv("RORQUAL_API_KEY", "also_secret")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:pass@mirror.example/hf")
    monkeypatch.setenv("RORQUAL_MAX_NUM_BATCHED_TOKENS", "64")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for typed in (["collect-env"], ["collect-env", "--json"]):
        code, out, err = rorqual(*typed)
        assert (code, err) == (0, "")
        assert "secret" not in out
        assert "pass@" not in out
        for shown in (
            "HF_TOKEN",
            "(set)",
            "RORQUAL_MAX_NUM_BATCHED_TOKENS",
            "64",
            "OMP_NUM_THREADS",
            "mirror.example/hf",
        ):
            assert shown in out


def test_collect_env_as_json_has_versions_and_machine(rorqual):
    facts = json.loads(rorqual("collect-env", "--json")[1])
    assert set(facts["versions"]) >= {"python", "torch", "numpy", "tokenizers", "safetensors", "gguf", "transformers"}
    machine = facts["machine"]
    assert machine["cores_usable"] >= 1
    assert 0 < machine["memory_available_bytes"] <= machine["memory_total_bytes"]
    assert isinstance(machine["gpus"], list)
