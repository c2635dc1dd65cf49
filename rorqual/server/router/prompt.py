"""What a request says about where it should go: its prompt, its session, and the response that it goes on from.

No tokenizer and no template: a chat is taken as a text of its tools and messages, which has the same beginning as
another wherever what the model reads does. No torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rorqual.server.router.prefix_index import blocks_of

SESSION_HEADER = b"x-session-id"
SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
"""The first that a body has."""
MOST_CHARACTERS = 256
"""Of a session's name; what is behind them makes no difference."""
_RESPONSE = re.compile(r"/v1/responses/([^/]+)(/.*)?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is known of a request when its replica is chosen."""

    blocks: list[int] = field(default_factory=list)
    """Of its prompt; empty if it has none."""
    session: str | None = None
    response_id: str | None = None
    """The stored response that it needs."""
    makes_response: bool = False
    """Whether what it makes may be asked for later."""


def wanted(method: str, path: str, headers: Mapping[bytes, bytes], body: bytes) -> Wanted:
    """Read a request. What cannot be read says nothing: its replica will complain.

    Args:
        method: as POST.
        path: without its query.
        headers: by names in lower case.
        body: JSON, or anything.
    """
    session = headers.get(SESSION_HEADER, b"").decode("latin-1") or None
    if found := _RESPONSE.fullmatch(path):
        return Wanted(session=session, response_id=found[1])
    if method != "POST":
        return Wanted(session=session)
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return Wanted(session=session)
    named = (fields.get(name) for name in SESSION_FIELDS)
    session = session or next((name[:MOST_CHARACTERS] for name in named if isinstance(name, str) and name), None)
    try:
        prompt = _PROMPTS.get(path, _nothing)(fields)
    except RecursionError:  # values within values within values
        prompt = None
    shared_by = tuple(value if isinstance(value := fields.get(name), str) else "" for name in ("model", "cache_salt"))
    previous = fields.get("previous_response_id")
    return Wanted(
        blocks=[] if prompt is None else blocks_of(prompt, (shared_by, type(prompt) is str)),
        session=session,
        response_id=previous if isinstance(previous, str) and previous else None,
        makes_response=path == "/v1/responses",
    )


def _nothing(_fields: dict[str, Any]) -> None:
    return None


def _completion(fields: dict[str, Any]) -> str | list[int] | None:
    """The prompt; of several, the first."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return prompt if all(type(token_id) is int for token_id in prompt) else None
    return prompt if isinstance(prompt, str) else None


def _chat(fields: dict[str, Any]) -> str:
    return _text(fields.get("tools"), fields.get("messages"))


def _response(fields: dict[str, Any]) -> str:
    given = fields.get("input")
    items: list[Any] = [{"role": "user", "content": given}] if isinstance(given, str) else []
    if isinstance(given, list):
        items += given
    if instructions := fields.get("instructions"):
        items.insert(0, {"role": "system", "content": instructions})
    return _text(fields.get("tools"), items)


_PROMPTS = {"/v1/completions": _completion, "/v1/chat/completions": _chat, "/v1/responses": _response}


def _text(tools: Any, messages: Any) -> str:
    """Tools come first, as in most templates; of a message its role, its content, and then all else."""
    parts = [_json(tools)] if tools else []
    for message in messages if isinstance(messages, list) else ():
        if not isinstance(message, dict):
            parts.append(_json(message))
            continue
        parts.append(f"\n<{message.get('role') or message.get('type')}>\n{_content(message.get('content'))}")
        rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
        if rest:
            parts.append(_json(rest))
    return "".join(parts)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: Sequence[Any] = content if isinstance(content, list) else []
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return "".join(text if isinstance(text, str) else _json(part) for text, part in zip(texts, parts, strict=True))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
