"""Frames on a stream socket: 4 bytes of length, most significant first, and so many bytes of msgpack. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

MAX_FRAME_BYTES = 1 << 30
"""A longer one can only be a fault of the other end: a million tokens are 5 MB."""

_HEADER_BYTES = 4
_ENCODER = msgspec.msgpack.Encoder()


class MalformedFrame(Exception):
    """The other end sent what is no message."""


def pack(message: msgspec.Struct) -> bytes:
    """One frame. Raises ValueError, TypeError or OverflowError for what msgpack cannot say, such as 2**64."""
    payload = _ENCODER.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message must have at most {MAX_FRAME_BYTES} bytes, got {len(payload)}")
    return len(payload).to_bytes(_HEADER_BYTES, "big") + payload


class FrameReader:
    """Takes bytes as they arrive and gives the messages that are complete."""

    def __init__(self, message_type: Any) -> None:
        """message_type: what the messages are; a union of structs."""
        self._decoder = msgspec.msgpack.Decoder(message_type)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete. Raises MalformedFrame at one that is none."""
        self._bytes += data
        start = 0
        try:
            while len(self._bytes) - start >= _HEADER_BYTES:
                stop = start + _HEADER_BYTES
                length = int.from_bytes(self._bytes[start:stop], "big")
                if length > MAX_FRAME_BYTES:
                    raise MalformedFrame(f"a frame of {length} bytes was announced, and {MAX_FRAME_BYTES} are the most")
                if len(self._bytes) - stop < length:
                    break
                payload = bytes(memoryview(self._bytes)[stop : stop + length])
                start = stop + length
                try:
                    message = self._decoder.decode(payload)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise MalformedFrame(f"a frame of {length} bytes is no message: {error}") from None
                yield message
        finally:
            del self._bytes[:start]
