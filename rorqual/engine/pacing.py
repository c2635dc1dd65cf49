"""How many prompt tokens a step may carry while somebody reads a stream, from what steps were measured to cost."""

from __future__ import annotations

import statistics
from collections import deque

STRETCH = 1.6
"""While one prompt is under way, steps should take at most so many times as long, on average, as one without prompt
tokens. Below two, since the rule works with estimates, and a step that follows one with prompt tokens finds the caches
cold. What it adds counts once for each prompt: those who wait for a first word are worth as much as those who read."""
FEWEST_TOKENS = 16
"""A prompt moves on by so many tokens at least, since each step reads its keys and values so far anew. Where they cost
more than STRETCH allows, several steps without any go before them."""
_REMEMBERED = 16


class Pacing:
    """Learns what a step costs without prompt tokens, and what each of these adds."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_REMEMBERED)
        self._per_token: deque[float] = deque(maxlen=_REMEMBERED)
        self._steps_alone = 0
        """Steps since the last one that carried prompt tokens."""

    def start(self, num_prompt_tokens: int) -> None:
        """Tell of a step that is started, with so many tokens of prompts; more may start before it is recorded."""
        self._steps_alone = 0 if num_prompt_tokens else self._steps_alone + 1

    def record(self, *, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """Tell of a step: sequences that got one token, tokens of prompts, and how long it took."""
        if num_decodes and not num_prompt_tokens:
            self._alone.append(seconds)
        elif num_prompt_tokens >= FEWEST_TOKENS:
            # Without a stream beside it a step reads the weights for its prompts alone: all of it is their cost.
            alone = statistics.median(self._alone) if num_decodes and self._alone else 0.0
            self._per_token.append(max(seconds - alone, 0.1 * seconds) / num_prompt_tokens)

    def prompt_limit(self, num_prompts: int) -> int | None:
        """Prompt tokens for a step beside streams while so many prompts wait or are under way, 0 for a step without;
        None until both costs are known."""
        if not self._alone or not self._per_token:
            return None
        tokens = (
            (STRETCH - 1) * max(1, num_prompts) * statistics.median(self._alone) / statistics.median(self._per_token)
        )
        if tokens < FEWEST_TOKENS:
            return FEWEST_TOKENS if tokens * (self._steps_alone + 1) >= FEWEST_TOKENS else 0
        return int(tokens) // FEWEST_TOKENS * FEWEST_TOKENS
