"""Logits to tokens. What one row gets depends on that row alone: its logits, its parameters, its seed and its position.

Order, per row: raw logprobs; allowed_token_ids, bad_words and min_tokens mask; logit_bias; repetition, frequency and
presence penalties; then the best token (greedy), or temperature, min_p, top_k, top_p and a draw.

min_p, top_k and top_p each keep the head of one order of tokens (larger logit first, lower id first among equals), so
only the head is ever sorted. Sums and comparisons are float64, so that no batch shape moves a boundary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rorqual.engine.transfer import Download, upload
from rorqual.ops.sample import (
    apply_penalties,
    gumbel_argmax,
    row_keys,
    row_max,
    top_candidates,
    total_mass,
)
from rorqual.sampling_params import SamplingParams

FIRST_HEAD = 256
"""Candidates tried first where no top_k says how many are needed."""
HEAD_GROWTH = 16
"""How many times more the next try takes where those were not enough."""
PROMPT_BLOCK = 64
"""Rows of prompt logprobs computed at once: bounds the float32 copy of their logits."""


class SampleRow(NamedTuple):
    """Which sequence a row of logits belongs to, and how many tokens come before the one to draw."""

    seq_id: int
    position: int


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


class Drawn(NamedTuple):
    """Tokens that were drawn on the device."""

    token_ids: torch.Tensor
    """[num_rows] int64 on the device; 0 for failed rows."""
    download: Download
    """The same on the way to the host, with -1 for failed rows."""
    output: SamplerOutput | None = None

    def wait(self) -> SamplerOutput:
        """What was drawn, on the host."""
        if self.output is not None:
            return self.output
        token_ids = self.download.wait()
        return SamplerOutput(token_ids, [None] * len(token_ids), [token < 0 for token in token_ids])


class _Sequence:
    """What the sampler keeps of one running sequence."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.seed = seed
        self.num_prompt = len(prompt_token_ids)
        # Ids beyond the model's vocabulary have no logit and cannot be drawn: nothing to mask.
        self.end_ids = [t for t in end_token_ids if t < vocab_size]
        words = [tuple(word) for word in bad_words if all(t < vocab_size for t in word)]
        assert all(words), "a bad word without tokens would forbid everything"
        self.banned_ids = [word[0] for word in words if len(word) == 1]
        self.bad_words = [word for word in words if len(word) > 1]
        self.tail: deque[int] = deque(maxlen=max((len(word) - 1 for word in self.bad_words), default=0))
        self.forbidden: torch.Tensor | None = None  # bool [vocab_size]
        if params.allowed_token_ids is not None:
            self.forbidden = torch.ones(vocab_size, dtype=torch.bool)
            self.forbidden[params.allowed_token_ids] = False
        self.penalised = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        self.greedy = params.greedy or params.top_k == 1
        edited = self.penalised or self.forbidden is not None or bool(bad_words) or bool(params.logit_bias)
        narrowed = not self.greedy and (params.min_p > 0.0 or params.top_p < 1.0 or params.top_k > 0)
        self.plain_from: float = self.num_prompt + params.min_tokens
        """The position from which on a draw needs logits, temperature and seed alone; infinity if never."""
        if edited or narrowed or params.logprobs is not None:
            self.plain_from = math.inf
        self.in_prompt = self.output_counts = torch.empty(0)
        if self.penalised:
            self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool)
            self.in_prompt[torch.tensor(prompt_token_ids, dtype=torch.int64)] = True
            self.output_counts = torch.zeros(vocab_size, dtype=torch.int32)

    def to(self, device: torch.device) -> None:
        """Move the dense state to where the logits are; free after the first step."""
        if self.forbidden is not None:
            self.forbidden = self.forbidden.to(device)
        self.in_prompt = self.in_prompt.to(device)
        self.output_counts = self.output_counts.to(device)

    def accept(self, token_id: int) -> None:
        self.tail.append(token_id)
        if self.penalised:
            self.output_counts[token_id] += 1

    def masked_ids(self, position: int) -> list[int]:
        """Ids that cannot come next: ends before min_tokens, bad words and the last token of started ones."""
        ids = list(self.banned_ids)
        if position - self.num_prompt < self.params.min_tokens:
            ids += self.end_ids
        if self.bad_words:
            tail = tuple(self.tail)
            ids += [word[-1] for word in self.bad_words if tail[len(tail) - len(word) + 1 :] == word[:-1]]
        return ids


