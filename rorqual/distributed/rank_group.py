"""Ranks and what they do together, on torch's process groups: gloo between CPUs, NCCL between GPUs.

Groups are made from a store and belong to nobody else: there is no default group in the process, so that engines come
and go, and two of them stand side by side.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, Work


class PeerLost(RuntimeError):
    """Another rank did not answer, or is gone."""


class RankGroup:
    """Some ranks, of which this is one. Every call is made by all of them, in the same order.

    Calls raise PeerLost where another rank is gone, or does not take part in time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        backend: str = "gloo",
        timeout: timedelta = timedelta(seconds=300),
        device: torch.device | None = None,
        address: str | None = None,
    ) -> None:
        """Connect, with the others that have the same store. Raises RuntimeError where one does not come in time.

        Args:
            store: of this group alone; see `dist.PrefixStore`.
            rank, size: this one's number in the group, and how many there are.
            backend: "gloo", for tensors anywhere, or "nccl", for those on GPUs of one each.
            timeout: how long one waits for another.
            device: the GPU, for NCCL.
            address: of this host, as the others reach it, for gloo; by default what its name stands for.
        """
        self.rank, self.size, self.backend = rank, size, backend
        self.add_up = add_in_order
        """How parts of more than two ranks are added up; an engine has a kernel for it."""
        self._open: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._open = dist.ProcessGroupNCCL(store, rank, size, options)
            if device is not None:
                self._open.eager_connect_single_device(device)
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            where = {"interface": chosen} if (chosen := os.environ.get("GLOO_SOCKET_IFNAME")) else {"hostname": address}
            if any(where.values()):
                options._devices = [dist.ProcessGroupGloo.create_device(**where)]
            else:
                options._devices = [dist.ProcessGroupGloo.create_default_device()]
            self._open = dist.ProcessGroupGloo(store, rank, size, options)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, the same to the bit on every rank and whatever lies beside an element; x may be overwritten.

        A ring would add up in another order for each part of a tensor, so that a token's sum would hang on its place
        among others. Two numbers have only one sum; those of more ranks are gathered, and added up in the order of
        ranks in float32 or better.
        """
        x = x.contiguous()
        if self.size == 2:
            _wait(self._group.allreduce([x]))
            return x
        return self.add_up(self.gather(x))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, stacked: [size, *x.shape]."""
        x = x.contiguous()
        parts = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        _wait(self._group._allgather_base(parts.view(-1), x.view(-1)))
        return parts

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank, side by side: [..., size * n]."""
        parts = self.gather(x)
        return parts.movedim(0, -2).reshape(*x.shape[:-1], self.size * x.shape[-1])

    def all_to_all(
        self, x: torch.Tensor, *, sent: Sequence[int] | None = None, received: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows for each rank in turn -> the rows from each rank in turn.

        sent, received: rows for and from each rank; None: as many for each.
        """
        x = x.contiguous()
        rows = len(x) if received is None else sum(received)
        out = torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
        _wait(self._group.alltoall_base(out, x, list(received or ()), list(sent or ())))
        return out

    def broadcast(self, x: torch.Tensor, *, root: int = 0) -> torch.Tensor:
        """x of the root, in x's place on the others."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        _wait(self._group.broadcast([x], options))
        return x

    def set_timeout(self, timeout: timedelta) -> None:
        """How long one waits for another from now on."""
        self._group._set_default_timeout(timeout)

    def close(self) -> None:
        """Let go of the others: calls that wait for them end with an error, and so do later ones. To be called once or
        more.

        Whoever makes a group closes it before the program ends. Its threads drop a call's tensors after the caller has
        gone on, for which they need the interpreter; where that is ending, they end the process with SIGABRT.
        """
        if (group := self._open) is not None:
            group.abort()
            self._open = None  # where this is the last one who has it, its threads have ended after this

    @property
    def _group(self) -> Any:
        if self._open is None:
            raise PeerLost("this rank has let go of it")
        return self._open


def add_in_order(parts: torch.Tensor) -> torch.Tensor:
    """parts [size, ...] -> their sum [...], from the first to the last, in float32 or better, rounded once."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def _wait(work: Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerLost("it is gone, or has not answered in time") from error
