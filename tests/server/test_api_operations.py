"""Running the server: clients that leave, keys, limits, the queue, health, and its end."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from urllib.parse import urlsplit

import httpx
import pytest

from rorqual.server import connection
from rorqual.server.listener import bind
from rorqual.server.settings import ServerSettings
from tests.server.fake_engine import FakeEngineClient, echoes, says
from tests.server.live import HTTP, MODEL, live
from tests.server.test_api_errors import CHAT, HI, error_of, post

LONG = "Hello world and so on " * 40


def until(condition, timeout_s=10.0):
    """Wait until something is so."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def running(server):
    return [request for request in server.engine.requests if not request.ended.is_set()]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_client_that_leaves_at_any_chunk_ends_its_request(path):
    body = {"messages": HI, "prompt": ["a", "b"], "stream": True, "n": 2}
    del body["prompt" if path == CHAT else "messages"]
    with live(says(LONG), delay_s=0.002, max_model_len=2000) as server:
        for num_chunks in range(8):
            with HTTP.stream("POST", server.url + path, json=body, timeout=30) as response:
                lines = response.iter_lines()
                for _ in range(2 * num_chunks):
                    next(lines)
            until(lambda: not running(server))
            requests = server.engine.requests
            assert all(request.aborted for request in requests)
            assert max(request.steps for request in requests) < 100, "a client that went away got all of its answer"
            requests.clear()
        until(lambda: server.state.num_answers == 0)
        until(lambda: server.state.num_http_requests == 0)


def test_client_that_leaves_before_the_answer_ends_its_request():
    with live(says(LONG), delay_s=0.01, max_model_len=2000) as server:
        for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": ["a", "b", "c"]})):
            for stream in (False, True):
                server.engine.delay_s = 0.2 if stream else 0.01
                with pytest.raises(httpx.ReadTimeout):
                    HTTP.post(server.url + path, json=body | {"stream": stream}, timeout=0.1)
                until(lambda: server.engine.requests and not running(server))
                assert all(request.aborted for request in server.engine.requests)
                server.engine.requests.clear()
        assert server.state.num_answers == 0


def _head(length):
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {length}"
    return f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


def test_client_that_does_not_read_holds_nobody_up(monkeypatch, caplog):
    monkeypatch.setattr(connection, "STALLED_S", 0.5)
    with live(says(LONG * 4), max_model_len=4000, max_num_seqs=128) as server:
        where = (urlsplit(server.url).hostname, urlsplit(server.url).port)
        body = json.dumps({"messages": HI, "stream": True, "n": 100}).encode()
        with socket.create_connection(where) as slow:
            slow.sendall(_head(len(body)) + body)
            for _ in range(3):
                assert post(server, {"messages": HI, "max_tokens": 5}).status_code == 200
            until(lambda: server.state.num_answers == 0, timeout_s=60)
            assert "did not read its stream" in caplog.text
            slow.recv(100)  # it has been there all the time
        assert post(server, {"messages": HI, "max_tokens": 5}).status_code == 200


def test_key_is_needed_where_it_matters():
    with live(says("x"), settings={"api_key": ("first", "second"), "enable_reset_prefix_cache": True}) as server:
        wrong = ({}, {"authorization": "Bearer nope"}, {"authorization": "first"}, {"authorization": "Basic first"})
        for headers in (*wrong, {"authorization": "Bearer first2"}, {"authorization": "Bearer"}):
            error = error_of(post(server, {"messages": HI}, headers=headers), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            for path in ("/v1/models", "/v1/nope", "/tokenizer_info", "/load"):
                error_of(HTTP.get(server.url + path, headers=headers), 401)
            error_of(post(server, {"prompt": "x"}, "/tokenize", headers=headers), 401)
            error_of(post(server, {}, "/reset_prefix_cache", headers=headers), 401)
        assert server.engine.requests == []
        for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json", "/"):
            assert HTTP.get(server.url + path).status_code == 200
        for key in ("first", "second"):
            assert post(server, {"messages": HI}, headers={"authorization": f"Bearer {key}"}).status_code == 200
            assert server.client(api_key=key).models.list().data[0].id == MODEL
        headers = {"authorization": "bearer first"}
        assert HTTP.post(server.url + "/reset_prefix_cache", headers=headers).status_code == 200
        assert server.engine.num_resets == 1


def test_full_queue_is_503_with_a_time_to_come_back():
    with live(says(LONG), delay_s=0.02, max_num_seqs=2, max_model_len=2000, settings={"max_queue": 2}) as server:
        threads = [
            threading.Thread(target=post, args=(server, {"messages": HI, "n": 2, "max_tokens": 30})) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.state.num_answers == 4)
        for stream in (False, True):
            response = post(server, {"messages": HI, "stream": stream})
            assert error_of(response, 503)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) > 0
        too_many = error_of(post(server, {"messages": HI, "n": 5}), 400)
        assert "takes 4 at once" in too_many["message"]  # it would never be its turn
        assert HTTP.get(server.url + "/load").json()["server_load"] == 4
        assert HTTP.get(server.url + "/health").status_code == 200
        for thread in threads:
            thread.join()
        assert post(server, {"messages": HI, "max_tokens": 1}).status_code == 200


