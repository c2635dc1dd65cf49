"""What the first rank of a replica tells the others: calls to repeat, and what none of them may find out alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from rorqual.distributed.rank_group import RankGroup

_FIRST_BYTES = 1000
"""A message up to this size is one broadcast, as most are; longer ones are two."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A call to repeat."""

    name: str
    args: tuple[Any, ...] = ()


class ControlGroup:
    """The ranks of a replica, by numbers and messages on the host."""

    def __init__(self, group: RankGroup) -> None:
        assert group.backend == "gloo"
        self._group = group
        self._unsent: list[Call] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Call])

    @property
    def leads(self) -> bool:
        """Whether this is the rank that others follow."""
        return self._group.rank == 0

    def put(self, name: str, *args: Any) -> None:
        """Queue a call for the others; nothing is sent before `send`. Arguments are numbers, texts, lists, dicts."""
        self._unsent.append(Call(name, args))

    def send(self) -> None:
        """Tell the others what was queued."""
        payload = self._encoder.encode(self._unsent)
        self._unsent = []
        first = torch.zeros(8 + _FIRST_BYTES, dtype=torch.uint8)
        first[:8] = torch.frombuffer(bytearray(len(payload).to_bytes(8, "little")), dtype=torch.uint8)
        data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        first[8 : 8 + min(len(data), _FIRST_BYTES)] = data[:_FIRST_BYTES]
        self._group.broadcast(first)
        if len(data) > _FIRST_BYTES:
            self._group.broadcast(data[_FIRST_BYTES:])

    def receive(self) -> list[Call]:
        """What the first rank tells; waits for it."""
        first = self._group.broadcast(torch.empty(8 + _FIRST_BYTES, dtype=torch.uint8))
        size = int.from_bytes(bytes(first[:8].tolist()), "little")
        payload = bytes(first[8 : 8 + min(size, _FIRST_BYTES)].tolist())
        if size > _FIRST_BYTES:
            rest = self._group.broadcast(torch.empty(size - _FIRST_BYTES, dtype=torch.uint8))
            payload += rest.numpy().tobytes()
        return self._decoder.decode(payload)

    def first_says(self, number: int | None) -> int | None:
        """The first rank's number, on every rank."""
        told = self._group.broadcast(torch.tensor([-1 if number is None else number]))
        value = int(told.item())
        return None if value < 0 else value

    def least(self, numbers: Sequence[int]) -> list[int]:
        """Of each number the least that any rank has."""
        found: list[int] = self._group.gather(torch.tensor(list(numbers), dtype=torch.int64)).amin(0).tolist()
        return found

    def all_say(self, *numbers: int) -> list[list[int]]:
        """Every rank's numbers."""
        found: list[list[int]] = self._group.gather(torch.tensor(numbers, dtype=torch.int64)).tolist()
        return found
