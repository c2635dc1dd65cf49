"""Logits to tokens. What one row gets depends on that row alone: its logits, its parameters, its seed and its position.

Order, per row: raw logprobs; the grammar's, allowed_token_ids, bad_words and min_tokens mask; logit_bias; repetition,
frequency and presence penalties; then the best token (greedy), or temperature, min_p, top_k, top_p and a draw.

Nothing here waits for the device: parameters go up, tokens and logprobs come down when somebody asks, and what depends
on drawn tokens is kept where they are (`SamplerTables`). So the step after one can be started before it is read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.engine.sampler_tables import SamplerTables
from rorqual.engine.transfer import Download, upload
from rorqual.ops.sample import (
    LastKept,
    RowMax,
    edit_logits,
    gumbel_argmax,
    mask_logits,
    narrow,
    row_keys,
    row_max,
    top_logprobs,
)
from rorqual.sampling_params import SamplingParams
from rorqual.structured import Matcher, fill_masks

PROMPT_BLOCK = 64
"""Rows of prompt logprobs computed at once: bounds the float32 copy of their logits."""
FIRST_SLOTS = 64
"""Sequences that the first parameter table has room for; then it doubles."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the chosen token first, then the most likely ones without it, best first.

    Asked for k: k + 1 entries, or k where the chosen token is itself among the top k (one entry for k = 0).
    A rank is the number of tokens at least as likely: 1 is the best. -inf is possible, NaN is not.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SamplerOutput(NamedTuple):
    """One entry per row, in the order of the rows."""

    token_ids: list[int]
    """-1 where failed."""
    logprobs: list[TokenLogprobs | None]
    """None where not asked for, and of failed rows."""
    failed: list[bool]
    """The row held NaN or +inf, or nothing was allowed; its token means nothing."""


class _Logprobs(NamedTuple):
    """Log-probabilities on their way to the host."""

    rows: list[int]
    counts: list[int]
    """How many top tokens each of these rows asked for."""
    downloads: list[Download]
    """The parts of `TopLogprobs`."""


class Draws(NamedTuple):
    """What `draw_tokens` needs of each row beside its logits."""

    temperature: NDArray[np.float64]
    """[num_rows]; 0 takes the best token."""
    keys: NDArray[np.int64]
    """[num_rows, 2]"""


class Drawn(NamedTuple):
    """Tokens that were drawn on the device."""

    token_ids: torch.Tensor
    """[num_rows] int64 on the device; 0 for failed rows."""
    download: Download
    """The same on the way to the host, with -1 for failed rows."""
    asked: _Logprobs | None = None

    @classmethod
    def of(cls, shown: torch.Tensor) -> Drawn:
        """What `draw_tokens` returned."""
        return cls(shown.clamp(min=0), Download(shown))

    def wait(self) -> SamplerOutput:
        """What was drawn, once the device is that far."""
        token_ids = self.download.wait()
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        failed = [token_id < 0 for token_id in token_ids]
        if self.asked is not None:
            entries = _entries(self.asked.counts, *(part.wait() for part in self.asked.downloads))
            for row, entry in zip(self.asked.rows, entries, strict=True):
                logprobs[row] = None if failed[row] else entry
        return SamplerOutput(token_ids, logprobs, failed)


DRAWN, NARROWED, LOGPROBS, TABLED, PENALISED, ENDS_MASKED, WORDS_MASKED, MATCHED = (1 << bit for bit in range(8))
"""What a row needs: a draw; min_p, top_k or top_p; logprobs; a row of the tables; counts in it; its end ids masked
until min_tokens; bad words of several tokens masked, whose beginnings only the host sees; a grammar's mask, as well."""
_PARAMETERS = np.dtype(
    [
        ("seed", "u8"),
        ("temperature", "f8"),  # 0 for greedy
        ("log_min_p", "f8"),
        ("top_k", "i8"),
        ("top_p", "f8"),
        ("repetition", "f4"),
        ("frequency", "f4"),
        ("presence", "f4"),
        ("num_logprobs", "i8"),
        ("masked_until", "i8"),  # the position from which on ends are allowed
        ("table_row", "i8"),  # 0 until the first draw
        ("newest_at", "i8"),  # position of the newest token that was drawn, or -1
    ],
    align=True,
)


