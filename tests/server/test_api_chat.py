"""/v1/chat/completions as OpenAI's client sees it: what is streamed, joined, is what is sent at once."""

from __future__ import annotations

import asyncio
import json

import pytest

from rorqual.tokenizer.tokenizer import Tokenizer
from tests.server.fake_engine import CHAT_TEMPLATE, EOS, FakeEngineClient, chat_tokenizer, echoes, says
from tests.server.live import HTTP, MODEL, live
from tests.unit.tiny_tokenizers import byte_level, save

HI = [{"role": "user", "content": "hi"}]
FAMILY = "👩‍👩‍👧‍👦 日本語 삼겹살 é — “quotes”"
CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln", "n": [1, {"a": "}"}]}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


def in_pieces(text):
    """A model that says a text in the smallest tokens there are, one per byte."""
    tokenizer = chat_tokenizer()
    by_bytes = {tokenizer.token_bytes(t): t for t in reversed(range(tokenizer.vocab_size))}
    ids = [by_bytes[bytes([b])] for b in text.encode()]
    return lambda _prompt, _params, _index: [*ids, *tokenizer.eos_token_ids]


def ask(server, **fields):
    body = {"model": MODEL, "messages": HI} | fields
    return HTTP.post(f"{server.url}/v1/chat/completions", json=body, timeout=30)


def chunks_of(server, **fields):
    """The stream's chunks as JSON; it must end with [DONE]."""
    response = ask(server, stream=True, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(chunks):
    """Per choice, what a client makes of a stream: message, logprobs, reason, ids."""
    answers = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            made = answers.setdefault(
                choice["index"],
                {"content": None, "reasoning": None, "calls": {}, "logprobs": None, "ends": [], "ids": None},
            )
            delta = choice["delta"]
            assert not made["ends"], "nothing comes after the end"
            if "content" in delta and "role" not in delta:
                made["content"] = (made["content"] or "") + delta["content"]
            if "reasoning_content" in delta:
                made["reasoning"] = (made["reasoning"] or "") + delta["reasoning_content"]
            for call in delta.get("tool_calls", ()):
                kept = made["calls"].setdefault(call["index"], {"arguments": ""})
                if "id" in call:
                    assert "id" not in kept, "a call's id and name are said once"
                    assert call["type"] == "function"
                    kept |= {"id": call["id"], "name": call["function"]["name"]}
                kept["arguments"] += call["function"]["arguments"]
            if choice["logprobs"] is not None:
                made["logprobs"] = (made["logprobs"] or []) + choice["logprobs"]["content"]
            if "token_ids" in choice:
                made["ids"] = (made["ids"] or []) + choice["token_ids"]
            if choice["finish_reason"] is not None:
                made["ends"].append((choice["finish_reason"], choice["stop_reason"]))
    return [answers[i] for i in sorted(answers)]


def at_once(response):
    """The same of an answer that was not streamed."""
    assert response.status_code == 200, response.text
    return [
        {
            "content": choice["message"]["content"],
            "reasoning": choice["message"].get("reasoning_content"),
            "calls": {
                i: {"arguments": call["function"]["arguments"], "id": call["id"], "name": call["function"]["name"]}
                for i, call in enumerate(choice["message"].get("tool_calls", ()))
            },
            "logprobs": None if choice["logprobs"] is None else choice["logprobs"]["content"],
            "ends": [(choice["finish_reason"], choice["stop_reason"])],
            "ids": choice.get("token_ids"),
        }
        for choice in response.json()["choices"]
    ]


def comparable(answers):
    """Without what is made up anew for each request; no content and empty content are one in a stream."""
    for answer in answers:
        for call in answer["calls"].values():
            assert call.pop("id").startswith("call_")
        if not (answer["calls"] or answer["reasoning"]):
            answer["content"] = answer["content"] or ""
    return answers


CASES = {
    "text": ("Hello world, the quick brown fox", {}),
    "characters of several tokens": (FAMILY, {}),
    "stop string": (f"Hello {FAMILY} world", {"stop": ["語 삼", "zz"]}),
    "stop string that only begins": ("Hello worl", {"stop": "world"}),
    "stop string that stays": ("Hello world", {"stop": "wor", "include_stop_str_in_output": True}),
    "logprobs": (FAMILY, {"logprobs": True, "top_logprobs": 4}),
    "logprobs without candidates": ("Hello", {"logprobs": True}),
    "cut in a character": ("日本語", {"max_tokens": 4}),
    "special tokens": ("a<s>b", {"skip_special_tokens": False}),
    "special tokens left out": ("a<s>b", {"logprobs": True}),
    "ids": ("Hello", {"return_token_ids": True}),
    "several": ("Hello", {"n": 3, "seed": 1}),
    "thinking": ("<think>\nhmm, 日本\n</think>\n\nYes", {}),
    "thinking and a stop string": ("<think>\nhmm\n</think>\n\nYes", {"stop": ["</thinkXX", "zz"]}),
    "thinking that is cut": ("<think>\nhmm and more", {"max_tokens": 10}),
    "tool call": (CALL, {"tools": TOOLS}),
    "tool calls and text": (f"Well. {CALL}\n{CALL}", {"tools": TOOLS}),
    "one of two tool calls": (f"{CALL}\n{CALL}", {"tools": TOOLS, "parallel_tool_calls": False}),
    "tool call without arguments": ('<tool_call>{"name": "now", "arguments": {}}</tool_call>', {"tools": TOOLS}),
    "tool call that is cut": (CALL, {"tools": TOOLS, "max_tokens": 30}),
    "tool call that nobody asked for": (CALL, {}),
    "tool call after thinking": (f"<think>x</think>\n\n{CALL}", {"tools": TOOLS}),
    "no such tool call": ("<tool_call>\n{broken", {"tools": TOOLS}),
}

CHAT = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}


