"""`rorqual bench serve`: what is sent and when, what is measured, and what is said of it."""

import asyncio
import builtins
import itertools
import json
import statistics

import numpy as np
import pytest

from rorqual.cli.load.report import best, is_good, parse_goodput, percentile, summary
from rorqual.cli.load.requests import Record, send
from rorqual.cli.load.workload import WORDS, arrivals, from_file, synthetic
from rorqual.server.app import create_app
from rorqual.server.http_client import HttpClient, HttpError
from rorqual.server.settings import ServerSettings
from tests.cli.load_server import StubApi, serving
from tests.server.fake_engine import FakeEngineClient, chat_tokenizer, echoes


@pytest.fixture
def api():
    api = StubApi()
    with serving(api.app) as api.url:
        yield api


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


# --- HTTP


async def raw_server(*answers, count=None):
    """A server that gives each connection's requests these lists of pieces in turn; None closes the connection."""

    async def handle(reader, writer):
        if count is not None:
            count.append(1)
        for pieces in answers:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            for piece in pieces or ():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.02)
            if pieces is None:
                break
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base/")


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


async def body_of(client):
    async with client.request("POST", "/x", b"{}") as response:
        return [piece async for piece in response.pieces()]


@pytest.mark.asyncio
async def test_pieces_are_timed_as_they_arrive():
    server, client = await raw_server([HEAD, b"3\r\nabc\r\n", b"2\r\nd", b"e\r\n0\r\n\r\n"])
    pieces = await body_of(client)
    assert b"".join(piece.data for piece in pieces) == b"abcde"
    gaps = [b.at - a.at for a, b in itertools.pairwise(pieces)]
    assert len(pieces) == 3
    assert all(0.015 < gap < 0.2 for gap in gaps)
    client.close()
    server.close()


@pytest.mark.asyncio
async def test_a_connection_is_used_again_and_a_stale_one_replaced():
    whole, count = [HEAD, b"1\r\na\r\n0\r\n\r\n"], []
    server, client = await raw_server(whole, whole, None, count=count)
    for _ in range(5):  # each connection ends silently after two
        assert [piece.data for piece in await body_of(client)] == [b"a"]
    assert len(count) == 3
    client.close()
    server.close()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "pieces",
    [None, [HEAD], [HEAD, b"5\r\nab"], [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"], [b"nonsense\r\n\r\n"]],
)
async def test_an_answer_that_ends_early_is_an_error(pieces):
    server, client = await raw_server(pieces)
    with pytest.raises(HttpError) as caught:
        await body_of(client)
    assert caught.value.kind == "connection closed"
    server.close()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", ""])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="must begin with http"):
        HttpClient(url)


# --- one request


def measured(api, body, *, endpoint="chat", timeout_s=5.0):
    async def one():
        client = HttpClient(api.url)
        try:
            return await send(client, endpoint, json.dumps(body).encode(), due_s=0.0, timeout_s=timeout_s)
        finally:
            client.close()

    return asyncio.run(one())


CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.mark.parametrize("body", [CHAT, {"prompt": "hi", "max_tokens": 4}])
def test_a_record_has_the_servers_pace_and_counts(api, body):
    endpoint = "chat" if "messages" in body else "completions"
    measured(api, body, endpoint=endpoint)  # a server's first answer takes longer
    api.first_s, api.between_s = 0.2, 0.05
    record = measured(api, body, endpoint=endpoint)
    assert record.error is None
    assert (record.prompt_tokens, record.completion_tokens, record.finish_reason) == (7, 4, "length")
    assert 0.2 <= record.ttft_s < 0.35  # the chat's opening is no token
    assert len(record.itl_s) == 3
    assert all(0.04 < gap < 0.15 for gap in record.itl_s)
    assert record.tpot_s == pytest.approx(sum(record.itl_s) / 3)
    assert record.ttft_s + sum(record.itl_s) <= record.e2e_s < record.ttft_s + sum(record.itl_s) + 0.1


def test_without_usage_pieces_are_counted(api):
    api.usage = False
    record = measured(api, CHAT)
    assert (record.error, record.completion_tokens, record.output_tokens) == (None, None, 4)


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (503, "HTTP 503", "no 503"),
        ("cut", "cut short", "without a finish reason"),
        ("error", "error in the stream", "no blocks"),
        ("hang", "timeout", "within 0.5 s"),
    ],
)
def test_faults_have_kinds(api, fault, kind, said):
    api.faults = {0: fault}
    record = measured(api, CHAT, timeout_s=0.5)
    assert record.error == kind
    assert said in record.error_text


