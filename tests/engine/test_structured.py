"""Answers of a given form from the engine: valid, alone and in company, with every other option."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from rorqual import LLM, SamplingParams
from rorqual.outputs import RequestOutput
from tests.engine.engines import TINY_OPTIONS, ScriptedRunner
from tests.structured.grammars import all_bytes_tokenizer
from tests.tiny import CONFIGS, edit_config, random_model

END = 256
PET = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json": PET},
    "regex": {"regex": "[a-z]{3,9}-[0-9]+\\."},
    "choice": {"choice": ["yes", "no", "maybe", "not at all"]},
    "grammar": {"grammar": 'root ::= "(" root ")" | [0-9] [0-9]? [0-9]?'},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny random model whose tokens are bytes, and an end; its logits have a few ids more."""
    made = tmp_path_factory.mktemp("structured") / "model"
    model_type, options = CONFIGS["llama"]
    random_model(model_type, options | {"vocab_size": 270, "eos_token_id": END}).save_pretrained(made)
    all_bytes_tokenizer().save(str(made / "tokenizer.json"))
    return made


def byte_llm(folder: Path, **options: Any) -> LLM:
    options = {"skip_tokenizer_init": False, "max_model_len": 256, "num_kv_blocks": 256} | options
    return LLM(str(folder), **(TINY_OPTIONS | options))


def check(form: str, text: str) -> None:
    if form == "schema":
        jsonschema.validate(json.loads(text), PET)
    elif form == "regex":
        assert re.fullmatch(FORMS["regex"]["regex"], text)
    elif form == "choice":
        assert text in FORMS["choice"]["choice"]
    else:
        assert re.fullmatch(r"(\(*)\d{1,3}(\)*)", text)
        assert text.count("(") == text.count(")")


def params_for(form: str, **more: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 1, "max_tokens": 150, "structured_outputs": FORMS[form]} | more))


PROMPTS = [[65 + i, 7, 100 + 3 * i, 9][: 1 + i % 4] for i in range(8)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 3.0, "top_p": 0.9, "n": 3},
        {"temperature": 1.0, "top_k": 3, "min_p": 0.01, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"ignore_eos": True},
        {"min_tokens": 100},
        {"logprobs": 2, "repetition_penalty": 1.2, "logit_bias": {END: 5.0}},
        {"stop": ["Q#"], "stop_token_ids": [260], "detokenize": True},
        {"skip_special_tokens": False},
    ],
    ids=",".join,
)
def test_an_answer_that_ends_by_itself_has_the_form(folder, form, options):
    with byte_llm(folder) as llm:
        outputs = llm.generate(PROMPTS, params_for(form, **options), use_tqdm=False)
        answers = [answer for output in outputs for answer in output.outputs]
        assert {answer.finish_reason for answer in answers} <= {"stop", "length"}
        ended = [answer for answer in answers if answer.finish_reason == "stop"]
        assert len(ended) >= len(answers) / 4
        for answer in ended:
            check(form, answer.text.removesuffix("<|end|>"))
            assert answer.error is None
            assert answer.stop_reason is None
            if "ignore_eos" in options:
                assert END not in answer.token_ids
            if answer.logprobs is not None:
                assert [next(iter(entry)) for entry in answer.logprobs] == answer.token_ids
        llm.engine.scheduler.check()


MIX: list[tuple[list[int], SamplingParams]] = [
    (PROMPTS[i % 8] * 3, params_for(form, seed=i, n=1 + i % 2, temperature=1.3, **more))
    for i, (form, more) in enumerate(
        [
            *((form, {}) for form in FORMS),
            ("schema", {"repetition_penalty": 1.1, "logprobs": 1}),
            ("regex", {"ignore_eos": True, "top_p": 0.8}),
            ("grammar", {"min_tokens": 6}),
        ]
    )
]
PLAIN = [
    (
        PROMPTS[i] * 2,
        SamplingParams(seed=i, max_tokens=40 + i, ignore_eos=True, temperature=0.9, presence_penalty=i / 9),
    )
    for i in range(4)
]


def run(llm: LLM, requests: list[tuple[list[int], SamplingParams]], *, ahead: bool = False) -> list[Any]:
    engine, done = llm.engine, dict[str, RequestOutput]()
    engine._looks_ahead = ahead
    ids = [engine.add_request(*each, on_finish=lambda out: done.update({out.request_id: out})) for each in requests]
    while engine.has_work:
        engine.step()
        engine.scheduler.check()
    return [[(a.token_ids, a.text, a.finish_reason) for a in done[i].outputs] for i in ids]


SWITCHES: dict[str, dict[str, Any]] = {
    "company": {},
    "ahead": {},
    "one at a time": {"max_num_seqs": 1},
    "chunks of 2": {"long_prefill_token_threshold": 2},
    "tight cache": {"num_kv_blocks": 42, "max_model_len": 164},
    "tight cache, ahead, no prefix cache": {"num_kv_blocks": 42, "max_model_len": 164, "enable_prefix_caching": False},
    "two threads": {"threads": 2},
}