@pytest.mark.parametrize("case", CASES)
def test_stream_is_the_whole_answer_whatever_the_steps(case):
    text, fields = CASES[case]
    with live(in_pieces(text), settings=CHAT) as server:
        whole = comparable(at_once(ask(server, **fields)))
        usage = ask(server, **fields).json()["usage"]
        for server.engine.tokens_per_step in (1, 2, 3, 7, 1000):
            chunks = chunks_of(server, stream_options={"include_usage": True}, **fields)
            assert comparable(joined(chunks)) == whole
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == usage
        assert len(whole) == fields.get("n", 1)


def test_what_the_cases_are():
    """The comparison above would hold for a server that always says nothing."""
    with live(in_pieces(""), settings=CHAT) as server:

        def answer(case):
            text, fields = CASES[case]
            server.engine.script = in_pieces(text)
            return at_once(ask(server, **fields))[0]

        assert answer("characters of several tokens")["content"] == FAMILY
        stopped = answer("stop string")
        assert (stopped["content"], stopped["ends"]) == ("Hello 👩‍👩‍👧‍👦 日本", [("stop", "語 삼")])
        assert answer("stop string that only begins")["content"] == "Hello worl"
        assert answer("stop string that stays")["content"] == "Hello wor"
        assert answer("cut in a character")["content"] == "日\ufffd"
        assert answer("cut in a character")["ends"] == [("length", None)]
        assert answer("special tokens")["content"] == "a<s>b"
        assert answer("thinking")["reasoning"] == "hmm, 日本"
        assert answer("thinking")["content"] == "Yes"
        assert answer("thinking and a stop string")["reasoning"] == "hmm"
        assert answer("thinking that is cut")["content"] is None
        assert answer("thinking that is cut")["ends"] == [("length", None)]
        called = answer("tool call")
        assert called["content"] is None
        assert called["ends"] == [("tool_calls", None)]
        assert called["calls"][0]["name"] == "now"
        assert json.loads(called["calls"][0]["arguments"]) == {"zone": "Köln", "n": [1, {"a": "}"}]}
        assert len(answer("tool calls and text")["calls"]) == 2
        assert answer("tool calls and text")["content"].startswith("Well.")
        assert len(answer("one of two tool calls")["calls"]) == 1
        assert answer("tool call without arguments")["calls"][0]["arguments"] == "{}"
        assert answer("tool call that is cut")["ends"] == [("length", None)]
        assert answer("tool call that nobody asked for")["content"] == CALL
        assert answer("tool call after thinking")["reasoning"] == "x"
        assert answer("no such tool call")["content"] == "<tool_call>\n{broken"


