"""What structured output costs: reading a vocabulary, compiling a form, a mask per token, and masking logits.

    python benchmarks/structured.py [--rows 64]

SmolLM2's vocabulary, and one of Qwen's size that is made from it by joining tokens. Times are of this process alone.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from rorqual.config import EngineConfig
from rorqual.engine.model_files import open_model
from rorqual.ops.registry import load_backends
from rorqual.ops.sample import mask_logits
from rorqual.sampling_params import StructuredOutputs
from rorqual.structured import GrammarCompiler, fill_masks
from rorqual.tokenizer import Tokenizer

LARGE = 151_936
_STRING_OR_NULL = {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}]}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "three fields": (
        {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
        '{"name": "Ada Lovelace of London", "age": 36, "tags": ["mathematician", "analyst"]}',
    ),
    "any object": ({"type": "object"}, '{"hello": "world é", "n": [1, 2.5, {"deep": null}], "b": true}'),
    "enum, pattern, date": (
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["cat", "dog", "whale"]},
                "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "when": {"type": "string", "format": "date-time"},
            },
            "required": ["kind", "id", "when"],
            "additionalProperties": False,
        },
        '{"kind": "whale", "id": "ABC-1234", "when": "2024-05-01T12:00:00Z"}',
    ),
    "50 fields": (
        {
            "type": "object",
            "properties": {f"field_{i}": _STRING_OR_NULL for i in range(50)},
            "additionalProperties": False,
        },
        json.dumps({f"field_{i}": "some text here" for i in range(50)}),
    ),
}


class Larger:
    """A tokenizer with more tokens: pairs of the first one's, joined."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self.special_token_ids = tokenizer.special_token_ids
        rng = random.Random(0)
        plain = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size) if i not in self.special_token_ids]
        known, self._more = set(plain), list[bytes]()
        while len(self._more) < vocab_size - tokenizer.vocab_size:
            token = rng.choice(plain) + rng.choice(plain)
            if token not in known:
                known.add(token)
                self._more.append(token)

    def token_bytes(self, token_id: int) -> bytes:
        first = self._tokenizer.vocab_size
        return self._tokenizer.token_bytes(token_id) if token_id < first else self._more[token_id - first]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def seconds(call: Callable[[], Any], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(name: str, tokenizer: Tokenizer, ends: Sequence[int], num_rows: int) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, ends)
    start = time.perf_counter()
    compiler.compile(StructuredOutputs(regex="a"))
    print(f"{name}: {tokenizer.vocab_size:,} tokens, read in {time.perf_counter() - start:.2f} s")
    for form, (schema, text) in FORMS.items():
        outputs = StructuredOutputs(json=schema)
        compiling = seconds(lambda outputs=outputs: compiler.compile(outputs))  # type: ignore[misc]
        masks, moves = list[float](), list[float]()
        matcher = compiler.compile(outputs).matcher()
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            start = time.perf_counter()
            fill_masks([matcher])
            masks.append(time.perf_counter() - start)
            start = time.perf_counter()
            matcher.accept(token_id)
            moves.append(time.perf_counter() - start)
        assert matcher.can_end, matcher.fault
        print(
            f"  {form:20} compile {compiling * 1e3:5.1f} ms; mask {statistics.mean(masks) * 1e6:4.0f} us on average, "
            f"{max(masks) * 1e6:4.0f} us at most; accept {statistics.mean(moves) * 1e6:3.0f} us"
        )
    schema, text = FORMS["any object"]
    matchers = [compiler.compile(StructuredOutputs(json=schema)).matcher() for _ in range(num_rows)]
    ids = tokenizer.encode(text, add_special_tokens=False)
    filling = []
    for token_id in ids:
        filling.append(seconds(lambda: fill_masks(matchers), 1))
        for matcher in matchers:
            matcher.accept(token_id)
    bits = torch.from_numpy(fill_masks(matchers))
    logits = torch.randn(num_rows, tokenizer.vocab_size)
    masking = seconds(lambda: mask_logits(logits, torch.arange(num_rows), bits))
    print(
        f"  {num_rows} rows at once: masks {statistics.mean(filling) * 1e3:.2f} ms, "
        f"applied to float32 logits on the CPU in {masking * 1e3:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    num_rows = parser.parse_args().rows
    load_backends("native", "cpu")
    tokenizer = open_model(EngineConfig(model="smollm2")).tokenizer
    assert tokenizer is not None
    measure("SmolLM2", tokenizer, tokenizer.eos_token_ids, num_rows)
    measure("of Qwen's size", cast(Tokenizer, Larger(tokenizer, LARGE)), tokenizer.eos_token_ids, num_rows)


if __name__ == "__main__":
    main()
