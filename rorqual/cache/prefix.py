"""Names of token prefixes: equal content is one object, so a hit can never be a hash collision. No torch."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from weakref import WeakValueDictionary


class PrefixNode:
    """A full block of tokens behind a certain parent prefix; compared and hashed by identity.

    `digest` is a chained BLAKE2b-256 over salt, every earlier token and these tokens. It is stable across processes.
    """

    __slots__ = ("__weakref__", "digest", "parent", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: bytes, digest: bytes) -> None:
        self.parent, self.tokens, self.digest = parent, tokens, digest


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a block from its parent's digest and its own tokens (int64, native order)."""
    return hashlib.blake2b(tokens, key=parent, digest_size=32).digest()


class PrefixIndex:
    """Hands out the one node for each (salt, tokens so far), for as long as anyone holds it."""

    def __init__(self) -> None:
        self._nodes: WeakValueDictionary[bytes, PrefixNode] = WeakValueDictionary()

    def root(self, salt: str) -> PrefixNode:
        """The empty prefix of a salt."""
        return self._intern(None, salt.encode())

    def child(self, parent: PrefixNode, token_ids: Sequence[int]) -> PrefixNode:
        """The prefix that continues `parent` by one full block."""
        return self._intern(parent, array("q", token_ids).tobytes())

    def _intern(self, parent: PrefixNode | None, tokens: bytes) -> PrefixNode:
        digest = chain_digest(parent.digest if parent else b"", tokens)
        known = self._nodes.get(digest)
        if known is not None:
            if known.parent is parent and known.tokens == tokens:
                return known
            # A digest collision: a node that is in no table names itself alone, so it can never hit.
            return PrefixNode(parent, tokens, digest)
        made = PrefixNode(parent, tokens, digest)
        self._nodes[digest] = made
        return made
