"""`rorqual route`: which settings reach the router, and one line for what does not go."""

from __future__ import annotations

import pytest

from rorqual.cli import route


@pytest.fixture
def routed(monkeypatch, rorqual):
    """Run the command up to where it would serve: returns the replicas' URLs, and both kinds of settings."""
    found = []

    async def instead(replicas, routing, listener, _sock):
        found.append(([replica.url for replica in replicas], routing, listener))

    monkeypatch.setattr(route, "_serve", instead)
    monkeypatch.setattr(route, "log_to_stderr", lambda: None)  # what it sets for its whole process

    def run(*typed):
        code, _, err = rorqual("route", "--port=0", *typed)
        assert code == 0, err
        return found[-1]

    return run


def test_replicas_and_options(routed, monkeypatch, tmp_path):
    urls, routing, listener = routed("--replicas", "http://a:1/, https://b/llm", "--replicas=http://c")
    assert urls == ["http://a:1", "https://b/llm", "http://c"]
    assert (routing.on_failure, routing.cache_threshold, listener.host) == ("retry", 0.3, "127.0.0.1")
    file = tmp_path / "route.yaml"
    file.write_text("replicas: [http://a, http://b]\non-failure: fail\n")
    monkeypatch.setenv("RORQUAL_CACHE_THRESHOLD", "0.5")
    urls, routing, _ = routed("--config", str(file), "--balance-abs-threshold=3")
    assert urls == ["http://a", "http://b"]
    assert (routing.on_failure, routing.cache_threshold, routing.balance_abs_threshold) == ("fail", 0.5, 3)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--replicas is needed"),
        (["--replicas=,"], "--replicas"),
        (["--replicas=localhost:8000"], "must begin with http:// or https:// and name a host, got 'localhost:8000'"),
        (["--replicas=http://a,http://a/"], "--replicas names a server twice"),
        (["--replicas=http://a", "--on-failure=ask"], "--on-failure must be 'retry' or 'fail', got 'ask'"),
        (["--replicas=http://a", "--cache-threshold=2"], "--cache-threshold must be less than or equal to 1"),
        (["--replicas=http://a", "--host=no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["http://a"], "unexpected argument 'http://a'"),
    ],
)
def test_mistakes(rorqual, monkeypatch, flags, said):
    monkeypatch.setattr(route, "log_to_stderr", lambda: None)
    code, _, err = rorqual("route", *flags)
    assert code == 2
    assert said in err
