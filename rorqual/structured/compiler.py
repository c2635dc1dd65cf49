"""From a form that is asked for to a grammar, on threads of its own."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from rorqual.sampling_params import StructuredOutputs
from rorqual.structured.matcher import Grammar, reason_of
from rorqual.structured.vocabulary import Vocabulary
from rorqual.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_BYTES = 256 * 2**10
"""Longest schema, grammar, expression or list of choices, as text: some compile in time quadratic in their length."""
WHITESPACE = r" |\n[ \t]{0,40}"
"""Between the parts of JSON: nothing, a space, or a line break and an indentation. No more, or a model that likes white
space would write it until max_tokens."""
_JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_pattern": WHITESPACE,
    "json_allowed_escapes": '"\\bfnrt',  # with \\u, a name that the schema lists could come in other letters
    "lenient": False,
    "coerce_one_of": False,
}
_MAX_LEXER_STATES = 50_000
"""Of one request's grammar, at 1 to 2 kB each."""
_MOST_DIGITS = 5
_NUM_THREADS = 2
_STACK_BYTES = 256 * 2**20
"""Compiling follows references recursively; 256 KiB of them fit into this. Untouched pages take no memory."""


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """vocab_size: of the model's logits. The vocabulary is read when the first grammar is compiled."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def prepare(self, outputs: StructuredOutputs) -> Future[Grammar]:
        """Compile on another thread, beside whatever this one does. The future raises what `compile` does."""
        with _STACK_SIZE:
            before = threading.stack_size(_STACK_BYTES)
            try:
                return self._threads.submit(self._compile, outputs)  # starts a thread while there are too few
            finally:
                threading.stack_size(before)

    def compile(self, outputs: StructuredOutputs) -> Grammar:
        """A grammar for the answers to one request.

        Raises ValueError in one sentence: a schema with keywords that are not supported, by name; text that is no
        regular expression or grammar; something too large or too complex; or a form that no text has.
        """
        return self.prepare(outputs).result()

    @cached_property
    def _vocabulary(self) -> tuple[Vocabulary, LLTokenizer]:
        vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return vocabulary, vocabulary.to_llguidance()

    @cached_property
    def _limits(self) -> LLParserLimits:
        from llguidance import LLParserLimits

        return LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)

    def _compile(self, outputs: StructuredOutputs) -> Grammar:
        from llguidance import LLMatcher

        kind, source = _source(outputs)
        with self._lock:
            vocabulary, trie = self._vocabulary
            limits = self._limits
        matcher = LLMatcher(trie, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        # The first mask may take longer than all that follow: here no step waits for it, and matchers inherit it.
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            raise _refused(kind, "no text has this form")
        return Grammar(matcher, vocab_size=len(vocabulary.tokens), eos_token_ids=vocabulary.eos_token_ids)


_STACK_SIZE = threading.Lock()
"""Held while the size of new threads' stacks, which is the process's, is another one."""


def _refused(kind: str, error: str) -> ValueError:
    reason = reason_of(error)
    if found := re.match(r"Unimplemented keys: (\[.*?\])(.*)", reason):
        names = ", ".join(map(repr, json.loads(found[1])))
        reason = f"its keyword {names} is not supported{found[2]}"
        if len(json.loads(found[1])) > 1:
            reason = f"its keywords {names} are not supported{found[2]}"
    elif reason.startswith("oneOf constraints are not supported"):
        reason = "its keyword 'oneOf' is supported only where no value fits two of its branches; anyOf allows that"
    return ValueError(f"structured_outputs: this {kind} cannot be followed: {reason[:_LONGEST_REASON]}")


_LONGEST_REASON = 500


def _source(outputs: StructuredOutputs) -> tuple[str, str]:
    """What it is called, and what llguidance compiles."""
    from llguidance import LLMatcher, grammar_from

    kind, text = _text(outputs)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise _refused(kind, "it is not valid Unicode, but has half of a surrogate pair") from None
    if size > MAX_BYTES:
        raise ValueError(
            f"structured_outputs: a {kind} may have {MAX_BYTES} bytes, got {size}: take a smaller one, or split the "
            "request"
        )
    try:
        if kind == "JSON schema":  # overrides stand above what the schema itself says in "x-guidance"
            return kind, LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
        if kind == "regular expression":
            return kind, LLMatcher.grammar_from_regex(text)
        if kind == "grammar":
            _check_names(text)
            return kind, grammar_from("grammar", text)
        return kind, LLMatcher.grammar_from_lark(text)
    except (ValueError, RecursionError) as error:
        raise _refused(kind, str(error)) from None


def _check_schema(schema: Any) -> None:
    """Refuse what llguidance would follow too slowly, or not to the letter."""
    if isinstance(schema, list):
        for part in schema:
            _check_schema(part)
    if not isinstance(schema, dict):
        return
    step, least = schema.get("multipleOf"), schema.get("minProperties")
    if _is_number(step) and len(Decimal(repr(step)).normalize().as_tuple().digits) > _MOST_DIGITS:
        raise _refused("JSON schema", f"multipleOf may have {_MOST_DIGITS} digits, got {step}")  # a state per remainder
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    if _is_number(least) and least > 1 and is_open:
        raise _refused(
            "JSON schema",
            f"minProperties above 1, here {least}, is supported only beside additionalProperties false and without "
            "patternProperties: a name that the schema does not list may come twice",
        )
    if "\\u00" in json.dumps([schema.get("const"), schema.get("enum")], ensure_ascii=False):
        raise _refused("JSON schema", "const and enum may hold no control characters but \\b, \\f, \\n, \\r and \\t")
    for part in schema.values():
        _check_schema(part)


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_names(gbnf: str) -> None:
    """Refuse two rules of one name, of which llguidance's translation to Lark would drop one."""
    rules = Counter(re.findall(r"^[ \t]*([\w-]+)[ \t]*::=", gbnf, re.MULTILINE))
    for name, count in rules.items():
        if count > 1:
            raise ValueError(f"{count} rules are called {name!r}")


def _text(outputs: StructuredOutputs) -> tuple[str, str]:
    if outputs.regex is not None:
        return "regular expression", outputs.regex
    if outputs.grammar is not None:
        return "grammar", outputs.grammar
    if outputs.choice is not None:
        literals = (json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(outputs.choice))
        return "list of choices", f"start: {' | '.join(literals)}"
    schema = {"type": "object"} if outputs.json_object else outputs.json_schema
    if schema is False:
        raise _refused("JSON schema", "no value has this form")
    try:
        _check_schema(schema)
        return "JSON schema", json.dumps({} if schema is True else schema)
    except RecursionError:
        raise _refused("JSON schema", "it is nested too deeply") from None
    except TypeError as error:
        raise _refused("JSON schema", f"it is not JSON ({error})") from None
