"""/v1/responses as the openai client sees it, strictly, over an engine that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from rorqual.server.errors import APIError
from rorqual.server.parsing.events import Content, Reasoning, ToolCallArguments, ToolCallStart
from rorqual.server.response_events import ResponseBuilder
from rorqual.server.response_items import messages_of
from rorqual.server.response_store import ResponseStore
from rorqual.server.schemas import responses as api
from tests.server.fake_engine import chat_tokenizer, echoes, says
from tests.server.live import Live, live

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TEXT = "Grüße 👩‍👩‍👧‍👦 日本語 <b>a    b</b>"


class Served:
    """A server, its engine, and a strict client of it."""

    def __init__(self, server: Live) -> None:
        self.url, self.engine, self.client = server.url, server.engine, server.client()

    def says(self, text: str, *, end: bool = True, tokens_per_step: int = 1) -> None:
        self.engine.script, self.engine.tokens_per_step = says(text, end=end), tokens_per_step

    @property
    def prompt(self) -> str:
        return chat_tokenizer().decode(self.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    settings = {"served_model_name": ("m",), "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with live(settings=settings, num_cached_tokens=3) as server:
        yield Served(server)


@pytest.fixture
def served(server: Served) -> Served:
    server.engine.script, server.engine.tokens_per_step, server.engine.delay_s = echoes, 1, 0.0
    server.engine.error_at = server.engine.refuses = None
    return server


def test_text(served: Served) -> None:
    served.says(TEXT)
    response = served.client.responses.create(
        model="m",
        input="Hello",
        instructions="Be short.",
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=100,
        metadata={"a": "b"},
    )
    assert response.output_text == TEXT
    assert (response.status, response.model, response.metadata) == ("completed", "m", {"a": "b"})
    assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 100)
    assert response.instructions == "Be short."
    assert served.prompt == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    params = served.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 100)
    usage = response.usage
    assert usage is not None
    assert usage.input_tokens == len(served.engine.requests[-1].prompt_token_ids)
    assert usage.output_tokens == len(says(TEXT)([], params, 0))
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("tokens_per_step", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("text", "tools"),
    [
        (TEXT, []),
        ("<think>\nLet me see…\n</think>\n\nIt is so.", []),
        (CALL, [WEATHER]),
        (f"Let me look.\n{CALL}\n{CALL}", [WEATHER]),
        (f"<think>\nHm.\n</think>\n\n{CALL}", [WEATHER]),
        ("", []),
    ],
)
def test_a_stream_is_the_same_response(
    served: Served, text: str, tools: list[dict[str, Any]], tokens_per_step: int
) -> None:
    served.says(text, tokens_per_step=tokens_per_step)
    request: dict[str, Any] = {"model": "m", "input": "Hello", "tools": tools}
    whole = served.client.responses.create(**request)
    events = list(served.client.responses.create(**request, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert sum(e.type == "response.completed" for e in events) == 1
    assert _as_text(events[-1].response.output) == _as_text(whole.output)
    assert events[-1].response.usage == whole.usage
    _check_items(events)
    with served.client.responses.stream(**request) as stream:
        for _ in stream:
            pass
        assert _as_text(stream.get_final_response().output) == _as_text(whole.output)


def _as_text(output: list[Any]) -> list[dict[str, Any]]:
    """Items without what is made anew each time."""
    made = [item.model_dump(exclude_none=True, exclude={"id", "call_id", "parsed_arguments"}) for item in output]
    for item in made:
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return made


def _check_items(events: list[Any]) -> None:
    """Each item is added, told piece by piece, and done, in this order and before the next one."""
    text: dict[int, str] = {}
    done: list[int] = []
    for e in events[2:-1]:
        assert e.output_index == len(done)
        kind = e.type.removeprefix("response.")
        if kind == "output_item.added":
            assert e.output_index not in text
            text[e.output_index] = ""
        elif kind.endswith(".delta"):
            assert e.delta
            text[e.output_index] += e.delta
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert e.text == text[e.output_index]
        elif kind == "function_call_arguments.done":
            assert e.arguments == text[e.output_index]
        elif kind == "output_item.done":
            assert e.item.status == "completed"
            done.append(e.output_index)
        else:
            assert kind in ("content_part.added", "content_part.done")
    assert done == list(range(len(events[-1].response.output)))


def test_thinking_is_an_item_of_its_own(served: Served) -> None:
    served.says("<think>\nLet me see…\n</think>\n\nIt is so.")
    response = served.client.responses.create(model="m", input="Hello")
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "Let me see…"
    assert response.output[0].summary == []
    assert response.output_text == "It is so."
    tokenizer = chat_tokenizer()
    num_thinking = len(tokenizer.encode("<think>\nLet me see…\n</think>", add_special_tokens=False))
    assert response.usage.output_tokens_details.reasoning_tokens == num_thinking

    summarized = served.client.responses.create(model="m", input="Hello", reasoning={"summary": "auto"})
    assert summarized.output[0].summary[0].text == "Let me see…"
    assert not summarized.output[0].content
    with served.client.responses.stream(model="m", input="Hello", reasoning={"summary": "auto"}) as stream:
        said = [e.delta for e in stream if e.type == "response.reasoning_summary_text.delta"]
    assert "".join(said) == "Let me see…"


def test_thinking_that_was_cut(served: Served) -> None:
    served.says("<think>\nLet me see and see and see")
    response = served.client.responses.create(model="m", input="Hello", max_output_tokens=6)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.type for item in response.output] == ["reasoning"]
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens_details.reasoning_tokens == 6


def test_a_cut_answer_is_incomplete(served: Served) -> None:
    served.says("one two three four five six seven eight")
    request: dict[str, Any] = {"model": "m", "input": "Hello", "max_output_tokens": 3}
    response = served.client.responses.create(**request)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"
    events = list(served.client.responses.create(**request, stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == response.output_text != ""


def test_tool_calls_and_back(served: Served) -> None:
    served.says(CALL)
    response = served.client.responses.create(model="m", input="How is it in Köln?", tools=[WEATHER])
    (call,) = response.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Köln"})
    served.says("It rains.")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    second = served.client.responses.create(
        model="m", input=[{"role": "user", "content": "How is it in Köln?"}, call, output], tools=[WEATHER]
    )
    by_hand = served.prompt
    assert second.output_text == "It rains."
    assert "Köln" in by_hand.split("<tool_call>")[1]
    assert "<|im_start|>tool\nrain<|im_end|>" in by_hand
    served.client.responses.create(model="m", input=[output], previous_response_id=response.id, tools=[WEATHER])
    assert served.prompt == by_hand


def test_only_one_call(served: Served) -> None:
    served.says(f"{CALL}\n{CALL}")
    response = served.client.responses.create(model="m", input="Hello", tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["function_call"]
    assert response.parallel_tool_calls is False


def test_no_tools_no_calls(served: Served) -> None:
    served.says(CALL)
    response = served.client.responses.create(model="m", input="Hello", tools=[WEATHER], tool_choice="none")
    assert response.output_text == CALL


def test_a_conversation_goes_on(served: Served) -> None:
    served.says("<think>\nHm.\n</think>\n\nFirst.")
    first = served.client.responses.create(model="m", input="One", instructions="Be short.")
    served.says("Second.")
    second = served.client.responses.create(model="m", input="Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    served.says("Third.")
    served.client.responses.create(
        model="m", input="Three", previous_response_id=second.id, instructions="Be long.", stream=True
    ).close()
    with served.client.responses.stream(
        model="m", input="Three", previous_response_id=second.id, instructions="Be long."
    ) as stream:
        third = stream.get_final_response()
    turns = ["system\nBe long.", "user\nOne", "assistant\nFirst.", "user\nTwo", "assistant\nSecond.", "user\nThree"]
    assert served.prompt == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
    assert served.client.responses.retrieve(third.id).output_text == "Third."


def test_what_is_not_stored_is_not_found(served: Served) -> None:
    served.says("Yes.")
    kept = served.client.responses.create(model="m", input="Hello")
    assert kept.store is True
    assert served.client.responses.retrieve(kept.id) == kept
    served.client.responses.delete(kept.id)
    unkept = served.client.responses.create(model="m", input="Hello", store=False)
    for response_id in (kept.id, unkept.id, "resp_nonsense"):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            served.client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            served.client.responses.delete(response_id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            served.client.responses.cancel(response_id)
        with pytest.raises(openai.NotFoundError, match="there is no response") as caught:
            served.client.responses.create(model="m", input="Hello", previous_response_id=response_id)
        assert caught.value.param == "previous_response_id"


def test_cancelling_what_has_ended(served: Served) -> None:
    kept = served.client.responses.create(model="m", input="Hello")
    with pytest.raises(openai.BadRequestError, match="has ended"):
        served.client.responses.cancel(kept.id)


class Person(BaseModel):
    name: str
    age: int


def test_parse(served: Served) -> None:
    served.says('{"name": "Ada", "age": 36}')
    response = served.client.responses.parse(model="m", input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)
    assert response.text.format.type == "json_schema"
    structured = served.engine.requests[-1].params.structured_outputs
    assert structured.json_schema["properties"].keys() == {"name", "age"}
    with served.client.responses.stream(model="m", input="Who?", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)


def test_logprobs(served: Served) -> None:
    served.says("<think>\nHm.\n</think>\n\nGrüße dahin")
    request: dict[str, Any] = {
        "model": "m",
        "input": "Hello",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = served.client.responses.create(**request)
    entries = whole.output[1].content[0].logprobs
    said = bytes(b for entry in entries for b in entry.bytes).decode()
    assert said.strip() == "Grüße dahin"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    events = list(served.client.responses.create(**request, stream=True))
    pieces = [entry for e in events if e.type == "response.output_text.delta" for entry in e.logprobs]
    assert len(pieces) > 1
    assert [p.logprob for p in pieces] == [e.logprob for e in entries][: len(pieces)]
    assert events[-1].response.output[1].content == whole.output[1].content
    none = served.client.responses.create(model="m", input="Hello")
    assert none.output[1].content[0].logprobs == []


def test_truncation(served: Served) -> None:
    served.says("Yes.")
    turns = [{"role": "system", "content": "S."}]
    for i in range(40):
        turns += [{"role": "user", "content": f"question {i} " * 3}, {"role": "assistant", "content": f"answer {i}"}]
    turns.append({"role": "user", "content": "last"})
    with pytest.raises(openai.BadRequestError, match="context") as caught:
        served.client.responses.create(model="m", input=turns)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    response = served.client.responses.create(model="m", input=turns, truncation="auto")
    assert response.truncation == "auto"
    prompt = served.prompt
    assert prompt.startswith("<|im_start|>system\nS.<|im_end|>\n<|im_start|>user\nquestion ")
    assert prompt.endswith("<|im_start|>user\nlast<|im_end|>\n<|im_start|>assistant\n")
    kept = prompt.count("answer ")
    assert 0 < kept < 40
    # One turn more would not fit.
    number = int(prompt.split("question ")[1].split()[0])
    longer = chat_tokenizer().encode(f"<|im_start|>user\n{f'question {number - 1} ' * 3}<|im_end|>\n")
    answered = chat_tokenizer().encode(f"<|im_start|>assistant\nanswer {number - 1}<|im_end|>\n")
    assert len(served.engine.requests[-1].prompt_token_ids) + len(longer) + len(answered) >= 512
    with pytest.raises(openai.BadRequestError, match="context"):
        served.client.responses.create(model="m", input="word " * 600, truncation="auto")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"input": []}, "input", "at least one message"),
        ({"input": 3}, "input", None),
        ({"input": [{"type": "computer_call"}]}, "input.0.type", "must be one of message"),
        ({"input": [{"foo": 1}]}, "input.0.type", "must be one of message"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "must be one of user"),
        ({"input": [{"role": "user"}]}, "input.0.content", "is required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content.0.type",
            "must be text",
        ),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id", "is required"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "no built-in tools"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "is required"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.name",
            "one of the tools",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "must be none, auto"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools", "must name"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "is required"),
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"n": 2}, "n", "no meaning"),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"temperature": -1}, "temperature", "temperature"),
        ({"top_logprobs": 1000}, "top_logprobs", "at most 20"),
        ({"truncation": "x"}, "truncation", None),
    ],
)
def test_wrong_values(served: Served, fields: dict[str, Any], param: str, message: str | None) -> None:
    for streamed in (False, True):
        body = {"model": "m", "input": "Hello", "stream": streamed} | fields
        answer = httpx.post(f"{served.url}/v1/responses", json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert message is None or message in error["message"]


def test_other_faults(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        served.client.responses.create(model="other", input="Hello")
    served.engine.refuses = "this can never be served"
    for streamed in (False, True):
        with pytest.raises(openai.BadRequestError, match="never be served"):
            served.client.responses.create(model="m", input="Hello", stream=streamed)
    served.engine.refuses = None
    served.says("one two three four five six")
    served.engine.error_at = 3
    with pytest.raises(openai.InternalServerError, match="not finite"):
        served.client.responses.create(model="m", input="Hello")
    events = list(served.client.responses.create(model="m", input="Hello", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert "not finite" in events[-1].response.error.message
    assert events[-1].response.output[0].status == "incomplete"


def test_a_client_that_leaves_ends_its_request(served: Served) -> None:
    served.says("word " * 100, end=False)
    served.engine.delay_s = 0.005
    stream = served.client.responses.create(model="m", input="Hello", stream=True)
    for _, event in zip(range(8), stream, strict=False):
        assert event.type != "response.completed"
    stream.close()
    request = served.engine.requests[-1]
    served.client.models.list()
    for _ in range(200):
        if request.aborted:
            break
        httpx.get(f"{served.url}/version")
    assert request.aborted
    assert request.steps < 90


# --- without HTTP


def test_items_of_a_turn_are_one_message() -> None:
    items = [
        {"role": "developer", "content": "D"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "u"}]},
        {"role": "assistant", "content": "y"},
        {"role": "assistant", "content": "z"},
    ]
    calls = [
        {"id": i, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for i, name in (("1", "f"), ("2", "g"))
    ]
    assert messages_of([api.InputItem.model_validate(item) for item in items]) == [
        {"role": "system", "content": "D"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "x", "reasoning_content": "t", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "y", "reasoning_content": "u"},
        {"role": "assistant", "content": "z"},
    ]


def test_the_builder_closes_one_item_before_the_next() -> None:
    response = api.Response(id="r", created_at=0, status="in_progress", model="m")
    builder = ResponseBuilder(response, summary=False)
    said = [e.type.removeprefix("response.") for e in builder.start()]
    for event in (Reasoning("a"), Content("b"), ToolCallStart(0, "i", "f"), ToolCallArguments(0, "{}"), Content("c")):
        said += [e.type.removeprefix("response.") for e in builder.push([event])]
    said += [e.type.removeprefix("response.") for e in builder.finish("completed", None)]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    assert said == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        *text,
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        *text,
        "output_item.done",
        "completed",
    ]
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "message"]


def test_the_store_is_bounded() -> None:
    now = [0.0]
    store = ResponseStore(ttl_s=10, max_count=3, max_bytes=100, clock=lambda: now[0])

    def put(name: str, size: int) -> None:
        store.put(api.Response(id=name, created_at=0, status="completed", model="m"), [], size)

    for name in "abcd":
        put(name, 10)
    with pytest.raises(APIError, match="no response 'a'"):
        store.get("a")
    assert store.get("b").response.id == "b"
    put("e", 90)
    assert len(store) == 2
    assert store.get("d").size == 10
    put("huge", 101)
    assert len(store) == 0
    put("f", 10)
    now[0] = 9.9
    store.get("f")
    now[0] = 10.0
    with pytest.raises(APIError, match="no response 'f'"):
        store.get("f")
    assert len(store) == 0
    put("g", 10)
    store.delete("g")
    with pytest.raises(APIError, match="no response 'g'"):
        store.delete("g")
