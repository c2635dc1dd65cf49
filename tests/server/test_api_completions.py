"""/v1/completions: texts and ids, echo, logprobs, several prompts; streamed as at once. And the tokens' own routes."""

from __future__ import annotations

import json

import pytest

from tests.server.fake_engine import chat_tokenizer, echoes, prompt_candidates, says
from tests.server.live import HTTP, MODEL, live
from tests.server.test_api_chat import FAMILY, in_pieces

TEXT = "Hello 日本 world"


def ask(server, prompt="Hello", **fields):
    body = {"model": MODEL, "prompt": prompt} | fields
    return HTTP.post(f"{server.url}/v1/completions", json=body, timeout=30)


def choices_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def streamed(server, prompt="Hello", **fields):
    """The choices that a stream's chunks make, in the shape of an answer at once."""
    response = ask(server, prompt, stream=True, **fields)
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    made = {}
    for chunk in (json.loads(line.removeprefix("data: ")) for line in lines[:-2]):
        for piece in chunk["choices"]:
            choice = made.setdefault(piece["index"], piece)
            if choice is piece:
                continue
            assert choice["finish_reason"] is None, "nothing comes after the end"
            choice["text"] += piece["text"]
            if piece["logprobs"] is not None:
                for key, values in piece["logprobs"].items():
                    choice["logprobs"][key] += values
            if "token_ids" in piece:
                choice["token_ids"] += piece["token_ids"]
            for key in ("finish_reason", "stop_reason"):
                choice[key] = piece.get(key)
    return [made[i] for i in sorted(made)]


CASES = {
    "text": {},
    "stop": {"stop": "日"},
    "logprobs": {"logprobs": 3},
    "no candidates": {"logprobs": 0},
    "echo": {"echo": True},
    "echo and logprobs": {"echo": True, "logprobs": 2},
    "only the prompt's logprobs": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "several": {"prompt": ["Hello", "日本", "x"], "n": 2, "logprobs": 1, "return_token_ids": True},
    "ids": {"prompt": [[76, 77], [78]], "echo": True},
    "cut": {"max_tokens": 8},
}


@pytest.mark.parametrize("case", CASES)
def test_stream_is_the_whole_answer_whatever_the_steps(case):
    fields = CASES[case]
    with live(in_pieces(TEXT)) as server:
        whole = choices_of(ask(server, **fields))
        for server.engine.tokens_per_step in (1, 2, 5, 1000):
            assert streamed(server, **fields) == whole


def test_openai_client_takes_answers():
    with live(says(TEXT)) as server:
        got = server.client().completions.create(model=MODEL, prompt=["a", "b"], logprobs=2, n=2, max_tokens=3)
        assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
        assert got.usage.completion_tokens == 12
        # In its types no chunk but the last may come, so it cannot be strict here.
        client = server.client(_strict_response_validation=False)
        chunks = list(
            client.completions.create(model=MODEL, prompt="a", stream=True, stream_options={"include_usage": True})
        )
        assert "".join(c.choices[0].text for c in chunks[:-1]) == TEXT
        assert chunks[-1].choices == []
        assert chunks[-1].usage.prompt_tokens == 1


def test_several_prompts_are_answered_each_in_its_place():
    with live(echoes) as server:
        texts = [f"prompt {i}" for i in range(12)]
        for choices in (choices_of(ask(server, texts, n=2)), streamed(server, texts, n=2)):
            assert [c["text"] for c in choices] == [f"{i}:{text}" for text in texts for i in (0, 1)]
            assert [c["index"] for c in choices] == list(range(24))
        as_ids = [chat_tokenizer().encode(text) for text in texts]
        assert [c["text"] for c in choices_of(ask(server, as_ids, n=1))] == [f"0:{text}" for text in texts]
        assert choices_of(ask(server, as_ids[3]))[0]["text"] == "0:prompt 3"
        usage = ask(server, texts, n=2).json()["usage"]
        assert usage["prompt_tokens"] == sum(map(len, as_ids))
        assert server.state.num_answers == 0


def test_echo_scores_the_prompt_as_lm_eval_asks():
    """Its calls: ids, echo, logprobs=1, max_tokens=1; it reads token_logprobs[1:-1] and top_logprobs[1:-1]."""
    prompts = [chat_tokenizer().encode("Hello world, the quick"), chat_tokenizer().encode("日本 x")]
    with live(says("!")) as server:
        fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        for choice, ids in zip(choices_of(ask(server, prompts, **fields)), prompts, strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["token_logprobs"]) == len(ids) + 1
            assert logprobs["token_logprobs"][0] is None
            assert logprobs["top_logprobs"][0] is None
            expected = prompt_candidates(ids, 1, chat_tokenizer().vocab_size)
            scored = zip(
                ids[1:], logprobs["token_logprobs"][1:-1], logprobs["top_logprobs"][1:-1], expected[1:], strict=True
            )
            for token_id, value, top, candidates in scored:
                assert value == candidates[token_id].logprob
                by_text = {}  # different tokens may have one text: the most likely one's value stands
                for c in candidates.values():
                    by_text[c.decoded_token] = max(c.logprob, by_text.get(c.decoded_token, c.logprob))
                assert top == by_text
                best = max(candidates.values(), key=lambda c: c.logprob)
                assert max(top, key=top.get) == best.decoded_token
        nothing = choices_of(ask(server, prompts, **(fields | {"max_tokens": 0})))
        for choice, ids in zip(nothing, prompts, strict=True):
            assert len(choice["logprobs"]["tokens"]) == len(ids)
            assert choice["text"] == chat_tokenizer().decode(ids)
            assert choice["finish_reason"] == "length"
        assert ask(server, prompts, **(fields | {"max_tokens": 0})).json()["usage"]["completion_tokens"] == 0
        assert ask(server, prompts, max_tokens=0).status_code == 400


