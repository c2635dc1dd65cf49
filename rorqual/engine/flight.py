"""A step that the device was told of, and what there is to do with its tokens when they are read."""

from __future__ import annotations

from dataclasses import dataclass, field

from rorqual.engine.answer import AnswerRows
from rorqual.engine.batch_builder import Unread
from rorqual.engine.decode_rows import DecodeRows
from rorqual.engine.sampler import Drawn
from rorqual.sequence import Chunk, Sequence


@dataclass(slots=True, eq=False)
class Flight:
    """A step that was started. Rows of what it draws are those of `decodes`, then one per prompt that ends."""

    decodes: DecodeRows | None
    """The sequences that already answer."""
    answers: AnswerRows | None
    """Theirs."""
    drawn: Drawn
    prompts: list[tuple[Chunk, int | None]] = field(default_factory=list)
    """The other chunks, each with its row of `drawn` where it reaches its sequence's end."""
    num_decodes: int = 0
    """Chunks of one token."""
    num_prompt_tokens: int = 0
    """Tokens of the longer ones."""
    seconds_to_start: float = 0.0
    """What the host was busy with it before it began to wait for it."""
    has_departed: bool = False
    """Whether the scheduler has counted it as computed already (`Scheduler.depart`)."""

    @classmethod
    def of_decodes(cls, rows: DecodeRows, answers: AnswerRows, drawn: Drawn) -> Flight:
        """A step that only decodes."""
        return cls(rows, answers, drawn, num_decodes=len(rows.seqs))

    @property
    def chunks(self) -> list[Chunk]:
        """All that it computes."""
        prompts = [chunk for chunk, _ in self.prompts]
        if self.decodes is None:
            return prompts
        stops = self.decodes.stops.tolist()
        return [*(Chunk(seq, stop - 1, stop) for seq, stop in zip(self.decodes.seqs, stops, strict=True)), *prompts]

    @property
    def drawing(self) -> list[Sequence]:
        """The sequence of each row of `drawn`."""
        decoding = self.decodes.seqs if self.decodes is not None else []
        return [*decoding, *(chunk.seq for chunk, row in self.prompts if row is not None)]

    @property
    def unread(self) -> Unread:
        """Where the tokens are, for the step after it."""
        return Unread(self.drawn.token_ids, {seq: row for row, seq in enumerate(self.drawing)})
