"""The chat page, served at `/` as one document that fetches nothing but this server's API. No torch."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter, Response


def document() -> tuple[str, str]:
    """The page, and a Content-Security-Policy that allows its own scripts and style, by their hashes, and no others."""
    folder = resources.files(__name__)
    page = re.sub(
        r"/\*\{([a-z.]+)\}\*/",
        lambda found: folder.joinpath(found[1]).read_text(encoding="utf-8"),
        folder.joinpath("index.html").read_text(encoding="utf-8"),
    )
    policy = (
        f"default-src 'none'; script-src {_hashes(page, 'script')}; style-src {_hashes(page, 'style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return page, policy


def _hashes(page: str, tag: str) -> str:
    inside = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def router() -> APIRouter:
    """GET /."""
    page, policy = document()
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def chat_page() -> Response:
        """The chat page."""
        return Response(page, media_type="text/html", headers=headers)

    return router