def test_request_that_takes_too_long_is_504():
    with live(says(LONG), delay_s=0.02, max_model_len=2000, settings={"request_timeout": 0.3}) as server:
        assert error_of(post(server, {"messages": HI}), 504)["type"] == "timeout_error"
        text = post(server, {"messages": HI, "stream": True}).text
        assert json.loads(text.strip().split("\n\n")[-1][6:])["error"]["type"] == "timeout_error"
        server.engine.delay_s = 10
        error_of(post(server, {"messages": HI, "stream": True}), 504)
        until(lambda: all(request.aborted for request in server.engine.requests))
        assert server.state.num_answers == 0


def test_health_says_what_is_wrong():
    with live(says(LONG), delay_s=0.01, max_model_len=2000) as server:

        def get(path):
            return HTTP.get(server.url + path)

        assert get("/health").status_code == get("/ready").status_code == 200
        server.engine.state = "loading"
        for path in ("/health", "/ready", "/v1/models", "/tokenizer_info"):
            response = get(path)
            assert error_of(response, 503)["code"] == "loading"
            assert response.headers["retry-after"]
        error_of(post(server, {"messages": HI}), 503)
        assert get("/version").status_code == get("/openapi.json").status_code == 200
        server.engine.state, server.engine.responsive = "ready", False
        assert error_of(get("/health"), 503)["code"] == "engine_stuck"
        server.engine.responsive = True
        with HTTP.stream("POST", server.url + CHAT, json={"messages": HI, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            server.engine.die("killed by SIGKILL")
            last = [line for line in lines if line][-1]
            assert "killed by SIGKILL" in json.loads(last[6:])["error"]["message"]
        for path in ("/health", "/ready"):
            assert "SIGKILL" in error_of(get(path), 503)["message"]
        assert "SIGKILL" in error_of(post(server, {"messages": HI}), 503)["message"]
        until(lambda: server.state.num_answers == 0)


def test_drain_ends_running_requests_and_takes_no_new_ones():
    with live(says("Hello world, the quick brown fox"), delay_s=0.05) as server:
        with HTTP.stream("POST", server.url + CHAT, json={"messages": HI, "stream": True}, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.handle_exit(15, None)
            refused = HTTP.get(server.url + "/ready")
            assert error_of(refused, 503)["code"] == "draining"
            assert refused.headers["retry-after"]
            assert error_of(post(server, {"messages": HI}), 503)["code"] == "draining"
            assert HTTP.get(server.url + "/health").status_code == 200
            text = list(lines)
        assert "data: [DONE]" in text
        until(lambda: server.server.should_exit)
        until(lambda: not _accepts(server.url))


def _accepts(url):
    try:
        HTTP.get(url + "/health", timeout=1)
    except httpx.TransportError:
        return False
    return True


def test_drain_ends_what_takes_too_long_and_says_so():
    with live(says(LONG), delay_s=0.02, max_model_len=2000, settings={"drain_timeout": 0.3}) as server:
        with HTTP.stream("POST", server.url + CHAT, json={"messages": HI, "stream": True}, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.handle_exit(15, None)
            last = [line for line in lines if line][-1]
        assert "ended by the server" in json.loads(last[6:])["error"]["message"]


def test_second_signal_does_not_wait():
    with (
        live(says(LONG), delay_s=0.05, max_model_len=2000, settings={"drain_timeout": 60}) as server,
        HTTP.stream("POST", server.url + CHAT, json={"messages": HI, "stream": True}) as response,
    ):
        next(response.iter_lines())
        server.server.handle_exit(15, None)
        server.server.handle_exit(15, None)
        until(lambda: not _accepts(server.url), timeout_s=3)


def test_request_ids_are_sent_back_and_may_be_there_twice():
    with live(echoes, delay_s=0.005, settings={"enable_request_id_headers": True}) as server:
        results = {}

        def ask(name):
            body = {"messages": [{"role": "user", "content": name}]}
            results[name] = post(server, body, headers={"x-request-id": "a"})

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, response in results.items():
            assert response.headers["x-request-id"] == "a"
            assert name in response.json()["choices"][0]["message"]["content"]
        assert len({request.request_id for request in server.engine.requests}) == 2
        made = HTTP.get(server.url + "/nope", headers={"x-request-id": "x" * 300}).headers["x-request-id"]
        assert len(made) == 32
    with live(says("x")) as server:
        assert "x-request-id" not in post(server, {"messages": HI}, headers={"x-request-id": "a"}).headers


def test_pages_of_other_origins_need_permission():
    ours, other = {"origin": "https://a.example"}, {"origin": "https://b.example"}
    with live(says("x"), settings={"allowed_origins": ("https://a.example",), "api_key": ("k",)}) as server:
        preflight = ours | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        assert HTTP.options(server.url + CHAT, headers=preflight).status_code == 200
        allowed = post(server, {"messages": HI}, headers=ours)
        error_of(allowed, 401)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in post(server, {}, headers=other).headers
    with live(says("x")) as server:
        assert "access-control-allow-origin" not in post(server, {"messages": HI}, headers=ours).headers


def test_root_path_of_a_proxy():
    with live(says("x"), settings={"root_path": "/llm", "api_key": ("k",)}) as server:
        assert HTTP.get(server.url + "/health").status_code == 200
        error_of(HTTP.get(server.url + "/v1/models"), 401)
        assert HTTP.get(server.url + "/v1/models", headers={"authorization": "Bearer k"}).status_code == 200


def test_trickling_clients_are_not_waited_for():
    with live(says("x"), settings={"body_timeout": 0.5}) as server:
        where = (urlsplit(server.url).hostname, urlsplit(server.url).port)

        def answer_to(*parts, pause_s=0.1):
            with socket.create_connection(where, timeout=10) as sock:
                received = b""
                try:
                    for part in parts:
                        sock.sendall(part)
                        time.sleep(pause_s)
                    while data := sock.recv(1000):
                        received += data
                except (BrokenPipeError, ConnectionResetError):
                    pass
                return received

        start = time.monotonic()
        assert answer_to() == b""  # it says nothing
        assert answer_to(*[b"x"] * 20) == b""  # nor ends its first line
        assert answer_to(b"GET /health HTTP/1.1\r\n", *[b"a: b\r\n"] * 20) == b""
        assert answer_to(_head(1000), b"{").startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - start < 15
        # Requests on one connection, one after the other, are none of these.
        one = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
        assert answer_to(*[one] * 10, one.replace(b"host", b"connection: close\r\nhost")).count(b"200 OK") == 11
        assert answer_to(b"what is this\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert post(server, {"messages": HI}).status_code == 200


def test_address_that_is_taken_is_refused_at_once():
    with bind(ServerSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}: .* choose another"):
            bind(ServerSettings(port=port))
    with pytest.raises(ValueError, match=r"cannot listen on no\.such\.host\.invalid"):
        bind(ServerSettings(host="no.such.host.invalid", port=0))


def test_unix_socket(tmp_path):
    path = str(tmp_path / "server.sock")
    with live(says("x"), settings={"uds": path}) as server:
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
            assert client.get("http://x/health").status_code == 200
        with pytest.raises(ValueError, match="another server listens there"):
            bind(ServerSettings(uds=path))
    bind(ServerSettings(uds=path)).close()  # the file is left, but nobody listens


def test_https(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    options = ["-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    for_here = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", "req", *options, *for_here], check=True, capture_output=True)
    files = {"ssl_keyfile": str(key), "ssl_certfile": str(certificate)}
    with live(says("x"), settings=files) as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        assert httpx.get(server.url + "/health", verify=context).status_code == 200
    with (
        pytest.raises(ValueError, match="ssl_keyfile"),
        live(says("x"), settings=files | {"ssl_keyfile": str(certificate)}),
    ):
        pass
    with pytest.raises(ValueError, match="go together"):
        ServerSettings(ssl_keyfile=str(key))


def test_two_apps_in_one_process_know_nothing_of_each_other():
    with live(says("one")) as first, live(engine=FakeEngineClient(says("two"))) as second:
        for server, text in ((first, "one"), (second, "two")):
            assert post(server, {"messages": HI}).json()["choices"][0]["message"]["content"] == text
        assert (
            'request_success_total{finished_reason="stop",model_name="fake"} 1.0'
            in HTTP.get(first.url + "/metrics").text
        )
