"""The scheduler with the real cache manager and no model: every answer is made up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import CacheManager, GroupPool
from rorqual.cache.paging import Paging, Retention
from rorqual.engine.scheduler import Scheduler
from rorqual.sequence import Chunk, Sequence

BLOCK = 4


class Run:
    """A scheduler that is stepped until its work is done; a sequence that reaches max_len is finished."""

    def __init__(self, *, num_blocks: int = 64, caching: bool = True, window: int | None = None, **options) -> None:
        self.pool = BlockPool(num_blocks)
        group = GroupPool(self.pool, Paging(BLOCK), Retention(window - 1) if window else None)
        self.cache = CacheManager([group], block_size=BLOCK, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.cache, **({"max_num_batched_tokens": 16, "max_num_seqs": 8} | options))
        self.seqs: list[Sequence] = []
        self.computed: Counter[Sequence] = Counter()
        self.first_token_step: dict[Sequence, int] = {}
        self.num_steps = 0
        self._fresh = itertools.count(1_000_000)  # no two made-up tokens are alike, so they never share a block

    def add(self, num_prompt_tokens: int | list[int], num_output_tokens: int = 1, **options) -> Sequence:
        """A prompt of tokens that no other has, unless given."""
        prompt = num_prompt_tokens
        if isinstance(prompt, int):
            prompt = [next(self._fresh) for _ in range(prompt)]
        seq = Sequence(len(self.seqs), list(prompt), len(prompt), len(prompt) + num_output_tokens, **options)
        assert self.scheduler.why_never_fits(seq) is None
        self.seqs.append(seq)
        self.scheduler.add(seq)
        return seq

    def step(self) -> dict[Sequence, Chunk]:
        chunks = self.scheduler.schedule()
        self.scheduler.check()
        assert bool(chunks) == self.scheduler.has_work, "a step without progress would spin"
        assert sum(chunk.num_tokens for chunk in chunks) <= self.scheduler.max_num_batched_tokens
        for chunk in chunks:
            self.computed[chunk.seq] += chunk.num_tokens
            if chunk.samples:
                self.first_token_step.setdefault(chunk.seq, self.num_steps)
            self.scheduler.advance(chunk, [next(self._fresh)] if chunk.samples else [])
            if len(chunk.seq.token_ids) == chunk.seq.max_len:
                self.scheduler.finish(chunk.seq)
        self.scheduler.check()
        self.num_steps += 1
        return {chunk.seq: chunk for chunk in chunks}

    def until(self, reached: Callable[[], object], limit: int = 1000) -> None:
        while not reached():
            assert self.scheduler.has_work, "the work ended too early"
            assert self.num_steps < limit, "the work does not end"
            self.step()

    def drain(self, limit: int = 1000) -> None:
        self.until(lambda: not self.scheduler.has_work, limit)
        assert self.pool.num_free == self.pool.num_blocks
        assert all(len(seq.token_ids) == seq.max_len for seq in self.seqs)

    @property
    def ideal(self) -> int:
        """Tokens to compute if nothing were computed twice. The last token of an answer is not computed."""
        return sum(seq.max_len - 1 for seq in self.seqs)


# --- sharing a step


def test_decoding_sequences_get_a_token_each_step_while_long_prompts_run():
    run = Run(max_num_batched_tokens=8)
    decoding = [run.add(2, 30) for _ in range(3)]
    run.step()
    long = [run.add(60, 1) for _ in range(2)]
    for _ in range(20):
        chunks = run.step()
        assert all(chunks[seq].num_tokens == 1 for seq in decoding)
        assert sum(chunk.num_tokens for chunk in chunks.values()) == 8, "prompts fill the rest of the step"
        assert any(seq in chunks for seq in long)


def test_single_token_chunks_come_first():
    run = Run()
    run.add(2, 9)
    run.step()
    run.add(5, 2)
    run.add(1, 2)
    lengths = [chunk.num_tokens for chunk in run.scheduler.schedule()]
    assert lengths == [1, 1, 5]


@pytest.mark.parametrize("caching", [True, False])
def test_pr10_short_prompts_pass_a_long_one(caching):
    run = Run(max_num_batched_tokens=8, num_blocks=100, caching=caching)
    long = run.add(32 * 8)
    short = [run.add(8) for _ in range(4)]
    run.drain()
    assert max(run.first_token_step[seq] for seq in short) < run.first_token_step[long]
    assert max(run.first_token_step[seq] for seq in short) <= 8, "half of each step is theirs"
    assert run.first_token_step[long] <= 32 + 4, "and no token of a step is wasted"


def test_pr10_short_prompts_pass_a_long_one_that_is_half_done():
    run = Run(max_num_batched_tokens=8, num_blocks=100)
    long = run.add(32 * 8)
    for _ in range(10):
        assert run.step()[long].num_tokens == 8, "alone it takes all"
    short = [run.add(8) for _ in range(4)]
    run.drain()
    assert max(run.first_token_step[seq] for seq in short) <= 10 + 8


def test_oldest_prompt_gets_at_least_half():
    run = Run(max_num_batched_tokens=16, num_blocks=100)
    oldest = run.add(100)
    others = [run.add(12) for _ in range(5)]
    while oldest.num_output_tokens == 0:
        left, chunks = oldest.num_pending_tokens, run.step()
        assert chunks[oldest].num_tokens >= min(8, left) if oldest in chunks else False
    assert all(seq in run.first_token_step for seq in others)


def test_tokens_that_the_oldest_does_not_get_go_to_the_shortest_first():
    run = Run(max_num_batched_tokens=16, num_blocks=100)
    oldest, middle, short = run.add(40), run.add(20), run.add(5)
    chunks = run.step()
    assert [chunks[seq].num_tokens for seq in (oldest, short, middle)] == [8, 5, 3]


@pytest.mark.parametrize("threshold", [1, 3, 5])
def test_long_prefill_token_threshold_caps_each_prompt(threshold):
    run = Run(long_prefill_token_threshold=threshold)
    seqs = [run.add(17), run.add(9), run.add(2)]
    pending = {seq: len(seq.token_ids) for seq in seqs}
    for _ in range(60):
        for seq, chunk in run.step().items() if run.scheduler.has_work else ():
            assert chunk.num_tokens <= threshold
            assert chunk.num_tokens == min(threshold, pending[seq]), "three such chunks fit a step together"
            pending[seq] -= chunk.num_tokens


def test_no_more_than_max_num_seqs_run():
    run = Run(max_num_seqs=3)
    seqs = [run.add(2, 4) for _ in range(7)]
    assert list(run.step()) == seqs[:3]
    while run.scheduler.has_work:
        assert len(run.step()) <= 3
    starts = [run.first_token_step[seq] for seq in seqs]
    assert starts == sorted(starts), "first come, first served"


def test_step_never_exceeds_its_tokens_though_every_seat_decodes():
    run = Run(max_num_batched_tokens=4, max_num_seqs=4)
    for _ in range(6):
        run.add(3, 8)
    run.drain()
    assert run.computed.total() == run.ideal


def test_one_token_prompts_are_no_special_case():
    run = Run()
    seqs = [run.add(1, 3) for _ in range(3)]
    run.drain()
    assert [run.computed[seq] for seq in seqs] == [3, 3, 3]
    assert set(run.first_token_step.values()) == {0}


# --- blocks run out


def test_pr3_sequence_that_preempts_itself_is_in_one_queue():
    run = Run(num_blocks=5, caching=False)
    old, new = run.add(7, 6), run.add(7, 6)  # two blocks each: their ninth tokens need two more
    run.step()
    assert run.scheduler.running == [old, new]
    run.until(lambda: new.num_preemptions)
    assert run.scheduler.running == [old]
    assert list(run.scheduler.waiting) == [new]
    assert not new.block_tables
    assert new.num_output_tokens > 0, "what it has generated is kept"
    run.drain(limit=40)
    assert old.num_preemptions == 0


def test_pr3_sequence_alone_uses_the_last_block_and_never_spins():
    run = Run(num_blocks=3, caching=False)
    seq = run.add(4, 9)  # 13 tokens, of which 12 have slots: exactly three blocks
    run.drain(limit=10)
    assert seq.num_preemptions == 0
    assert run.computed[seq] == 12


def test_pr3_sequence_that_can_never_fit_is_told_so():
    run = Run(num_blocks=3)
    too_long = Sequence(0, [1, 2], 2, 14)
    why = run.scheduler.why_never_fits(too_long)
    assert why is not None
    assert "14 tokens need 4 KV blocks of 4 tokens, and the cache has 3" in why
    assert "--kv-cache-memory" in why


@pytest.mark.parametrize("caching", [True, False])
def test_pr4_long_prompt_is_not_resumed_only_to_be_preempted(caching):
    run = Run(
        num_blocks=10, caching=caching, max_num_batched_tokens=5, max_num_seqs=4, long_prefill_token_threshold=BLOCK
    )
    decoder = run.add(6 * BLOCK, 16)  # grows from 6 to 10 blocks
    run.until(lambda: decoder.num_output_tokens)
    prompt = run.add(8 * BLOCK, 4)
    run.drain(limit=200)
    assert decoder.num_preemptions == 0, "the older one goes on"
    assert prompt.num_preemptions <= 2
    assert run.computed.total() <= 2 * run.ideal


@pytest.mark.parametrize("caching", [True, False])
def test_pr4_preemptions_are_bounded_under_pressure(caching):
    run = Run(num_blocks=10, caching=caching, max_num_batched_tokens=6, max_num_seqs=4, long_prefill_token_threshold=4)
    seqs = [run.add(8 + 3 * i, 12) for i in range(6)]
    run.drain(limit=500)
    assert max(seq.num_preemptions for seq in seqs) <= 3
    assert run.computed.total() <= 2 * run.ideal


def test_kv2_pages_at_an_edge_are_counted_per_sequence():
    """All sequences need a new block in the same step, and there are fewer free blocks than sequences."""
    run = Run(num_blocks=8, caching=False, max_num_batched_tokens=24, max_num_seqs=6)
    seqs = [run.add(4, 13) for _ in range(6)]
    run.until(lambda: 0 < run.pool.num_free < len(run.scheduler.running) or run.scheduler.num_preemptions)
    run.drain(limit=100)
    assert run.scheduler.num_preemptions > 0
    assert max(seq.num_preemptions for seq in seqs) <= 2
    assert seqs[0].num_preemptions == 0
    assert run.computed.total() <= 2 * run.ideal


def test_newest_is_preempted_and_comes_back_first():
    run = Run(num_blocks=8, caching=False, max_num_seqs=3)
    seqs = [run.add(5, 12) for _ in range(3)]
    late = run.add(2, 2)
    run.until(lambda: run.scheduler.num_preemptions)
    assert seqs[0].num_preemptions == 0
    assert run.scheduler.waiting[-1] is late, "who has run goes before who has not"
    run.drain(limit=200)


def test_preempted_sequence_finds_its_own_blocks_again():
    run = Run(num_blocks=12)
    seq = run.add(11, 6)
    run.step()
    run.scheduler._preempt(seq)
    assert seq.num_computed_tokens == 0
    chunk = run.step()[seq]
    assert chunk.start == 8, "two full blocks were still cached"
    assert seq.num_cached_tokens == 0, "the caller is told of its first admission"
    run.drain()


def test_admission_leaves_a_block_for_each_running_sequence():
    """Two blocks each, four in all: the second would only be preempted when either grows."""
    run = Run(num_blocks=4, caching=False)
    old, new = run.add(7, 6), run.add(7, 6)
    run.step()
    assert run.scheduler.running == [old]
    assert list(run.scheduler.waiting) == [new]
    run.drain()
    assert run.scheduler.num_preemptions == 0
    assert run.computed.total() == run.ideal


# --- prefixes

SHARED = list(range(9))  # two full blocks and a token


@pytest.mark.parametrize("first_to_finish", [0, 1])
def test_pc9_twin_waits_for_the_blocks_of_the_first(first_to_finish):
    run = Run()
    twins = [run.add(SHARED, 4), run.add(SHARED, 4)]
    assert list(run.step()) == [twins[0]]
    assert run.step()[twins[1]].start == 8
    assert twins[0].block_tables[0][:2] == twins[1].block_tables[0][:2]
    assert (twins[0].num_cached_tokens, twins[1].num_cached_tokens) == (0, 8)
    run.scheduler.finish(twins[first_to_finish])
    run.scheduler.check()
    third = run.add(SHARED, 2)
    run.step()
    assert third.num_cached_tokens == 8
    while run.scheduler.has_work:
        run.step()
    assert run.pool.num_free == run.pool.num_blocks
    assert run.computed[third] <= 2
    fourth = run.add(SHARED, 1)
    run.step()
    assert fourth.num_cached_tokens == 8


def test_pc9_waiting_twin_lets_others_pass():
    run = Run()
    first, twin, other = run.add(SHARED, 3), run.add(SHARED, 3), run.add(6, 3)
    assert set(run.step()) == {first, other}
    assert set(run.step()) == {first, twin, other}
    run.drain()


def test_pc9_waiting_twin_keeps_its_place():
    run = Run(max_num_seqs=2)
    first, twin, other, late = run.add(SHARED, 3), run.add(SHARED, 3), run.add(6, 3), run.add(6, 3)
    run.step()
    assert run.scheduler.running == [first, other]
    assert list(run.scheduler.waiting) == [twin, late]
    run.drain()


def test_twin_that_does_not_read_the_cache_waits_for_nobody():
    run = Run(max_num_batched_tokens=32)
    seqs = [run.add(SHARED, 2), run.add(SHARED, 2, reads_prefix_cache=False)]
    assert set(run.step()) == set(seqs)
    run.drain()


def test_pc9_twin_is_computed_when_the_first_is_gone():
    run = Run(max_num_batched_tokens=8)
    first, twin = run.add(SHARED, 3), run.add(SHARED, 3)
    run.step()
    assert twin in run.scheduler.waiting
    run.scheduler.finish(first)
    run.seqs.remove(first)
    run.drain(limit=10)


def test_pc9_twins_under_two_salts_share_nothing():
    run = Run(max_num_batched_tokens=32)
    seqs = [run.add(SHARED, 2, cache_salt=salt) for salt in ("a", "b")]
    assert set(run.step()) == set(seqs)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0]


def test_pr8_sequence_that_does_not_read_the_cache_completes_like_any_other():
    run = Run(max_num_batched_tokens=4, max_num_seqs=2)
    for _ in range(3):
        run.add(SHARED, 2, reads_prefix_cache=False)
    run.drain(limit=40)
    assert run.computed.total() == run.ideal
    assert all(seq.num_cached_tokens == 0 for seq in run.seqs)


@pytest.mark.parametrize("length", [4, 8, 12])
def test_pc2_wholly_cached_prompt_still_computes_its_last_block(length):
    run = Run()
    prompt = list(range(length))
    run.add(prompt)
    run.drain()
    again = run.add(prompt)
    run.drain()
    assert again.num_cached_tokens == length - BLOCK
    assert run.computed[again] == BLOCK


# --- drafts


def decode_with_drafts(run: Run, drafts: list[int], num_output_tokens: int = 10) -> tuple[Sequence, Chunk]:
    seq = run.add(3, num_output_tokens)
    run.step()
    seq.draft_token_ids = drafts
    (chunk,) = run.scheduler.schedule()
    return seq, chunk


def test_drafts_are_computed_with_the_token_before_them():
    seq, chunk = decode_with_drafts(Run(), [7, 8])
    assert (chunk.start, chunk.stop) == (3, 6)
    assert chunk.samples
    assert seq.draft_token_ids == [7, 8]


def test_drafts_beyond_max_len_are_cut():
    seq, chunk = decode_with_drafts(Run(), [7, 8, 9], num_output_tokens=3)
    assert seq.draft_token_ids == [7], "one output is there, one comes for free"
    assert chunk.stop == 5


def test_drafts_beyond_the_step_are_cut():
    seq, chunk = decode_with_drafts(Run(max_num_batched_tokens=3, max_num_seqs=2), [7, 8, 9])
    assert seq.draft_token_ids == [7, 8]
    assert chunk.num_tokens == 3


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_rejected_drafts_are_rolled_back(num_accepted):
    run = Run()
    seq, chunk = decode_with_drafts(run, [7, 8])
    run.scheduler.advance(chunk, [*[7, 8][:num_accepted], 99])
    assert len(seq.token_ids) == 4 + num_accepted + 1
    assert seq.num_computed_tokens == len(seq.token_ids) - 1
    assert seq.num_pending_tokens == 1
    assert seq.draft_token_ids == []
    run.scheduler.check()
    run.drain()


# --- steps that are scheduled before the one before is read


def test_a_started_step_counts_as_computed_and_its_token_as_unknown():
    run = Run(max_num_batched_tokens=6, max_num_seqs=2)
    seq = run.add(9, 4)
    first = run.scheduler.schedule()
    run.scheduler.depart(first)
    assert (seq.num_computed_tokens, seq.num_unknown_tokens, seq.num_pending_tokens) == (6, 0, 3)
    second = run.scheduler.schedule()
    run.scheduler.depart(second)
    assert (seq.num_computed_tokens, seq.num_unknown_tokens, seq.num_pending_tokens) == (9, 1, 1)
    assert seq.num_published_tokens == 2 * BLOCK
    third = run.scheduler.schedule()
    assert [(c.start, c.stop, c.samples) for c in (*first, *second, *third)] == [
        (0, 6, False),
        (6, 9, False),
        (9, 10, True),
    ]
    run.scheduler.learn([seq], [77])
    run.scheduler.check()
    assert seq.token_ids[9:] == [77]
    run.scheduler.advance(third[0], [78])
    run.drain()


def test_blocks_are_published_when_their_tokens_are_known():
    run = Run()
    seq = run.add(7, 9)
    for count in (1, 2, 2, 2, 2, 3):
        chunks = run.scheduler.schedule()
        run.scheduler.depart(chunks)
        assert seq.num_published_tokens == count * BLOCK, "its last token has been read, and its step is started"
        run.scheduler.learn([seq], [next(run._fresh)])


@pytest.mark.parametrize("num_output_tokens", [1, 2])
def test_a_sequence_leaves_with_its_last_token(num_output_tokens):
    run = Run(max_num_seqs=1)
    seq, late = run.add(5, num_output_tokens), run.add(5, 1)
    for _ in range(num_output_tokens):
        run.scheduler.depart(run.scheduler.schedule())
        run.scheduler.learn([seq], [1])
    assert not seq.block_tables
    assert [chunk.seq for chunk in run.scheduler.schedule()] == [late], "its seat is free before it is read"
    run.scheduler.finish(seq)
    run.drain()


def test_a_sequence_that_is_preempted_keeps_the_token_it_has_drawn():
    run = Run(num_blocks=5, caching=False)
    old, new = run.add(7, 6), run.add(7, 6)  # two blocks each: their ninth tokens need two more
    while not new.num_preemptions:
        chunks = run.scheduler.schedule()
        assert {chunk.seq for chunk in chunks} == {old, new}
        run.scheduler.depart(chunks)
        ahead = run.scheduler.schedule()
        if new.num_preemptions:
            assert [chunk.seq for chunk in ahead] == [old]
            assert (new.num_unknown_tokens, new.num_computed_tokens, new.block_tables) == (1, 0, [])
        run.scheduler.learn([old, new], [1, 2])
    run.scheduler.check()
    assert list(run.scheduler.waiting) == [new]
    assert new.token_ids[7:] == [2] * len(old.token_ids[7:])
    run.drain(limit=40)


# --- leaving


def test_finish_takes_a_sequence_out_of_either_queue():
    run = Run(max_num_seqs=1)
    running, waiting = run.add(5, 5), run.add(5, 5)
    run.step()
    run.scheduler.finish(waiting)
    assert run.scheduler.running == [running]
    assert not run.scheduler.waiting
    run.scheduler.finish(running)
    assert not run.scheduler.has_work
    assert run.pool.num_free == run.pool.num_blocks
    run.scheduler.check()


def test_idle_scheduler_has_nothing_to_do():
    scheduler = Run().scheduler
    assert not scheduler.has_work
    assert scheduler.schedule() == []
