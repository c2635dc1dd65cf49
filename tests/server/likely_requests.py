"""Hooks for schemathesis: most made-up bodies become ones that a server could take, so that answers are checked too.

What a schema cannot say (the model's name, ids of its vocabulary, that a prompt is not empty) is put right, and all but
a few optional fields are left out, as one that is wrong is enough for a refusal.
"""

from __future__ import annotations

import random
from typing import Any

import schemathesis

MODEL = "fake"
MESSAGES = [[{"role": "user", "content": "Hello"}], [{"role": "system", "content": "Be."}, {"role": "user"}]]
REQUIRED: dict[str, tuple[str, list[Any]]] = {
    "/v1/chat/completions": ("messages", MESSAGES),
    "/v1/completions": ("prompt", ["Hello", ["one", "two"], [5, 6, 7], [[5, 6], [7]]]),
    "/v1/responses": ("input", ["Hello", [{"role": "user", "content": "Hello"}]]),
    "/tokenize": ("prompt", ["", "Hello"]),
    "/detokenize": ("tokens", [[], [5, 6, 300]]),
}
"""By path: the field that it needs, and good values of it."""


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_body(context: Any, body: Any) -> Any:
    """A body that is likely to be taken; every fourth stays as it is."""
    path = context.operation.path
    if not isinstance(body, dict) or path not in REQUIRED:
        return body
    draw = random.Random(repr(body))
    if draw.random() < 0.25:
        return body
    name, values = REQUIRED[path]
    optional = [field for field in body if field not in (name, "model", "stream", "messages", "prompt")]
    kept = draw.sample(optional, min(len(optional), draw.choice((0, 1, 1, 2))))
    made = {field: body[field] for field in kept} | {name: draw.choice(values)}
    if "model" in body:
        made["model"] = MODEL
    if path.startswith("/v1/"):
        made["stream"] = draw.random() < 0.3
    return made
