"""What is wrong with a request, in one shape, with the right status and the name of the field."""

from __future__ import annotations

import http.client
import json
import logging
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.server.fake_engine import says
from tests.server.live import HTTP, MODEL, live

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server():
    with live(says("Hello"), settings={"max_body_size": 20_000}) as running:
        yield running


def error_of(response, status):
    """The error's body, whose shape is always the same."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    return body["error"]


def post(server, body, path=CHAT, **options):
    return HTTP.post(server.url + path, json=body, timeout=30, **options)


BAD_VALUES = [
    ("temperature", -1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", 1e999),
    ("temperature", float("nan")),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("n", 0),
    ("n", 129),
    ("n", 10**9),
    ("n", "2"),
    ("seed", 1.5),
    ("seed", "x"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["", "x"]),
    ("stop", [1]),
    ("stop", 5),
    ("stop", ["x"] * 1025),
    ("bad_words", ["x"] * 1025),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", "x"),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 1.5),
    ("max_completion_tokens", 0),
    ("min_tokens", -1),
    ("logit_bias", {"999999": 5}),
    ("logit_bias", {"-1": 5}),
    ("logit_bias", {"abc": 5}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", [1]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [10**9]),
    ("bad_words", [""]),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", 10**9),
    ("logprobs", 5),
    ("stream", "yes"),
    ("stream_options", []),
    ("stream_options", {"include_usage": 1}),
    ("messages", []),
    ("messages", "hi"),
    ("messages", [1]),
    ("messages", [{"content": "no role"}]),
    ("messages", [{"role": 5, "content": "x"}]),
    ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": "\ud800"}]),
    ("messages", None),
    ("tools", [{"type": "function"}]),
    ("tools", [{"type": "web_search"}]),
    ("tools", {}),
    ("tool_choice", "required"),
    ("tool_choice", "perhaps"),
    ("tool_choice", {"type": "function", "function": {"name": "nope"}}),
    ("response_format", {"type": "yaml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("guided_regex", ""),
    ("chat_template", "no such"),
    ("chat_template_kwargs", {"messages": []}),
    ("chat_template_kwargs", {"self": 1}),
    ("chat_template_kwargs", 5),
    ("model", 5),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_bad_value_is_400_and_names_the_field(server, name, value):
    body = json.dumps({"model": MODEL, "messages": HI} | {name: value})
    response = post(server, None, content=body, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["param"].split(".")[0] == name
    assert name in error["message"]
    assert error["type"] == "invalid_request_error"
    assert post(server, {"messages": HI}).status_code == 200


def test_fields_are_named_by_their_path(server):
    for messages, path in (
        ([{"content": "x"}], "messages.0.role"),
        ([*HI, {"role": "user", "content": 5}], "messages.1.content"),
    ):
        assert error_of(post(server, {"messages": messages}), 400)["param"] == path


def test_limits_of_logprobs_are_told_under_the_name_that_was_used(server):
    for fields in ({"top_logprobs": 21}, {"top_logprobs": 2 * 10**9}, {"top_logprobs": -1}):
        error = error_of(post(server, {"messages": HI, "logprobs": True} | fields), 400)
        assert error["param"] == "top_logprobs"
        assert error["message"].startswith("top_logprobs must be")
    assert error_of(post(server, {"messages": HI, "top_logprobs": 2}), 400)["param"] == "top_logprobs"
    for value in (21, 10**9, -1, True, 1.5):
        error = error_of(post(server, {"prompt": "x", "logprobs": value}, "/v1/completions"), 400)
        assert error["param"] == "logprobs"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a": }',
        b"[1, 2]",
        b'"x"',
        b"null",
        b"5",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b"[" * 5000,
        b'{"a": 1e5000000}',
    ],
)
def test_body_that_is_no_object_is_400(server, path, body):
    response = HTTP.post(server.url + path, content=body, headers={"content-type": "application/json"})
    error_of(response, 400)


def test_body_of_another_type_is_400_and_says_so(server):
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        headers = {} if kind is None else {"content-type": kind}
        response = HTTP.post(server.url + CHAT, content=json.dumps({"messages": HI}).encode(), headers=headers)
        assert "Content-Type: application/json" in error_of(response, 400)["message"]


def test_unknown_model_path_and_method(server):
    error = error_of(post(server, {"model": "nope", "messages": HI}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert MODEL in error["message"]
    assert error_of(HTTP.get(server.url + "/v1/models/nope"), 404)["code"] == "model_not_found"
    for path in ("/nope", "/v1/nope", "/v1", "/health/x", "/reset_prefix_cache"):
        assert error_of(HTTP.post(server.url + path), 404)["type"] == "not_found_error"
    for method, path in (
        ("GET", CHAT),
        ("PUT", "/v1/completions"),
        ("POST", "/v1/models"),
        ("DELETE", "/health"),
        ("TRACE", CHAT),
    ):
        response = HTTP.request(method, server.url + path)
        error_of(response, 405)
        assert response.headers["allow"]


def test_openai_client_raises_its_own_errors(server):
    client = server.client()
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nope", messages=HI)
    assert unknown.value.code == "model_not_found"


def test_too_large_a_body_is_413_however_it_is_sent(server):
    large = json.dumps({"messages": [{"role": "user", "content": "x" * 20_000}]}).encode()
    huge = json.dumps({"messages": [{"role": "user", "content": "x" * 10_000_000}]}).encode()
    headers = {"content-type": "application/json"}
    error_of(HTTP.post(server.url + CHAT, content=large, headers=headers), 413)
    error_of(HTTP.post(server.url + CHAT, content=iter([large[:5000], large[5000:]]), headers=headers), 413)
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.putrequest("POST", CHAT)
    connection.putheader("content-length", str(len(huge)))
    connection.endheaders(huge[:1000])  # it is refused by what its length says
    assert connection.getresponse().status == 413
    with pytest.raises((httpx.TransportError, AssertionError)):
        # Nobody reads ten megabytes for a client that sends them without a length; it may see no answer.
        error_of(HTTP.post(server.url + CHAT, content=iter([huge[:100_000]] * 100), headers=headers), 200)
    assert post(server, {"messages": HI}).status_code == 200


def test_unknown_fields_are_ignored_and_logged_once(server, caplog):
    body = {"messages": HI, "foo_bar": 1, "metadata": {"a": "b"}, "store": True, "user": "me", "service_tier": "auto"}
    with caplog.at_level(logging.WARNING, logger="rorqual.server"):
        for _ in range(3):
            assert post(server, body).status_code == 200
    assert caplog.text.count("foo_bar") == 1
    assert "'user'" not in caplog.text


def test_fault_of_an_answer_is_500_and_ends_a_stream():
    with live(says("Hello world")) as server:
        server.engine.error_at = 2
        error = error_of(post(server, {"messages": HI}), 500)
        assert "not finite" in error["message"]
        text = post(server, {"messages": HI, "stream": True}).text
        events = [json.loads(line[6:]) for line in text.strip().split("\n\n")]
        assert "not finite" in events[-1]["error"]["message"]
        assert all("choices" in event for event in events[:-1])
        with pytest.raises(openai.APIError, match="not finite"):
            list(server.client().chat.completions.create(model=MODEL, messages=HI, stream=True))
        server.engine.error_at = None
        server.engine.refuses = "a prompt like this can never be served"
        for stream in (False, True):
            assert "never be served" in error_of(post(server, {"messages": HI, "stream": stream}), 400)["message"]
        server.engine.refuses = None
        assert post(server, {"messages": HI}).status_code == 200


def test_fault_in_the_server_is_500_without_its_insides(monkeypatch):
    with live(says("x")) as server:
        monkeypatch.setattr(server.state, "model_name", lambda _asked: 1 / 0)
        error = error_of(post(server, {"messages": HI}), 500)
        assert "division" not in error["message"]


def test_openapi_declares_every_error_and_no_422(server):
    described = HTTP.get(server.url + "/openapi.json").json()
    for path in (CHAT, "/v1/completions", "/v1/models", "/tokenize", "/health", "/ready"):
        for operation in described["paths"][path].values():
            assert {"200", "400", "401", "404", "405", "413", "429", "500", "503"} <= set(operation["responses"])
            assert "422" not in operation["responses"]
            schema = operation["responses"]["503"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/ErrorResponse"}
    for name, fields in (
        ("ChatRequest", {"messages", "max_completion_tokens", "tools", "top_k"}),
        ("CompletionRequest", {"prompt", "echo"}),
    ):
        assert fields <= set(described["components"]["schemas"][name]["properties"])
    assert {"choices", "usage"} <= set(described["components"]["schemas"]["ChatCompletion"]["properties"])
