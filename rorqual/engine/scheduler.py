"""Scheduler: share each step's token budget among sequences. Knows counts, not phases, tensors or models. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from rorqual.cache.manager import CacheManager
from rorqual.cache.prefix import PrefixNode
from rorqual.engine.decode_rows import DecodeRows
from rorqual.sequence import Chunk, Sequence

MAX_PROMPTS_IN_PROGRESS = 8
"""Beyond what fills a step, so many prompts may hold blocks at once: short ones can pass long ones, few sit idle."""


class Scheduler:
    """Every step, moves each sequence's num_computed_tokens towards its length.

    A prompt, a piece of a prompt, one decode token, a token with five drafts, and a preempted sequence coming back
    are all "tokens not computed yet". Each step:

    1. every sequence with one pending token gets it, so that arrivals never stall those who stream;
    2. waiting sequences are admitted, oldest first, while there are seats and blocks;
    3. prompts share the tokens that are left: half go to the oldest, the rest to the shortest, so that a long prompt
       neither starves nor starves others.

    When blocks run out, the newest running sequence is preempted: it gives its blocks back and later recomputes. The
    oldest one can therefore always finish, and nothing that fits the cache alone waits for ever.
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        long_prefill_token_threshold: int | None = None,
    ) -> None:
        assert max_num_seqs <= max_num_batched_tokens, "every running sequence needs its token each step"
        self.cache = cache
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.long_prefill_token_threshold = long_prefill_token_threshold
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first; a list, because every rank must agree on the order
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_prompts(self) -> int:
        """Sequences that wait, or are working through more than one token."""
        return len(self.waiting) + sum(seq.num_pending_tokens > 1 for seq in self.running)

    def why_never_fits(self, seq: Sequence) -> str | None:
        """Why this sequence could never run, or None."""
        return self.cache.why_never_fits(seq.max_len, max_chunk=self.max_num_batched_tokens)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. The caller has made sure that it fits."""
        self.waiting.append(seq)

    def schedule(self, prompt_limit: int | None = None) -> list[Chunk]:
        """Choose this step's chunks and hold the blocks they will write. Single-token chunks come first.

        The step before may still be in flight: `depart` has counted it then, and a chunk may end with the token that it
        draws.

        prompt_limit: the most tokens that prompts get in a step that also moves a stream on; None sets no limit.
        """
        chunks: dict[Sequence, Chunk] = {}
        preemptions_before = self.num_preemptions
        decoding = [seq for seq in self.running if seq.num_pending_tokens == 1]
        spare = self.max_num_batched_tokens - len(decoding)
        for seq in decoding:
            if seq.block_tables:  # not preempted for the sake of an older one
                if seq.draft_token_ids:
                    most = max(0, min(spare, seq.max_len - len(seq.token_ids) - 1))
                    seq.draft_token_ids = seq.draft_token_ids[:most]
                    spare -= len(seq.draft_token_ids)
                self._compute(seq, 1 + len(seq.draft_token_ids), chunks)
        budget = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks.values())
        if prompt_limit is not None and any(seq.is_streamed for seq in chunks):
            budget = min(budget, prompt_limit)
        if self.num_preemptions == preemptions_before:  # a resumed sequence must not fight for the blocks it just lost
            self._admit_waiting(budget)
        self._share_among_prompts(budget, chunks)
        return sorted(chunks.values(), key=lambda chunk: chunk.num_tokens > 1)

    def depart(self, chunks: Iterable[Chunk]) -> None:
        """Count chunks of a step that was started as computed, and what it draws as tokens that are not known yet.

        So the next step can be scheduled before this one is read: whatever uses the same blocks is computed after it.
        A sequence that its unknown token fills has nothing left to compute, and leaves.
        """
        for chunk in chunks:
            seq = chunk.seq
            assert chunk.stop <= len(seq.token_ids), "how many drafts are accepted cannot be said before"
            seq.num_unknown_tokens = int(chunk.samples)
            seq.num_computed_tokens = chunk.stop
            self.cache.publish(seq)
            if seq.num_tokens == seq.max_len:
                self.finish(seq)

    def learn(self, seqs: SequenceOf[Sequence], new_token_ids: SequenceOf[int]) -> None:
        """Record the tokens that were unknown. Where a sequence stands, and whether it still does, is as it was."""
        for seq, token_id in zip(seqs, new_token_ids, strict=True):
            seq.token_ids.append(token_id)
            seq.num_unknown_tokens = 0

    def advance(self, chunk: Chunk, new_token_ids: SequenceOf[int]) -> None:
        """Record that a chunk was computed and which tokens were accepted after it: drafts, then one fresh token."""
        seq = chunk.seq
        if seq.num_unknown_tokens:  # `depart` has counted the chunk
            self.learn([seq], new_token_ids)
            return
        if chunk.samples:  # asked before the tokens grow
            seq.draft_token_ids = []
        seq.num_computed_tokens = min(chunk.stop, len(seq.token_ids))
        if new_token_ids:
            # The last accepted token has no KV yet; drafts behind the accepted ones are rolled back by the count.
            seq.token_ids += new_token_ids
            seq.num_computed_tokens = len(seq.token_ids) - 1
        self.cache.publish(seq)

    def advance_decodes(
        self, seqs: SequenceOf[Sequence], stops: NDArray[np.int64], new_token_ids: SequenceOf[int]
    ) -> None:
        """As `advance` for chunks that end a sequence's known tokens, have one token each, and yield one each.

        stops: int64 [num_seqs], those of the chunks.
        """
        for seq, token_id in zip(seqs, new_token_ids, strict=True):
            seq.token_ids.append(token_id)
            seq.num_computed_tokens += 1
        for i in np.flatnonzero(self.cache.has_news_at(stops)).tolist():
            self.cache.publish(seqs[i])

    def look_ahead(self, rows: DecodeRows, gone: SequenceOf[int] = ()) -> DecodeRows | None:
        """The step after one that decodes these rows, before its tokens are known; None where that cannot be said.

        A short cut past `depart` and `schedule`, while nothing but these sequences could be scheduled and blocks are
        free for them. Left out are rows in `gone`, whose sequences were finished meanwhile, and those that the unknown
        token fills. Other ends show later: what was computed for them then is dropped.
        """
        if len(rows.seqs) - len(gone) != len(self.running):
            return None
        goes_on = rows.stops + 1 < rows.max_lens
        if gone:
            goes_on[list(gone)] = False
        if self.waiting and np.count_nonzero(goes_on) < self.max_num_seqs:
            return None
        if not goes_on.all():
            rows = rows.take(np.flatnonzero(goes_on))
            if not rows.seqs:
                return None
        if any(seq.draft_token_ids for seq in rows.seqs):
            return None
        for group, (_, (size, _), _) in enumerate(self.cache.groups):
            for row in np.flatnonzero(rows.stops % size == 0).tolist():
                stop = int(rows.stops[row])
                if not self.cache.reserve(rows.seqs[row], stop + 1):
                    return None
                rows.copy_block(row, group, stop // size)
        return rows.next()

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back. One that left with its last token is gone."""
        if seq in self.running:
            self.running.remove(seq)
            self.cache.release(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def check(self) -> None:
        """Assert every invariant of the scheduler and its cache."""
        self.cache.check(self.running)
        assert not set(self.running) & set(self.waiting), "a sequence is in two queues"
        assert len(self.running) <= self.max_num_seqs
        assert not any(seq.num_unknown_tokens for seq in (*self.running, *self.waiting)), "a step was never read"
        for seq in self.running:
            assert seq.num_computed_tokens < len(seq.token_ids) <= seq.max_len
            for group, table in zip(self.cache.groups, seq.block_tables, strict=True):
                assert seq.num_computed_tokens <= len(table) * group.paging.block_tokens
        for seq in self.waiting:
            assert not seq.block_tables
            assert seq.num_computed_tokens == 0

    def _compute(self, seq: Sequence, num_tokens: int, chunks: dict[Sequence, Chunk]) -> None:
        """Schedule the next num_tokens of a sequence, preempting newer ones for blocks, or itself at last."""
        start = seq.num_computed_tokens
        while not self.cache.reserve(seq, start + num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            chunks.pop(victim, None)
            if victim is seq:
                return
        chunks[seq] = Chunk(seq, start, start + num_tokens)

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.cache.release(seq)
        self.waiting.appendleft(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _admit_waiting(self, num_tokens: int) -> None:
        """Move waiting sequences into the running list, until prompts fill the step or no seat or block is left."""
        prompts = [seq for seq in self.running if seq.num_pending_tokens > 1]
        num_wanted = sum(seq.num_pending_tokens for seq in prompts)
        num_prompts = len(prompts)
        in_progress = self._blocks_in_progress(prompts)
        postponed: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_num_seqs:
            if num_tokens <= 0 or (num_wanted >= num_tokens and num_prompts >= MAX_PROMPTS_IN_PROGRESS):
                break
            seq = self.waiting.popleft()
            cached = self.cache.find_prefix(seq)
            if self._next_block(seq, cached.num_tokens) in in_progress:
                # Another sequence is computing this very block: wait for it rather than compute it twice.
                postponed.append(seq)
                continue
            stop = min(len(seq.token_ids), cached.num_tokens + self._largest_chunk())
            # Each running sequence will soon want a block: leave it one, or admitting would only preempt.
            if not self.cache.admit(seq, cached, stop=stop, headroom=len(self.running)):
                self.waiting.appendleft(seq)
                break
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.running.append(seq)
            num_wanted += seq.num_pending_tokens
            num_prompts += seq.num_pending_tokens > 1
            in_progress |= self._blocks_in_progress([seq])
        self.waiting.extendleft(reversed(postponed))

    def _next_block(self, seq: Sequence, num_cached: int) -> PrefixNode | None:
        """The first block that a sequence would have to compute although it might be shared."""
        block = num_cached // self.cache.block_size
        if not seq.reads_prefix_cache or block >= (len(seq.token_ids) - 1) // self.cache.block_size:
            return None
        return seq.prefix[block] if block < len(seq.prefix) else None

    def _blocks_in_progress(self, prompts: list[Sequence]) -> set[PrefixNode]:
        if not self.cache.enable_prefix_caching:
            return set()
        found: set[PrefixNode] = set()
        for seq in prompts:
            self.cache.name_blocks(seq, len(seq.token_ids))
            found.update(seq.prefix[seq.num_computed_tokens // self.cache.block_size :])
        return found

    def _largest_chunk(self) -> int:
        return min(self.long_prefill_token_threshold or self.max_num_batched_tokens, self.max_num_batched_tokens)

    def _share_among_prompts(self, budget: int, chunks: dict[Sequence, Chunk]) -> None:
        prompts = [seq for seq in self.running if seq not in chunks]
        if not prompts:
            return
        limit = self._largest_chunk()
        shares = dict.fromkeys(prompts, 0)
        # A lone prompt takes all; otherwise half is kept from the oldest, for those who need less.
        oldest = prompts[0]
        shares[oldest] = min(oldest.num_pending_tokens, limit, budget if len(prompts) == 1 else -(-budget // 2))
        budget -= shares[oldest]
        for seq in sorted(prompts, key=lambda seq: seq.num_pending_tokens):
            extra = min(seq.num_pending_tokens - shares[seq], limit - shares[seq], budget)
            shares[seq] += extra
            budget -= extra
        for seq, share in shares.items():
            if share > 0 and seq.block_tables:
                self._compute(seq, share, chunks)
