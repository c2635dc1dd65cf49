"""Grammars for tests: a vocabulary of single bytes, and walks through what a grammar allows."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from rorqual.sampling_params import StructuredOutputs
from rorqual.structured import Grammar, GrammarCompiler, Matcher
from rorqual.tokenizer import Tokenizer
from rorqual.tokenizer.parts import TokenizerParts

END = "<|end|>"


def all_bytes_tokenizer() -> BackendTokenizer:
    """Every byte is a token, in the order of byte-level BPE's alphabet; then comes the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = BackendTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, normalized=False)])
    return backend


@functools.cache
def byte_compiler() -> GrammarCompiler:
    """For a vocabulary of 256 bytes and an end."""
    return GrammarCompiler(byte_tokenizer(), 257, [256])


@functools.cache
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(all_bytes_tokenizer(), eos_token_ids=(256,)))


def compile_for_bytes(**form: Any) -> Grammar:
    return byte_compiler().compile(StructuredOutputs(**form))


def allowed(matcher: Matcher) -> list[int]:
    """The ids whose bit is set."""
    mask = np.empty(matcher.num_words, np.int32)
    matcher.mask(mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text can be an answer: every mask on the way allows its next byte, and the last one the end."""
    matcher = grammar.matcher()
    for token_id in byte_tokenizer().encode(text, add_special_tokens=False):
        if token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
    return 256 in allowed(matcher)


def walk(matcher: Matcher, tokenizer: Tokenizer, rng: random.Random, ends: set[int], most: int) -> tuple[str, bool]:
    """What a model that knows nothing writes: a text, and whether it came to an end."""
    detokenizer = tokenizer.detokenizer()
    text = ""
    for _ in range(most):
        ids = allowed(matcher)
        assert ids, f"nothing may follow {text!r}: {matcher.fault}"
        if ended := matcher.can_end and rng.random() < 0.5 and not ends.isdisjoint(ids):
            token_id = next(iter(ends.intersection(ids)))
        else:
            token_id = rng.choice(ids)
        matcher.accept(token_id)
        assert matcher.fault is None
        if ended or token_id in ends:
            return text + detokenizer.finish(), True
        text += detokenizer.push(token_id)
        if matcher.finished:
            return text + detokenizer.finish(), True
    return text + detokenizer.finish(), False