@pytest.fixture(scope="module")
def alone(folder) -> list[Any]:
    """What each request gets when there is no other."""
    with byte_llm(folder, enable_prefix_caching=False) as llm:
        return [run(llm, [request])[0] for request in MIX + PLAIN]


@pytest.mark.parametrize("switch", SWITCHES)
def test_tokens_do_not_depend_on_company(folder, alone, switch):
    with byte_llm(folder, **SWITCHES[switch]) as llm:
        order = list(range(len(MIX + PLAIN)))
        random.Random(5).shuffle(order)
        found = run(llm, [(MIX + PLAIN)[i] for i in order], ahead="ahead" in switch)
        assert found == [alone[i] for i in order]
        if "tight" in switch:
            assert llm.engine.scheduler.num_preemptions > 0


def test_only_steps_with_a_grammar_wait(folder):
    with byte_llm(folder) as llm:
        engine = llm.engine
        engine._looks_ahead = True
        flights = {True: 0, False: 0}
        structured = engine.add_request(PROMPTS[0], params_for("schema"))
        engine.add_request(PROMPTS[1], SamplingParams(seed=0, max_tokens=200, ignore_eos=True))
        while engine.has_work:
            engine.step()
            flights[structured in engine._requests] += engine._flight is not None
        assert flights[True] == 0
        assert flights[False] > 3


def test_streamed_pieces_are_the_text(folder):
    with byte_llm(folder) as llm:
        for form in FORMS:
            pieces = list(llm.stream(PROMPTS[1], params_for(form)))
            whole = llm.generate(PROMPTS[1], params_for(form), use_tqdm=False)[0]
            assert "".join(piece.text for piece in pieces) == whole.text
            assert [t for piece in pieces for t in piece.token_ids] == whole.token_ids
            assert pieces[-1].finish_reason == whole.finish_reason == "stop"
            check(form, whole.text)


def scripted(folder: Path, text: str, **options: Any) -> LLM:
    """A model that wants to say `text` after the prompt [5]."""
    llm = byte_llm(folder, **options)
    script = [*llm.get_tokenizer().encode(text), END]
    llm.engine._runner = ScriptedRunner(llm, {5: script}, {5: 1})  # type: ignore[assignment]
    return llm


def test_a_model_that_keeps_to_the_form_is_left_alone(folder):
    text = '{"name": "Mia", "age": 3, "kind": "cat", "tags": [true]}'
    with scripted(folder, text) as llm:
        answer = llm.generate([5], params_for("schema", temperature=0.0), use_tqdm=False)[0].outputs[0]
    assert answer.text == text
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == len(text), "it ends with the last brace, without a token that says so"


def test_the_last_token_that_is_allowed_may_complete_the_answer(folder):
    for most, reason in ((3, "stop"), (2, "length")):
        with scripted(folder, "yes") as llm:
            params = params_for("choice", temperature=0.0, max_tokens=most)
            answer = llm.generate([5], params, use_tqdm=False)[0].outputs[0]
        assert (answer.text, answer.finish_reason) == ("yes"[:most], reason)


def test_an_answer_may_end_early_only_where_it_is_complete(folder):
    regex = {"structured_outputs": {"regex": "ab*"}, "temperature": 0.0, "max_tokens": 5}
    for more, text, reason in (
        ({}, "abb", "stop"),
        ({"ignore_eos": True}, "abbbb", "length"),
        ({"min_tokens": 4}, "abbb", "stop"),
    ):
        with scripted(folder, "abb") as llm:
            llm.engine._runner.scripts[5] += [END]
            answer = llm.generate([5], SamplingParams(**regex, **more), use_tqdm=False)[0].outputs[0]
        assert answer.text[: len(text)] == text, more
        if more == {}:
            assert answer.finish_reason == reason
            assert answer.token_ids[-1] == END
        if "ignore_eos" in more:
            assert answer.finish_reason == reason


def test_a_stop_string_ends_it_before_it_is_complete(folder):
    with scripted(folder, '{"name": "Mia", "age": 3, "kind": "cat"}') as llm:
        answer = llm.generate([5], params_for("schema", temperature=0.0, stop='"age"'), use_tqdm=False)[0].outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ('{"name": "Mia", ', "stop", '"age"')


def test_logprobs_are_those_of_the_raw_logits(folder):
    with byte_llm(folder) as llm:
        free = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20), use_tqdm=False)[0]
        bound = llm.generate(PROMPTS[0], params_for("schema", temperature=0.0, logprobs=20), use_tqdm=False)[0]
    first, chosen = bound.outputs[0].logprobs[0], bound.token_ids[0]
    assert {t: e.logprob for t, e in first.items() if t != chosen} == {
        t: e.logprob for t, e in free.outputs[0].logprobs[0].items() if t != chosen
    }
    assert first[chosen].rank > 1


