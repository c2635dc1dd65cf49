"""What is sent and when: drawn from a seed, or read from a file. No torch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

from rorqual.cli.load.requests import Endpoint

PromptKind = Literal["words", "ids"]

# Words that are one token, with the space before them, for nearly every tokenizer.
_TEXT = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also did many off before must well back through years much where your way down
should because long each just state those people too world very good here old life day same right part house
still group place war air great own small home hand high water side head room point school next week fact
order best line sea light blue ice
"""
WORDS = _TEXT.split()


def synthetic(
    endpoint: Endpoint,
    count: int,
    *,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    prefix_len: int = 0,
    kind: PromptKind = "words",
    vocab_size: int = 1000,
    ignore_eos: bool = True,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Bodies of requests; the same for the same arguments.

    Args:
        endpoint: whose bodies.
        count: how many.
        input_len: words or ids per prompt, both ends included, behind the prefix.
        output_len: max_tokens, likewise.
        prefix_len: words or ids that all prompts begin with.
        kind: "words", or "ids" of tokens below `vocab_size` for completions.
        vocab_size: see there.
        ignore_eos: whether to ask for the full length.
        seed: what is drawn from.

    Raises:
        ValueError: ids for a chat.
    """
    if kind == "ids" and endpoint == "chat":
        raise ValueError("--prompt-kind ids needs --endpoint completions: a chat has messages of text")
    draw = random.Random(seed)

    def pieces(length: int) -> list[Any]:
        return [draw.randrange(vocab_size) for _ in range(length)] if kind == "ids" else draw.choices(WORDS, k=length)

    prefix = pieces(prefix_len)
    bodies = []
    for _ in range(count):
        parts = prefix + pieces(draw.randint(*input_len))
        body: dict[str, Any] = _prompt(endpoint, parts if kind == "ids" else " ".join(parts))
        body["max_tokens"] = draw.randint(*output_len)
        if ignore_eos:
            body["ignore_eos"] = True
        bodies.append(body)
    return bodies


def from_file(endpoint: Endpoint, path: str, count: int) -> list[dict[str, Any]]:
    """Bodies from a JSONL file, from its start again when it has fewer lines than are wanted.

    Each line holds "messages" or "prompt", and may hold "max_tokens" or any other field of the request.

    Raises:
        ValueError: the file cannot be read, or a line is not like that.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --dataset {path}: {error}") from None
    bodies = [_body(endpoint, line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not bodies:
        raise ValueError(f"--dataset {path} has no lines")
    return list(islice(cycle(bodies), count))


def _body(endpoint: Endpoint, line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f'{where} must be an object with either "prompt" or "messages"')
    if "messages" in entry and endpoint == "completions":
        raise ValueError(f'{where} has "messages", but --endpoint completions takes "prompt": use --endpoint chat')
    rest = {name: value for name, value in entry.items() if name != "prompt"}
    return (_prompt(endpoint, entry["prompt"]) if "prompt" in entry else {}) | rest


def _prompt(endpoint: Endpoint, prompt: Any) -> dict[str, Any]:
    if endpoint == "completions":
        return {"prompt": prompt}
    return {"messages": [{"role": "user", "content": prompt}]}


def arrivals(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests are due, for ever: gaps from a gamma distribution, as vLLM draws them.

    Args:
        rate: requests per second on average.
        burstiness: the distribution's shape. 1: Poisson arrivals; less: in bursts; more: evenly.
        seed: what is drawn from.
    """
    draw, at = random.Random(f"arrivals {seed}"), 0.0
    while True:
        at += draw.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at