# --- workloads


def test_drawn_bodies_depend_on_the_seed_only_and_have_the_lengths():
    def drawn(seed, **more):
        return synthetic("chat", 200, input_len=(2, 5), output_len=(1, 3), seed=seed, **more)

    bodies = drawn(3)
    assert bodies == drawn(3) != drawn(4)
    texts = [body["messages"][0]["content"].split() for body in bodies]
    assert {len(words) for words in texts} == {2, 3, 4, 5}
    assert {body["max_tokens"] for body in bodies} == {1, 2, 3}
    assert all(body["ignore_eos"] for body in bodies)
    assert not any("ignore_eos" in body for body in drawn(3, ignore_eos=False))
    shared = [body["messages"][0]["content"].split() for body in drawn(3, prefix_len=4)]
    assert len({tuple(words[:4]) for words in shared}) == 1
    assert {len(words) for words in shared} == {6, 7, 8, 9}
    assert len(set(WORDS)) == len(WORDS) > 100


def test_ids_are_for_completions():
    bodies = synthetic("completions", 50, input_len=(3, 3), output_len=(1, 1), kind="ids", vocab_size=4)
    assert {token for body in bodies for token in body["prompt"]} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="--prompt-kind ids needs --endpoint completions"):
        synthetic("chat", 1, input_len=(3, 3), output_len=(1, 1), kind="ids")