def test_offsets_say_where_each_token_begins():
    prompt = "Say 日本: "
    with live(in_pieces(FAMILY)) as server:
        choice = choices_of(ask(server, prompt, echo=True, logprobs=0))[0]
        assert choice["text"] == prompt + FAMILY
        logprobs = choice["logprobs"]
        ids = [*chat_tokenizer().encode(prompt), *in_pieces(FAMILY)(None, None, 0)]
        assert len(ids) == len(logprobs["tokens"]) == len(logprobs["text_offset"])
        data = b""
        for token_id, offset in zip(ids, logprobs["text_offset"], strict=True):
            complete = data.decode(errors="ignore")
            assert offset == len(complete), "characters that are whole before this token"
            data += chat_tokenizer().token_bytes(token_id)
        alone = choices_of(ask(server, prompt, logprobs=0))[0]["logprobs"]["text_offset"]
        assert alone[0] == 0
        assert alone == [o - len(prompt) for o in logprobs["text_offset"][-len(alone) :]]


def test_what_is_refused():
    with live(says("x"), max_model_len=32) as server:
        for fields, param in (
            ({"suffix": "x"}, "suffix"),
            ({"best_of": 3}, "best_of"),
            ({"n": 2, "best_of": 3}, "best_of"),
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [""]}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": ["a", ""]}, "prompt.1"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": [476]}, "prompt"),
            ({"prompt": [2**63]}, "prompt"),
            ({"prompt": [[1], [2**63]]}, "prompt.1"),
            ({"prompt": [1.5]}, "prompt"),
            ({"prompt": [True]}, "prompt"),
            ({"prompt": ["x", 1]}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"prompt": {"a": 1}}, "prompt"),
            ({"prompt": "\ud800"}, "prompt"),
            ({"prompt": [1] * 32}, "prompt"),
        ):
            # httpx would not send half of a surrogate pair; JSON's escape for it is what clients send
            body = json.dumps({"model": MODEL, "prompt": "x"} | fields)
            response = HTTP.post(
                f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=30
            )
            error = response.json()["error"]
            assert response.status_code == 400
            assert error["param"].startswith(param), (fields, error)
            assert "list[" not in error["param"]
        too_long = ask(server, [1] * 32).json()["error"]
        assert too_long["code"] == "context_length_exceeded"
        assert "32" in too_long["message"]
        assert ask(server, [1] * 31).json()["choices"][0]["finish_reason"] == "length"
        assert ask(server, "x", suffix="", best_of=1, n=1).status_code == 200


def test_tokenize_and_back():
    text = "Hello <|im_start|>日本"
    with live() as server:

        def post(path, **body):
            response = HTTP.post(server.url + path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        got = post("/tokenize", prompt=text, return_token_strs=True)
        assert got["tokens"] == chat_tokenizer().encode(text)
        assert (got["count"], got["max_model_len"]) == (len(got["tokens"]), 512)
        assert got["token_strs"][0] == "Hello"
        assert "token_strs" not in post("/tokenize", prompt=text, add_special_tokens=False)
        assert post("/detokenize", tokens=got["tokens"]) == {"prompt": text}
        messages = [{"role": "user", "content": "hi"}]
        assert post("/tokenize", messages=messages)["tokens"] == chat_tokenizer().encode_chat(messages)
        HTTP.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
        assert post("/tokenize", messages=messages)["tokens"] == server.engine.requests[-1].prompt_token_ids
        assert post("/tokenize", prompt="")["tokens"] == []
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "x", "messages": messages}),
            ("/tokenize", {"prompt": "x", "model": "nope"}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": [10**9]}),
            ("/detokenize", {"tokens": "x"}),
        ):
            response = HTTP.post(server.url + path, json=body)
            assert response.status_code == (404 if "model" in body else 400), (path, body)
            assert response.json()["error"]["message"]
        info = HTTP.get(server.url + "/tokenizer_info").json()
        assert info["eos_token"] == "<|im_end|>"
        assert info["bos_token"] is None
        assert "im_start" in info["chat_template"]
