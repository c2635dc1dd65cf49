"""Sequence: one running answer's tokens, counts and blocks. No torch."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rorqual.cache.prefix import PrefixNode


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and what was generated after it. There is no state machine: the counts say what is left to do."""

    seq_id: int
    token_ids: list[int]
    """Prompt, then accepted output."""
    num_prompt_tokens: int
    max_len: int
    """Prompt plus output may reach this many tokens."""
    cache_salt: str = ""
    """Prefix-cache blocks are shared only among sequences with equal salts."""
    reads_prefix_cache: bool = True
    """False recomputes the whole prompt, for requests that need the logits of every prompt token."""
    sampler_slot: int = -1
    """Where the sampler keeps its parameters."""
    is_streamed: bool = False
    """Somebody reads its tokens as they come, so that steps should take about equally long."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Guessed continuation, to be verified by the next step."""
    num_unknown_tokens: int = 0
    """Tokens behind token_ids that were drawn on the device and are not read yet: 0 or 1."""
    num_computed_tokens: int = 0
    """Leading tokens whose KV is in the cache, or will be before anything else reads the cache."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when it was first admitted; None before that."""
    num_preemptions: int = 0
    block_tables: list[array[int]] = field(default_factory=list)
    """Per cache group, its blocks in order; -1 where nothing is read any more. Empty if not admitted."""
    prefix: list[PrefixNode] = field(default_factory=list)
    """The name of each full block_size of token_ids, as far as they were needed."""
    num_published_tokens: int = 0
    """Leading tokens, a multiple of block_size, whose full blocks the prefix cache knows."""

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Prompt and output, with the token that is not known yet."""
        return len(self.token_ids) + self.num_unknown_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that are not computed: 1 while it decodes, more while it works through a prompt."""
        return self.num_tokens - self.num_computed_tokens


class Chunk(NamedTuple):
    """The tokens [start, stop) of one sequence to compute in a step; drafts count as tokens behind token_ids."""

    seq: Sequence
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it computes."""
        return self.stop - self.start

    @property
    def samples(self) -> bool:
        """Whether it reaches the sequence's end, so that its logits yield new tokens; asked before they are counted."""
        return self.stop >= self.seq.num_tokens