def test_openai_client_takes_every_kind_of_answer():
    with live(in_pieces(f"Well. {CALL}"), settings=CHAT) as server:
        client = server.client()
        fields = {"model": MODEL, "messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 2, "n": 2}
        whole = client.chat.completions.create(**fields)
        assert whole.choices[1].message.tool_calls[0].function.name == "now"
        with client.chat.completions.stream(**fields) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion()
        assert final.choices[1].message.content == whole.choices[1].message.content
        assert final.choices[1].finish_reason == "tool_calls"
        call = final.choices[0].message.tool_calls[0].function
        assert call.arguments == whole.choices[0].message.tool_calls[0].function.arguments


def test_openai_client_for_asyncio_gets_many_answers_at_once():
    with live(echoes, delay_s=0.001) as server:

        async def one(client, text):
            parts = []
            stream = await client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": text}], stream=True
            )
            async for chunk in stream:
                parts.append(chunk.choices[0].delta.content or "")
            return "".join(parts)

        async def all_of_them():
            async with server.async_client() as client:
                return await asyncio.gather(*(one(client, f"number {i}") for i in range(16)))

        for i, text in enumerate(asyncio.run(all_of_them())):
            assert text == f"0:user\nnumber {i}"
        assert server.state.num_answers == 0


def test_chunks_have_one_head_and_each_choice_one_role_and_one_end():
    with live(says("Hello world")) as server:
        chunks = chunks_of(server, n=2)
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        assert chunks[0]["id"].startswith("chatcmpl-")
        assert all("usage" not in c for c in chunks)
        for index in (0, 1):
            mine = [choice for c in chunks for choice in c["choices"] if choice["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert [choice["delta"].get("role") for choice in mine[1:]] == [None] * (len(mine) - 1)
            assert [choice["finish_reason"] for choice in mine][-1] == "stop"
            assert sum(choice["finish_reason"] is not None for choice in mine) == 1


def test_usage_comes_when_asked_for_and_counts_cached_tokens():
    with live(says("Hello world"), num_cached_tokens=16) as server:
        with_usage = chunks_of(server, stream_options={"include_usage": True})
        assert all(c["usage"] is None and c["choices"] for c in with_usage[:-1])
        usage = with_usage[-1]["usage"]
        assert usage == ask(server).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert usage["prompt_tokens"] == len(server.engine.requests[0].prompt_token_ids)
        running = [
            c["usage"]["completion_tokens"] for c in chunks_of(server, stream_options={"continuous_usage_stats": True})
        ]
        assert running == sorted(running)
        assert running[-1] == usage["completion_tokens"]


def test_logprobs_have_bytes_that_make_the_text_and_are_json():
    with live(in_pieces(FAMILY)) as server:
        choice = ask(server, logprobs=True, top_logprobs=5).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        text = b"".join(bytes(entry["bytes"]) for entry in entries if entry["bytes"] is not None)
        assert text.decode() == choice["message"]["content"] == FAMILY
        assert entries[-1]["token"] == "<|im_end|>"
        assert entries[-1]["bytes"] is None
        assert all(len(entry["top_logprobs"]) == 5 for entry in entries)
        top = [candidate["logprob"] for candidate in entries[0]["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert min(top) == -9999.0  # minus infinity is no JSON
        by_id = ask(server, logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["content"]
        ids = ask(server, return_token_ids=True).json()["choices"][0]["token_ids"]
        assert [entry["token"] for entry in by_id] == [f"token_id:{i}" for i in ids]


def test_prompt_logprobs_are_the_same_streamed():
    with live(says("x")) as server:
        whole = ask(server, prompt_logprobs=1, return_token_ids=True).json()
        chunks = chunks_of(server, prompt_logprobs=1, return_token_ids=True)
        assert whole["prompt_logprobs"] == chunks[0]["prompt_logprobs"]
        assert whole["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
        assert whole["prompt_logprobs"][0] is None
        assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]


def test_parameters_reach_the_engine():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1.0},
        "allowed_token_ids": [5, 6],
        "bad_words": ["no"],
        "seed": -1,
        "n": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 5,
        "skip_special_tokens": False,
    }
    with live(says("x"), generation_config={"temperature": 0.6, "top_k": 20, "min_p": 0.05}) as server:
        assert ask(server, **given, cache_salt="salt").status_code == 200
        request = server.engine.requests[-1]
        sent = request.params.model_dump(exclude_unset=True)
        expected = given | {"logit_bias": {5: 1.0}, "seed": 2**64 - 1, "stop": ("a", "b")}
        assert sent == expected
        assert request.cache_salt == "salt"
        nothing = dict.fromkeys(given)  # null is unset
        assert ask(server, **nothing).status_code == 200
        assert server.engine.requests[-1].params.model_dump(exclude_unset=True) == {
            "temperature": 0.6,
            "top_k": 20,
            "min_p": 0.05,
        }


def test_newer_name_of_max_tokens_wins_and_too_many_are_cut_at_the_context():
    with live(says("Hello world and more", end=False), max_model_len=40) as server:
        assert ask(server, max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3
        filled = ask(server)
        for limit in (10_000, 10**30):
            cut = ask(server, max_tokens=limit, ignore_eos=True)
            assert cut.json()["choices"][0]["finish_reason"] == "length"
            assert cut.json()["usage"]["total_tokens"] == 40
        assert filled.status_code == 200


def test_messages_reach_the_template_as_they_are():
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    with live(says("x")) as server:

        def prompt(messages, **fields):
            response = ask(server, messages=messages, **fields)
            assert response.status_code == 200, response.text
            return chat_tokenizer().decode(server.engine.requests[-1].prompt_token_ids, skip_special_tokens=False)

        plain = prompt(HI)
        assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert prompt([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]) == plain
        assert prompt(HI, add_generation_prompt=False) == plain.removesuffix("<|im_start|>assistant\n")
        unfinished = [*HI, {"role": "assistant", "content": "Well,"}]
        assert prompt(unfinished, continue_final_message=True).endswith("<|im_start|>assistant\nWell,")
        assert "<think>" in prompt(HI, chat_template_kwargs={"enable_thinking": False})
        with_tools = prompt(HI, tools=TOOLS)
        assert '"name": "now"' in with_tools
        assert prompt(HI, tools=TOOLS, tool_choice="none") == plain
        history = [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "9", "tool_call_id": "1"},
        ]
        for content in ({}, {"content": None}, {"content": ""}):
            with_call = prompt([history[0], history[1] | content, history[2]])
            assert "<tool_call>" in with_call
            assert "<|im_start|>tool\n9" in with_call


def test_own_message_can_be_sent_back():
    with live(in_pieces(f"<think>x</think>{CALL}"), settings=CHAT) as server:
        message = ask(server, tools=TOOLS).json()["choices"][0]["message"]
        answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "noon"}
        assert ask(server, messages=[*HI, message, answer], tools=TOOLS).status_code == 200


def test_template_of_a_request_needs_the_servers_trust():
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    with live(says("x")) as server:
        refused = ask(server, chat_template=template)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "chat_template"
        assert ask(server, chat_template="default").status_code == 200
    with live(says("x"), settings={"trust_request_chat_template": True}) as server:
        assert ask(server, chat_template=template).status_code == 200
        assert chat_tokenizer().decode(server.engine.requests[-1].prompt_token_ids) == "[hi]"
        for wrong in ("{% for", "/etc/passwd", "{{ messages[0].__class__.__mro__ }}{{ 1 / 0 }}"):
            assert ask(server, chat_template=wrong).status_code == 400


def test_thinking_that_the_prompt_closed_is_not_looked_for():
    with live(says("Yes"), settings=CHAT) as server:
        choice = ask(server, chat_template_kwargs={"enable_thinking": False}).json()["choices"][0]
        assert choice["message"]["content"] == "Yes"
        assert "reasoning_content" not in choice["message"]


def test_echo_begins_with_the_last_message():
    unfinished = [*HI, {"role": "assistant", "content": "Well,"}]
    fields = {"messages": unfinished, "echo": True, "continue_final_message": True}
    with live(says(" yes")) as server:
        assert at_once(ask(server, **fields))[0]["content"] == "Well, yes"
        assert joined(chunks_of(server, **fields))[0]["content"] == "Well, yes"


def test_forced_calls_are_json_of_the_tools_schema():
    with live(says('{"zone": "x"}')) as server:
        named = {"type": "function", "function": {"name": "now"}}
        choice = ask(server, tools=TOOLS, tool_choice=named).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"zone": "x"}'}
        form = server.engine.requests[-1].params.structured_outputs
        assert form.json_schema == TOOLS[0]["function"]["parameters"]
        server.engine.script = says('[{"name": "now", "parameters": {"a": 1}}]')
        choice = ask(server, tools=TOOLS, tool_choice="required").json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}