def test_when_no_token_is_left_only_that_request_ends(folder):
    brace = 91  # of no importance: some token that JSON cannot start with
    with byte_llm(folder) as llm:
        requests = [
            (PROMPTS[0], params_for("schema", allowed_token_ids=[brace])),
            (PROMPTS[1], params_for("schema")),
            (PROMPTS[2], params_for("choice", bad_words=["y", "n", "m"])),
        ]
        prompts, params = zip(*requests, strict=True)
        outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
        for output in (outputs[0], outputs[2]):
            assert output.finish_reason == "error"
            assert "no token is left that the structured output allows" in str(output.outputs[0].error)
        assert outputs[1].finish_reason == "stop"
        assert not llm.engine.has_work
        llm.engine.scheduler.check()


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(folder, monkeypatch):
    monkeypatch.setattr("rorqual.structured.compiler._MAX_LEXER_STATES", 60)
    with byte_llm(folder) as llm:
        hungry = SamplingParams(structured_outputs={"regex": "(a|b)*a(a|b){60}"}, seed=3, max_tokens=200)
        outputs = llm.generate(PROMPTS[:2], [hungry, PLAIN[0][1]], use_tqdm=False)
    assert outputs[0].finish_reason == "error"
    assert "too many states" in str(outputs[0].outputs[0].error)
    assert outputs[1].finish_reason == "length"


def test_nan_logits_end_a_structured_answer(folder):
    with scripted(folder, "yes") as llm:
        llm.engine._runner.spoil.add(5)
        output = llm.generate([5], params_for("choice"), use_tqdm=False)[0]
    assert output.finish_reason == "error"
    assert "NaN" in str(output.outputs[0].error)


def test_what_cannot_be_followed_is_refused_and_changes_nothing(folder):
    with byte_llm(folder) as llm:
        bad = SamplingParams(structured_outputs={"json": {"not": {}}})
        with pytest.raises(ValueError, match="keyword 'not' is not supported"):
            llm.generate([PROMPTS[0], PROMPTS[1]], [params_for("choice"), bad], use_tqdm=False)
        assert not llm.engine.has_work
        with pytest.raises(ValueError, match="keyword 'not' is not supported"):
            llm.stream(PROMPTS[0], bad)
        assert not llm.engine.has_work
        assert llm.generate(PROMPTS[0], params_for("choice"), use_tqdm=False)[0].finish_reason == "stop"


def test_a_request_waits_for_its_grammar_while_others_go_on(folder):
    slow = {"type": "object", "properties": {f"value{i}": {"type": "null"} for i in range(2000)}}
    with byte_llm(folder) as llm:
        engine, done = llm.engine, dict[str, RequestOutput]()
        params = SamplingParams(structured_outputs={"json": slow}, seed=0, max_tokens=20)
        future = engine.prepare(params)
        assert future is not None
        assert engine.prepare(PLAIN[0][1]) is None
        engine.add_request(*PLAIN[0])
        steps = 0
        while engine.has_work:
            engine.step()
            steps += not future.done()
        assert steps > 10
        request_id = engine.add_request(
            PROMPTS[0], params, grammar=future.result(), on_finish=lambda out: done.update({out.request_id: out})
        )
        while engine.has_work:
            engine.step()
        assert done[request_id].outputs[0].text.startswith("{")


def test_a_model_without_a_tokenizer_says_so(folder):
    with byte_llm(folder, skip_tokenizer_init=True) as llm, pytest.raises(ValueError, match="need a tokenizer"):
        llm.generate(PROMPTS[0], params_for("choice"), use_tqdm=False)


def test_an_end_that_the_tokenizer_does_not_know_ends_it_too(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    edit_config(tmp_path / "model", eos_token_id=[7, 269])
    with byte_llm(tmp_path / "model") as llm:
        output = llm.generate(
            PROMPTS[0],
            SamplingParams(structured_outputs={"regex": "ab*"}, temperature=0.0, max_tokens=9, logit_bias={269: 100.0}),
            use_tqdm=False,
        )[0]
    assert output.text == "a"
    assert output.token_ids[1:] == [269]
    assert output.finish_reason == "stop"


def test_masks_reach_logits_of_every_dtype(folder):
    for dtype in ("float32", "bfloat16"):
        with byte_llm(folder, dtype=dtype) as llm:
            output = llm.generate(PROMPTS[0], params_for("choice", logprobs=0), use_tqdm=False)[0]
            check("choice", output.text)
            assert all(
                torch.isfinite(torch.tensor(e.logprob)) for at in output.outputs[0].logprobs for e in at.values()
            )


def test_smollm2_fills_in_a_form():
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "maximum": 10**9},
        },
        "required": ["capital", "population"],
        "additionalProperties": False,
    }
    with LLM("smollm2", progress=False, max_model_len=256, num_kv_blocks=64) as llm:
        message = [{"role": "user", "content": "What is the capital of France, and how many people live there?"}]
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=80, structured_outputs={"json": schema})
            output = llm.chat(message, params, use_tqdm=False)[0]
            assert output.finish_reason == "stop"
            jsonschema.validate(json.loads(output.text), schema)
            if temperature == 0.0:
                assert "Paris" in output.text
