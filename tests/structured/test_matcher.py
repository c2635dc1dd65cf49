"""Masks: what they allow in every kind of vocabulary, ends of texts, and matchers that stand side by side."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest

from rorqual.sampling_params import StructuredOutputs
from rorqual.structured import GrammarCompiler, Matcher, fill_masks
from rorqual.structured.vocabulary import Vocabulary
from rorqual.tokenizer import Tokenizer
from rorqual.tokenizer.parts import TokenizerParts
from tests.structured.grammars import allowed, byte_tokenizer, compile_for_bytes, walk
from tests.unit.tiny_tokenizers import SHAPES, TEXTS, byte_level, sentencepiece_like

VALUE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@functools.cache
def tokenizer_like(kind: str) -> tuple[Tokenizer, int]:
    """A tokenizer and the id that ends its texts."""
    backend = sentencepiece_like() if kind == "sentencepiece" else byte_level(kind)
    end = backend.token_to_id("</s>" if kind == "sentencepiece" else "<|im_end|>")
    assert end is not None
    return Tokenizer(TokenizerParts(backend, eos_token_ids=(end,))), end


KINDS = ["sentencepiece", *SHAPES]


@pytest.mark.parametrize("kind", KINDS)
def test_what_masks_allow_is_what_the_detokenizer_writes(kind):
    tokenizer, end = tokenizer_like(kind)
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size + 13, [end]).compile(StructuredOutputs(json=VALUE))
    ended = 0
    for seed in range(20):
        text, complete = walk(grammar.matcher(), tokenizer, random.Random(seed), {end}, 300)
        ended += complete
        if complete:
            value = json.loads(text)
            assert len(value["name"]) <= 9
            assert 0 <= value["n"] <= 99
    assert ended == 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_read_as_ids_that_write_it(kind):
    tokenizer, end = tokenizer_like(kind)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, [end])
    for text in [*TEXTS, '{"name": "Ada"}', "</s><|im_end|>", "\x02", "e\u0301"]:
        ids = vocabulary(text)
        assert b"".join(vocabulary.tokens[i] for i in ids) == text.encode()
        assert tokenizer.special_token_ids.isdisjoint(ids)
        assert vocabulary(text.encode()) == ids
    half = "日".encode()[:2]
    assert b"".join(vocabulary.tokens[i] for i in vocabulary(half)) == half


@pytest.mark.parametrize("kind", KINDS)
def test_no_special_token_and_no_id_without_a_token_is_ever_allowed(kind):
    tokenizer, end = tokenizer_like(kind)
    size = tokenizer.vocab_size + 70
    compiler = GrammarCompiler(tokenizer, size, [end, size + 5])
    matcher = compiler.compile(StructuredOutputs(regex="(.|\\n)*")).matcher()
    for _ in range(3):
        ids = set(allowed(matcher))
        assert ids.isdisjoint(tokenizer.special_token_ids - {end})
        assert end in ids
        assert max(ids) < tokenizer.vocab_size
        matcher.accept(max(ids - {end}))


def test_several_ends_are_allowed_where_the_text_may_end():
    compiler = GrammarCompiler(byte_tokenizer(), 300, [256, 7])
    matcher = compiler.compile(StructuredOutputs(regex="ab*")).matcher()
    a, b = (byte_tokenizer().encode(letter)[0] for letter in "ab")
    assert allowed(matcher) == [a]
    assert not matcher.can_end
    matcher.accept(a)
    assert allowed(matcher) == sorted([b, 7, 256])
    assert matcher.can_end
    assert not matcher.finished
    matcher.accept(7)
    assert matcher.finished
    assert matcher.fault is None


def test_a_model_without_an_end_ends_where_nothing_may_follow():
    tokenizer, _ = tokenizer_like("gpt-2")
    grammar = GrammarCompiler(tokenizer, tokenizer.vocab_size, []).compile(StructuredOutputs(choice=["yes", "no"]))
    matcher = grammar.matcher()
    while not matcher.finished:
        ids = [i for i in allowed(matcher) if i < tokenizer.vocab_size]
        matcher.accept(ids[0])
    assert matcher.fault is None


def test_ends_that_are_ignored_are_allowed_only_where_nothing_else_is():
    grammar = compile_for_bytes(regex="ab{0,2}")
    a, b = (byte_tokenizer().encode(letter)[0] for letter in "ab")
    matcher = grammar.matcher(ignore_eos=True)
    for token_id in (a, b, b):
        assert allowed(matcher) == [token_id]
        assert not matcher.finished
        matcher.accept(token_id)
    assert matcher.finished
    assert allowed(matcher) == [256]


def test_a_token_that_is_not_allowed_is_a_fault_of_one_matcher():
    grammar = compile_for_bytes(regex="ab")
    a, b = (byte_tokenizer().encode(letter)[0] for letter in "ab")
    spoiled, other = grammar.matcher(), grammar.matcher()
    spoiled.accept(b)
    other.accept(a)
    assert spoiled.fault is not None
    assert "\n" not in spoiled.fault
    assert not spoiled.finished
    masks = fill_masks([spoiled, other, grammar.matcher()])
    assert not masks[0].any()
    assert [np.count_nonzero(np.unpackbits(mask.view(np.uint8))) for mask in masks[1:]] == [1, 1]
    assert other.fault is None


@pytest.mark.parametrize("kind", ["sentencepiece", "qwen2"])
def test_masks_computed_side_by_side_are_those_computed_alone(kind):
    """Also where the text is forced, for which the tokenizer is asked from other threads."""
    tokenizer, end = tokenizer_like(kind)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [end])
    forms = [
        {"json": VALUE},
        {"json_object": True},
        {"regex": "[a-z]{40}"},
        {"choice": ["Hello world, all of you"] * 2},
    ]
    grammars = [compiler.compile(StructuredOutputs(**forms[i % 4])) for i in range(24)]
    together, alone = [g.matcher() for g in grammars], [g.matcher() for g in grammars]
    rng = random.Random(0)
    going = list(range(24))
    for _ in range(60):
        masks = fill_masks([together[i] for i in going])
        for i, mask in zip(going, masks, strict=True):
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            assert ids == allowed(alone[i])
            token_id = rng.choice(ids)
            together[i].accept(token_id)
            alone[i].accept(token_id)
        going = [i for i in going if not together[i].finished]
        assert all(together[i].fault is None for i in going)
    assert len(going) < 24


HUNGRY = {"regex": "(a|b)*a(a|b){60}"}
"""Nearly every text is another state."""


def run_on(matcher: Matcher, num_tokens: int) -> int:
    """How many tokens it takes at random."""
    ids = [byte_tokenizer().encode(letter)[0] for letter in "ab"]
    rng = random.Random(1)
    for count in range(num_tokens):
        if not set(ids) <= set(allowed(matcher)):
            return count
        matcher.accept(rng.choice(ids))
    return num_tokens


def test_answers_of_other_requests_do_not_use_up_what_a_grammar_may_hold():
    """llguidance's matchers that are copies of each other share their states, whose number is limited."""
    for _ in range(12):
        assert run_on(compile_for_bytes(**HUNGRY).matcher(), 4000) == 4000


def test_a_grammar_that_becomes_too_complex_is_a_fault():
    matcher = compile_for_bytes(**HUNGRY).matcher()
    assert 10_000 < run_on(matcher, 100_000) < 100_000
    assert "too many states" in str(matcher.fault)
    assert allowed(matcher) == []