def test_a_file_is_read_in_turn_and_its_faults_name_the_line(tmp_path):
    file = tmp_path / "d.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    file.write_text(f'{{"prompt": "a", "max_tokens": 3}}\n\n{json.dumps({"messages": messages, "top_p": 0.5})}\n')
    bodies = from_file("chat", str(file), 3)
    assert bodies[0] == bodies[2] == {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    assert bodies[1] == {"messages": messages, "top_p": 0.5}
    with pytest.raises(ValueError, match=r'd.jsonl:3 has "messages", but --endpoint completions takes "prompt"'):
        from_file("completions", str(file), 1)
    for text, said in [
        ("{", "1 is not JSON"),
        ('{"x": 1}', '1 must be an object with either "prompt"'),
        ("", "no lines"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            from_file("chat", str(file), 1)
    with pytest.raises(ValueError, match="cannot read --dataset"):
        from_file("chat", str(tmp_path / "none"), 1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    times = list(itertools.islice(arrivals(20.0, burstiness, 1), 20_000))
    gaps = [b - a for a, b in itertools.pairwise([0.0, *times])]
    assert times[-1] / len(times) == pytest.approx(1 / 20, rel=0.05)
    spread = statistics.stdev(gaps) / statistics.fmean(gaps)
    assert spread == pytest.approx(burstiness**-0.5, rel=0.05)  # of a gamma distribution
    assert times[:5] == list(itertools.islice(arrivals(20.0, burstiness, 1), 5))


# --- the report


def test_percentiles_are_numpys():
    values = sorted(np.random.default_rng(0).exponential(size=57).tolist())
    for percent in (0, 50, 90, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
        assert percentile([3.0], percent) == 3.0


def record(sent, *tokens, end=None, **more):
    """A request sent at a second, with tokens at those."""
    return Record(sent, sent, list(tokens), end or tokens[-1], 10, len(tokens), "stop", **more)


RECORDS = [record(0, 1, 2, 3), record(1, 1.5, 2, end=4), record(2, 8), record(0, 1, error="timeout", end=5)]


def test_a_summary_counts_whole_answers_and_errors_apart():
    result = summary(RECORDS, {"ttft": 1000.0, "tpot": 700.0})
    assert (result["num_requests"], result["num_completed"], result["errors"]) == (4, 3, {"timeout": 1})
    assert (result["duration_s"], result["output_tokens"], result["prompt_tokens"]) == (8, 6, 30)
    assert (result["output_tokens_per_s"], result["total_tokens_per_s"]) == (0.75, 4.5)
    assert result["most_at_a_time"] == 4
    assert result["ttft_ms"]["median"] == 1000
    assert result["ttft_ms"]["max"] == 6000
    assert result["itl_ms"]["mean"] == pytest.approx(2500 / 3)
    assert result["tpot_ms"]["median"] == 750
    assert result["tokens_per_s_per_user"] == pytest.approx(1000 / 750)
    assert result["goodput"] == {"limits_ms": {"ttft": 1000.0, "tpot": 700.0}, "num_good": 1, "requests_per_s": 1 / 8}


def test_goodput_is_every_limit_and_a_whole_answer():
    whole, _, single, failed = RECORDS
    assert is_good(whole, {"ttft": 1000, "tpot": 1000, "e2e": 3000})
    assert not is_good(whole, {"ttft": 999})
    assert is_good(single, {"tpot": 1})
    assert not is_good(failed, {"ttft": 5000})


def test_goodput_is_read_in_every_spelling():
    assert parse_goodput(["ttft:500", "tpot:50.5, e2el:9000"]) == {"ttft": 500, "tpot": 50.5, "e2e": 9000}
    for wrong in ("ttft", "ttft:", "ttft:x", "itl:5", "tpot:0", "tpot:-1", "tpot:nan"):
        with pytest.raises(ValueError, match=f"--goodput takes NAME:MILLISECONDS .*got '{wrong}'"):
            parse_goodput([wrong])


def test_the_front_has_no_point_that_another_beats():
    points = [
        {"tokens_per_s_per_user": user, "output_tokens_per_s": total}
        for user, total in [(100, 100), (90, 180), (80, 170), (50, 300), (50, 290), (None, 0)]
    ]
    assert [point["output_tokens_per_s"] for point in best(points)] == [300, 180, 100]


# --- the command

SMALL = ("bench", "serve", "--num-prompts", "6", "--input-len", "2:4", "--output-len", "3:5", "-q")


def test_closed_loop_keeps_its_streams_and_says_what_it_saw(rorqual, api, tmp_path):
    api.between_s = 0.02
    file = tmp_path / "r.json"
    code, out, err = rorqual(
        *(*SMALL, "--base-url", f"{api.url}/v1/", "--max-concurrency", "3", "--json", file, "--seed", "1"),
        *("--api-key", "secret", "--temperature", "0.5", "--extra-body", '{"top_k": 3}', "--goodput", "ttft:5000"),
        *("tpot:1",),
    )
    assert (code, err) == (0, "")
    assert out.startswith("requests      6 of 6 answered\n")
    for row in (
        "duration",
        "output",
        "per user",
        "at a time     3 at most",
        "goodput       0.00 answers/s (0) with ttft",
    ):
        assert f"\n{row}" in out
    assert api.most == 3
    assert len(api.clients) == 3
    result = json.loads(file.read_text())
    drawn = synthetic("chat", 8, input_len=(2, 4), output_len=(3, 5), seed=1)
    assert [body["messages"] for body in api.bodies] == [body["messages"] for body in drawn]
    sent = api.bodies[0]
    assert (sent["model"], sent["temperature"], sent["top_k"], sent["ignore_eos"]) == ("stub", 0.5, 3, True)
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})
    assert result["output_tokens"] == sum(body["max_tokens"] for body in drawn[2:])
    assert result["prompt_tokens"] == 42
    assert result["itl_ms"]["max"] > 15
    assert len(result["requests"]) == 6
    assert set(api.keys) == {"Bearer secret"}
    assert "api_key" not in result["options"]
    assert result["options"]["model"] == "stub"


def test_the_key_may_come_from_openais_variable(rorqual, api, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    rorqual(*SMALL, "--base-url", api.url, "--model", "other")
    assert set(api.keys) == {"Bearer theirs"}
    assert {body["model"] for body in api.bodies} == {"other"}


def test_open_loop_sends_when_due_whatever_still_runs(rorqual, api, tmp_path):
    api.first_s = 0.6
    file = tmp_path / "r.json"
    code, out, _ = rorqual(*SMALL, "--base-url", api.url, "--request-rate", "40", "--num-warmups", "0", "--json", file)
    assert code == 0
    result = json.loads(file.read_text())
    assert api.most == result["most_at_a_time"] == 6
    due = list(itertools.islice(arrivals(40, 1.0, 0), 6))
    assert [r["sent_s"] for r in result["requests"]] == pytest.approx([at - due[0] for at in due], abs=0.1)
    assert result["sent_late_ms"] < 100
    code, out, _ = rorqual(*SMALL, "--base-url", api.url, "--request-rate", "1000", "--max-concurrency", "2")
    assert "at a time     2 at most" in out


def test_errors_are_counted_by_kind_and_only_a_run_without_answers_fails(rorqual, api):
    api.faults = {0: 503, 2: "cut", 3: 503}
    code, out, _ = rorqual(*SMALL, "--base-url", api.url, "--num-warmups", "0")
    assert code == 0
    assert "requests      3 of 6 answered\n  2 x HTTP 503: no 503\n  1 x cut short: the stream ended" in out
    api.faults = dict.fromkeys(range(20), 500)
    code, out, _ = rorqual(*SMALL, "--base-url", api.url, "--num-warmups", "0")
    assert code == 1
    assert "requests      0 of 6 answered" in out


def test_a_sweep_gives_a_front_and_a_plot(rorqual, api, tmp_path):
    pytest.importorskip("matplotlib")
    api.between_s = 0.005
    file, picture = tmp_path / "r.json", tmp_path / "deep" / "p.png"
    code, out, _ = rorqual(
        *(*SMALL, "--base-url", api.url, "--sweep-concurrency", "1,2", "--sweep-concurrency", "8"),
        *("--json", file, "--plot-out", picture),
    )
    assert code == 0
    assert f"plot written to {picture}" in out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    result = json.loads(file.read_text())
    assert [(p["concurrency"], p["num_completed"], p["most_at_a_time"]) for p in result["points"]] == [
        (1, 6, 1),
        (2, 6, 2),
        (8, 8, 8),
    ]
    assert result["points"][2]["output_tokens_per_s"] > 2 * result["points"][0]["output_tokens_per_s"]
    assert 8 in result["pareto_concurrency"]
    texts = [body["messages"][0]["content"] for body in api.bodies]
    assert len(set(texts)) == len(texts)


def test_without_matplotlib_there_is_no_plot_and_it_says_so(rorqual, api, tmp_path, monkeypatch):
    real, picture = builtins.__import__, tmp_path / "p.png"

    def without(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    code, out, err = rorqual(*SMALL, "--base-url", api.url, "--sweep-concurrency", "2", "--plot-out", picture)
    assert code == 0
    assert "tok/s/user" in out
    assert "no plot: it needs matplotlib" in err
    assert not picture.exists()


def test_progress_is_shown_unless_quiet(rorqual, api):
    code, _, err = rorqual(*[part for part in SMALL if part != "-q"], "--base-url", api.url)
    assert code == 0
    assert "stub: 100%" in err
    assert "6/6" in err


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--sweep-concurrency", "2", "--request-rate", "3"], "leave out --request-rate and --max-concurrency"),
        (["--sweep-concurrency", "0"], "--sweep-concurrency must be numbers from 1 on, got [0]"),
        (["tpot:50"], "unexpected argument 'tpot:50'"),
        (["--goodput", "ttft:500", "x:50"], "--goodput takes NAME:MILLISECONDS"),
        (["--input-len", "5:2"], "--input-len must be a number or LOW:HIGH"),
        (["--prompt-kind", "ids"], "--prompt-kind ids needs --endpoint completions"),
        (["--base-url", "nowhere"], "must begin with http:// or https://"),
        (["--base-url", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9: nothing listens on 127.0.0.1:9"),
        (["--base-url", "http://127.0.0.1:9", "-m", "x"], "the first request to http://127.0.0.1:9 failed: connection"),
    ],
)
def test_mistakes_are_one_line(rorqual, typed, said):
    code, out, err = rorqual("bench", "serve", *typed)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_a_server_that_refuses_says_why(rorqual, api):
    api.faults = {0: 400}
    code, _, err = rorqual(*SMALL, "--base-url", api.url)
    assert code == 2
    assert f"the first request to {api.url} failed: HTTP 400: no 400" in err


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_our_own_server_is_measured(rorqual, tmp_path, endpoint):
    engine = FakeEngineClient(echoes, delay_s=0.005)
    file = tmp_path / "r.json"
    with serving(create_app(engine, ServerSettings(), chat_tokenizer())) as url:
        code, out, err = rorqual(
            *SMALL, "--base-url", url, "--endpoint", endpoint, "--num-warmups", "1", "--json", file
        )
    assert code == 0, err
    assert "requests      6 of 6 answered" in out
    result = json.loads(file.read_text())
    assert result["output_tokens_counted_by"] == "server"
    assert result["output_tokens"] == sum(request.params.max_tokens for request in engine.requests[1:])
    assert result["prompt_tokens"] == sum(len(request.prompt_token_ids) for request in engine.requests[1:])
    assert all(request.params.ignore_eos for request in engine.requests)
    assert 4 < result["tpot_ms"]["median"] < 100
