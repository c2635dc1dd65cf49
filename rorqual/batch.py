"""Batch: the flat tensors of one step; an argument of every model and layer."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class CacheView(NamedTuple):
    """Where the batch's tokens live in one cache group."""

    slot_mapping: torch.Tensor
    """[num_tokens] int64: slot that each token writes, block * rows per block + row; -1 writes nothing. Where a row
    stands for several tokens, the last of them writes it."""
    block_tables: torch.Tensor
    """[num_seqs, max_blocks] int32: blocks of each sequence's context; what no query sees is any valid block."""


class ExchangeSize(NamedTuple):
    """What replicas that share experts have agreed on before a step, so that each takes part in the same exchanges."""

    most_tokens: int
    """The most tokens that any replica has in this step; perhaps more, as graphs have tokens that only fill up."""
    fixed: bool
    """Whether buffers are as large as could be needed, so that nobody waits for the device to learn a number; else as
    large as they need to be."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks of several sequences laid end to end: no batch dimension, no padding.

    Sequence i owns the tokens [cu_seqlens_q[i], cu_seqlens_q[i + 1]), which are the last ones of its context_lens[i]
    tokens so far. Tokens of answers come first, each as a sequence, so that kernels may treat them together.
    """

    input_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64: position of each token in its sequence."""
    cu_seqlens_q: torch.Tensor
    """[num_seqs + 1] int32: running sum of chunk lengths, from 0."""
    context_lens: torch.Tensor
    """[num_seqs] int32: keys that each sequence's last token sees, itself included."""
    caches: tuple[CacheView, ...]
    """One per cache group."""
    logits_indices: torch.Tensor
    """[num_rows] int64: tokens whose logits are wanted."""
    query_lens: tuple[int, ...]
    """Chunk lengths on the host, so that nothing has to wait for the device to learn a shape."""
    context_lens_host: tuple[int, ...]
    """context_lens on the host."""
    num_answer_tokens: int | None = None
    """How many sequences, from the front, are a token of an answer each; None: all there that have one token. Where
    kernels for them add up in another order than those for prompts, a prompt's last token must not be among them."""
    splits_sequences: bool = False
    """Whether some of these sequences are parts of one, whose tokens see each other only through the cache."""
    exchange: ExchangeSize | None = None
    """Where several replicas share experts; None: there is one, or each has all of them."""
    scratch: dict[Hashable, Any] = field(default_factory=dict)
    """What kernels worked out from the fields above, once for all layers."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the batch."""
        return self.input_ids.shape[0]

    def once(self, name: Hashable, make: Callable[[], T]) -> T:
        """What the scratch holds under a name, made now by the first layer that asks."""
        return once(self.scratch, name, make)

    @property
    def wants_all_in_order(self) -> bool:
        """Whether logits are wanted of every token, in the batch's order; False where that cannot be said."""
        return self.num_answer_tokens is None and len(self.logits_indices) == self.num_tokens

    @property
    def num_single_token_seqs(self) -> int:
        """How many sequences, from the front, kernels may treat as one token of an answer each."""
        if self.num_answer_tokens is not None:
            return self.num_answer_tokens
        return next((i for i, length in enumerate(self.query_lens) if length != 1), len(self.query_lens))


def once(scratch: dict[Hashable, Any] | None, name: Hashable, make: Callable[[], T]) -> T:
    """What a batch's scratch holds under a name, made now by the first layer that asks; made each time without one."""
    if scratch is None:
        return make()
    if name not in scratch:
        scratch[name] = make()
    made: T = scratch[name]
    return made
