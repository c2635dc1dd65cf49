"""Thinking between tags, split from the answer.

What is cut away: the tags, line breaks on either side of the thinking, and line breaks before the answer. Templates
write these themselves when the message comes back (`<think>\\n...\\n</think>\\n\\n`), and clients expect neither of the
texts to begin with empty lines. All else is as the model wrote it. An answer without thinking is not touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rorqual.server.parsing.machine import LINE_BREAKS, Steps, Tags, TextMachine, Trimmed


class ReasoningParser(TextMachine):
    """`<think>...</think>` and then the answer; thinking that does not end is all thinking.

    Only an answer's beginning can be thinking: a tag that comes later is text.

    Args:
        starts_inside: whether the text begins within the thinking, because the prompt has opened it.
    """

    start_tag: ClassVar[str] = "<think>"
    end_tag: ClassVar[str] = "</think>"

    def __init__(self, *, starts_inside: bool) -> None:
        self._starts_inside = starts_inside
        self.done = False
        """What follows is answer, whatever it is."""
        super().__init__()

    @classmethod
    def is_opened_by(
        cls, prompt: str, template_kwargs: Mapping[str, Any] | None = None, *, continues: bool = False
    ) -> bool:
        """Whether what follows a rendered prompt is thinking, though no tag begins it.

        Args:
            prompt: the rendered prompt.
            template_kwargs: what its template was given (`enable_thinking`, `thinking`).
            continues: whether the prompt ends within an assistant message, so that the last tag counts wherever it is.
        """
        start, end = prompt.rfind(cls.start_tag), prompt.rfind(cls.end_tag)
        if continues and max(start, end) >= 0:
            return start > end
        prompt = prompt.rstrip()
        if prompt.endswith((cls.start_tag, cls.end_tag)):
            return prompt.endswith(cls.start_tag)
        return cls._starts_untold(template_kwargs or {})

    @classmethod
    def _starts_untold(cls, template_kwargs: Mapping[str, Any]) -> bool:
        """Whether a model begins with thinking when the prompt's end says nothing."""
        return False

    def _read(self) -> Steps[None]:
        space = "" if self._starts_inside else (yield from self._spaces())
        if self._starts_inside or (yield from self._accept(self.start_tag)):
            yield from self._read_thinking()
        else:
            self._content(space)
        self.done = True
        while True:
            self._content(self._take(len(self._text)))
            yield

    def _read_thinking(self) -> Steps[None]:
        yield from self._spaces(LINE_BREAKS)
        if self._starts_inside and (yield from self._accept(self.start_tag)):  # said again after the prompt said it
            yield from self._spaces(LINE_BREAKS)
        thinking = Trimmed(self._reasoning, "\n")
        if (yield from self._until(Tags(self.end_tag), thinking)):
            yield from self._spaces(LINE_BREAKS)
        else:
            self._reasoning(thinking.take_held())


class Qwen3(ReasoningParser):
    """May or may not think; the prompt or the answer has the opening tag."""


class DeepSeekR1(ReasoningParser):
    """Thinks from its first token on unless the prompt has closed it, tag or no tag."""

    @classmethod
    def _starts_untold(cls, template_kwargs: Mapping[str, Any]) -> bool:
        return True


class DeepSeekV3(ReasoningParser):
    """DeepSeek V3.1 and later: a template variable says whether it thinks, and the prompt's end shows it."""

    thinks_by_default: ClassVar[bool] = False

    @classmethod
    def _starts_untold(cls, template_kwargs: Mapping[str, Any]) -> bool:
        asked = [
            template_kwargs[key] for key in ("thinking", "enable_thinking") if template_kwargs.get(key) is not None
        ]
        return any(asked) if asked else cls.thinks_by_default


class DeepSeekV4(DeepSeekV3):
    """Thinks unless it is told not to."""

    thinks_by_default = True


def count_reasoning_tokens(token_ids: Sequence[int], *, end_token_id: int | None, starts_inside: bool) -> int:
    """How many of an answer's tokens are thinking, with its closing tag.

    Args:
        token_ids: the whole answer.
        end_token_id: of the closing tag; None if it is no token of its own, and then nothing is counted.
        starts_inside: as for `ReasoningParser`; without it, a closing tag shows that there was an opening one.
    """
    if end_token_id is None:
        return 0
    if end_token_id in token_ids:
        return list(token_ids).index(end_token_id) + 1
    return len(token_ids) if starts_inside else 0
