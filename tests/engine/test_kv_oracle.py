"""The KV oracle: a fake model that can only read what was written to the paged cache.

Each row stores the exact token prefix it was computed from. The model re-reads every row that its query may see
through the block tables, and fails if any is stale, foreign or missing; its next token is a hash of what it read. An
entry that stands for several tokens is written by the last of them alone, out of the rows of state that its window and,
with overlap, the one before have left. So equal output to the plain loop proves paging, prefix sharing, chunking,
windows, compression, preemption and draft rejection at once; and steps ahead, which run before the tokens of the step
before are recorded: those with prompts, and those that only decode, which go through the block tables of their rows.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from types import MappingProxyType
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import PASSED, CacheManager, GroupPool
from rorqual.cache.paging import Paging, Retention
from rorqual.engine.decode_rows import DecodeRows
from rorqual.engine.scheduler import Scheduler
from rorqual.sequence import Chunk, Sequence

VOCAB = 3


def next_token(prefix: tuple[int, ...], salt: str) -> int:
    return random.Random(repr((prefix, salt))).randrange(VOCAB)


def plain_generate(prompt: list[int], max_len: int, salt: str) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < max_len:
        tokens.append(next_token(tuple(tokens), salt))
    return tokens


class Layer(NamedTuple):
    """A kind of layer: it sees all tokens, a window of them, or an entry for every `ratio` tokens."""

    window: int | None = None
    ratio: int | None = None
    overlap: bool = False
    """Whether an entry is made of the window before its own too."""

    def groups(self, block_size: int) -> list[tuple[Paging, Retention | None]]:
        """Those of its caches: tokens; or entries and states."""
        if self.ratio is None:
            return [(Paging(block_size), Retention(self.window - 1) if self.window else None)]
        state = Retention(self.ratio if self.overlap else 0, self.ratio)
        return [(Paging(math.lcm(block_size, self.ratio), self.ratio), None), (Paging(block_size), state)]


V4 = [Layer(window=3), Layer(ratio=4, overlap=True), Layer(ratio=8)]


class Rows:
    """One cache group: (salt, token prefix) by block and row."""

    def __init__(self, group: GroupPool) -> None:
        self.paging = group.paging
        self.slots: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    def write(self, table: SequenceOf[int], row: int, seq: Sequence, text: list[int]) -> None:
        """A row of a sequence, by the token that completes it."""
        block, at = divmod(row, self.paging.rows)
        assert table[block] != PASSED
        self.slots[table[block], at] = (seq.cache_salt, tuple(text[: (row + 1) * self.paging.tokens_per_row]))

    def read(self, table: SequenceOf[int], rows: range, seq: Sequence, text: list[int]) -> None:
        """Rows that must be those of this sequence."""
        for row in rows:
            block, at = divmod(row, self.paging.rows)
            want = (seq.cache_salt, tuple(text[: (row + 1) * self.paging.tokens_per_row]))
            assert self.slots.get((table[block], at)) == want, "stale or foreign KV"


class PagedModel:
    """Layers over the groups of a cache, in their order."""

    def __init__(self, layers: SequenceOf[Layer], cache: CacheManager) -> None:
        self.layers = layers
        self.rows = [Rows(group) for group in cache.groups]

    def run(self, chunk: Chunk, unread: Mapping[Sequence, int] = MappingProxyType({})) -> list[int]:
        """What a chunk yields; tokens of the step before, in `unread`, are not in token_ids yet."""
        seq = chunk.seq
        text = [*seq.token_ids, *([unread[seq]] if seq.num_unknown_tokens else []), *seq.draft_token_ids]
        self._write_and_read(chunk, text, seq.block_tables)
        accepted: list[int] = []
        if chunk.samples:
            for i in range(seq.num_tokens, chunk.stop + 1):
                accepted.append(next_token(tuple(text[:i]), seq.cache_salt))
                if i == chunk.stop or accepted[-1] != text[i]:
                    break
        return accepted[: seq.max_len - seq.num_tokens]

    def run_rows(self, rows: DecodeRows, unread: Mapping[Sequence, int] = MappingProxyType({})) -> list[list[int]]:
        """As `run` for rows, through their block tables."""
        tokens = []
        for row, seq in enumerate(rows.seqs):
            text = [*seq.token_ids, *([unread[seq]] if seq in unread else [])]
            stop = int(rows.stops[row])
            assert stop == len(text) < rows.max_lens[row]
            assert seq.num_pending_tokens == 1
            tables = [table[row].tolist() for table in rows.block_tables]
            self._write_and_read(Chunk(seq, stop - 1, stop), text, tables)
            tokens.append([next_token(tuple(text), seq.cache_salt)])
        return tokens

    def _write_and_read(self, chunk: Chunk, text: list[int], tables: SequenceOf[SequenceOf[int]]) -> None:
        seq, queries = chunk.seq, range(chunk.start, chunk.stop)
        groups = zip(self.rows, tables, strict=True)
        for window, ratio, overlap in self.layers:
            rows, table = next(groups)
            if ratio is None:
                for token in queries:
                    rows.write(table, token, seq, text)
            else:
                states, states_table = next(groups)
                for token in queries:
                    states.write(states_table, token, seq, text)
                for token in queries:
                    if (token + 1) % ratio == 0:
                        pooled = range(max(0, token + 1 - (1 + overlap) * ratio), token + 1)
                        states.read(states_table, pooled, seq, text)
                        rows.write(table, token // ratio, seq, text)
            for query in queries:
                first = max(0, query - window + 1) if window else 0
                rows.read(table, range(first, (query + 1) // (ratio or 1)), seq, text)
        assert next(groups, None) is None


def guess(seq: Sequence, rng: random.Random) -> list[int]:
    """A proposer that is right about half of the time."""
    truth = plain_generate(seq.token_ids, len(seq.token_ids) + 3, seq.cache_salt)[len(seq.token_ids) :]
    return [t if rng.random() < 0.7 else (t + 1) % VOCAB for t in truth][: rng.randint(0, 3)]


@st.composite
def prompts_with_shared_beginnings(draw) -> list[list[int]]:
    """Each is a piece of a common text and something of its own."""
    tokens = st.integers(0, VOCAB - 1)
    text = draw(st.lists(tokens, max_size=12))
    own = st.lists(tokens, min_size=1, max_size=16)
    return draw(
        st.lists(st.builds(lambda keep, rest: text[:keep] + rest, st.integers(0, 12), own), min_size=1, max_size=7)
    )


workloads = {
    "prompts": prompts_with_shared_beginnings(),
    "block_size": st.integers(1, 4),
    "spare_blocks": st.sampled_from([0, 0, 1, 2, 4, 12]),
    "max_num_batched_tokens": st.sampled_from([1, 2, 3, 4, 4, 5, 6, 9]),
    "max_num_seqs": st.integers(1, 5),
    "threshold": st.sampled_from([None, None, None, 1, 2, 4]),
    "layers": st.sampled_from(
        [
            [Layer()],
            [Layer()],
            *([Layer(window=window)] for window in (1, 2, 3, 4, 6)),
            [Layer(), Layer(window=3)],
            [Layer(window=5), Layer(), Layer(window=2)],
            [Layer(ratio=4)],
            [Layer(ratio=3, overlap=True)],
            [Layer(ratio=8)],
            [Layer(), Layer(ratio=6), Layer(window=2)],
            V4,
            V4,
        ]
    ),
    "enable_prefix_caching": st.booleans(),
    "looks_ahead": st.booleans(),
    "seed": st.integers(0, 2**16),
}


def schedule(scheduler: Scheduler) -> list[Chunk]:
    """A step's chunks, which keep the scheduler's promises."""
    decoding = {s for s in scheduler.running if s.num_pending_tokens == 1}
    oldest = scheduler.running[:1]
    chunks = scheduler.schedule()
    assert oldest == scheduler.running[: len(oldest)], "the oldest was preempted: nothing would be sure to finish"
    assert bool(chunks) == scheduler.has_work, "a step without progress would spin"
    assert all(c.stop > c.start == c.seq.num_computed_tokens for c in chunks)
    assert all(c.stop < c.seq.max_len for c in chunks), "the last token needs no KV"
    assert sum(c.num_tokens for c in chunks) <= scheduler.max_num_batched_tokens
    assert decoding & set(scheduler.running) <= {c.seq for c in chunks}, "a decoding sequence got no token"
    for chunk in chunks:
        if scheduler.long_prefill_token_threshold is not None and chunk.start + 1 < chunk.seq.num_tokens:
            assert chunk.num_tokens <= scheduler.long_prefill_token_threshold
    return chunks


def fly(
    scheduler: Scheduler, model: PagedModel, chunks: list[Chunk], late: list[Sequence], rng: random.Random
) -> set[int]:
    """Compute steps, each started before the tokens of the last are recorded, until that cannot go on.

    Sequences of `late` arrive meanwhile, and some are aborted with a step in flight. Returns the ids of the aborted.
    """
    aborted: set[int] = set()
    rows = DecodeRows.of(chunks)
    results = model.run_rows(rows) if rows is not None else [model.run(chunk) for chunk in chunks]
    while True:
        if late and rng.random() < 0.2:
            scheduler.add(late.pop(0))
        if scheduler.has_work and rng.random() < 0.05:
            seq = rng.choice([*scheduler.running, *scheduler.waiting])
            scheduler.finish(seq)
            aborted.add(seq.seq_id)
        gone = [i for i, chunk in enumerate(chunks) if chunk.seq.seq_id in aborted or ended(chunk.seq)]
        live = [i for i in range(len(chunks)) if i not in gone]
        unread = {chunks[i].seq: results[i][0] for i in live if results[i]}
        rows_ahead, chunks_ahead, results_ahead, departed = None, [], [], False
        if rng.random() < 0.95:
            if rows is not None and rng.random() < 0.9:
                rows_ahead = scheduler.look_ahead(rows, gone)
            if rows_ahead is not None:
                results_ahead = model.run_rows(rows_ahead, unread)
                chunks_ahead = [
                    Chunk(s, stop - 1, stop) for s, stop in zip(rows_ahead.seqs, rows_ahead.stops.tolist(), strict=True)
                ]
            else:
                scheduler.depart(chunks[i] for i in live)
                assert all(chunks[i].seq.num_computed_tokens == chunks[i].stop for i in live if not full(chunks[i]))
                departed, chunks_ahead = True, schedule(scheduler)
                rows_ahead = DecodeRows.of(chunks_ahead)
                if rows_ahead is not None:
                    results_ahead = model.run_rows(rows_ahead, unread)
                else:
                    results_ahead = [model.run(chunk, unread) for chunk in chunks_ahead]
        if rows is not None and not departed:
            scheduler.advance_decodes([rows.seqs[i] for i in live], rows.stops[live], [results[i][0] for i in live])
        for i in live:
            if results[i] and departed:
                scheduler.learn([chunks[i].seq], results[i])
            elif rows is None and not departed:
                scheduler.advance(chunks[i], results[i])
            # Where an answer ends by its token, the step ahead has computed one more, for nobody.
            seq = chunks[i].seq
            if ended(seq) or (results[i] and rng.random() < 0.02):
                scheduler.finish(seq)
                if not ended(seq):
                    aborted.add(seq.seq_id)
        scheduler.check()
        if not chunks_ahead:
            return aborted
        rows, chunks, results = rows_ahead, chunks_ahead, results_ahead


def full(chunk: Chunk) -> bool:
    """Whether the token behind it is the last that fits."""
    return chunk.stop + 1 == chunk.seq.max_len


def ended(seq: Sequence) -> bool:
    """Whether it has all its tokens."""
    return len(seq.token_ids) == seq.max_len


def run_workload(
    prompts: list[list[int]],
    block_size: int,
    spare_blocks: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    threshold: int | None,
    layers: list[Layer],
    enable_prefix_caching: bool,
    looks_ahead: bool,
    seed: int,
) -> None:
    rng = random.Random(seed)
    seqs = [
        Sequence(
            i,
            list(prompt),
            len(prompt),
            len(prompt) + rng.randint(1, 10 if looks_ahead else 6),
            cache_salt=rng.choice(["", "", "other"]),
            reads_prefix_cache=rng.random() < 0.9,
        )
        for i, prompt in enumerate(prompts)
    ]

    longest = max(seq.max_len for seq in seqs)

    def group(paging: Paging, retention: Retention | None) -> GroupPool:
        """The fewest blocks with which nothing is refused, and a few to spare."""
        for num_blocks in itertools.count(1):
            alone = CacheManager([GroupPool(BlockPool(num_blocks), paging, retention)], block_size=block_size)
            if alone.why_never_fits(longest, max_chunk=max_num_batched_tokens) is None:
                return GroupPool(BlockPool(num_blocks + spare_blocks), paging, retention)
        raise AssertionError

    groups = [group(*each) for layer in layers for each in layer.groups(block_size)]
    cache = CacheManager(groups, block_size=block_size, enable_prefix_caching=enable_prefix_caching)
    scheduler = Scheduler(
        cache,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
        long_prefill_token_threshold=threshold,
    )
    want = {s.seq_id: plain_generate(s.token_ids, s.max_len, s.cache_salt) for s in seqs}
    model, pending, aborted = PagedModel(layers, cache), list(seqs), set()
    for _ in range(4000):
        if pending and rng.random() < 0.5:
            scheduler.add(pending.pop(0))
        if scheduler.has_work and rng.random() < 0.02:
            seq = rng.choice([*scheduler.running, *scheduler.waiting])
            scheduler.finish(seq)
            aborted.add(seq.seq_id)
        for seq in scheduler.running:
            if seq.num_pending_tokens == 1 and rng.random() < (0.1 if looks_ahead else 0.5):
                seq.draft_token_ids = guess(seq, rng)
        chunks = schedule(scheduler)
        if looks_ahead and chunks and all(c.stop <= len(c.seq.token_ids) for c in chunks):
            aborted |= fly(scheduler, model, chunks, pending, rng)
            chunks = []
        results = [model.run(chunk) for chunk in chunks]
        for chunk, new in zip(chunks, results, strict=True):
            scheduler.advance(chunk, new)
            if len(chunk.seq.token_ids) == chunk.seq.max_len:
                scheduler.finish(chunk.seq)
        scheduler.check()
        if not pending and not scheduler.has_work:
            break
    done = {s.seq_id: s.token_ids for s in seqs if s.seq_id not in aborted}
    assert done == {i: want[i] for i in done}
    assert all(group.pool.num_free == group.pool.num_blocks for group in cache.groups)


@settings(max_examples=1000, deadline=None)
@given(**workloads)
def test_engine_equals_plain_loop(**workload):
    run_workload(**workload)
