"""CUDA graphs of steps with prompts, in pieces: what lies between a model's attentions is recorded, attention is not.

All but attention depends on the number of tokens alone, so that a step of few of them pays for launching some ten
pieces of a layer at once instead of one by one. Attention's shapes are each step's own, and it runs between the pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from rorqual.batch import Batch, CacheView
from rorqual.ops.attention import paged_attention
from rorqual.ops.registry import Op, around

_SMALLEST = 16
_CLOSE = 1024
"""Up to here sizes double, from here on there are three to an octave more."""


def prompt_sizes(most: int) -> list[int]:
    """Tokens of the graphs, ascending; the last one is `most`. A step takes the next one, and computes the rest in
    vain."""
    sizes, size = [], _SMALLEST
    while size < most:
        sizes += [size] if size < _CLOSE else [size, size * 5 // 4, size * 3 // 2]
        size *= 2
    return [size for size in sizes if size < most] + [most]


class _Attention(NamedTuple):
    """A call between two pieces."""

    fn: Callable[..., torch.Tensor]
    query: torch.Tensor
    """[size, num_heads, head_dim], where the piece before leaves it."""
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    group: int
    options: dict[str, Any]
    out: torch.Tensor
    """As query, where the piece behind reads it."""

    def run(self, batch: Batch) -> None:
        count, tables = batch.num_tokens, batch.caches[self.group].block_tables
        query, out = self.query[:count], self.out[:count]
        self.fn(query, self.key_cache, self.value_cache, batch, tables, **self.options, out=out)


class _Recorded(NamedTuple):
    pieces: list[torch.cuda.CUDAGraph]
    """One more than attentions."""
    attentions: list[_Attention]
    hidden: torch.Tensor
    """[size, hidden_size], written by the last piece."""


class PromptGraphs:
    """The graphs of one model."""

    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        *,
        sizes: Sequence[int],
        num_groups: int,
        device: torch.device,
        progress: bool = False,
    ) -> None:
        """Record `forward`, of a batch to hidden states [num_tokens, hidden_size], at ascending sizes, the largest
        first. It has run at each of them before, as what it compiles cannot be recorded.
        """
        self._sizes = list(sizes)
        shape = (self._sizes[-1],)
        self._ids, self._positions = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in "12")
        self._slots = [torch.full(shape, -1, dtype=torch.int64, device=device) for _ in range(num_groups)]
        self._tables = [torch.zeros((1, 1), dtype=torch.int32, device=device) for _ in range(num_groups)]
        """Only their identity counts: it says which group an attention is of."""
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        self._recorded = {
            size: self._record(forward, size, pool, stream)
            for size in tqdm(self._sizes[::-1], desc="Capturing prompts", unit=" graphs", disable=not progress)
        }

    def run(self, batch: Batch) -> torch.Tensor | None:
        """Hidden states [num_tokens, hidden_size] of a batch, valid until the next call; None if it is too large."""
        count = batch.num_tokens
        if count > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        given = (batch.input_ids, batch.positions, *(view.slot_mapping for view in batch.caches))
        for to, values in zip((self._ids, self._positions, *self._slots), given, strict=True):
            to[:count].copy_(values)
        for slots in self._slots:  # tokens behind the batch's may be anything that is written nowhere
            slots[count:size].fill_(-1)
        pieces, attentions, hidden = self._recorded[size]
        for piece, attention in zip(pieces, attentions, strict=False):
            piece.replay()
            attention.run(batch)
        pieces[-1].replay()
        return hidden[:count]

    @torch.inference_mode()
    def _record(
        self, forward: Callable[[Batch], torch.Tensor], size: int, pool: Any, stream: torch.cuda.Stream
    ) -> _Recorded:
        pieces: list[torch.cuda.CUDAGraph] = []
        attentions: list[_Attention] = []
        batch = self._batch(size)

        def begin() -> None:
            pieces.append(torch.cuda.CUDAGraph())
            pieces[-1].capture_begin(pool=pool)

        def on_call(op: Op[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            if op is not paged_attention:
                return fn(*args, **options)
            query, key_cache, value_cache, _, tables = args
            pieces[-1].capture_end()
            begin()
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            group = next(i for i, known in enumerate(self._tables) if known is tables)
            # Not the tensors: pieces behind may use their memory again.
            attentions.append(_Attention(fn, _alias(query), key_cache, value_cache, group, options, _alias(out)))
            return out

        with torch.cuda.stream(stream), around(on_call):
            begin()
            try:
                hidden = forward(batch)
            finally:
                pieces[-1].capture_end()
        return _Recorded(pieces, attentions, _alias(hidden))

    def _batch(self, size: int) -> Batch:
        """The first tokens of the buffers."""
        device = self._ids.device
        return Batch(
            input_ids=self._ids[:size],
            positions=self._positions[:size],
            cu_seqlens_q=torch.tensor([0, size], dtype=torch.int32, device=device),
            context_lens=torch.tensor([size], dtype=torch.int32, device=device),
            caches=tuple(
                CacheView(slots[:size], table) for slots, table in zip(self._slots, self._tables, strict=True)
            ),
            logits_indices=torch.tensor([size - 1], device=device),
            query_lens=(size,),
            context_lens_host=(size,),
        )


class _Memory:
    """Bytes on a GPU that belong to somebody else, in the form that torch.as_tensor takes."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at the same place, without keeping them from being freed."""
    last = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = _Memory(tensor.data_ptr(), (last + 1) * tensor.element_size())
    flat = torch.as_tensor(memory, device=tensor.device).view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())