class _Sequence:
    """What the sampler keeps of a sequence whose rows need more than numbers."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        matcher: Matcher | None,
        vocab_size: int,
    ) -> None:
        self.params = params
        self.matcher = matcher
        self.prompt_token_ids = prompt_token_ids
        self.position = len(prompt_token_ids)
        """Of the next token to accept."""
        # Ids beyond the model's vocabulary have no logit and cannot be drawn: nothing to mask.
        self.end_ids = [t for t in end_token_ids if t < vocab_size]
        words = [tuple(word) for word in bad_words if all(t < vocab_size for t in word)]
        assert all(words), "a bad word without tokens would forbid everything"
        self.banned_ids = [word[0] for word in words if len(word) == 1]
        self.bad_words = [word for word in words if len(word) > 1]
        self.tail: deque[int] = deque(maxlen=max((len(word) - 1 for word in self.bad_words), default=0))
        self.uncounted: list[int] = []
        """Accepted tokens that were not drawn here."""
        self.penalised = params.penalised
        self.tabled = (
            self.penalised or params.allowed_token_ids is not None or bool(params.logit_bias) or bool(self.banned_ids)
        )

    def completing_ids(self) -> list[int]:
        """The last tokens of bad words that the answer has begun."""
        tail = tuple(self.tail)
        return [word[-1] for word in self.bad_words if tail[len(tail) - len(word) + 1 :] == word[:-1]]


class Sampler:
    """Draws tokens for running sequences, which `add` and `remove` announce.

    With penalties, the positions of a sequence are drawn in order, one row per call. Drawing position p once more
    replaces what was drawn there; drawing p + 1 says that the token at p was kept, whether or not `accept` came yet. So
    dropped tokens never count. bad_words of several tokens and grammars know the accepted tokens, min_tokens the row's
    position.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._parameters = np.zeros(0, _PARAMETERS)
        self._kinds = np.zeros(0, np.uint8)
        self._sequences: list[_Sequence | None] = []
        self._free: list[int] = []
        self._tables = SamplerTables(vocab_size)

    def add(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
    ) -> int:
        """Announce a sequence whose params passed `validate_for`; returns its slot, which `remove` frees.

        seed: what its draws depend on (64 bits; params.seed is not read). end_token_ids: masked until min_tokens.
        bad_words: token ids of each spelling that the answer must not complete. matcher: says what its grammar allows.
        """
        if not self._free:
            count = len(self._kinds)
            more = max(FIRST_SLOTS, count)
            self._parameters = np.concatenate([self._parameters, np.zeros(more, _PARAMETERS)])
            self._kinds = np.concatenate([self._kinds, np.zeros(more, np.uint8)])
            self._sequences += [None] * more
            self._free = list(range(count + more - 1, count - 1, -1))
        seq = _Sequence(
            params,
            prompt_token_ids=prompt_token_ids,
            end_token_ids=end_token_ids,
            bad_words=bad_words,
            matcher=matcher,
            vocab_size=self.vocab_size,
        )
        greedy = params.greedy or params.top_k == 1
        narrowed = not greedy and (params.min_p > 0.0 or params.top_p < 1.0 or 0 < params.top_k < self.vocab_size)
        kinds = {
            DRAWN: not greedy,
            NARROWED: narrowed,
            LOGPROBS: params.logprobs is not None,
            TABLED: seq.tabled,
            PENALISED: seq.penalised,
            ENDS_MASKED: params.min_tokens > 0 and bool(seq.end_ids),
            WORDS_MASKED: bool(seq.bad_words),
            MATCHED: matcher is not None,
        }
        kind = sum(kind for kind, wanted in kinds.items() if wanted)
        slot = self._free.pop()
        self._kinds[slot] = kind
        self._parameters[slot] = (
            seed,
            0.0 if greedy else params.temperature,
            math.log(params.min_p) if narrowed and params.min_p > 0.0 else -math.inf,
            params.top_k if narrowed and 0 < params.top_k < self.vocab_size else self.vocab_size,
            params.top_p if narrowed else 1.0,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            params.logprobs or 0,
            len(prompt_token_ids) + params.min_tokens,
            0,
            -1,
        )
        self._sequences[slot] = seq if kind & (TABLED | ENDS_MASKED | WORDS_MASKED | MATCHED) else None
        return slot

    def remove(self, slot: int) -> None:
        """Forget a sequence."""
        if row := int(self._parameters["table_row"][slot]):
            self._tables.give_back(row)
        self._sequences[slot] = None
        self._free.append(slot)

    def accept(self, slot: int, token_id: int) -> None:
        """Say that a sequence keeps a token; the one that was drawn last at its position, if any was."""
        seq = self._sequences[slot]
        if seq is not None:
            seq.tail.append(token_id)
            if seq.penalised and seq.position > self._parameters["newest_at"][slot]:
                seq.uncounted.append(token_id)
            seq.position += 1
            if seq.matcher is not None:
                seq.matcher.accept(token_id)

    def matcher(self, slot: int) -> Matcher | None:
        """Where a sequence stands in its grammar; None if it has none."""
        seq = self._sequences[slot]
        return seq.matcher if seq is not None else None

    def can_draw_later(self, slots: NDArray[np.int64]) -> bool:
        """Whether these may be drawn before the tokens that were drawn for them last are accepted."""
        return not (self._kinds[slots] & (WORDS_MASKED | MATCHED)).any()

    def plain_draws(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Draws | None:
        """What `draw_tokens` needs beside logits, where that is all that these rows need; else None. As for `draw`."""
        chosen, more = self._parameters[slots], self._kinds[slots] & ~np.uint8(DRAWN)
        if more.any() and np.where(positions < chosen["masked_until"], more, more & ~np.uint8(ENDS_MASKED)).any():
            return None
        return _draws(chosen, positions)

    def draw(self, logits: torch.Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Drawn:
        """One token per row of logits [num_rows, vocab_size], any float dtype; the logits stay as they are.

        slots: int64 [num_rows], the sequence of each row. positions: int64 [num_rows], how many tokens come before the
        one to draw. Does not wait for the device, and keeps neither array.
        """
        assert logits.shape == (len(slots), self.vocab_size), f"{tuple(logits.shape)} logits for {len(slots)} rows"
        kinds = self._kinds[slots]
        kind = int(np.bitwise_or.reduce(kinds))
        if not kind:
            return Drawn.of(draw_tokens(logits, None, None))
        if kind & TABLED:
            self._give_table_rows(slots[(kinds & TABLED) > 0], logits.device)
        chosen = self._parameters[slots]
        host: dict[str, NDArray[Any]] = {}
        if kind & DRAWN:
            host |= _draws(chosen, positions)._asdict()
        if kind & NARROWED:
            host |= {name: chosen[name] for name in ("log_min_p", "top_k", "top_p")}
        if kind & TABLED:
            host |= {name: chosen[name] for name in ("table_row", "repetition", "frequency", "presence")}
        if kind & PENALISED:
            host |= self._counts(np.flatnonzero(kinds & PENALISED), chosen, slots, positions)
        if kind & MATCHED:
            host |= self._bitmask(np.flatnonzero(kinds & MATCHED), slots)
        if kind & (ENDS_MASKED | WORDS_MASKED):
            host["masked"] = self._masked_cells(kinds, chosen, slots, positions)
        asked = np.flatnonzero(kinds & LOGPROBS) if kind & LOGPROBS else None
        if asked is not None:
            host["asked"] = asked
        there: dict[str, torch.Tensor] = {}
        if host:
            arrays = [np.ascontiguousarray(array) for array in host.values()]
            there = dict(zip(host, upload(arrays, logits.device), strict=True))

        edited = self._edit(logits, there)
        narrowing = {name: there[name] for name in ("log_min_p", "top_k", "top_p") if name in there}
        shown = draw_tokens(edited, there.get("temperature"), there.get("keys"), **narrowing)
        if edited is not logits:
            shown = _without_broken(shown, row_max(logits))  # a mask can hide a NaN
        token_ids = shown.clamp(min=0)
        if "penalised" in there:
            self._tables.newest.index_copy_(0, there["penalised_row"], token_ids[there["penalised"]])
        found = None
        if asked is not None:
            counts = np.minimum(chosen["num_logprobs"][asked], self.vocab_size).tolist()
            rows = slice(None) if len(asked) == len(slots) else there["asked"]
            found = _Logprobs(
                asked.tolist(),
                counts,
                [Download(part) for part in top_logprobs(logits[rows], token_ids[rows], max(counts))],
            )
        return Drawn(token_ids, Download(shown), found)

    def _give_table_rows(self, slots: NDArray[np.int64], device: torch.device) -> None:
        """Give a row of the tables to each of these that has none yet."""
        for slot in np.unique(slots[self._parameters["table_row"][slots] == 0]).tolist():
            seq = self._sequences[slot]
            assert seq is not None
            row = self._tables.take(device)
            self._tables.fill(
                row,
                allowed=seq.params.allowed_token_ids,
                bias=seq.params.logit_bias or {},
                forbidden=seq.banned_ids,
                prompt_token_ids=seq.prompt_token_ids if seq.penalised else (),
            )
            self._parameters["table_row"][slot] = row

    def _counts(
        self,
        penalised: NDArray[np.int64],
        chosen: NDArray[Any],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> dict[str, NDArray[np.int64]]:
        """The penalised rows, which of their newest tokens are behind them now, and what else to count."""
        rows, newest_at = chosen["table_row"][penalised], chosen["newest_at"][penalised]
        host = {
            "penalised": penalised,
            "penalised_row": rows,
            "kept_row": rows[(newest_at >= 0) & (newest_at < positions[penalised])],
        }
        uncounted = []
        for slot, row in zip(slots[penalised].tolist(), rows.tolist(), strict=True):
            seq = self._sequences[slot]
            assert seq is not None
            if seq.uncounted:
                uncounted.append(self._tables.cells(row, seq.uncounted))
                seq.uncounted = []
        if uncounted:
            host["uncounted"] = np.concatenate(uncounted)
        self._parameters["newest_at"][slots[penalised]] = positions[penalised]
        return host

    def _bitmask(self, matched: NDArray[np.int64], slots: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """What grammars allow next, and whose row is whose: as for `mask_logits`."""
        matchers = [self.matcher(slot) for slot in slots[matched].tolist()]
        rows = np.full(len(slots), -1)
        rows[matched] = np.arange(len(matched))
        return {"bitmask": fill_masks([m for m in matchers if m is not None]), "bitmask_row": rows}

    def _masked_cells(
        self,
        kinds: NDArray[np.uint8],
        chosen: NDArray[Any],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Tokens that cannot come next in this step: row * vocab_size + id."""
        early = ((kinds & ENDS_MASKED) > 0) & (positions < chosen["masked_until"])
        cells = [np.empty(0, np.int64)]
        for row in np.flatnonzero(early | ((kinds & WORDS_MASKED) > 0)).tolist():
            seq = self._sequences[slots[row]]
            assert seq is not None
            ends = early[row] and not (seq.matcher is not None and seq.matcher.finished)  # then nothing else can come
            ids = seq.completing_ids() + (seq.end_ids if ends else [])
            cells.append(row * self.vocab_size + np.array(ids, np.int64))
        return np.concatenate(cells)

    def _edit(self, logits: torch.Tensor, there: dict[str, torch.Tensor]) -> torch.Tensor:
        """Logits after masks, bias and penalties; the same tensor where no row has any."""
        tables, edited = self._tables, logits
        if "kept_row" in there:
            tables.count_newest(there["kept_row"])
        if "uncounted" in there:
            tables.count(there["uncounted"])
        if "table_row" in there:
            edited = edit_logits(
                logits,
                there["table_row"],
                bias=tables.bias,
                in_prompt=tables.in_prompt,
                output_counts=tables.output_counts,
                repetition=there["repetition"],
                frequency=there["frequency"],
                presence=there["presence"],
            )
        if "bitmask" in there:
            edited = mask_logits(edited, there["bitmask_row"], there["bitmask"])
        if "masked" in there and len(there["masked"]):
            if edited is logits:
                edited = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            edited.view(-1).index_fill_(0, there["masked"], -torch.inf)
        return edited


def _draws(chosen: NDArray[Any], positions: NDArray[np.int64]) -> Draws:
    """The draws at these positions, by rows of the parameter table."""
    return Draws(chosen["temperature"], row_keys(chosen["seed"], positions.astype(np.uint64)))


def draw_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    keys: torch.Tensor | None,
    **narrowing: torch.Tensor,
) -> torch.Tensor:
    """The token of each row of logits [num_rows, vocab_size], int64; -1 where none can be said. On the device alone.

    temperature, keys: as for `gumbel_argmax`; None takes the best of each row. narrowing: as for `narrow`, or nothing.
    """
    best = row_max(logits)
    if temperature is None or keys is None:
        return best.token_ids
    last: LastKept | None = narrow(logits, best.values, temperature, **narrowing) if narrowing else None
    return _without_broken(gumbel_argmax(logits, temperature, keys, last=last), best)


def _without_broken(token_ids: torch.Tensor, best: RowMax) -> torch.Tensor:
    """-1 in place of tokens whose row has no best one."""
    return torch.where(best.token_ids < 0, best.token_ids, token_ids)


def prompt_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """What each row of logits [num_rows, vocab_size] says of the token that came next, and of its num_top best ones.

    In a row with NaN every logprob is -inf; the sequence's own draw reports such logits as failed.
    """
    found = []
    for start in range(0, len(token_ids), PROMPT_BLOCK):
        block = np.array(token_ids[start : start + PROMPT_BLOCK])
        rows = logits[start : start + PROMPT_BLOCK]
        top = top_logprobs(rows, upload([block], logits.device)[0], min(num_top, logits.shape[1]))
        found += _entries([num_top] * len(block), *(Download(part).wait() for part in top))
    return found


def _entries(
    counts: list[int], logprobs: list[list[float]], token_ids: list[list[int]], ranks: list[list[int]]
) -> list[TokenLogprobs]:
    """One entry per row of `TopLogprobs`, with as many top tokens as that row asked for."""
    entries = []
    for count, values, ids, row_ranks in zip(counts, logprobs, token_ids, ranks, strict=True):
        keep = [0, *(i for i in range(1, min(count + 1, len(ids))) if ids[i] != ids[0])]
        entries.append(TokenLogprobs([ids[i] for i in keep], [values[i] for i in keep], [row_ranks[i] for i in keep]))
    return entries