def test_forms_reach_the_engine():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with live(says("{}")) as server:

        def form(**fields):
            assert ask(server, **fields).status_code == 200
            found = server.engine.requests[-1].params.structured_outputs
            return found and {k: v for k, v in found.model_dump().items() if v is not None}

        assert form(response_format={"type": "text"}) is None
        assert form(response_format={"type": "json_object"}) == {"json_object": True}
        assert form(response_format=wrapped) == {"json_schema": schema}
        assert form(guided_json=schema) == form(structured_outputs={"json": schema}) == {"json_schema": schema}
        assert form(guided_json=json.dumps(schema)) == {"json_schema": schema}
        assert form(guided_regex="a+") == {"regex": "a+"}
        assert form(guided_choice=["a", "b"]) == {"choice": ["a", "b"]}
        assert form(guided_grammar='start: "a"') == {"grammar": 'start: "a"'}
        two = ask(server, guided_regex="a", guided_choice=["a"])
        assert two.status_code == 400
        assert "guided_regex and guided_choice" in two.json()["error"]["message"]
        assert ask(server, guided_choice=[]).json()["error"]["param"] == "guided_choice"


def test_special_tokens_that_begin_calls_reach_the_parser(tmp_path):
    backend = byte_level("qwen2")
    backend.add_special_tokens(["[TOOL_CALLS]", "[OTHER]"])
    tokenizer = Tokenizer.from_folder(save(backend, tmp_path, {"eos_token": EOS, "chat_template": CHAT_TEMPLATE}))
    text = '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}]'
    engine = FakeEngineClient(lambda _prompt, _params, _index: [*tokenizer.encode(text), *tokenizer.eos_token_ids])
    engine.tokenizer = tokenizer
    with live(engine=engine, tokenizer=tokenizer, settings={"tool_call_parser": "mistral"}) as server:
        choice = ask(server, tools=TOOLS).json()["choices"][0]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": 1}'}
        assert ask(server).json()["choices"][0]["message"]["content"] == text.removeprefix("[TOOL_CALLS]")
        kept = ask(server, skip_special_tokens=False).json()["choices"][0]["message"]["content"]
        assert kept == text