class Sampler:
    """Draws tokens for running sequences, which `add` and `remove` announce.

    `sample` changes nothing: only `accept` moves counts, so that rejected drafts and dropped tokens never count.
    Penalties and bad_words know the accepted tokens, min_tokens the row's position.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._sequences: dict[int, _Sequence] = {}

    def add(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
    ) -> int:
        """Announce a sequence whose params passed `validate_for`; returns its slot, a small number.

        seed: what its draws depend on (64 bits; params.seed is not read). end_token_ids: masked until min_tokens.
        bad_words: token ids of each spelling that the answer must not complete.
        """
        slot = next(slot for slot in range(len(self._sequences) + 1) if slot not in self._sequences)
        self._sequences[slot] = _Sequence(
            params,
            seed=seed,
            prompt_token_ids=prompt_token_ids,
            end_token_ids=end_token_ids,
            bad_words=bad_words,
            vocab_size=self.vocab_size,
        )
        return slot

    def remove(self, slot: int) -> None:
        """Forget a sequence."""
        del self._sequences[slot]

    def accept(self, slot: int, token_id: int) -> None:
        """Count a token that the sequence keeps."""
        self._sequences[slot].accept(token_id)

    def can_draw_later(self, slots: NDArray[np.int64]) -> bool:
        """Whether these may be drawn before the tokens that were drawn for them last are accepted."""
        found = self._sequences
        return all(found[slot].plain_from <= found[slot].num_prompt for slot in slots.tolist())

    def draw(self, logits: torch.Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Drawn:
        """One token per row of logits [num_rows, vocab_size], any float dtype; the logits stay as they are."""
        rows = [SampleRow(*row) for row in zip(slots.tolist(), positions.tolist(), strict=True)]
        if not self.can_draw_later(slots):
            out = self.sample(logits, rows)
            token_ids = torch.tensor(out.token_ids, device=logits.device)
            return Drawn(token_ids.clamp(min=0), Download(token_ids), out)
        sequences = [self._sequences[slot] for slot, _ in rows]
        best = row_max(logits)
        usable, token_ids = best.values.isfinite(), best.token_ids
        drawn = np.fromiter((not seq.greedy for seq in sequences), np.bool_, len(rows))
        if drawn.any():
            temperatures = np.fromiter((seq.params.temperature for seq in sequences), np.float64, len(rows))
            host = (_keys(sequences, rows), np.where(drawn, temperatures, 1.0), drawn)
            keys, temperature, drawn_there = upload(host, logits.device)
            token_ids = torch.where(drawn_there, gumbel_argmax(logits, temperature, keys), token_ids)
        token_ids = torch.where(usable, token_ids, 0)
        return Drawn(token_ids, Download(torch.where(usable, token_ids, -1)))

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SamplerOutput:
        """One token per row of logits [num_rows, vocab_size], any float dtype; the logits stay as they are."""
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        sequences = [self._sequences[row.seq_id] for row in rows]
        adjusted, failed = _adjust(logits, sequences, rows)
        best = row_max(adjusted)
        failed = [bad or not math.isfinite(value) for bad, value in zip(failed, best.values.tolist(), strict=True)]
        token_ids = best.token_ids.tolist()
        drawn = [i for i, seq in enumerate(sequences) if not (seq.greedy or failed[i])]
        for i, token_id in zip(drawn, _draw(adjusted, [(i, sequences[i], rows[i]) for i in drawn]), strict=True):
            token_ids[i] = token_id
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        asked = [i for i, seq in enumerate(sequences) if seq.params.logprobs is not None and not failed[i]]
        if asked:
            counts = [sequences[i].params.logprobs or 0 for i in asked]
            entries = _token_logprobs(_take(logits, asked), [token_ids[i] for i in asked], counts)
            for i, entry in zip(asked, entries, strict=True):
                logprobs[i] = entry
        token_ids = [-1 if bad else token for token, bad in zip(token_ids, failed, strict=True)]
        return SamplerOutput(token_ids, logprobs, failed)


def prompt_logprobs(logits: torch.Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """What each row of logits [num_rows, vocab_size] says of the token that came next, and of its num_top best ones.

    In a row with NaN every logprob is -inf; the sequence's own draw reports such logits as failed.
    """
    found = []
    for start in range(0, len(token_ids), PROMPT_BLOCK):
        block = token_ids[start : start + PROMPT_BLOCK]
        found += _token_logprobs(logits[start : start + PROMPT_BLOCK], block, [num_top] * len(block))
    return found


def _keys(sequences: Sequence[_Sequence], rows: Sequence[SampleRow]) -> NDArray[np.int64]:
    """What the noise of each row depends on, as `row_keys`."""
    seeds = np.fromiter((seq.seed for seq in sequences), np.uint64, len(rows))
    return row_keys(seeds, np.fromiter((position for _, position in rows), np.uint64, len(rows)))


def _take(rows: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """The rows at ascending indices; no copy where that is all of them."""
    return rows if len(indices) == len(rows) else rows[torch.tensor(indices, device=rows.device)]


def _adjust(
    logits: torch.Tensor, sequences: list[_Sequence], rows: Sequence[SampleRow]
) -> tuple[torch.Tensor, list[bool]]:
    """Logits after masks, bias and penalties (the same tensor if no row has any), and which rows were broken before.

    A mask can hide a NaN, so that masked rows are looked at here.
    """
    masked = [seq.masked_ids(row.position) for seq, row in zip(sequences, rows, strict=True)]
    touched = [
        i
        for i, (seq, ids) in enumerate(zip(sequences, masked, strict=True))
        if ids or seq.penalised or seq.forbidden is not None or seq.params.logit_bias
    ]
    failed = [False] * len(rows)
    if not touched:
        return logits, failed
    for i, highest in zip(touched, _take(logits, touched).amax(1).tolist(), strict=True):
        failed[i] = not math.isfinite(highest)
        sequences[i].to(logits.device)
    logits = logits.to(torch.float32, copy=True)
    _mask(logits, sequences, masked)
    _add_bias(logits, sequences)
    _penalise(logits, sequences)
    return logits, failed


def _mask(logits: torch.Tensor, sequences: list[_Sequence], masked: list[list[int]]) -> None:
    for row, seq in zip(logits, sequences, strict=True):
        if seq.forbidden is not None:
            row.masked_fill_(seq.forbidden, -math.inf)
    cells = [(i, token_id) for i, ids in enumerate(masked) for token_id in ids]
    if cells:
        row_ids, token_ids = torch.tensor(cells, device=logits.device).unbind(1)
        logits[row_ids, token_ids] = -math.inf


def _add_bias(logits: torch.Tensor, sequences: list[_Sequence]) -> None:
    cells = [(i, token_id) for i, seq in enumerate(sequences) for token_id in seq.params.logit_bias or ()]
    if cells:
        values = [value for seq in sequences for value in (seq.params.logit_bias or {}).values()]
        row_ids, token_ids = torch.tensor(cells, device=logits.device).unbind(1)
        logits[row_ids, token_ids] += torch.tensor(values, dtype=torch.float32, device=logits.device)


def _penalise(logits: torch.Tensor, sequences: list[_Sequence]) -> None:
    indices = [i for i, seq in enumerate(sequences) if seq.penalised]
    if not indices:
        return
    chosen = [sequences[i] for i in indices]
    amounts = [
        (seq.params.repetition_penalty, seq.params.frequency_penalty, seq.params.presence_penalty) for seq in chosen
    ]
    repetition, frequency, presence = torch.tensor(amounts, dtype=torch.float32, device=logits.device).unbind(1)
    in_prompt = torch.stack([seq.in_prompt for seq in chosen])
    output_counts = torch.stack([seq.output_counts for seq in chosen])
    logits[torch.tensor(indices, device=logits.device)] = apply_penalties(
        _take(logits, indices),
        in_prompt,
        output_counts,
        repetition=repetition,
        frequency=frequency,
        presence=presence,
    )


class _Filter(NamedTuple):
    """What narrows a draw; what is off has its neutral value."""

    min_p: float
    top_k: int
    top_p: float


def _filter(params: SamplingParams, vocab_size: int) -> _Filter:
    return _Filter(params.min_p, params.top_k if 0 < params.top_k < vocab_size else vocab_size, params.top_p)


def _draw(logits: torch.Tensor, jobs: list[tuple[int, _Sequence, SampleRow]]) -> list[int]:
    """A token for each job, whose first part says which row of logits [num_rows, vocab_size] is its."""
    if not jobs:
        return []
    vocab_size = logits.shape[1]
    logits = _take(logits, [i for i, _, _ in jobs])
    device = logits.device
    temperature = torch.tensor([seq.params.temperature for _, seq, _ in jobs], dtype=torch.float64, device=device)
    keys = torch.from_numpy(_keys([seq for _, seq, _ in jobs], [row for _, _, row in jobs])).to(device)
    filters = [_filter(seq.params, vocab_size) for _, seq, _ in jobs]
    off = _Filter(min_p=0.0, top_k=vocab_size, top_p=1.0)
    free = [j for j, wanted in enumerate(filters) if wanted == off]
    narrow = [j for j, wanted in enumerate(filters) if wanted != off]
    token_ids = [0] * len(jobs)
    if free:
        drawn = gumbel_argmax(_take(logits, free), _take(temperature, free), _take(keys, free)).tolist()
        for j, token_id in zip(free, drawn, strict=True):
            token_ids[j] = token_id
    if narrow:
        drawn = _draw_narrow(
            _take(logits, narrow), _take(temperature, narrow), _take(keys, narrow), [filters[j] for j in narrow]
        )
        for j, token_id in zip(narrow, drawn, strict=True):
            token_ids[j] = token_id
    return token_ids


def _draw_narrow(
    logits: torch.Tensor, temperature: torch.Tensor, keys: torch.Tensor, filters: list[_Filter]
) -> list[int]:
    """Draw from the head of each row that its filter keeps, sorting no more of the row than that takes."""
    vocab_size = logits.shape[1]
    masses = _whole_masses(logits, temperature, filters)
    count = max(f.top_k if f.top_k < vocab_size else min(FIRST_HEAD, vocab_size) for f in filters)
    token_ids = [0] * len(filters)
    waiting = list(range(len(filters)))
    while waiting:
        t, row_keys = _take(temperature, waiting), _take(keys, waiting)
        head = top_candidates(_take(logits, waiting), count=count)
        sizes = _head_sizes(head.logits.double() / t[:, None], [filters[j] for j in waiting], _take(masses, waiting))
        known = [at for at, size in enumerate(sizes) if size is not None]
        if known:
            kept = torch.tensor([sizes[at] for at in known], device=logits.device)
            widest = max(size for size in sizes if size is not None)
            outside = torch.arange(widest, device=logits.device) >= kept[:, None]
            candidates = _take(head.logits, known)[:, :widest].masked_fill(outside, -math.inf)
            ids = _take(head.token_ids, known)[:, :widest]
            drawn = gumbel_argmax(candidates, _take(t, known), _take(row_keys, known), token_ids=ids).tolist()
            for at, token_id in zip(known, drawn, strict=True):
                token_ids[waiting[at]] = token_id
        waiting = [j for j, size in zip(waiting, sizes, strict=True) if size is None]
        count = min(count * HEAD_GROWTH, vocab_size)
    return token_ids


def _whole_masses(logits: torch.Tensor, temperature: torch.Tensor, filters: list[_Filter]) -> torch.Tensor:
    """float64 [num_rows]: the mass that top_p is a share of where nothing narrows it before, else NaN."""
    masses = torch.full_like(temperature, math.nan)
    alone = [j for j, f in enumerate(filters) if f.top_p < 1 and f.top_k == logits.shape[1] and f.min_p == 0]
    if alone:
        masses[torch.tensor(alone, device=logits.device)] = total_mass(_take(logits, alone), _take(temperature, alone))
    return masses


def _head_sizes(scaled: torch.Tensor, filters: list[_Filter], masses: torch.Tensor) -> list[int | None]:
    """How many tokens each filter keeps, or None where that takes more than this head.

    With w = exp(scaled - best): min_p keeps w >= min_p; of these, top_k keeps the first k; of these, top_p keeps those
    before which less than its share lies. It always keeps the first.

    scaled: logits / T in order, float64 [num_rows, count]. masses: see `_whole_masses`.
    """
    count = scaled.shape[1]
    limits = torch.tensor(filters, dtype=torch.float64, device=scaled.device)  # exact: top_k is far below 2**53
    min_p, top_k, top_p = limits.unbind(1)
    relative = scaled - scaled[:, :1]
    likely = (relative >= min_p.log()[:, None]).sum(1)
    narrowed = torch.minimum(likely, top_k.long())
    mass = relative.exp().cumsum(1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    totals = torch.where(masses.isnan(), mass.gather(1, narrowed[:, None] - 1)[:, 0], masses)
    nucleus = (before < (top_p * totals)[:, None]).sum(1)
    sizes = torch.where(top_p < 1, torch.minimum(nucleus, narrowed), narrowed)
    complete = (likely < count) | (top_k <= count)
    known = complete | (~masses.isnan() & (nucleus < count))
    return [size if sure else None for size, sure in zip(sizes.tolist(), known.tolist(), strict=True)]


def _token_logprobs(logits: torch.Tensor, token_ids: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """One entry per row of raw logits [num_rows, vocab_size]: the row's token, and its own count of top tokens."""
    broken = ~row_max(logits).values.isfinite()
    logprobs = logits.float().log_softmax(1)
    if broken.any():
        logprobs[broken] = -math.inf
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    values, ids = logprobs.gather(1, chosen), chosen
    if widest := min(max(counts), logits.shape[1]):
        top = top_candidates(logprobs, count=widest)
        values, ids = torch.cat([values, top.logits], 1), torch.cat([ids, top.token_ids], 1)
    ranks = _ranks(logprobs, values)
    entries = []
    for row_ids, row_values, row_ranks, count in zip(
        ids.tolist(), values.tolist(), ranks.tolist(), counts, strict=True
    ):
        keep = [0, *(i for i in range(1, min(count, widest) + 1) if row_ids[i] != row_ids[0])]
        entries.append(TokenLogprobs(*([column[i] for i in keep] for column in (row_ids, row_values, row_ranks))))
    return entries


def _ranks(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How many of a row of logprobs [num_rows, vocab_size] reach its values [num_rows, 1 + k]: any one, then its top k.

    Only ties of the last one can lie outside the top k: two passes over the vocabulary answer for all.
    """
    top = values[:, 1:]
    ranks = (top[:, None, :] >= values[:, :, None]).sum(2)
    for column in {0, values.shape[1] - 1}:
        reached = (logprobs >= values[:, column, None]).sum(1, keepdim=True)
        ranks = torch.where(values == values[:, column, None], reached, ranks)
    return ranks
